// Few query rows (decode): keys and values are used once, so byte planes of them would cost more memory traffic than
// the products. Here is what the scores and sums kernels that read them in place share: when they apply, and
// docs/contract.md section 1 for rows of 16-bit elements in registers.
#pragma once

#include "sums.cuh"

namespace det_attn::cuda {

// The calls that read keys and values in place: one block of query rows a head, 16-byte pieces of 16-bit elements.
inline bool reads_in_place(const View& x, int64_t head_dim) {
  return x.dtype != DType::kFloat32 && head_dim <= 128 && in_pieces(x, static_cast<int>(head_dim));
}
inline bool is_direct(const Problem& p) {
  return p.kv_heads > 0 && p.q_heads / p.kv_heads * p.q_len <= kBlockRows && reads_in_place(p.k, p.head_dim) &&
         (p.v.data == nullptr || reads_in_place(p.v, p.head_dim));
}

#if defined(__CUDACC__)
// CTAs per multiprocessor, where its shared memory holds them. The compiler needs more registers for later chips.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kScoresDirectCtas = 3, kSumsDirectCtas = 1;
#else
constexpr int kScoresDirectCtas = 4, kSumsDirectCtas = 2;
#endif

// Two elements in a word.
template <bool BF16>
struct Packed {
  static constexpr int kInfinity = BF16 ? 0x7f80 : 0x7c00;  // this and everything above it is not finite

  // Larger magnitudes of two words, half by half; NaN is kept.
  __device__ __forceinline__ static uint32_t max_magnitude(uint32_t a, uint32_t b) {
    uint32_t c;
    if constexpr (BF16) {
      asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
    } else {
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
    }
    return c;
  }
  // Bits of the larger of a word's magnitudes, which order as the magnitudes do.
  __device__ __forceinline__ static int larger(uint32_t magnitudes) {
    return max(static_cast<int>(magnitudes & 0xffffu), static_cast<int>(magnitudes >> 16));
  }
  __device__ __forceinline__ static float low(uint32_t w) {
    return BF16 ? __uint_as_float(w << 16) : half_to_float(static_cast<uint16_t>(w));
  }
  __device__ __forceinline__ static float high(uint32_t w) {
    return BF16 ? __uint_as_float(w & 0xffff0000u) : half_to_float(static_cast<uint16_t>(w >> 16));
  }

 private:
  __device__ __forceinline__ static float half_to_float(uint16_t h) {  // float16_to_float() in one instruction
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
  }
};

// exponent_of_largest() of the bits of a 16-bit float.
template <bool BF16>
__device__ __forceinline__ int exponent_of_largest_16(int bits) {
  return exponent_of_largest(__float_as_int(Packed<BF16>::low(static_cast<uint32_t>(bits))));
}

// Byte planes of four integers that lie side by side: planes[p] gets them as one word. A 16-bit float has 11
// significant bits at most, so the largest element of its row is an integer below the limit as it is.
__device__ __forceinline__ void quantise_four(const float (&x)[4], RowScale scale, uint32_t (&planes)[4]) {
  const uint32_t q[4] = {static_cast<uint32_t>(scale.round(x[0])), static_cast<uint32_t>(scale.round(x[1])),
                         static_cast<uint32_t>(scale.round(x[2])), static_cast<uint32_t>(scale.round(x[3]))};
  byte_planes(q, planes);
}
#endif

}  // namespace det_attn::cuda
