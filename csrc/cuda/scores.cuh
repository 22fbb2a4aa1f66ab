// Scores stage, the part every tensor-core path shares: digit accumulators -> S -> distances from a block maximum
// (docs/contract.md sections 2, 3). Works on C fragments, so mma.sync and wgmma meet here.
//
// S travels to the sums kernel as a distance: for each 16 x 32 block a row keeps the maximum of its 32 scores (int64)
// and each pair keeps how far it lies below, in 32 bits. Since M is at least the block maximum, a distance of 2^29 or
// more means W = 0 whatever M is, so anything from 2^29 up may be stored in its place.
#pragma once

#include "planes.cuh"

namespace det_attn::cuda {

constexpr auto kFarDistance = static_cast<uint32_t>(kZeroWeightDistance);
constexpr int64_t kNoScore = -(int64_t(1) << 60);     // a masked pair: below every score
constexpr int64_t kPoisonedScore = int64_t(1) << 60;  // an attended pair with a non-finite row: above every score

// Distances of one chunk of row tiles. Block (row16, key32) is 4 x 32 uint4: word i of lane l are that lane's four
// bytes of A register i, see value_slot().
struct Distances {
  uint4* distance;     // [row16][key32][4][32]
  int64_t* block_max;  // [row16][key32][16]
  int64_t key_blocks;  // key32 blocks a row
};

struct ScoresArgs {
  Problem problem;
  Shape shape;
  Prepared prepared;
  Distances distances;  // distance == nullptr: row maxima only
  int64_t first_tile;  // row tiles of kRowPad rows, counted over all heads; distances are indexed from here, and by key
                       // from the tile's first
  int slab_keys;       // keys one CTA walks with its query planes resident
};

// ---- from digit groups to the dot product ----
// A dot product arrives as int32 digit groups of one 16 x 32 block of C fragments, [8-key block][fragment element]:
//   I * 2^(8 * (6 - 2 * planes)) = hi * 2^24 + mid * 2^16 + lo
// Three planes: hi = p4 * 2^8 + p3, mid = p2, lo = p1 * 2^8 + p0 as unsigned. Two planes: hi = p2 * 2^8 + p1, mid = p0,
// no lo; I is then 2^16 times too large, which the shift r of 24-bit operands takes back exactly (it is 16 more).
//   |p4 * 2^8 + p3| <= dims * (128*128*256 + 2*128*255) < 2^31 for dims <= 256
//   p1 * 2^8 + p0   <= dims * (2*255*255*256 + 255*255)  < 2^32 for dims <= 128; wider rows keep p1 and p0 apart
static_assert(int64_t(kMaxHeadDim) * (128 * 128 * 256 + 2 * 128 * 255) < (int64_t(1) << 31), "hi must fit an int32");
static_assert(int64_t(128) * (2 * 255 * 255 * 256ll + 255 * 255) < (int64_t(1) << 32), "lo must fit a uint32");
template <int PLANES, bool WIDE>
struct Groups {
  static constexpr int kCount = PLANES == 2 ? 2 : (WIDE ? 4 : 3);
};
constexpr int kGroupHi = 0, kGroupMid = 1, kGroupLo = 2, kGroupLowest = 3;

template <int PLANES, bool WIDE, class Acc>
__device__ __forceinline__ int64_t dot_of(const Acc& acc, int n, int i) {
  int64_t dot = (static_cast<int64_t>(acc(kGroupHi, n, i)) << 24) + (static_cast<int64_t>(acc(kGroupMid, n, i)) << 16);
  if constexpr (PLANES == 3) {
    const int64_t lo = static_cast<uint32_t>(acc(kGroupLo, n, i));
    dot += WIDE ? (lo << 8) + static_cast<uint32_t>(acc(kGroupLowest, n, i)) : lo;
  }
  return dot;
}

// mid with what lo carries into it: I = hi * 2^24 + middle * 2^16 + [0, 2^16).
//   mid <= dims * (255*255 + 2*127*255), -mid is less, and lo carries less than 2^16, or 2^17 for wide rows; two planes
//   have 0 <= mid <= dims * 255*255, which for 256 dims is below this bound for 128
template <bool WIDE>
constexpr int64_t kMiddleBound = (WIDE ? kMaxHeadDim : 128) * (255 * 255 + 2 * 127 * 255) + (WIDE ? 131072 : 65536);
template <int PLANES, bool WIDE, class Acc>
__device__ __forceinline__ int32_t middle_of(const Acc& acc, int n, int i) {
  int32_t mid = acc(kGroupMid, n, i);
  if constexpr (PLANES == 3) {
    if constexpr (WIDE) {
      mid += static_cast<int32_t>(
          (static_cast<uint32_t>(acc(kGroupLo, n, i)) + (static_cast<uint32_t>(acc(kGroupLowest, n, i)) >> 8)) >> 8);
    } else {
      mid += static_cast<int32_t>(static_cast<uint32_t>(acc(kGroupLo, n, i)) >> 16);
    }
  }
  return mid;
}

// ---- what a warp knows of its rows and keys ----

// 16 rows of one head: exponents of the lane's two rows (lane / 4 and lane / 4 + 8).
struct BlockRows {
  int exponent[2];
  int first;  // of the 16, in the warp
};
// All rows of a warp, in shared memory for want of registers. The extremes say which shortcuts its tiles may take.
struct alignas(16) WarpRows {
  int exponent_min, exponent_max, begin_max, end_min;
  const ScoresArgs* args;     // for the modifiers
  int64_t first;              // over heads * rows_pad
  int exponent[kScoreWarpTile];
  int2 keys[kScoreWarpTile];  // attended ones; only blocks at the edge of a mask look

  // Whether some row does not attend some of the `count` keys from `key` on.
  __device__ __forceinline__ bool mask_keys(int key, int count) const {
    return key < begin_max || key + count > end_min;
  }
};

// Reads `ROWS` (16 or 32) rows from row_base on; a lane holds one row, then each picks its own.
template <int ROWS>
__device__ __forceinline__ void load_rows(const ScoresArgs& args, int64_t head, int64_t row_base, int lane,
                                          BlockRows (&blocks)[ROWS / 16], WarpRows* warp) {
  const int64_t row = row_base + lane % ROWS;
  const bool real = row < args.shape.rows;
  const int own = args.prepared.query_exponent[head * args.shape.rows_pad + row];
  const int2 own_keys = args.prepared.row_keys[head * args.shape.rows_pad + row];
#pragma unroll
  for (int m = 0; m < ROWS / 16; ++m) {
    blocks[m].first = m * 16;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      blocks[m].exponent[h] = __shfl_sync(kFullWarp, own, m * 16 + h * 8 + lane / 4);
  }
  // Padding rows count for nothing but the mask.
  const int exponent_min = __reduce_min_sync(kFullWarp, real ? own : INT32_MAX),
            exponent_max = __reduce_max_sync(kFullWarp, real ? own : INT32_MIN),
            begin_max = __reduce_max_sync(kFullWarp, own_keys.x), end_min = __reduce_min_sync(kFullWarp, own_keys.y);
  if (lane == 0) {
    warp->exponent_min = exponent_min, warp->exponent_max = exponent_max;
    warp->begin_max = begin_max, warp->end_min = end_min;
    warp->args = &args;
    warp->first = head * args.shape.rows_pad + row_base;
  }
  if (lane < ROWS) warp->keys[lane] = own_keys, warp->exponent[lane] = own;
  __syncwarp();
}

// The attended keys of a CTA's rows within [begin, end), outwards to multiples of STEP; empty if first >= last.
struct KeyRange {
  int first, last;
};
template <int STEP, class Args>
__device__ __forceinline__ KeyRange keys_of_rows(const Args& args, int64_t head, int64_t row_base, int rows,
                                                 int64_t begin, int64_t end) {
  const int2* blocks = args.prepared.block_keys + (head * args.shape.rows_pad + row_base) / kBlockRows;
  int first = INT32_MAX, last = 0;
  for (int b = 0; b < rows / kBlockRows; ++b) first = min(first, blocks[b].x), last = max(last, blocks[b].y);
  return {static_cast<int>(max(static_cast<int64_t>(first / STEP * STEP), begin)),
          static_cast<int>(min(static_cast<int64_t>((last + STEP - 1) / STEP * STEP), end))};
}

// ---- row maxima ----

// Publishes a row maximum gathered in a tile; a given one only if it was found poisoned.
template <bool GIVEN>
__device__ __forceinline__ void publish_rowmax(int64_t* rowmax, int64_t m) {
  if (GIVEN ? m < kPoisonedScore : m == kNoScore) return;
  atomicMax(reinterpret_cast<long long*>(rowmax), m >= kPoisonedScore ? kRowmaxPoisoned : m);
}

// A masked pair among 32-bit scores, which are above -2^30, with a bias above -2^31 + 2^29.
constexpr int32_t kNone = INT32_MIN;

// What a thread knows of the maxima of its two rows: `small` of blocks that took 32 bits, `any` of the others, or M
// itself if it is given.
struct RowMaxima {
  int64_t any[2];
  int32_t small[2];

  __device__ __forceinline__ int64_t of(int h) const {
    return small[h] == kNone ? any[h] : max(any[h], static_cast<int64_t>(small[h]));
  }
};

// M of a row, over heads * rows_pad, where it is given.
__device__ __forceinline__ int64_t given_rowmax(const ScoresArgs& args, int64_t row) {
  return max(min(args.prepared.rowmax[row], kPoisonedScore), kNoScore);
}
// Where they start: nothing seen, or M. `row` is the thread's first.
template <bool GIVEN>
__device__ __forceinline__ RowMaxima start_of_rowmax(const ScoresArgs& args, int64_t row) {
  if constexpr (GIVEN) return {{given_rowmax(args, row), given_rowmax(args, row + 8)}, {kNone, kNone}};
  return {{kNoScore, kNoScore}, {kNone, kNone}};
}

template <typename T>
__device__ __forceinline__ T max_over_quad(T x) {
  x = max(x, __shfl_xor_sync(kFullWarp, x, 1));
  return max(x, __shfl_xor_sync(kFullWarp, x, 2));
}

// Several, none waiting for another.
template <int COUNT>
__device__ __forceinline__ void max_over_quad(int32_t (&x)[COUNT][2]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    int32_t other[COUNT][2];
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) other[c][h] = __shfl_xor_sync(kFullWarp, x[c][h], distance);
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) x[c][h] = max(x[c][h], other[c][h]);
  }
}

// A difference of scores as a distance: 0 below 0, kFarDistance from there on.
__device__ __forceinline__ uint32_t clamp_distance(int64_t below) {
  const int high = static_cast<int>(below >> 32);
  const uint32_t near = min(static_cast<uint32_t>(below), kFarDistance);
  return high == 0 ? near : (high < 0 ? 0u : kFarDistance);
}

// ---- blocks of 16 x 32 scores ----

// One block, or a few side by side: where the results go, and what is known of the rows and keys.
struct Block {
  uint4* distance;                 // the lane's first word
  int64_t* block_max;              // of the lane's first row
  bool stored;                     // or row maxima only
  bool masked;                     // some pair may be masked
  int key_base;                    // first key, relative to kv_lo
  const int* key_exponent;         // of each key, shared memory
  int exponent_min, exponent_max;  // of them
  int shift_min, shift_max;        // r of any of the warp's rows and any key

  // The block `b` to the right.
  __device__ __forceinline__ Block at(int b) const {
    Block other = *this;
    other.distance += b * 4 * kWarpSize;
    other.block_max += b * kBlockRows;
    other.key_base += b * kBlockKeys;
    other.key_exponent += b * kBlockKeys;
    return other;
  }
};

// The block of key 0, were there one, of row block `row16`, counted from the chunk's first, of a tile. Blocks of a
// chunk are far fewer than 2^31; without distances the number means nothing.
__device__ __forceinline__ int first_block(const Distances& d, int64_t row16, int tile_first) {
  return static_cast<int>(row16 * d.key_blocks) - tile_first / kBlockKeys;
}

// All lanes call it.
template <int BLOCKS = 1>
__device__ __forceinline__ Block block_at(const Distances& d, int first_block, int key_base, const int* key_exponent,
                                          const WarpRows& warp, int lane) {
  const int64_t block = first_block + key_base / kBlockKeys;
  Block b;
  b.distance = d.distance + block * 4 * kWarpSize + lane;
  b.block_max = d.block_max + block * kBlockRows + lane / 4;
  b.stored = d.distance != nullptr;
  b.masked = warp.mask_keys(key_base, BLOCKS * kBlockKeys);
  b.key_base = key_base;
  b.key_exponent = key_exponent;
  int least = key_exponent[lane], greatest = least;
#pragma unroll
  for (int i = 1; i < BLOCKS; ++i) {
    const int exponent = key_exponent[i * kBlockKeys + lane];
    least = min(least, exponent), greatest = max(greatest, exponent);
  }
  b.exponent_min = __reduce_min_sync(kFullWarp, least);
  b.exponent_max = __reduce_max_sync(kFullWarp, greatest);
  b.shift_min = score_shift(warp.exponent_max, b.exponent_max, kHighest.operand_bits);
  b.shift_max = score_shift(warp.exponent_min, b.exponent_min, kHighest.operand_bits);
  return b;
}

struct Dots {
  int64_t dot[4][4];
};
template <int PLANES, bool WIDE, class Acc>
__device__ __forceinline__ Dots dots_of(const Acc& acc) {
  Dots dots;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) dots.dot[n][i] = dot_of<PLANES, WIDE>(acc, n, i);
  return dots;
}

// Section 10: an attended pair's score, kPoisonedScore among them, after the modifiers; kNoScore where they mask it.
// `row` counts over heads * rows_pad.
static __device__ __noinline__ int64_t modify(const ScoresArgs& args, int64_t row, int key, int64_t s) {
  const Problem& p = args.problem;
  const Pair at = pair_in_call(p, row / args.shape.rows_pad, row % args.shape.rows_pad, key);
  const int64_t changed = modified_score(p, s == kPoisonedScore ? 0 : s, at);
  if (changed == kScoreMasked) return kNoScore;
  return s == kPoisonedScore || changed == kScorePoisoned ? kPoisonedScore : changed;
}

// Any exponents, any scores, and the modifiers, if MODIFIED: 64 bits throughout. Out of line: ordinary tiles do not
// come here.
template <bool GIVEN, bool MODIFIED>
static __device__ __noinline__ RowMaxima finish_block_careful(const Dots dots, const WarpRows& warp,
                                                              const BlockRows rows, const Block block, int lane,
                                                              RowMaxima row_max) {
  int64_t s[4][4], top[2] = {kNoScore, kNoScore};
  const int first = rows.first + lane / 4;
  const int2 keys[2] = {warp.keys[first], warp.keys[first + 8]};
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = n * 8 + (lane % 4) * 2 + (i & 1), h = i >> 1;
      const int eq = rows.exponent[h], ek = block.key_exponent[column];
      s[n][i] = eq >= kPoisonedInTile || ek >= kPoisonedInTile
                    ? kPoisonedScore
                    : score_of(dots.dot[n][i], score_shift(eq, ek, kHighest.operand_bits));
      const int key = block.key_base + column;
      if (key < keys[h].x || key >= keys[h].y) {
        s[n][i] = kNoScore;
      } else if constexpr (MODIFIED) {
        s[n][i] = modify(*warp.args, warp.first + first + 8 * h, key, s[n][i]);
      }
      top[h] = max(top[h], s[n][i]);
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (GIVEN) {
      // A poisoned pair under a finite M poisons the row all the same; -inf says that the row attends nothing.
      if (top[h] == kPoisonedScore && row_max.any[h] != kNoScore) row_max.any[h] = kPoisonedScore;
      top[h] = row_max.any[h];
    } else {
      row_max.any[h] = max(row_max.any[h], top[h]);
      top[h] = max_over_quad(top[h]);
    }
    if (block.stored && lane % 4 == 0) block.block_max[8 * h] = top[h];
  }
  if (!block.stored) return row_max;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // A register i: rows of half i & 1, keys of 16-group i >> 1
    const int h = i & 1, n = (i >> 1) * 2;
    block.distance[i * kWarpSize] =
        make_uint4(clamp_distance(top[h] - s[n][2 * h]), clamp_distance(top[h] - s[n][2 * h + 1]),
                   clamp_distance(top[h] - s[n + 1][2 * h]), clamp_distance(top[h] - s[n + 1][2 * h + 1]));
  }
  return row_max;
}

// Section 10 where a bias is all there is, and is below 32 in magnitude: then it takes 29 bits, and so does the way.
__device__ __forceinline__ bool only_bias(const Modifiers& m) { return m.softcap == 0.0 && m.slopes == nullptr; }

// Adds it to a thread's attended pairs. Returns false, with s left in pieces, if some bias is larger or no number.
__device__ __forceinline__ bool add_bias(const WarpRows& warp, const BlockRows& rows, const Block& block, int lane,
                                         int32_t (&s)[4][4]) {
  const Bias& bias = warp.args->problem.modifiers.bias;
  bool fits = true;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = warp.args->prepared.row_bias[warp.first + rows.first + lane / 4 + 8 * h];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int32_t& score = s[n][2 * h + i];
        if (score == kNone) continue;
        const float b = bias.at(row + (block.key_base + n * 8 + lane % 4 * 2 + i) * bias.stride_key);
        const bool masked = b == float_of(0xff800000u);
        fits = fits && (masked || fabsf(b) < 32.0f);
        score = masked ? kNone : score + __float2int_rn(mul_f32(b, 16777216.0f));
      }
  }
  return fits;
}

// Keeps the compiler from knowing that x is a power of two: it would shift and add where one multiply-add does.
__device__ __forceinline__ uint32_t as_factor(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}

// Exponents of keys side by side, least and greatest.
struct Spread {
  int least, greatest;
};
// How far apart they may be in a block that takes 32 bits, so that a raised middle digit still fits.
template <bool WIDE>
constexpr int kMostRaised = WIDE ? 6 : 7;

// The scores of a block that takes 32 bits, in 3 to 5 instructions a pair. With n = r - 16 in [1, 8] and I / 2^16 =
// hi * 2^8 + middle, whose fraction cannot reach past the floor,
//   S = floor((hi * 2^8 + middle + 2^(n-1)) / 2^n) = hi * 2^(8-n) + floor((middle + 2^(n-1)) / 2^n),
// exact in 32 bits since S fits. A key whose exponent is d above the block's least has a d lower n: both digits times
// 2^d under the largest n are the same fraction. row_exponent: of the lane's two rows; key_exponents(n): of its two
// keys in 8-key column n.
template <int PLANES, bool WIDE, int COLUMNS, class Acc, class KeyExponents>
__device__ __forceinline__ void small_scores(const Acc& acc, const int (&row_exponent)[2], Spread keys,
                                             const KeyExponents& key_exponents, int32_t (&s)[COLUMNS][4]) {
  static_assert((kMiddleBound<WIDE> << kMostRaised<WIDE>) + 128 < (int64_t(1) << 31), "a raised middle digit must fit");
  int n_of[2], half[2];
  uint32_t factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    n_of[h] = score_shift(row_exponent[h], keys.least, kHighest.operand_bits) - 16;
    half[h] = 1 << (n_of[h] - 1);
    factor[h] = as_factor(1u << (8 - n_of[h]));
  }
  if (keys.least == keys.greatest) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i >> 1;
        const int32_t low = (middle_of<PLANES, WIDE>(acc, n, i) + half[h]) >> n_of[h];
        s[n][i] = static_cast<int32_t>(static_cast<uint32_t>(acc(kGroupHi, n, i)) * factor[h] + low);
      }
    return;
  }
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    const int2 ek = key_exponents(n);
    const uint32_t raised[2] = {as_factor(1u << (ek.x - keys.least)), as_factor(1u << (ek.y - keys.least))};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i >> 1;
      const uint32_t hi = static_cast<uint32_t>(acc(kGroupHi, n, i)) * raised[i & 1],
                     middle = static_cast<uint32_t>(middle_of<PLANES, WIDE>(acc, n, i)) * raised[i & 1] + half[h];
      s[n][i] = static_cast<int32_t>(hi * factor[h] + (static_cast<int32_t>(middle) >> n_of[h]));
    }
  }
}

// BLOCKS blocks side by side. acc(group, n, i) are their digit groups, n counting 8-key columns. Folds the two rows'
// maxima into row_max (a thread's own; the quad is combined at the end), or, if GIVEN, row_max.any is M and distances
// are taken from it.
template <int PLANES, bool WIDE, bool GIVEN, bool MODIFIED, int BLOCKS = 1, class Acc>
__device__ __forceinline__ void finish_block(const Acc& acc, const WarpRows& warp, const BlockRows& rows,
                                             const Block& block, int lane, RowMaxima& row_max) {
  // The shortcut: every shift r of the tile in [17, 24], and |I| < 2^(r + 30) for every pair, so scores fit 31 bits.
  // |I| < (|hi| + 2^17) * 2^24 since |mid| * 2^16 + lo < 2^41; |hi| <= 2^(r_min + 5) is enough as r_min + 5 > 17.
  // Exponents of the keys differ by no more than the middle digit has room for.
  constexpr int kColumns = BLOCKS * 4;
  bool small = block.shift_min >= 17 && block.shift_max <= 24;
  if constexpr (WIDE) small = small && block.exponent_max - block.exponent_min <= kMostRaised<WIDE>;
  if constexpr (MODIFIED) small = small && only_bias(warp.args->problem.modifiers);
  if (small) {
    const int bound = 1 << (block.shift_min + 5);
    int least = INT32_MAX, greatest = INT32_MIN;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        least = min(least, min(acc(kGroupHi, n, i), acc(kGroupHi, n, i + 1)));
        greatest = max(greatest, max(acc(kGroupHi, n, i), acc(kGroupHi, n, i + 1)));
      }
    small = __all_sync(kFullWarp, least >= -bound && greatest <= bound);
  }
  const auto finish_carefully = [&] {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const Dots dots = dots_of<PLANES, WIDE>([&](int g, int n, int i) { return acc(g, b * 4 + n, i); });
      row_max = finish_block_careful<GIVEN, MODIFIED>(dots, warp, rows, block.at(b), lane, row_max);
    }
  };
  if (!small) return finish_carefully();

  int32_t s[kColumns][4];
  const auto key_exponents = [&](int n) {
    return *reinterpret_cast<const int2*>(block.key_exponent + n * 8 + (lane % 4) * 2);
  };
  small_scores<PLANES, WIDE>(acc, rows.exponent, {block.exponent_min, block.exponent_max}, key_exponents, s);
  if (block.masked) {
    const int2 keys[2] = {warp.keys[rows.first + lane / 4], warp.keys[rows.first + lane / 4 + 8]};
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = block.key_base + n * 8 + (lane % 4) * 2 + (i & 1);
        if (key < keys[i >> 1].x || key >= keys[i >> 1].y) s[n][i] = kNone;
      }
  }
  if constexpr (MODIFIED) {
    if (!__all_sync(kFullWarp, add_bias(warp, rows, block, lane, s))) return finish_carefully();
  }
  if constexpr (GIVEN) {
    const auto below = [&](int h, int32_t score) {
      return score == kNone ? kFarDistance : clamp_distance(row_max.any[h] - score);
    };
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const Block to = block.at(b);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (lane % 4 == 0) to.block_max[8 * h] = row_max.any[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i & 1, n = b * 4 + (i >> 1) * 2;
        to.distance[i * kWarpSize] = make_uint4(below(h, s[n][2 * h]), below(h, s[n][2 * h + 1]),
                                                below(h, s[n + 1][2 * h]), below(h, s[n + 1][2 * h + 1]));
      }
    }
  } else {
    int32_t top[BLOCKS][2];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[b][h] = kNone;
#pragma unroll
        for (int n = b * 4; n < b * 4 + 4; ++n) top[b][h] = max(top[b][h], max(s[n][2 * h], s[n][2 * h + 1]));
      }
    max_over_quad(top);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) row_max.small[h] = max(row_max.small[h], top[b][h]);
    if (!block.stored) return;
    // The lanes of a quad share its maxima out, so that they are written at once.
    static_assert(BLOCKS <= 2, "a quad has four lanes");
    const int mine = lane % 4;
    const int32_t own = mine & 1 ? top[0][1] : top[0][0], right = mine & 1 ? top[BLOCKS - 1][1] : top[BLOCKS - 1][0],
                  chosen = mine >> 1 ? right : own;
    if (mine < 2 * BLOCKS) {
      block.block_max[(mine >> 1) * kBlockRows + (mine & 1) * 8] =
          chosen == kNone ? kNoScore : static_cast<int64_t>(chosen);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const Block to = block.at(b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Below 2^32: top < 2^30 + 2^29, and s is above minus that or kNone. A masked pair is at least 2^29 below a
        // real maximum.
        const int h = i & 1, n = b * 4 + (i >> 1) * 2;
        const uint32_t t = static_cast<uint32_t>(top[b][h]);
        to.distance[i * kWarpSize] =
            make_uint4(t - s[n][2 * h], t - s[n][2 * h + 1], t - s[n + 1][2 * h], t - s[n + 1][2 * h + 1]);
      }
    }
  }
}

}  // namespace det_attn::cuda
