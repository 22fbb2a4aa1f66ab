// Finalize stage (docs/contract.md sections 6 and 7). In: NUM digits [count, head_dim, 12], normal or not, and DEN.
// Out: the output elements, rounded once to float32 and once more to another output type.
#include "common.cuh"
#include "paths.h"

namespace det_attn::cuda {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    finalize_kernel(const int64_t* num, const int64_t* den, int64_t elements, int64_t head_dim, int weight_bits,
                    double rescale, void* out, DType out_dtype) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t* digits = num + i * kDigits;
    const float value =
        output_of(digits_round(digits, 1), den[i / head_dim], digits[kSpecialDigit], weight_bits, rescale);
    store_element(out, i, out_dtype, value);
  }
}

}  // namespace

void finalize(const Context& ctx, const int64_t* num, const int64_t* den, int64_t count, int64_t head_dim,
              Precision precision, double rescale, void* out, DType out_dtype) {
  const int64_t elements = count * head_dim;
  if (elements == 0) return;
  finalize_kernel<<<stride_blocks(elements, kThreads), kThreads, 0, stream_of(ctx)>>>(
      num, den, elements, head_dim, precision.weight_bits, rescale, out, out_dtype);
  check_launch("finalize_kernel");
}

}  // namespace det_attn::cuda
