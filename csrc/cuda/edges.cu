// The tensor-core path around its matrix products: row maxima in public form, rounding of long accumulators, and the
// special values of docs/contract.md section 7, which ordinary data never pays for.
#include "tensor_core.cuh"

namespace det_attn::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void export_rowmax_kernel(Shape s, Prepared prepared, double* rowmax) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= s.heads * s.rows) return;
  rowmax[i] = rowmax_to_public(prepared.rowmax[i / s.rows * s.rows_pad + i % s.rows]);
}

__global__ void import_rowmax_kernel(Shape s, Prepared prepared, const double* rowmax) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= s.heads * s.rows_pad) return;
  const int64_t head = i / s.rows_pad, row = i % s.rows_pad;
  const int64_t given = row < s.rows ? rowmax_from_public(rowmax[head * s.rows + row]) : kRowmaxEmpty;
  if (prepared.rowmax[i] != kRowmaxPoisoned)
    prepared.rowmax[i] = given;  // only queries are marked by now: they stay so
}

__device__ __forceinline__ bool is_poisoned(const SumsArgs& a, int64_t head, int64_t row) {
  return a.rowmax(head, row) == kRowmaxPoisoned;
}

__global__ void finalize_rows_kernel(SumsArgs a, int64_t first_row, int64_t elements) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int dim = static_cast<int>(i % a.shape.dims);
  const int64_t index = first_row + i / a.shape.dims, head = index / a.shape.rows, row = index % a.shape.rows;
  const double num = digits_round(a.digits_of(index, dim), 1);
  const float o = output_of(num, a.den[index], is_poisoned(a, head, row) ? kCountNan : 0,
                            a.problem.precision.weight_bits, a.problem.modifiers.rescale());
  store_element(a.out.data, a.out_offset(head, row) + dim, a.out.dtype, o);
}

// One CTA: 32 rows of one head. The special keys of a stretch are listed in shared memory, then counted by (row, dim).
__global__ void __launch_bounds__(kThreads) patch_specials_kernel(const __grid_constant__ SumsArgs a) {
  constexpr int kRows = 32;
  const Shape& s = a.shape;
  const int64_t tiles = (s.rows + kRows - 1) / kRows;
  const int64_t head = blockIdx.x / tiles, row_base = blockIdx.x % tiles * kRows;
  if (a.prepared.value_special[head] == 0) return;
  __shared__ int listed;
  __shared__ int list[kThreads];
  const Problem& problem = a.problem;
  const View& v = problem.v;
  const int64_t base = head / problem.kv_heads * v.stride_batch + head % problem.kv_heads * v.stride_head;
  const Bias& bias = problem.modifiers.bias;
  const bool maskable = bias.data != nullptr;
  const int elements = static_cast<int>(min(static_cast<int64_t>(kRows), s.rows - row_base)) * s.dims;

  for (int first = 0; first < elements; first += kThreads) {
    const int element = first + threadIdx.x;
    const int64_t row = row_base + element / s.dims;
    const int dim = element % s.dims;
    const int2 keys = element < elements ? a.prepared.row_keys[head * s.rows_pad + row] : make_int2(0, 0);
    const int64_t row_bias = maskable && element < elements ? a.prepared.row_bias[head * s.rows_pad + row] : 0;
    int64_t count = 0;
    for (int64_t stretch = 0; stretch < s.keys; stretch += kThreads) {
      __syncthreads();
      if (threadIdx.x == 0) listed = 0;
      __syncthreads();
      const int64_t key = stretch + threadIdx.x;
      if (key < s.keys && a.prepared.special_key[head * s.keys_pad + key])
        list[atomicAdd(&listed, 1)] = static_cast<int>(key);
      __syncthreads();
      for (int i = 0; i < listed && element < elements; ++i) {
        if (list[i] < keys.x || list[i] >= keys.y) continue;
        if (maskable && bias.at(row_bias + list[i] * bias.stride_key) == float_of(0xff800000u)) continue;
        const float x = load_element(v.data, base + (problem.mask.kv_lo + list[i]) * v.stride_row + dim, v.dtype);
        if (x != x)
          count += kCountNan;
        else if (!is_finite(x))
          count += x < 0 ? kCountNegInf : kCountPosInf;
      }
    }
    if (count == 0 || a.rowmax(head, row) == kRowmaxPoisoned || a.rowmax(head, row) == kRowmaxEmpty) continue;
    if (a.out.data != nullptr) {
      store_element(a.out.data, a.out_offset(head, row) + dim, a.out.dtype,
                    output_of(0.0, 1, count, a.problem.precision.weight_bits));
    } else {
      a.digits_of(head * s.rows + row, dim)[kSpecialDigit] = count;
    }
  }
}

__global__ void finish_num_kernel(SumsArgs a, int64_t elements) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t index = i / a.shape.dims;
  int64_t* digits = a.digits + i * kDigits;
  if (is_poisoned(a, index / a.shape.rows, index % a.shape.rows)) digits[kSpecialDigit] = kCountNan;  // the sums are 0
  digits_normalise(digits, 1);
}

}  // namespace

void export_rowmax(const Context& ctx, const Shape& s, const Prepared& prepared, double* rowmax) {
  export_rowmax_kernel<<<grid_of(ceil_div(s.heads * s.rows, kThreads)), kThreads, 0, stream_of(ctx)>>>(s, prepared,
                                                                                                       rowmax);
  check_launch("export_rowmax_kernel");
}

void import_rowmax(const Context& ctx, const Shape& s, const Prepared& prepared, const double* rowmax) {
  import_rowmax_kernel<<<grid_of(ceil_div(s.heads * s.rows_pad, kThreads)), kThreads, 0, stream_of(ctx)>>>(s, prepared,
                                                                                                           rowmax);
  check_launch("import_rowmax_kernel");
}

void finalize_rows(const Context& ctx, const SumsArgs& a, int64_t first_row, int64_t count) {
  const int64_t elements = count * a.shape.dims;
  finalize_rows_kernel<<<grid_of(ceil_div(elements, kThreads)), kThreads, 0, stream_of(ctx)>>>(a, first_row, elements);
  check_launch("finalize_rows_kernel");
}

void patch_specials(const Context& ctx, const SumsArgs& a) {
  const int64_t blocks = a.shape.heads * ceil_div(a.shape.rows, 32);
  patch_specials_kernel<<<grid_of(blocks), kThreads, 0, stream_of(ctx)>>>(a);
  check_launch("patch_specials_kernel");
}

void finish_num(const Context& ctx, const SumsArgs& a) {
  const int64_t elements = a.shape.heads * a.shape.rows * a.shape.dims;
  finish_num_kernel<<<grid_of(ceil_div(elements, kThreads)), kThreads, 0, stream_of(ctx)>>>(a, elements);
  check_launch("finish_num_kernel");
}

}  // namespace det_attn::cuda
