// Rows stage (docs/contract.md sections 1 and 7). In: a strided view of Q, K or V. Out: integers and exponents, either
// the public boundary or the padded workspace that the reference kernels read. One warp a row.
#include "rows.cuh"

#include "paths.h"

namespace det_attn::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kLaneDims = kMaxHeadDim / kWarpSize;  // elements of a row that a lane may hold

struct RowsTask {
  View x;
  int64_t heads, length, count;  // count = batch * heads * length
  int head_dim;
  RowKind kind;
  double scale;
  Precision precision;
  PreparedRows out;
  bool notes;  // write the notes on value rows, and kZeroRow
};

__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, static_cast<unsigned long long>(x), step);
    x = other > x ? other : x;
  }
  return x;
}

__device__ __forceinline__ int32_t special_of(double x) {
  return x != x ? kValueNan : (x > 0.0 ? kValuePosInf : kValueNegInf);
}

__device__ void quantise_row(const RowsTask& task, int64_t row, int lane) {
  const int64_t head_row = row / task.length;
  const int64_t start = head_row / task.heads * task.x.stride_batch + head_row % task.heads * task.x.stride_head +
                        row % task.length * task.x.stride_row;
  const bool value_row = task.kind == RowKind::kValue;

  // The row's exponent, over its finite elements. Non-negative float64 numbers order as their bits do.
  double x[kLaneDims];
  uint64_t largest = 0;
  bool special = false;
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int d = lane + i * kWarpSize;
    x[i] = d < task.head_dim ? static_cast<double>(load_element(task.x.data, start + d, task.x.dtype)) : 0.0;
    if (task.kind == RowKind::kQuery) x[i] = mul_f64(x[i], task.scale);
    const uint64_t magnitude = bits_of(x[i]) & 0x7fffffffffffffffull;
    if (!is_finite(x[i])) {
      special = true;
    } else if (magnitude > largest) {
      largest = magnitude;
    }
  }
  special = __any_sync(kFullWarp, special);
  const int e = row_exponent(double_of(warp_max(largest)));

  const bool poisoned = special && !value_row;
  int32_t* integers = task.out.integers + row * task.out.pitch;
  bool nonzero = false;
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int d = lane + i * kWarpSize;
    if (d >= task.out.pitch) break;
    int32_t q = 0;
    if (is_finite(x[i])) {
      if (!poisoned) q = quantise(x[i], e, task.precision.operand_bits);
      nonzero = nonzero || q != 0;
    } else if (value_row) {
      q = special_of(x[i]);
    }
    integers[d] = q;
  }
  nonzero = __any_sync(kFullWarp, nonzero);

  if (lane != 0) return;
  task.out.exponents[row] = poisoned ? kPoisonedExponent : (task.notes && !nonzero ? kZeroRow : e);
  if (!task.notes) return;
  task.out.special_rows[row] = special;
  if (special) task.out.special_heads[head_row] = 1;  // every writer writes the same
}

__global__ void __launch_bounds__(kWarps* kWarpSize) rows_kernel(const RowsTask task) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  for (int64_t row = first; row < task.count; row += static_cast<int64_t>(gridDim.x) * kWarps) {
    quantise_row(task, row, lane);
  }
}

void launch(const Context& ctx, const RowsTask& task) {
  if (task.count == 0) return;
  rows_kernel<<<stride_blocks(task.count, kWarps), kWarps * kWarpSize, 0, stream_of(ctx)>>>(task);
  check_launch("rows_kernel");
}

}  // namespace

void rows(const Context& ctx, const View& x, int64_t batch, int64_t heads, int64_t length, int64_t head_dim,
          RowKind kind, double scale, Precision precision, int32_t* integers, int32_t* exponents) {
  const int dim = static_cast<int>(head_dim);
  const PreparedRows out{integers, exponents, dim, nullptr, nullptr};
  launch(ctx, RowsTask{x, heads, length, batch * heads * length, dim, kind, scale, precision, out, false});
}

PreparedRows prepare_rows(const Context& ctx, const View& x, int64_t batch, int64_t heads, int64_t length,
                          int64_t head_dim, RowKind kind, double scale, Precision precision) {
  const int64_t count = batch * heads * length;
  const int dim = static_cast<int>(head_dim);
  PreparedRows out{};
  if (count == 0) return out;
  out.pitch = static_cast<int32_t>(round_up(head_dim, kDimPad));
  out.integers = workspace<int32_t>(ctx, count * out.pitch);
  out.exponents = workspace<int32_t>(ctx, count);
  const bool notes = kind == RowKind::kValue;
  if (notes) {
    out.special_rows = workspace<uint8_t>(ctx, count);
    out.special_heads = workspace<int32_t>(ctx, batch * heads);
    check(cudaMemsetAsync(out.special_heads, 0, batch * heads * sizeof(int32_t), stream_of(ctx)), "cudaMemsetAsync");
  }
  launch(ctx, RowsTask{x, heads, length, count, dim, kind, scale, precision, out, notes});
  return out;
}

}  // namespace det_attn::cuda
