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
// u + 2^23 with u = (distance * c + 2^29) >> 30 is the high word of 4 * distance * c + (2^55 + 2^31). From 2^29 on u >= 46
// * 2^24, so n >= 46 and every shift below gives 0: no test for the zero range is needed.
// p = m * 2^(E - 127 - 23) with m the 24-bit significand and E in {126, 127}, so p * 2^31 = (m << 8) >> (127 - E), exact.
// The rounded shift by n + 31 - T is then one rounded shift of m << 8 by k = n + 31 - T + 127 - E: its floor plus the bit
// below. k = 0 has no bit below: k - 1 wraps to 2^32 - 1 and the clamping shift gives 0, as it does for every k above 32.
template <int WEIGHT_BITS>
__device__ __forceinline__ uint32_t weight_from_distance(uint32_t distance) {
  const uint64_t product = static_cast<uint64_t>(4 * distance) * kLog2eFixed + ((1ull << 55) + (1ull << 31));
  const uint32_t rounded = static_cast<uint32_t>(product >> 32);
  const uint32_t n = rounded >> 24;
  const float g = fma_f32(static_cast<float>(rounded & 0xffffffu), 5.9604644775390625e-08f, -0.5f);  // exact
  const uint32_t bits = __float_as_uint(exp2_poly(g));
  const uint32_t m = (bits << 8) | 0x80000000u;
  const uint32_t k = n + (31 - WEIGHT_BITS + 127) - (bits >> 23);
  return shift_right(m, k) + (shift_right(m, k - 1) & 1u);
}

// Byte p of four weights in key order, for the four planes of 32 bits.
__device__ __forceinline__ void byte_planes(const uint32_t (&w)[4], uint32_t (&planes)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);  // bytes 0, 1 interleaved
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);  // bytes 2, 3 interleaved
  planes[0] = __byte_perm(a, b, 0x5410);
  planes[1] = __byte_perm(a, b, 0x7632);
  planes[2] = __byte_perm(c, d, 0x5410);
  planes[3] = __byte_perm(c, d, 0x7632);
}

// Which of the five planes hold a nonzero byte, from the OR of low and high words.
__device__ __forceinline__ unsigned planes_seen(uint32_t low, uint32_t high) {
  return ((low & 0xffu) != 0) | ((low & 0xff00u) != 0) << 1 | ((low & 0xff0000u) != 0) << 2 | (low >> 24 != 0) << 3 | (high != 0) << 4;
}

}  // namespace det_attn::cuda
