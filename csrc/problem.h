// What one attention call is: views of the tensors, sizes, the mask and the precision. Plain structs for host and
// device; no torch types. Implements the shapes and the mask of docs/contract.md sections 1 and 2.
#pragma once

#include "contract.h"

namespace det_attn {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

DET_HD int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// A [batch, heads, length, head_dim] tensor in elements of `dtype`; the last dimension is dense.
// Strides are in elements, may be zero or negative, and may exceed 2^31.
struct View {
  const void* data;
  int64_t stride_batch, stride_head, stride_row;
  DType dtype;
};
struct MutableView {
  void* data;
  int64_t stride_batch, stride_head, stride_row;
  DType dtype;
};

DET_HD float bfloat16_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

// Exact: every float16, denormals included, is a float32.
DET_HD float float16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // As the bits of a float32 the magnitude is too small by 2^112; multiplying is exact, denormals too.
  const float value = mul_f32(float_of(magnitude << 13), float_of(0x77800000u));
  return float_of(sign) + value == 0.0f ? float_of(sign) : (sign ? -value : value);
}

DET_HD float load_element(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  const uint16_t h = static_cast<const uint16_t*>(data)[index];
  return dtype == DType::kBFloat16 ? bfloat16_to_float(h) : float16_to_float(h);
}

// One rounding, to nearest even, of the float32 output to the output's dtype (section 6). NaN stays a quiet NaN.
DET_HD uint16_t float_to_bfloat16(float x) {
#if defined(__CUDA_ARCH__)
  const uint32_t u = __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
#endif
  if (x != x) return 0x7fc0u;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
DET_HD uint16_t float_to_float16(float x) {
#if defined(__CUDA_ARCH__)
  const uint32_t u = __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
#endif
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and up round to infinity
  if (magnitude < 0x38800000u) {                         // below 2^-14: the result is a float16 denormal
    // |x| * 2^24 is exact and below 2^10, so rne gives the denormal's integer.
    return sign | static_cast<uint16_t>(rne(mul_f64(static_cast<double>(float_of(magnitude)), pow2(24))));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

DET_HD void store_element(void* data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    const bool bf16 = dtype == DType::kBFloat16;
    static_cast<uint16_t*>(data)[index] = bf16 ? float_to_bfloat16(value) : float_to_float16(value);
  }
}

// Which keys a query attends: always one interval of local key indices, so tiles outside it are skipped.
// Keys are counted locally (0 is the first row of K); global positions enter through `diagonal`.
struct Mask {
  int64_t kv_lo, kv_hi;  // the keys of this call, 0 <= kv_lo <= kv_hi <= kv_len
  bool causal;
  int64_t diagonal;      // causal: local key j is attended when j <= query + diagonal  (q_offset - kv_offset)

  DET_MEMBER int64_t begin(int64_t) const { return kv_lo; }
  DET_MEMBER int64_t end(int64_t query) const {
    if (!causal) return kv_hi;
    const int64_t last = query + diagonal + 1;
    return last < kv_lo ? kv_lo : (last < kv_hi ? last : kv_hi);
  }
};

struct Problem {
  int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim;
  View q, k, v;      // v is unused by rowmax
  Mask mask;
  double scale;
  Precision precision;

  DET_MEMBER int64_t kv_head(int64_t q_head) const { return q_head / (q_heads / kv_heads); }
};

// What the backward stages see (section 8): the call, the gradient of its output, and what the forward pass kept.
struct Gradient {
  Problem problem;        // all of q, k, v
  View grad;              // dO [batch, q_heads, q_len, head_dim], any input dtype
  View out;               // the float32 output over all keys, before any further rounding; q's shape
  const double* rowmax;   // public form, over all keys, [batch, q_heads, q_len]
  const int64_t* den;     // over all keys, [batch, q_heads, q_len]
};

}  // namespace det_attn
