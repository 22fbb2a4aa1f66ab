// Pairs stage of the backward pass, the part every tensor-core path shares: digit accumulators of Q K^T -> p, of dO V^T
// -> ds; their reference exponents; and both where the gradient sums kernel reads them (docs/contract.md sections 2, 4
// and 8). Works on C fragments of 16 x 32 pairs.
#pragma once

#include "gradients.cuh"
#include "weights.cuh"

namespace det_attn::cuda {

// Rows of a warp that take part in shortcuts, and what all its rows attend.
struct PairWarp {
  WarpRows rows;
  int begin_max, end_min;  // keys in [begin_max, end_min) are attended by all 32 rows
};

__device__ __forceinline__ PairWarp pair_warp(const RowState* rows, int lane) {
  const RowState& own = rows[lane];
  const bool counts = own.maximum != kFarMaximum;  // the scores of the others do not matter
  return {{__reduce_min_sync(kFullWarp, counts ? own.query_exponent : INT32_MAX),
           __reduce_max_sync(kFullWarp, counts ? own.query_exponent : INT32_MIN),
           __reduce_min_sync(kFullWarp, own.end)},
          __reduce_max_sync(kFullWarp, own.begin),
          __reduce_min_sync(kFullWarp, own.end)};
}

// ---- section 2 and 4: scores to p ----

// Any exponents, any scores, 64 bits throughout. Out of line: ordinary tiles do not come here.
static __device__ __noinline__ void careful_distances(const Dots dots, int eq0, int eq1, const int2* keys, int64_t m0,
                                                      int64_t m1, int lane, uint32_t* distance) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int ek = keys[n * 8 + (lane % 4) * 2 + (i & 1)].x;
      const int64_t s = score_of(dots.dot[n][i], score_shift(i >> 1 ? eq1 : eq0, ek, kHighest.operand_bits));
      distance[n * 4 + i] = clamp_distance((i >> 1 ? m1 : m0) - s);
    }
}

// p of a block of 16 rows and 32 keys. rows: the block's; keys: exponents of the 32; key_base: the first of them.
template <int PLANES, class Acc>
__device__ __forceinline__ void block_probabilities(const Acc& acc, const PairWarp& warp, const RowState* rows,
                                                    const int2* keys, int key_base, int lane, float (&p)[4][4]) {
  constexpr int kWeightBits = PLANES == 3 ? kHighest.weight_bits : kHigh.weight_bits;
  const RowState* own[2] = {rows + lane / 4, rows + lane / 4 + 8};
  const int64_t m[2] = {own[0]->maximum, own[1]->maximum};
  uint32_t distance[4][4];
  // The shortcut of finish_block().
  const int ek_max = __reduce_max_sync(kFullWarp, keys[lane].x), ek_min = __reduce_min_sync(kFullWarp, keys[lane].x);
  const int r_min = score_shift(warp.rows.exponent_max, ek_max, kHighest.operand_bits);
  const int r_max = score_shift(warp.rows.exponent_min, ek_min, kHighest.operand_bits);
  bool small = warp.rows.exponent_min <= warp.rows.exponent_max && r_min >= 17 && r_max <= 24;
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
    const int shift[2] = {score_shift(own[0]->query_exponent, 0, kHighest.operand_bits) + 7,
                          score_shift(own[1]->query_exponent, 0, kHighest.operand_bits) + 7};
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int ek = keys[n * 8 + (lane % 4) * 2 + (i & 1)].x;
        const int32_t s = (half_score<PLANES, false>(acc, n, i, shift[i >> 1] - ek) + 1) >> 1;
        distance[n][i] = clamp_distance(m[i >> 1] - s);
      }
  } else {
    Dots dots;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dots.dot[n][i] = dot_of<PLANES, false>(acc, n, i);
    uint32_t found[16];
    careful_distances(dots, own[0]->query_exponent, own[1]->query_exponent, keys, m[0], m[1], lane, found);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) distance[n][i] = found[n * 4 + i];
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[n][i] = probability_of(weight_from_distance<kWeightBits>(distance[n][i]), own[i >> 1]->inverse);
  if (key_base < warp.begin_max || key_base + kPairBlock > warp.end_min) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key_base + n * 8 + (lane % 4) * 2 + (i & 1);
        if (key < own[i >> 1]->begin || key >= own[i >> 1]->end) p[n][i] = 0.0f;
      }
  }
}

// ---- section 8: dP to ds ----

// ds of the same block. The accumulators are of dO V^T. W is 0 exactly where p is: both of its factors are large enough.
template <int PLANES, class Acc>
__device__ __forceinline__ void block_terms(const Acc& acc, const RowState* rows, const int2* keys, int lane,
                                            const float (&p)[4][4], float (&ds)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowState& row = rows[lane / 4 + 8 * (i >> 1)];
      const int ev = keys[n * 8 + (lane % 4) * 2 + (i & 1)].y;
      // dot_of() of 16-bit operands is 2^16 too large, which the unit of 24-bit ones takes back: see Groups.
      const double unit = pow2(row.grad_exponent + ev - 2 * (kHighest.operand_bits - 1));
      const float gradient = score_gradient_of(__ll2float_rn(dot_of<PLANES, false>(acc, n, i)), unit);
      ds[n][i] = score_term_of(p[n][i] != 0.0f, p[n][i], gradient, row.delta);
    }
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

// What a warp has seen of its columns in one 32 x 32 tile.
struct ColumnMaxima {
  int b[8], c[8];
  __device__ __forceinline__ ColumnMaxima() {
#pragma unroll
    for (int i = 0; i < 8; ++i) b[i] = c[i] = kNoTerm;
  }
  // Folds one 16 x 32 block in, and its rows into `a`.
  __device__ __forceinline__ void add(const RowState* rows, const int2* keys, int lane, const float (&p)[4][4],
                                      const float (&ds)[4][4], int (&a)[2]) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const RowState& row = rows[lane / 4 + 8 * (i >> 1)];
        const int e = term_exponent(ds[n][i]), column = 2 * n + (i & 1);
        a[i >> 1] = max(a[i >> 1], e + keys[n * 8 + (lane % 4) * 2 + (i & 1)].x);
        b[column] = max(b[column], e + row.query_exponent);
        c[column] = max(c[column], term_exponent(p[n][i]) + row.grad_exponent);
      }
  }
  __device__ __forceinline__ void publish(const References& r, int64_t head, int key_base, int lane) {
    const int64_t key = head * r.key_stride + key_base + (lane / 8) * 8 + (lane % 4) * 2 + (lane / 4 & 1);
    raise(r.b + key, scatter_max(b, lane));
    raise(r.c + key, scatter_max(c, lane));
  }
};

// ---- keeping pairs ----

// The float4 of a lane and a row half: see Pairs. `to` is the block's first, m the 16-row half of the block.
__device__ __forceinline__ void keep_block(float4* to, int m, int lane, const float (&x)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    __stcs(to + ((i & 1) * 4 + m * 2 + (i >> 1)) * kWarpSize + lane, make_float4(x[0][i], x[1][i], x[2][i], x[3][i]));
}

// Where a CTA of `ROWS` rows stands: a row tile of the strip, and the keys that it walks, whole steps of kPairStep.
struct PairsWork {
  int64_t head, row;
  int begin, end;
};
template <int ROWS>
__device__ __forceinline__ PairsWork pairs_work(const PairsArgs& args, int64_t tile, int slab, int slab_keys) {
  const Shape& s = args.shape;
  const int64_t tiles = args.strip.rows / ROWS;
  PairsWork w;
  w.head = args.strip.head + tile / tiles;
  w.row = args.strip.row + (tiles - 1 - tile % tiles) * ROWS;  // the longest rows of a causal call first
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
