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

// The greatest distance weight_from_distance() takes; anything above it is 0 as it is.
constexpr uint32_t kDistanceLimit = (1u << 30) - 1;

// W of a distance <= kDistanceLimit.
// rounded = u + 2^23 with u = (distance * c + 2^29) >> 30 is the high word of 4 * distance * c + (2^55 + 2^31). From
// 2^29 on u >= 46 * 2^24, so n >= 46 and every shift below gives 0: no test for the zero range is needed. p = m * 2^(E
// - 127 - 23) with m the 24-bit significand, so p * 2^31 = (m << 8) >> (127 - E), exact; E is 127 where g <= 0 and 126
// where g > 0, since p(0) = 1 and p falls. The rounded shift by n + 31 - T is then one rounded shift of m << 8 by k = n
// + 31 - T + [g > 0]; and n + [g > 0] is u / 2^24 rounded up. Its value is the floor plus the bit below. T = 31 has k =
// 0, which has no bit below: k - 1 wraps to 2^32 - 1 and the clamping shift gives 0, as it does for every k above 32.
template <int WEIGHT_BITS>
__device__ __forceinline__ uint32_t weight_from_distance(uint32_t distance) {
  const uint64_t product = static_cast<uint64_t>(4 * distance) * kLog2eFixed + ((1ull << 55) + (1ull << 31));
  const uint32_t rounded = static_cast<uint32_t>(product >> 32);
  const float g = fma_f32(static_cast<float>(rounded & 0xffffffu), 5.9604644775390625e-08f, -0.5f);  // exact
  const uint32_t m = (__float_as_uint(exp2_poly(g)) << 8) | 0x80000000u;
  const uint32_t up = (rounded + ((1u << 23) - 1)) >> 24;
  if constexpr (WEIGHT_BITS == 31) {
    return shift_right(m, up) + (shift_right(m, up - 1) & 1u);
  } else {  // k > 0, so half of the rounded-up floor by k - 1; m is below 2^32 - 1 after that shift: no carry out
    return (shift_right(m, up + (30 - WEIGHT_BITS)) + 1) >> 1;
  }
}

// Which of the five planes hold a nonzero byte, from the OR of low and high words.
__device__ __forceinline__ unsigned planes_seen(uint32_t low, uint32_t high) {
  return ((low & 0xffu) != 0) | ((low & 0xff00u) != 0) << 1 | ((low & 0xff0000u) != 0) << 2 | (low >> 24 != 0) << 3 |
         (high != 0) << 4;
}

}  // namespace det_attn::cuda
