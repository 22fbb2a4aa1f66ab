// Weights stage for the tensor cores: score distances -> W, shifted to the values' common exponent, as byte planes
// (docs/contract.md section 4). weight_of() in contract.h is the rule; weight_from_distance() is the same integer with
// fewer instructions, see its argument.
#pragma once

#include "scores.cuh"

namespace det_attn::cuda {

// Shifts that clamp at 32 instead of being undefined, as the PTX instructions do.
__device__ __forceinline__ uint32_t shift_right(uint32_t x, uint32_t n) {
  uint32_t y;
  asm("shr.u32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(n));
  return y;
}
__device__ __forceinline__ uint32_t shift_left(uint32_t x, uint32_t n) {
  uint32_t y;
  asm("shl.b32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(n));
  return y;
}

// W of a distance <= kFarDistance.
// product has u from bit 30 up: n is u / 2^24 rounded, and the low 24 bits of u, read as signed, are g * 2^24; shifted
// to the top of a word they are g * 2^32, which the polynomial takes as it is. At kFarDistance n is 46, where every
// shift below gives 0.
//   T = 23: W = floor(v + 1/2) of v = p * 2^(23 - n) <= 2^23. Rounded down, v + (2^23 - 1/2) is floor(v + 1/2) +
// 2^23 - 1 where v >= 1/2, since floats there are whole, and 2^23 - 1/2, the float before 2^23, where v < 1/2: as bits,
// in both cases W more than those of 2^23, less one. The exponent of the factor is a constant less n, which is
// floor((2 * high + 2^22) / 2^23).
//   T = 31: p * 2^31 is the 24-bit significand shifted up by 8 or 7, and W its rounded shift by n: the floor plus the
// bit below. Where nothing is shifted out the shift for that bit wraps and the clamping shift gives 0, as above 32.
template <int WEIGHT_BITS>
__device__ __forceinline__ uint32_t weight_from_distance(uint32_t distance) {
  static_assert(WEIGHT_BITS == 23 || WEIGHT_BITS == 31, "see the argument above");
  constexpr int kScale = 80;  // keeps coefficients of g * 2^32, and the factor below, normal
  const uint64_t product = static_cast<uint64_t>(distance) * kLog2eFixed + (1ull << 29);
  const uint32_t low = static_cast<uint32_t>(product), high = static_cast<uint32_t>(product >> 32);
  const int g = static_cast<int>(__funnelshift_l(low, high, 10) & 0xffffff00u);
  const float p = exp2_poly<32, kScale>(static_cast<float>(g));  // exact: g has 24 bits
  if constexpr (WEIGHT_BITS == 23) {
    constexpr uint32_t kExponent = static_cast<uint32_t>(127 + WEIGHT_BITS - kScale) << 23;
    const float factor = __uint_as_float(((kExponent + (1u << 22) - 1) - 2 * high) & 0xff800000u);
    return __float_as_uint(__fmaf_rd(p, factor, 8388607.5f)) - (0x4b000000u - 1);
  } else {
    const uint32_t m = (__float_as_uint(p) << 8) | 0x80000000u;
    const uint32_t by = ((high + (1u << 21)) >> 22) + (127 + kScale) - (__float_as_uint(p) >> 23);
    return shift_right(m, by) + (shift_right(m, by - 1) & 1u);
  }
}

// Which of the five planes hold a nonzero byte, from the OR of low and high words.
__device__ __forceinline__ unsigned planes_seen(uint32_t low, uint32_t high) {
  return ((low & 0xffu) != 0) | ((low & 0xff00u) != 0) << 1 | ((low & 0xff0000u) != 0) << 2 | (low >> 24 != 0) << 3 |
         (high != 0) << 4;
}

}  // namespace det_attn::cuda
