// Scores kernel for few query rows: query planes, and keys as the caller has them -> row maxima and score distances
// (docs/contract.md sections 1 to 3). Warps work alone: each turns 32 keys into byte planes in shared memory of its own
// and multiplies them with the one block of query rows, which the CTA shares.
#pragma once

#include "direct.cuh"
#include "scores_mma.cuh"

namespace det_attn::cuda {

template <int PLANES, int DIMS>
struct ScoresDirectTile {
  static constexpr int kPlanes = PLANES, kDims = DIMS, kWarps = 4, kThreads = kWarps * kWarpSize;
  // Blocks of 32 keys a warp, keys a CTA.
  static constexpr int kSlabBlocks = 8, kSlab = kWarps * kSlabBlocks * kBlockKeys;
  static constexpr int kQueryBytes = PLANES * kBlockRows * DIMS, kKeyBytes = PLANES * kBlockKeys * DIMS;
  static constexpr int kSharedBytes = kQueryBytes + kWarps * kKeyBytes;
};

namespace scores_direct {

// Eight keys of a warp: a lane has key lane % 8 and every fourth piece of 16 elements of it, so that the eight lanes of
// one shared-memory phase write eight rows of one core matrix.
template <int PIECES>
struct RawKeys {
  uint4 word[PIECES][2];

  // `keys` and `dims` guard: what lies beyond either is 0.
  __device__ __forceinline__ void load(const uint16_t* from, int64_t stride_row, int key, int keys, int dims,
                                       int lane) {
    const uint16_t* row = from + key * stride_row;
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = (p * 4 + lane / 8) * 16 + half * 8;
        word[p][half] = make_uint4(0, 0, 0, 0);
        if (key < keys && d < dims) word[p][half] = __ldcs(reinterpret_cast<const uint4*>(row + d));
      }
  }
};

// Their integers as byte planes into `planes`, and their exponents. `key` is the lane's key in the warp's 32.
template <class Tile, bool BF16, int PIECES>
__device__ __forceinline__ void quantise_keys(const RawKeys<PIECES>& raw, uint8_t* planes, int* exponents, int key,
                                              int lane) {
  constexpr int kOperandBits = Tile::kPlanes * 8;
  uint32_t magnitudes = 0;
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& w = raw.word[p][half];
      magnitudes = Packed<BF16>::max_magnitude(magnitudes, w.x);
      magnitudes = Packed<BF16>::max_magnitude(magnitudes, w.y);
      magnitudes = Packed<BF16>::max_magnitude(magnitudes, w.z);
      magnitudes = Packed<BF16>::max_magnitude(magnitudes, w.w);
    }
  int largest = Packed<BF16>::larger(magnitudes);
  largest = max(largest, __shfl_xor_sync(kFullWarp, largest, 8));
  largest = max(largest, __shfl_xor_sync(kFullWarp, largest, 16));
  const bool finite = largest < Packed<BF16>::kInfinity;
  const int e = exponent_of_largest_16<BF16>(largest);
  if (lane < 8) exponents[key] = finite ? e : kPoisonedInTile;
  RowScale scale(e, kOperandBits);
  if (!finite) scale.first = 0.0f;  // 0 or NaN, either of which rounds to 0
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    uint4 out[Tile::kPlanes];
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      const uint4& w = raw.word[p][quad / 2];
      const uint32_t a = quad % 2 == 0 ? w.x : w.z, b = quad % 2 == 0 ? w.y : w.w;
      const float x[4] = {Packed<BF16>::low(a), Packed<BF16>::high(a), Packed<BF16>::low(b), Packed<BF16>::high(b)};
      uint32_t bytes[4];
      quantise_four(x, scale, bytes);
#pragma unroll
      for (int plane = 0; plane < Tile::kPlanes; ++plane)
        reinterpret_cast<uint32_t*>(&out[plane])[quad] = bytes[plane];
    }
#pragma unroll
    for (int plane = 0; plane < Tile::kPlanes; ++plane)
      *reinterpret_cast<uint4*>(planes + plane * kBlockKeys * Tile::kDims +
                                plane_offset(key, (p * 4 + lane / 8) * 16, Tile::kDims)) = out[plane];
  }
}

}  // namespace scores_direct

template <class Tile, bool BF16, bool GIVEN>
__global__ void __launch_bounds__(Tile::kThreads, kScoresDirectCtas)
    scores_direct_kernel(const __grid_constant__ ScoresArgs args) {
  using namespace scores_direct;
  constexpr int kPlanes = Tile::kPlanes, kDims = Tile::kDims, kPieces = kDims / 64;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) int key_exponents[Tile::kWarps][kBlockKeys];
  __shared__ WarpRows shared_rows[Tile::kWarps];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t head = args.first_tile + blockIdx.x;
  const int tile_first = args.prepared.tile_first[head];
  const int64_t slab = tile_first + int64_t(blockIdx.y) * Tile::kSlab;
  // Whole steps of the sums kernel, which reads every block of a step it enters.
  const KeyRange range = keys_of_rows<kKeyPad>(args, head, 0, kBlockRows, slab, slab + Tile::kSlab);
  if (range.first >= range.last) return;
  BlockRows rows[1];
  WarpRows& warp_rows = shared_rows[warp];
  load_rows<kBlockRows>(args, head, 0, lane, rows, &warp_rows);
  RowMaxima row_max = start_of_rowmax<GIVEN>(args, head * s.rows_pad + lane / 4);

  const uint32_t query_shared = shared_address(shared);
  uint8_t* planes = shared + Tile::kQueryBytes + warp * Tile::kKeyBytes;
  int* exponents = key_exponents[warp];
  const uint8_t* query = args.prepared.query + head * kPlanes * s.rows_pad * kDims;
  for (int p = 0; p < kPlanes; ++p)
    scores_mma::copy_bytes<Tile::kThreads>(query_shared + p * kBlockRows * kDims, query + p * s.rows_pad * kDims,
                                           kBlockRows * kDims);
  commit_copies();

  const int matrix = lane / 8, matrix_row = lane % 8;
  scores_mma::Fragments f;  // as in scores_kernel
  f.a_plane = kBlockRows * kDims;
  f.b_plane = kBlockKeys * kDims;
  f.sixteen_rows = 16 * kDims;
  f.a = query_shared + (matrix & 1) * 8 * kDims + (matrix >> 1) * 128 + matrix_row * 16;
  f.b = shared_address(planes) + (matrix >> 1) * 8 * kDims + (matrix & 1) * 128 + matrix_row * 16;

  const Problem& problem = args.problem;
  const View& k = problem.k;
  const int keys = static_cast<int>(s.keys);
  const uint16_t* from = static_cast<const uint16_t*>(k.data) + head / problem.kv_heads * k.stride_batch +
                         head % problem.kv_heads * k.stride_head + problem.mask.kv_lo * k.stride_row;
  RawKeys<kPieces> raw;
  int first = range.first + warp * kBlockKeys;
  raw.load(from, k.stride_row, first + lane % 8, keys, s.dims, lane);
  wait_copies<0>();
  __syncthreads();
#pragma unroll 1
  for (; first < range.last; first += Tile::kWarps * kBlockKeys) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const RawKeys<kPieces> now = raw;
      const int next = part < 3 ? first + (part + 1) * 8 : first + Tile::kWarps * kBlockKeys;
      raw.load(from, k.stride_row, next + lane % 8, next < range.last ? keys : 0, s.dims, lane);
      quantise_keys<Tile, BF16>(now, planes, exponents, part * 8 + lane % 8, lane);
    }
    __syncwarp();
    int32_t acc[Groups<kPlanes, false>::kCount][1][4][4] = {};
    scores_mma::dot_tile<kPlanes, false>(acc, f, kDims / 32);
    const Block block = block_at(args.distances, first_block(args.distances, blockIdx.x, tile_first), first, exponents,
                                 warp_rows, lane);
    finish_block<kPlanes, false, GIVEN, false>([&](int g, int n, int i) { return acc[g][0][n][i]; }, warp_rows, rows[0],
                                        block, lane, row_max);
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t top = max_over_quad(row_max.of(h));
    if (lane % 4 == 0) publish_rowmax<GIVEN>(args.prepared.rowmax + head * s.rows_pad + h * 8 + lane / 4, top);
  }
}

}  // namespace det_attn::cuda
