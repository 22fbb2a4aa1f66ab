// Tile sizes of the tensor-core kernels and the budgets that follow from them, each with its reason.
#pragma once

#include "../digits.h"

namespace det_attn::cuda {

constexpr int kWarpSize = 32;

// One mma.sync.m16n8k32: A is 16 x 32 bytes, B is 8 x 32 bytes. A "block" is the unit in which score distances travel
// from the scores kernel to the sums kernel: 16 rows x 32 keys, the C fragments of one and the A fragments of the
// other.
constexpr int kBlockRows = 16;
constexpr int kBlockKeys = 32;

// Rows and keys are padded to this; a multiple of every tile below.
constexpr int kRowPad = 128;
constexpr int kKeyPad = 128;
// The inner (head) dimension of query and key planes: one k-step of the tensor core.
constexpr int kDimPad = 32;

// ---- scores kernel ----
constexpr int kScoreWarpTile = 32;  // 32 x 32 pairs a warp: 3 int32 accumulators a pair are 96 registers
// Keys one CTA walks with its query planes resident; fewer where rows attend more or fewer keys, which then even out.
// A tile whose rows attend up to kMostScoreSlab is not cut.
constexpr int kScoreSlab = 1024, kUnevenScoreSlab = 512, kMostScoreSlab = 1536;

// ---- sums kernel ----
constexpr int kSumWarps = 8;      // that multiply, two on each scheduler
constexpr int kWeightWarps = 4;   // that form weights meanwhile, one on each scheduler
constexpr int kSumWarpDims = 32;  // 16 rows x 32 dims x 7 positions (5 + 3 planes) are 112 accumulator registers
constexpr int kSumKeys = 64;      // keys a step: two stages of weights and three of values still fit 99 KB parts

// Shift of a weight that keeps it inside five byte planes: W <= 2^31, so W << 8 < 2^40.
constexpr int kMaxWeightShift = 8;

// A digit position takes at most 3 products a key, each at most 255 * 255, in an int32: flush before it overflows.
constexpr int64_t kFlushKeys = 8192;
static_assert(kFlushKeys * 3 * 255 * 255 < (int64_t(1) << 31), "an int32 position must survive until the flush");
static_assert((kFlushKeys / kSumKeys & (kFlushKeys / kSumKeys - 1)) == 0, "flushes happen every power of two of steps");

// Score distances of one chunk of query rows live in this much workspace, whatever Sq and Skv are: at 8192 keys
// two waves of 64-row sums CTAs on 132 multiprocessors, so that long and short rows of a mask even out. Where a window
// bounds the distances there is room for four heads of 8192 rows and a window of 4096; in 576 MB three would fit.
constexpr int64_t kBlockBytes = kBlockRows * kBlockKeys * 4 + kBlockRows * 8;  // distances and block maxima
constexpr int64_t kChunkBytes = int64_t(576) << 20, kWindowChunkBytes = int64_t(578) << 20;
static_assert(4 * (8192 / kRowPad) * (kRowPad / kBlockRows) * ((4096 + kRowPad + kKeyPad) / kBlockKeys) * kBlockBytes <=
                  kWindowChunkBytes,
              "four heads of 8192 rows, each tile of which attends 4096 keys and the padding of span_of()");
constexpr int64_t kChunkTiles = 132;  // so that the long accumulators of a chunk stay near 200 MB at 128 dims
// Where those are the CTAs' own, not the rows': tiles of short rows or of a window are small, the fewer launches the
// better, and the short rows of one head even out with the long ones of others.
constexpr int64_t kResidentChunkTiles = 4 * kChunkTiles;
constexpr int64_t kLeastSplitKeys = 512;  // fewer keys a part and adding digits costs more than the products

}  // namespace det_attn::cuda
