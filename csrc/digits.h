// The long (Kulisch) accumulator of NUM (docs/contract.md section 5), for host and device.
// In: integers W * v^ (or sums of them) with a bit position. Out: digits, the normal form, and one float64 rounding.
#pragma once

#include "contract.h"

namespace det_attn {

constexpr int kDigits = 12;        // digits 0..10 hold the number, digit 11 the special counts
constexpr int kSumDigits = 11;
constexpr int kSpecialDigit = 11;
constexpr int kDigitBits = 32;
constexpr int kUnitExponent = 180;  // digit 0 weighs 2^-180 in true units

// Bit position of an integer W * v^ whose value row has exponent ev. The smallest is 0, see the assert.
DET_HD int digit_position(int ev, Precision p) {
  return ev - (p.operand_bits - 1) - p.weight_bits + kUnitExponent;
}
static_assert(kMinExponent - (kHighest.operand_bits - 1) - kHighest.weight_bits + kUnitExponent == 0,
              "the finest term of `highest` must land on bit 0");
// The largest: ev = 128, |W * v^| <= 2^54, 2^31 keys: 254 + 54 + 31 = 339 bits, inside 11 digits of 32 bits.
static_assert(254 + 54 + 31 < kSumDigits * kDigitBits, "the accumulator must hold 2^31 keys of the largest term");

// What x * 2^position, |x| < 2^63, adds to digits k = position / 32, k + 1 and k + 2. Each part is below 2^33, so 2^30
// additions never overflow an int64 digit. The sign stays in the last digit there is: digit 10 takes digit 11's share,
// which is no more than the sign as long as the number fits the accumulator.
DET_HD void digit_parts(int64_t x, int position, int64_t (&part)[3]) {
  const int shift = position & 31;
  // x = high * 2^32 + low, low in [0, 2^32): both halves shifted by < 32 stay inside 64 bits.
  const uint64_t low = (static_cast<uint64_t>(x) & 0xffffffffull) << shift;
  const int64_t high = (x >> 32) * (int64_t(1) << shift);
  const bool last = (position >> 5) + 2 == kSumDigits;
  part[0] = static_cast<int64_t>(low & 0xffffffffull);
  part[1] = static_cast<int64_t>(low >> 32) + (last ? high : static_cast<int64_t>(high & 0xffffffffll));
  part[2] = last ? 0 : high >> 32;
}

// digits += x * 2^position. Digit k of this number lies at digits[k * stride].
DET_HD void digits_add(int64_t* digits, int64_t stride, int64_t x, int position) {
  int64_t part[3];
  digit_parts(x, position, part);
  const int k = position >> 5;
  digits[k * stride] += part[0];
  digits[(k + 1) * stride] += part[1];
  if (k + 2 < kSumDigits) digits[(k + 2) * stride] += part[2];
}

// Carries digits 0..10 so that 0..9 are in [0, 2^32) and digit 10 keeps the sign. Exact, value unchanged.
DET_HD void digits_normalise(int64_t* digits, int64_t stride) {
  int64_t carry = 0;
  for (int k = 0; k < kSumDigits - 1; ++k) {
    const int64_t d = digits[k * stride] + carry;
    digits[k * stride] = d & 0xffffffffll;
    carry = d >> 32;
  }
  digits[(kSumDigits - 1) * stride] += carry;
}

DET_HD int leading_zeros(uint64_t x) {
#if defined(__CUDA_ARCH__)
  return __clzll(static_cast<long long>(x));
#else
  return x == 0 ? 64 : __builtin_clzll(x);
#endif
}

// f64 of the magnitude hi * 2^64 + lo (+ something in (0,1) if sticky), rounded once. The top 64 bits with every
// lower bit ORed into the last one round as the whole number does, since 64 > 53 + 2.
DET_HD double round_magnitude(uint64_t hi, uint64_t lo, bool sticky) {
  int exponent = 0;
  uint64_t top = lo;
  if (hi != 0) {
    const int lz = leading_zeros(hi);
    top = lz == 0 ? hi : (hi << lz) | (lo >> (64 - lz));
    exponent = 64 - lz;
    if (lz == 0 ? lo != 0 : (lo << lz) != 0) sticky = true;
  }
  if (sticky) top |= 1;
#if defined(__CUDA_ARCH__)
  const double rounded = __ull2double_rn(top);
#else
  const double rounded = static_cast<double>(top);
#endif
  return mul_f64(rounded, pow2(exponent));
}

// f64 of a signed 128-bit integer, rounded once; a zero is +0.
DET_HD double round_wide(int64_t hi, uint64_t lo) {
  const bool negative = hi < 0;
  uint64_t h = static_cast<uint64_t>(hi);
  if (negative) {
    lo = ~lo + 1;
    h = ~h + (lo == 0 ? 1 : 0);
  }
  const double magnitude = round_magnitude(h, lo, false);
  return negative ? -magnitude : magnitude;
}

// f64 of NUM in true units (digit 0 weighs 2^-180). The digits need not be normal; they are left unchanged.
DET_HD double digits_round(const int64_t* digits, int64_t stride) {
  // Carry into 12 limbs of 32 bits in two's complement: the last limb takes what exceeds digit 10.
  uint32_t limb[kSumDigits + 1];
  int64_t carry = 0;
  for (int k = 0; k < kSumDigits; ++k) {
    const int64_t d = digits[k * stride] + carry;
    limb[k] = static_cast<uint32_t>(d);
    carry = d >> 32;
  }
  limb[kSumDigits] = static_cast<uint32_t>(carry);
  const bool negative = carry < 0;
  if (negative) {
    uint64_t c = 1;
    for (int k = 0; k <= kSumDigits; ++k) {
      c += static_cast<uint32_t>(~limb[k]);
      limb[k] = static_cast<uint32_t>(c);
      c >>= 32;
    }
  }
  // The four limbs from the highest nonzero one hold every bit that can round; below them only a sticky bit counts.
  int top = kSumDigits;
  while (top > 3 && limb[top] == 0) --top;
  bool sticky = false;
  for (int k = 0; k < top - 3; ++k) sticky = sticky || limb[k] != 0;
  const uint64_t hi = (static_cast<uint64_t>(limb[top]) << 32) | limb[top - 1];
  const uint64_t lo = (static_cast<uint64_t>(limb[top - 2]) << 32) | limb[top - 3];
  const double magnitude = mul_f64(round_magnitude(hi, lo, sticky), pow2((top - 3) * kDigitBits - kUnitExponent));
  return negative ? -magnitude : magnitude;
}

// ---- Section 8: gradient sums ----------------------------------------------------------------------------------
// A gradient sum is a plain integer of three digits: digit k weighs 2^(32k). |sum| <= L * 2^(b-1) * 2^31 terms.
constexpr int kGradientDigits = 3;
static_assert(kMostGradientBits + (kHighest.operand_bits - 1) + 31 < 2 * kDigitBits + 31,
              "the top digit must hold 2^31 of the largest terms, with room for shards");

// digits += x
DET_HD void gradient_digits_add(int64_t (&digits)[kGradientDigits], int64_t x) {
  digits[0] += x & 0xffffffffll;
  digits[1] += x >> 32;  // signed: the top digit is left to the carries
}

// Digits 0 and 1 into [0, 2^32), the sign into digit 2. Exact, value unchanged.
DET_HD void gradient_digits_normalise(int64_t* digits) {
  digits[1] += digits[0] >> 32;
  digits[0] &= 0xffffffffll;
  digits[2] += digits[1] >> 32;
  digits[1] &= 0xffffffffll;
}

// f64 of the sum, rounded once. The digits need not be normal; they are left unchanged.
DET_HD double gradient_digits_round(const int64_t* digits) {
  const int64_t middle = digits[1] + (digits[0] >> 32);
  const int64_t high = digits[2] + (middle >> 32);
  return round_wide(high, (static_cast<uint64_t>(middle) << 32) | (static_cast<uint64_t>(digits[0]) & 0xffffffffull));
}

}  // namespace det_attn
