// The reference path's backward kernels (docs/contract.md section 8): pairs of a strip from float64 products, and exact
// sums in int64. Simple; the tests' second opinion beside the tensor cores. What surrounds them is the same.
#pragma once

#include "gradients.cuh"
#include "modified_pairs.cuh"
#include "scores_reference.cuh"

namespace det_attn::cuda::reference {

// The integers that the kernels read, in prepared rows: queries and dO [heads][rows], keys and values [heads][kv_len].
struct BackwardRows {
  PreparedRows q, grad, k, v;
  int64_t kv_len, kv_lo;
};

// ---- Pairs -----------------------------------------------------------------------------------------------------

struct PairsShared {
  ScoreShared scores;
  RowState rows[kQueries];
  int32_t a[kQueries], b[kKeys], c[kKeys];
};

// Out of line: calls without modifiers do not come here.
static __device__ __noinline__ ModifiedPair modify_pair(const Problem& p, int64_t head, int64_t row, int64_t key,
                                                        int64_t s) {
  return modified_pair(p, head, row, key, s);
}
// What a pair's p and dP are multiplied by.
static __device__ __noinline__ float dropout_factor(const Problem& p, int64_t head, int64_t row, int64_t key) {
  if (!p.modifiers.dropout.on) return 1.0f;
  return is_kept(p, pair_in_call(p, head, row, key)) ? p.modifiers.dropout.rescale : 0.0f;
}

// p and dP of a pair, from its two dots, before any dropout.
__device__ inline float pair_probability(const RowState& row, int64_t distance, Precision precision) {
  return probability_of(weight_of(distance, precision.weight_bits), row.inverse);
}
__device__ inline float pair_gradient(const RowState& row, int64_t dot, int ev, Precision precision) {
  const double unit = pow2(row.grad_exponent + ev - 2 * (precision.operand_bits - 1));
  return score_gradient_of(__ll2float_rn(dot), unit);
}

template <bool MODIFIED>
__global__ void __launch_bounds__(kThreads, 1)
    pairs_kernel(const __grid_constant__ PairsArgs args, const __grid_constant__ BackwardRows in, Precision precision) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  PairsShared& shared = *reinterpret_cast<PairsShared*>(shared_bytes);
  const Shape& s = args.shape;
  const int64_t tiles = args.strip.rows / kQueries;
  const int64_t head = args.strip.head + blockIdx.x / tiles, row0 = args.strip.row + blockIdx.x % tiles * kQueries;
  if (row0 >= s.rows) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kQueries), s.rows - row0));
  const int tx = thread_x(), ty = thread_y();
  if (threadIdx.x < kQueries) {
    shared.rows[threadIdx.x] = args.state.rows[head * s.rows_pad + row0 + threadIdx.x];
    shared.a[threadIdx.x] = kNoTerm;
  }
  const int64_t range = (head * s.rows_pad + row0) / 32;
  const int2 first = args.state.range[range], second = args.state.range[range + 1];
  const int64_t begin = min(first.x, second.x) / kPairStep * kPairStep, end = max(first.y, second.y);
  const int64_t slab = int64_t(blockIdx.y) * kPairSlab;
  static_assert(kQueries == kPairStep && kKeys == kPairStep && kPairSlab % kPairStep == 0, "whole steps are written");
  for (int64_t key0 = max(begin, slab); key0 < min(end, slab + kPairSlab); key0 += kKeys) {
    const int keys = static_cast<int>(min(static_cast<int64_t>(kKeys), s.keys - key0));
    const int64_t first_row = head * s.rows + row0, first_key = head * in.kv_len + in.kv_lo + key0;
    if (threadIdx.x < kKeys) shared.b[threadIdx.x] = shared.c[threadIdx.x] = kNoTerm;
    float p[kThreadKeys][kThreadRows], slope[kThreadKeys][kThreadRows];
    int2 exponents[kThreadKeys];
    score_dots(shared.scores, in.q.integers + first_row * in.q.pitch, rows, in.k.integers + first_key * in.k.pitch,
               keys, in.q.pitch);
#pragma unroll
    for (int c = 0; c < kThreadKeys; ++c) {
      exponents[c] = args.state.key_exponents[head * s.keys_pad + key0 + pair_index(tx, c)];
#pragma unroll
      for (int a = 0; a < kThreadRows; ++a) {
        const RowState& row = shared.rows[kThreadRows * ty + a];
        const int64_t key = key0 + pair_index(tx, c);
        p[c][a] = 0.0f, slope[c][a] = 1.0f;
        if (key < row.begin || key >= row.end) continue;
        const int64_t score = score_of(shared.scores.dots[c][a][threadIdx.x],
                                 score_shift(row.query_exponent, exponents[c].x, precision.operand_bits));
        int64_t distance = row.maximum - score;
        if constexpr (MODIFIED) {
          const ModifiedPair pair = modify_pair(args.problem, head, row0 + kThreadRows * ty + a, key, score);
          distance = modified_distance(row.maximum, pair.score), slope[c][a] = pair.slope;
        }
        p[c][a] = pair_probability(row, distance, precision);
      }
    }
    score_dots(shared.scores, in.grad.integers + first_row * in.grad.pitch, rows,
               in.v.integers + first_key * in.v.pitch, keys, in.grad.pitch);
#pragma unroll
    for (int c = 0; c < kThreadKeys; ++c)
#pragma unroll
      for (int a = 0; a < kThreadRows; ++a) {
        const int row = kThreadRows * ty + a, key = pair_index(tx, c);
        const RowState& state = shared.rows[row];
        float gradient = pair_gradient(state, shared.scores.dots[c][a][threadIdx.x], exponents[c].y, precision);
        float weight = p[c][a];  // of dO
        if constexpr (MODIFIED) {
          const bool attended = key0 + key >= state.begin && key0 + key < state.end;
          const float factor = attended ? dropout_factor(args.problem, head, row0 + row, key0 + key) : 0.0f;
          gradient = dropped(gradient, factor), weight = dropped(weight, factor);
        }
        float ds = score_term_of(p[c][a] != 0.0f, p[c][a], gradient, state.delta);
        if constexpr (MODIFIED) ds = mul_f32(ds, slope[c][a]);
        if (args.pairs.p != nullptr) {
          const int64_t at = args.pairs.element(args.strip, head, row0 + row, key0 + key);
          reinterpret_cast<float*>(args.pairs.p)[at] = weight;
          reinterpret_cast<float*>(args.pairs.ds)[at] = ds;
        }
        if (args.references.a != nullptr) {
          atomicMax(&shared.a[row], term_exponent(ds) + exponents[c].x);
          atomicMax(&shared.b[key], term_exponent(ds) + state.query_exponent);
          atomicMax(&shared.c[key], term_exponent(weight) + state.grad_exponent);
        }
      }
    __syncthreads();
    if (args.references.a != nullptr && threadIdx.x < keys) {
      const int64_t key = head * args.references.key_stride + key0 + threadIdx.x;
      raise(args.references.b + key, shared.b[threadIdx.x]);
      raise(args.references.c + key, shared.c[threadIdx.x]);
    }
    __syncthreads();
  }
  if (args.references.a != nullptr && threadIdx.x < rows)
    raise(args.references.a + head * s.rows + row0 + threadIdx.x, shared.a[threadIdx.x]);
}

// ---- Sums ------------------------------------------------------------------------------------------------------

constexpr int kSumRows = 64, kSumDims = 64, kSumInner = 32;

struct GradientShared {
  int32_t terms[kSumInner][kSumRows];
  int32_t factor[kSumInner][kSumDims];
};

// One of the jobs of a strip: 64 rows x 64 dims of sums by 16 x 16 threads. The factor's integers come row by row.
__global__ void __launch_bounds__(kThreads)
    gradient_sums_kernel(const __grid_constant__ GradientSumsArgs args, const __grid_constant__ BackwardRows in) {
  __shared__ GradientShared shared;
  const Shape& s = args.shape;
  const SumJob& job = args.jobs[blockIdx.z];
  const int64_t tiles = (job.of_query ? args.strip.rows : s.keys_pad) / kSumRows, tile = blockIdx.x / args.dim_blocks;
  if (tile >= tiles * args.strip.heads) return;
  const int64_t head = args.strip.head + tile / tiles;
  const int64_t row0 = (job.of_query ? args.strip.row : 0) + tile % tiles * kSumRows;
  const int64_t rows = job.of_query ? s.rows : s.keys;  // of the sums
  const int dim0 = blockIdx.x % args.dim_blocks * kSumDims;
  const PreparedRows& factor = job.of_query ? in.k : (job.of_p ? in.grad : in.q);
  const int64_t first_factor = job.of_query ? head * in.kv_len + in.kv_lo : head * s.rows;
  const int64_t inner_pad = job.of_query ? s.keys_pad : s.rows_pad;
  const int64_t part = job.of_query ? args.split_keys : args.split_rows;
  const int64_t inner_first = job.of_query ? 0 : args.strip.row;
  const int64_t begin = inner_first + int64_t(blockIdx.y) * part;
  const int64_t end = min(begin + part, job.of_query ? s.keys : min(s.rows, inner_first + args.strip.rows));
  const float* pairs = reinterpret_cast<const float*>(job.of_p ? args.pairs.p : args.pairs.ds);
  const int tx = thread_x(), ty = thread_y();
  int64_t sums[4][4] = {};
  bool any = false;
  for (int64_t inner0 = begin; inner0 < end; inner0 += kSumInner) {
    // Pairs are there for whole steps in which one of 64 query rows attends a key.
    const int64_t query0 = job.of_query ? row0 : inner0 / kPairStep * kPairStep, key0 = job.of_query ? inner0 : row0;
    const int2 first = args.state.range[(head * s.rows_pad + query0) / 32];
    const int2 second = args.state.range[(head * s.rows_pad + query0) / 32 + 1];
    const int64_t first_kept = min(first.x, second.x) / kPairStep * kPairStep;
    if (key0 < first_kept || key0 >= max(first.y, second.y)) continue;
    any = true;
    __syncthreads();
    for (int i = threadIdx.x; i < kSumInner * kSumRows; i += kThreads) {
      const int k = i / kSumRows, r = i % kSumRows;
      int32_t t = 0;
      int shift;
      if (inner0 + k < end && row0 + r < rows &&
          term_shift(job.reference[head * job.reference_stride + row0 + r], job.bits, shift)) {
        const int64_t query = job.of_query ? row0 + r : inner0 + k, key = job.of_query ? inner0 + k : row0 + r;
        const float x = pairs[args.pairs.element(args.strip, head, query, key)];
        t = gradient_term(x, job.exponent[head * inner_pad + inner0 + k] + shift, job.bits);
      }
      shared.terms[k][r] = t;
    }
    for (int i = threadIdx.x; i < kSumInner * kSumDims; i += kThreads) {
      const int k = i / kSumDims, d = dim0 + i % kSumDims;
      shared.factor[k][i % kSumDims] =
          inner0 + k < end && d < s.dims ? factor.integers[(first_factor + inner0 + k) * factor.pitch + d] : 0;
    }
    __syncthreads();
    for (int k = 0; k < kSumInner; ++k) {
#pragma unroll
      for (int a = 0; a < 4; ++a)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sums[a][c] += static_cast<int64_t>(shared.terms[k][4 * ty + a]) * shared.factor[k][tx + kSide * c];
    }
  }
  if (!any) return;
#pragma unroll
  for (int a = 0; a < 4; ++a)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t row = row0 + 4 * ty + a;
      const int dim = dim0 + tx + kSide * c;
      if (row < rows && dim < s.dims) add_to_sum(job.at(head, row, s.dims, dim), job.digit_stride, sums[a][c]);
    }
}

}  // namespace det_attn::cuda::reference
