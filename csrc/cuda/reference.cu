// The reference path (docs/contract.md sections 2 to 7): the rowmax kernel and the launches. In: a Problem. Out:
// rowmax; NUM and DEN, or the output. Memory is the quantised rows plus, for `forward`, one tile of digits per resident
// block.
#include <algorithm>

#include "paths.h"
#include "sums_reference.cuh"

namespace det_attn::cuda::reference {

namespace {

// ---- Row maximum -----------------------------------------------------------------------------------------------

// Two blocks a processor: one computes while the other waits for its chunk.
__global__ void __launch_bounds__(kThreads, 2)
    rowmax_kernel(const __grid_constant__ Problem p, const PreparedRows q, const PreparedRows k, int64_t items,
                  double* rowmax) {
  __shared__ ScoreShared shared;
  __shared__ RowKeys row_keys;
  __shared__ int32_t exponents[kQueries];
  const int tx = thread_x(), ty = thread_y();
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Work w = work_of(p, item, kMaxHeadDim);
    const int64_t first_row = w.head_row * p.q_len + w.query;
    const int64_t first_key = w.kv_row * p.kv_len;
    __syncthreads();  // the item before has been written
    if (threadIdx.x < kQueries) {
      const int row = threadIdx.x;
      exponents[row] = row < w.rows ? q.exponents[first_row + row] : kMinExponent;
    }
    load_row_keys(row_keys, p, w, [](int) { return true; });
    const bool modified = p.modifiers.of_scores();
    int64_t best[kThreadRows] = {kRowmaxEmpty, kRowmaxEmpty, kRowmaxEmpty, kRowmaxEmpty};
    const int64_t key_end = static_cast<int64_t>(row_keys.last);
    for (int64_t key0 = key_end == 0 ? 0 : static_cast<int64_t>(row_keys.first); key0 < key_end; key0 += kKeys) {
      const int keys = static_cast<int>(min(static_cast<int64_t>(kKeys), key_end - key0));
      score_dots(shared, q.integers + first_row * q.pitch, w.rows, k.integers + (first_key + key0) * k.pitch, keys,
                 q.pitch);
#pragma unroll 1
      for (int c = 0; c < kThreadKeys; ++c) {
        const int key = pair_index(tx, c);
        const int ek = key < keys ? k.exponents[first_key + key0 + key] : kMinExponent;
#pragma unroll
        for (int a = 0; a < kThreadRows; ++a) {
          const int row = kThreadRows * ty + a;
          if (key0 + key < row_keys.begin[row] || key0 + key >= row_keys.end[row]) continue;
          const bool poisoned = exponents[row] == kPoisonedExponent || ek == kPoisonedExponent;
          const int64_t dot = shared.dots[c][a][threadIdx.x];
          int64_t s = poisoned ? kScorePoisoned
                               : score_of(dot, score_shift(exponents[row], ek, p.precision.operand_bits));
          if (modified) s = modify(p, w, row, key0 + key, s);
          if (s > best[a]) best[a] = s;
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kThreadRows; ++a) {
      const int row = kThreadRows * ty + a;
      const int64_t m = side_max(best[a]);
      if (tx != 0 || row >= w.rows) continue;
      rowmax[first_row + row] = rowmax_to_public(exponents[row] == kPoisonedExponent ? kRowmaxPoisoned : m);
    }
  }
}

__global__ void __launch_bounds__(kThreads) raise_kernel(const double* others, int64_t rows, double* rowmax) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < rows; i += step)
    rowmax[i] = larger_rowmax(rowmax[i], others[i]);
}

// ---- Launches --------------------------------------------------------------------------------------------------

// The problem without the keys that no query attends, so they are neither quantised nor read.
Problem attended_part(const Problem& problem) {
  Problem p = problem;
  Mask& mask = p.mask;
  int64_t first = mask.kv_lo, end = mask.kv_hi;
  if (mask.ranges == nullptr) {  // whose contents only the device knows; without them both ends rise with the queries
    first = mask.begin(0, 0);
    end = std::max(first, mask.end(0, p.q_len - 1));
  }
  for (View* view : {&p.k, &p.v}) {
    if (view->data == nullptr) continue;  // rowmax has no values
    view->data = static_cast<const char*>(view->data) + first * view->stride_row * element_size(view->dtype);
  }
  p.kv_len = end - first;
  mask.kv_lo = 0, mask.kv_hi = p.kv_len;
  mask.diagonal -= first;
  mask.first_key += first;
  Bias& bias = p.modifiers.bias;
  if (bias.data != nullptr) {
    const int size = bias.boolean ? 1 : element_size(bias.dtype);
    bias.data = static_cast<const char*>(bias.data) + first * bias.stride_key * size;
  }
  Dropout& dropout = p.modifiers.dropout;
  dropout.first_key += first;
  if (dropout.keys != nullptr) dropout.keys += first;
  return p;
}

PreparedRows prepare_queries(const Context& ctx, const Problem& p) {
  return prepare_rows(ctx, p.q, p.batch, p.q_heads, p.q_len, p.head_dim, RowKind::kQuery, p.scale, p.precision);
}
PreparedRows prepare_keys(const Context& ctx, const Problem& p) {
  return prepare_rows(ctx, p.k, p.batch, p.kv_heads, p.kv_len, p.head_dim, RowKind::kKey, 1.0, p.precision);
}
PreparedRows prepare_values(const Context& ctx, const Problem& p) {
  return prepare_rows(ctx, p.v, p.batch, p.kv_heads, p.kv_len, p.head_dim, RowKind::kValue, 1.0, p.precision);
}

void launch_rowmax(const Context& ctx, const Problem& p, const PreparedRows& q, const PreparedRows& k, double* rowmax) {
  const int64_t items = p.batch * p.q_heads * ceil_div(p.q_len, kQueries);
  const int blocks = resident_blocks(rowmax_kernel, kThreads, 0, ctx.device, items);
  rowmax_kernel<<<blocks, kThreads, 0, stream_of(ctx)>>>(p, q, k, items, rowmax);
  check_launch("rowmax_kernel");
}

template <int kHalves, int kDims>
void launch_sums(const Context& ctx, SumTask task) {
  const Problem& p = task.problem;
  const auto kernel = sum_kernel<kHalves, kDims>;
  const int bytes = static_cast<int>(sizeof(SumShared<kHalves, kDims>));
  allow_shared(kernel, bytes);
  task.items = p.batch * p.q_heads * ceil_div(p.q_len, kQueries) * ceil_div(p.head_dim, kDims);
  const int blocks = resident_blocks(kernel, kThreads, bytes, ctx.device, task.items);
  if (task.num == nullptr) task.scratch = workspace<int64_t>(ctx, int64_t(blocks) * kQueries * kDims * kDigits);
  kernel<<<blocks, kThreads, bytes, stream_of(ctx)>>>(task);
  check_launch("sum_kernel");
}

void launch_sums(const Context& ctx, const SumTask& task) {
  const bool narrow = task.problem.head_dim <= 64;
  if (task.problem.precision.weight_bits == kHighest.weight_bits) {
    narrow ? launch_sums<2, 64>(ctx, task) : launch_sums<2, 128>(ctx, task);
  } else {
    narrow ? launch_sums<1, 64>(ctx, task) : launch_sums<1, 128>(ctx, task);
  }
}

bool has_no_rows(const Problem& p) { return p.batch * p.q_heads * p.q_len == 0; }

}  // namespace

void rowmax(const Context& ctx, const Problem& problem, double* rowmax) {
  if (has_no_rows(problem)) return;
  const Problem p = attended_part(problem);
  launch_rowmax(ctx, p, prepare_queries(ctx, p), prepare_keys(ctx, p), rowmax);
}

void accumulate(const Context& ctx, const Problem& problem, const double* rowmax, int64_t* num, int64_t* den) {
  if (has_no_rows(problem)) return;
  const Problem p = attended_part(problem);
  SumTask task{};
  task.problem = p;
  task.q = prepare_queries(ctx, p);
  task.k = prepare_keys(ctx, p);
  task.v = prepare_values(ctx, p);
  task.rowmax = rowmax;
  task.den = den;
  task.num = num;
  launch_sums(ctx, task);
}

void accumulate_last(const Context& ctx, const Problem& problem, const double* others, double* rowmax, int64_t* num,
                     int64_t* den) {
  if (has_no_rows(problem)) return;
  reference::rowmax(ctx, problem, rowmax);
  const int64_t rows = problem.batch * problem.q_heads * problem.q_len;
  raise_kernel<<<stride_blocks(rows, kThreads), kThreads, 0, stream_of(ctx)>>>(others, rows, rowmax);
  check_launch("raise_kernel");
  accumulate(ctx, problem, rowmax, num, den);
}

void forward(const Context& ctx, const Problem& problem, const MutableView& out, double* rowmax, int64_t* den) {
  if (has_no_rows(problem)) return;
  const Problem p = attended_part(problem);
  SumTask task{};
  task.problem = p;
  task.q = prepare_queries(ctx, p);
  task.k = prepare_keys(ctx, p);
  launch_rowmax(ctx, p, task.q, task.k, rowmax);
  task.v = prepare_values(ctx, p);
  task.rowmax = rowmax;
  task.den = den;
  task.out = out;
  launch_sums(ctx, task);
}

}  // namespace det_attn::cuda::reference
