// Pairs stage of the backward pass, the part every tensor-core path shares: digit accumulators of Q K^T -> p, of dO V^T
// -> ds; their reference exponents; and both where the gradient sums kernel reads them (docs/contract.md sections 2, 4
// and 8). Works on C fragments of 16 x 32 pairs.
#pragma once

#include "gradients.cuh"
#include "modified_pairs.cuh"
#include "weights.cuh"

namespace det_attn::cuda {

// ---- what a warp knows of its rows, a lane of its own ----

// Where a warp's 16 x 32 pairs stand, and what is known of their rows and keys.
struct WarpPairs {
  int lane;
  int64_t head;
  int row, key;          // the first
  const RowState* rows;  // the 16 rows'
  const int2* keys;      // exponents of the rows of K, .x, and of V, .y, of the 32 keys
  float4* waiting = nullptr;  // the lane's memory, for what waits for the second product: see below
  int stride = 0;             // of it

  // A lane's columns are 8 * n + 2 * (lane % 4) + j, n < 4, j < 2; its rows lane / 4 + 8 * h, h < 2.
  __device__ __forceinline__ int2 column(int n, int j) const { return keys[n * 8 + lane % 4 * 2 + j]; }
  __device__ __forceinline__ const RowState& own_row(int h) const { return rows[lane / 4 + 8 * h]; }
};

// Over a warp's rows; those that take no part count for the mask only, since their p is 0 whatever their scores are.
struct PairWarp {
  int exponent_min, exponent_max;  // of Q; min > max if no row takes part
  int begin_max, end_min;          // keys in [begin_max, end_min) are attended by all rows
  bool ordinary;                   // exponents of Q and dO are within kOrdinaryExponent
};

// Where the exponents of a pair's rows are at most this, powers of two made of them are float32 numbers.
constexpr int kOrdinaryExponent = 30;
__device__ __forceinline__ bool is_ordinary(int e) { return e >= -kOrdinaryExponent && e <= kOrdinaryExponent; }
__device__ __forceinline__ float power_of_two(int n) { return __int_as_float((n + 127) << 23); }  // -126 <= n <= 127

__device__ __forceinline__ PairWarp pair_warp(const WarpPairs& at) {
  const RowState& own = at.rows[at.lane % kBlockRows];
  const bool counts = own.maximum != kFarMaximum;
  const bool ordinary = !counts || (is_ordinary(own.query_exponent) && is_ordinary(own.grad_exponent));
  return {__reduce_min_sync(kFullWarp, counts ? own.query_exponent : INT32_MAX),
          __reduce_max_sync(kFullWarp, counts ? own.query_exponent : INT32_MIN),
          __reduce_max_sync(kFullWarp, own.begin),
          __reduce_min_sync(kFullWarp, own.end),
          static_cast<bool>(__all_sync(kFullWarp, ordinary))};
}

// ---- section 2 and 4: scores to p ----

// Any exponents, any scores, 64 bits throughout. Out of line: ordinary tiles do not come here.
struct BlockDistances {
  uint32_t distance[4][4];
};
static __device__ __noinline__ BlockDistances careful_distances(const Dots dots, const WarpPairs at) {
  BlockDistances out;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowState& row = at.own_row(i >> 1);
      const int shift = score_shift(row.query_exponent, at.column(n, i & 1).x, kHighest.operand_bits);
      out.distance[n][i] = clamp_distance(row.maximum - score_of(dots.dot[n][i], shift));
    }
  return out;
}

// M - S for |S| < 2^30, at most kFarDistance: from 3 * 2^29 on every distance is at least 2^29, and at -2^30 or below
// each is 0, so M may be clamped there.
__device__ __forceinline__ int32_t narrow_maximum(int64_t m) {
  return static_cast<int32_t>(max(min(m, int64_t(3) << 29), -(int64_t(1) << 30)));
}
__device__ __forceinline__ uint32_t narrow_distance(int32_t m, int32_t s) {
  return min(static_cast<uint32_t>(max(m, s)) - static_cast<uint32_t>(s), kFarDistance);
}

// p of a block of 16 rows and 32 keys.
template <int PLANES, class Acc>
__device__ __forceinline__ void block_probabilities(const Acc& acc, const PairWarp& warp, const WarpPairs& at,
                                                    float (&p)[4][4]) {
  constexpr int kWeightBits = PLANES == 3 ? kHighest.weight_bits : kHigh.weight_bits;
  const RowState &row0 = at.own_row(0), &row1 = at.own_row(1);
  uint32_t distance[4][4];
  // The shortcut of finish_block(); digits of wide rows are joined by now, but as large.
  const int own = at.keys[at.lane].x;
  const Spread spread{__reduce_min_sync(kFullWarp, own), __reduce_max_sync(kFullWarp, own)};
  const int r_min = score_shift(warp.exponent_max, spread.greatest, kHighest.operand_bits);
  const int r_max = score_shift(warp.exponent_min, spread.least, kHighest.operand_bits);
  bool small = warp.exponent_min <= warp.exponent_max && r_min >= 17 && r_max <= 24 &&
               spread.greatest - spread.least <= kMostRaised<true>;
  if (small) {
    const int bias = 1 << (r_min + 5);
    uint32_t above = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) above |= static_cast<uint32_t>(acc(kGroupHi, n, i) + bias);
    small = __all_sync(kFullWarp, above >> (r_min + 6) == 0);
  }
  if (small) {
    const int exponent[2] = {row0.query_exponent, row1.query_exponent};
    int32_t s[4][4];
    const auto key_exponents = [&](int n) { return make_int2(at.column(n, 0).x, at.column(n, 1).x); };
    small_scores<PLANES, false>(acc, exponent, spread, key_exponents, s);
    const int32_t m[2] = {narrow_maximum(row0.maximum), narrow_maximum(row1.maximum)};
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) distance[n][i] = narrow_distance(m[i >> 1], s[n][i]);
  } else {
    const BlockDistances found = careful_distances(dots_of<PLANES, false>(acc), at);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) distance[n][i] = found.distance[n][i];
  }
  // W has at most 24 significant bits: the polynomial has 24, and once some are rounded away W is at most 2^24. Both
  // factors are float32 numbers then, and their float32 product is probability_of(), rounded once.
  const float inverse[2] = {static_cast<float>(row0.inverse), static_cast<float>(row1.inverse)};
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[n][i] = mul_f32(__uint2float_rn(weight_from_distance<kWeightBits>(distance[n][i])), inverse[i >> 1]);
  if (at.key < warp.begin_max || at.key + kPairBlock > warp.end_min) {
    const int begin[2] = {row0.begin, row1.begin}, end[2] = {row0.end, row1.end};
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = at.key + n * 8 + (at.lane % 4) * 2 + (i & 1);
        if (key < begin[i >> 1] || key >= end[i >> 1]) p[n][i] = 0.0f;
      }
  }
}

// ---- section 8: dP to ds ----

// Whether every row of the warp and every key of the block has ordinary exponents.
__device__ __forceinline__ bool is_ordinary_block(const PairWarp& warp, const WarpPairs& at) {
  const int2 own = at.keys[at.lane];
  return warp.ordinary && __all_sync(kFullWarp, is_ordinary(own.x) && is_ordinary(own.y));
}

// dP for any exponents, in place of the dot products that x has. Out of line, as careful_distances().
struct BlockGradients {
  float x[4][4];
};
static __device__ __noinline__ BlockGradients careful_gradients(BlockGradients block, const WarpPairs at) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int exponents = at.own_row(i >> 1).grad_exponent + at.column(n, i & 1).y;
      block.x[n][i] = score_gradient_of(block.x[n][i], pow2(exponents - 2 * (kHighest.operand_bits - 1)));
    }
  return block;
}

// ds of the same block. The accumulators are of dO V^T. W is 0 exactly where p is: both of its factors are large
// enough.
// dot_of() of 16-bit operands is 2^16 too large, which the unit of 24-bit ones takes back: see Groups.
template <int PLANES, class Acc>
__device__ __forceinline__ void block_terms(const Acc& acc, bool ordinary, const WarpPairs& at,
                                            const float (&p)[4][4], float (&ds)[4][4]) {
  constexpr int kFraction = 2 * (kHighest.operand_bits - 1);
  const float delta[2] = {at.own_row(0).delta, at.own_row(1).delta};
  BlockGradients gradient;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) gradient.x[n][i] = __ll2float_rn(dot_of<PLANES, false>(acc, n, i));
  if (ordinary) {
    const int exponent[2] = {at.own_row(0).grad_exponent, at.own_row(1).grad_exponent};
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The unit as a float32: one rounding of the exact product, as in float64.
        const float unit = power_of_two(exponent[i >> 1] + at.column(n, i & 1).y - kFraction);
        gradient.x[n][i] = mul_f32(gradient.x[n][i], unit);
      }
  } else {
    gradient = careful_gradients(gradient, at);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) ds[n][i] = score_term_of(p[n][i] != 0.0f, p[n][i], gradient.x[n][i], delta[i >> 1]);
}

// ---- sections 10 and 11: the same under modifiers ----
// Pair by pair by the rules and out of line: what modifiers need would not find registers beside the accumulators. p
// and the softcap's slopes wait in shared memory: float4 n * stride of the lane's holds p of the pairs (n, i), and
// slopes are 4 * stride further.
static __device__ __noinline__ void modified_probabilities(const Dots& dots, const PairsArgs& args,
                                                           const WarpPairs& at) {
  const Problem& problem = args.problem;
#pragma unroll 1
  for (int e = 0; e < 16; ++e) {
    const int n = e / 4, i = e % 4, h = i >> 1, j = i & 1;
    const int key = at.key + n * 8 + (at.lane % 4) * 2 + j;
    const RowState& row = at.own_row(h);
    float p = 0.0f, slope = 1.0f;
    if (key >= row.begin && key < row.end) {
      const int shift = score_shift(row.query_exponent, at.column(n, j).x, kHighest.operand_bits);
      const ModifiedPair pair =
          modified_pair(problem, at.head, at.row + at.lane / 4 + 8 * h, key, score_of(dots.dot[n][i], shift));
      const int64_t distance = modified_distance(row.maximum, pair.score);
      p = probability_of(weight_of(distance, problem.precision.weight_bits), row.inverse);
      slope = pair.slope;
    }
    float* to = reinterpret_cast<float*>(at.waiting + n * at.stride) + i;
    to[0] = p, to[4 * 4 * at.stride] = slope;
  }
}

// p as it meets dO, and ds.
struct BlockPairs {
  float p[4][4], ds[4][4];
};
static __device__ __noinline__ BlockPairs modified_terms(const Dots& dots, const PairsArgs& args, const WarpPairs& at) {
  const Dropout& dropout = args.problem.modifiers.dropout;
  BlockPairs out;
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    const int r = at.row + at.lane / 4 + 8 * h;
    const RowState& row = at.own_row(h);
    unsigned drops = 0;
    if (dropout.on && r < args.shape.rows) {
      const Pair own = pair_in_call(args.problem, at.head, r, 0);
      const int64_t row_id = dropout.row_id(own.batch, own.query, args.problem.q_len);
      const int head = static_cast<int>(own.head), key = at.key + (at.lane % 4) * 2;
      drops = dropped_keys(args, row_id, head, key) | dropped_keys(args, row_id, head, key + 16) << 4;
    }
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      const int n = k / 2, j = k % 2, i = 2 * h + j;
      const float* from = reinterpret_cast<const float*>(at.waiting + n * at.stride) + i;
      const float p = from[0], slope = from[4 * 4 * at.stride];
      const float factor = dropout.on ? (drops >> k & 1 ? 0.0f : dropout.rescale) : 1.0f;
      const double unit = pow2(row.grad_exponent + at.column(n, j).y - 2 * (kHighest.operand_bits - 1));
      const float gradient = dropped(score_gradient_of(__ll2float_rn(dots.dot[n][i]), unit), factor);
      out.p[n][i] = dropped(p, factor);
      out.ds[n][i] = mul_f32(score_term_of(p != 0.0f, p, gradient, row.delta), slope);
    }
  }
  return out;
}

// ---- references ----

// A lane's 8 columns (2 * n + j), each the maximum over its own rows -> the maximum over all rows of column lane / 4.
__device__ __forceinline__ int scatter_max(int (&column)[8], int lane) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & (4 * half);
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const int keep = upper ? column[k + half] : column[k], give = upper ? column[k] : column[k + half];
      column[k] = max(keep, __shfl_xor_sync(kFullWarp, give, 4 * half));
    }
  }
  return column[0];
}
// The key, in its 32, of the column that scatter_max() leaves a lane.
__device__ __forceinline__ int scattered_key(int lane) { return lane / 8 * 8 + lane % 4 * 2 + (lane / 4 & 1); }

// The same by the rule, for blocks with extraordinary exponents or terms; raises the references itself. Out of line.
static __device__ __noinline__ void raise_carefully(const BlockPairs x, const References& to, const WarpPairs at,
                                                    int64_t real_rows) {
  int b[8], c[8];
  for (int h = 0; h < 2; ++h) {
    const RowState& row = at.own_row(h);
    int a = kNoTerm;
    for (int q = 0; q < 8; ++q) {
      const int n = q >> 1, i = 2 * h + (q & 1), e = term_exponent(x.ds[n][i]);
      const int of_b = e + row.query_exponent, of_c = term_exponent(x.p[n][i]) + row.grad_exponent;
      a = max(a, e + at.column(n, q & 1).x);
      b[q] = h == 0 ? of_b : max(b[q], of_b);
      c[q] = h == 0 ? of_c : max(c[q], of_c);
    }
    a = max_over_quad(a);
    const int64_t r = at.row + at.lane / 4 + 8 * h;
    if (at.lane % 4 == 0 && r < real_rows) raise(to.a + at.head * real_rows + r, a);
  }
  const int64_t key = at.head * to.key_stride + at.key + scattered_key(at.lane);
  raise(to.b + key, scatter_max(b, at.lane));
  raise(to.c + key, scatter_max(c, at.lane));
}

// Maxima of |ds| and p times powers of two, as bits: non-negative float32 numbers order as they do, with NaN on top.
// The powers are between 1 and 2^60, so products are exact, or too large, which `add` looks for.
struct PairMaxima {
  static constexpr int kLargest = (60 + 127) << 23;  // bits of 2^60: times 2^60 it is a float32
  int b[8], c[8];                                    // of the lane's columns over the rows of one tile

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int q = 0; q < 8; ++q) b[q] = c[q] = 0;
  }
  // Folds a block in, its rows into `a`. False, and nothing done, where its terms are too large.
  __device__ __forceinline__ bool add(const WarpPairs& at, const BlockPairs& x, int (&a)[2]) {
    int largest = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_int(x.ds[n][i]) & 0x7fffffff);
    if (__any_sync(kFullWarp, largest >= kLargest)) return false;
    float of_query[2], of_grad[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowState& row = at.own_row(h);
      const bool counts = row.maximum != kFarMaximum;  // the others' exponents may be anything, their terms are 0
      of_query[h] = power_of_two((counts ? row.query_exponent : 0) + kOrdinaryExponent);
      of_grad[h] = power_of_two((counts ? row.grad_exponent : 0) + kOrdinaryExponent);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_key = power_of_two(at.column(n, j).x + kOrdinaryExponent);
        const int q = 2 * n + j;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float size = fabsf(x.ds[n][2 * h + j]);
          a[h] = max(a[h], __float_as_int(mul_f32(size, of_key)));
          b[q] = max(b[q], __float_as_int(mul_f32(size, of_query[h])));
          c[q] = max(c[q], __float_as_int(mul_f32(x.p[n][2 * h + j], of_grad[h])));
        }
      }
    return true;
  }
  __device__ __forceinline__ static int exponent(int bits) {
    return term_exponent(__int_as_float(bits)) - kOrdinaryExponent;
  }
  __device__ __forceinline__ void publish(const References& to, const WarpPairs& at) {
    const int64_t key = at.head * to.key_stride + at.key + scattered_key(at.lane);
    raise(to.b + key, exponent(scatter_max(b, at.lane)));
    raise(to.c + key, exponent(scatter_max(c, at.lane)));
  }
  // A row's maximum over a lane's columns of every tile, for all lanes of a quad.
  __device__ __forceinline__ static void publish_row(int32_t* to, int a, bool real, int lane) {
    const int e = exponent(max_over_quad(a));
    if (lane % 4 == 0 && real) raise(to, e);
  }
};

// ---- keeping pairs ----

// The warp's half of a block: see Pairs. `to` is the block's first entry.
__device__ __forceinline__ void keep_block(float4* to, const WarpPairs& at, const float (&x)[4][4]) {
  to += at.row / kBlockRows % 2 * 2 * kWarpSize + at.lane;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    __stcs(to + ((i & 1) * 4 + (i >> 1)) * kWarpSize, make_float4(x[0][i], x[1][i], x[2][i], x[3][i]));
}

// The end of a block: its pairs to memory and to the references, if these are wanted. The rows' maxima are folded into
// row_max, for raise_rows() after the last block.
__device__ __forceinline__ void keep_and_raise(const PairsArgs& args, const WarpPairs& at, const BlockPairs& x,
                                               bool ordinary, int (&row_max)[2]) {
  if (args.pairs.p != nullptr) {
    const int64_t block = args.pairs.block(args.strip, at.head, at.row, at.key);
    keep_block(args.pairs.p + block, at, x.p);
    keep_block(args.pairs.ds + block, at, x.ds);
  }
  if (args.references.a == nullptr) return;
  PairMaxima maxima;
  maxima.clear();
  if (ordinary && maxima.add(at, x, row_max)) {
    maxima.publish(args.references, at);
  } else {
    raise_carefully(x, args.references, at, args.shape.rows);
  }
}
__device__ __forceinline__ void raise_rows(const PairsArgs& args, const WarpPairs& at, const int (&row_max)[2]) {
  if (args.references.a == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = at.row + h * 8 + at.lane / 4;
    PairMaxima::publish_row(args.references.a + at.head * args.shape.rows + row, row_max[h], row < args.shape.rows,
                            at.lane);
  }
}

// Where a CTA of `ROWS` rows stands: a row tile of the strip, and the keys that it walks, whole steps of kPairStep.
struct PairsWork {
  int64_t head;
  int row, begin, end;  // 2^31 rows fit no memory
};
template <int ROWS>
__device__ __forceinline__ PairsWork pairs_work(const PairsArgs& args, int64_t tile, int slab, int slab_keys) {
  const Shape& s = args.shape;
  const int64_t tiles = args.strip.rows / ROWS;
  PairsWork w;
  w.head = args.strip.head + tile / tiles;
  // The longest rows of a causal call first.
  w.row = static_cast<int>(args.strip.row + (tiles - 1 - tile % tiles) * ROWS);
  int begin = INT32_MAX, end = 0;
  for (int i = 0; i < ROWS / 32; ++i) {
    const int2 range = args.state.range[(w.head * s.rows_pad + w.row) / 32 + i];
    begin = min(begin, range.x), end = max(end, range.y);
  }
  begin = begin / kPairStep * kPairStep, end = (end + kPairStep - 1) / kPairStep * kPairStep;
  w.begin = max(begin, slab * slab_keys);
  w.end = min(end, slab * slab_keys + slab_keys);
  return w;
}

}  // namespace det_attn::cuda
