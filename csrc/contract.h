// The contract's scalar rules (docs/contract.md sections 1 to 8, 10 and 11), for host and device.
// In: numbers of one row, one pair or one output. Out: the integers and bytes the contract names.
// Every implementation includes this file; nobody repeats a rule.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DET_HD __host__ __device__ __forceinline__
#define DET_MEMBER __host__ __device__ __forceinline__
#else
#define DET_HD static inline  // internal linkage: files built for different ISAs must not share a copy
#define DET_MEMBER inline __attribute__((always_inline))  // the same for members, which cannot have it
#endif

// The rules are exact only while no compiler contracts a*b+c or flushes denormals.
#if defined(__FAST_MATH__)
#error "det-attn must not be compiled with -ffast-math"
#endif

namespace det_attn {

// ---- Precision -------------------------------------------------------------------------------------------------

struct Precision {
  int operand_bits;  // b: a row element is a signed b-bit integer
  int weight_bits;   // T: the weight at the row maximum is exactly 2^T
};

constexpr Precision kHighest{24, 31};
constexpr Precision kHigh{16, 23};

constexpr int kMaxHeadDim = 256;
constexpr int kMinExponent = -126;         // section 1: the exponent of a row of zeros and of tiny rows
constexpr int kScoreFractionBits = 24;     // S and M are in units of 2^-24
constexpr int64_t kScoreLimit = int64_t(1) << 52;  // S saturates here, so M * 2^-24 is exact in float64

// Exponent that marks a query or key row holding a NaN or an infinity (section 7).
constexpr int32_t kPoisonedExponent = INT32_MAX;
// Integers that mark a non-finite value element; a b-bit integer never reaches them.
constexpr int32_t kValueNan = INT32_MIN;
constexpr int32_t kValuePosInf = INT32_MAX;
constexpr int32_t kValueNegInf = -INT32_MAX;

// M_i as an integer: section 7 for poisoned rows, section 3 for rows that attend nothing.
constexpr int64_t kRowmaxPoisoned = INT64_MAX;
constexpr int64_t kRowmaxEmpty = INT64_MIN;

// ---- Bits ------------------------------------------------------------------------------------------------------

DET_HD uint64_t bits_of(double x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  uint64_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

DET_HD double double_of(uint64_t u) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(u));
#else
  double x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

DET_HD float float_of(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

// 2^n exactly, -1022 <= n <= 1023.
DET_HD double pow2(int n) { return double_of(static_cast<uint64_t>(n + 1023) << 52); }

DET_HD bool is_finite(double x) { return (bits_of(x) & 0x7ff0000000000000ull) != 0x7ff0000000000000ull; }

// Single float32 and float64 operations, spelled so that no compiler may fuse or split them.
DET_HD float fma_f32(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
DET_HD float mul_f32(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
DET_HD double mul_f64(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
DET_HD double add_f64(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}
DET_HD double div_f64(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}
DET_HD double fma_f64(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// ---- Section 1: rows -------------------------------------------------------------------------------------------

// e with 2^(e-1) <= max_abs < 2^e, never below kMinExponent. max_abs is finite and >= 0.
DET_HD int row_exponent(double max_abs) {
  const int e = static_cast<int>((bits_of(max_abs) >> 52) & 0x7ff) - 1022;
  return e < kMinExponent ? kMinExponent : e;
}

// Nearest integer, ties to even, for |x| < 2^51: adding 1.5 * 2^52 leaves no fraction bits.
DET_HD double rne(double x) {
  const double magic = 6755399441055744.0;
  return add_f64(add_f64(x, magic), -magic);
}

// x^ of one element of a row with exponent e. The scaling is by a power of two, so exact (or far below 1/2).
DET_HD int32_t quantise(double x, int e, int operand_bits) {
  const int limit = 1 << (operand_bits - 1);
  const int q = static_cast<int>(rne(mul_f64(x, pow2(operand_bits - 1 - e))));
  return q >= limit ? limit - 1 : (q < -limit ? -limit : q);
}

// ---- Section 2: scores -----------------------------------------------------------------------------------------

// r of a query row and a key row: how far I is shifted right to land on the 2^-24 grid (negative: left).
DET_HD int score_shift(int eq, int ek, int operand_bits) {
  return 2 * (operand_bits - 1) - kScoreFractionBits - eq - ek;
}

// S from the exact dot product, |dot| <= 2^54.
DET_HD int64_t score_of(int64_t dot, int r) {
  if (r > 62) return 0;  // |dot| <= 2^54 < 2^(r-1)
  int64_t s;
  if (r > 0) {
    s = (dot + (int64_t(1) << (r - 1))) >> r;
  } else {
    if (dot == 0) return 0;
    if (r <= -52) return dot > 0 ? kScoreLimit : -kScoreLimit;
    const int64_t limit = kScoreLimit >> -r;  // dot * 2^-r saturates exactly when |dot| >= limit
    if (dot >= limit) return kScoreLimit;
    if (dot <= -limit) return -kScoreLimit;
    s = dot * (int64_t(1) << -r);
  }
  if (s > kScoreLimit) return kScoreLimit;
  if (s < -kScoreLimit) return -kScoreLimit;
  return s;
}

// ---- Section 3: row maximum ------------------------------------------------------------------------------------

// The public float64 rowmax of the integer M.
DET_HD double rowmax_to_public(int64_t m) {
  if (m == kRowmaxPoisoned) return double_of(0x7ff8000000000000ull);
  if (m == kRowmaxEmpty) return double_of(0xfff0000000000000ull);
  return mul_f64(static_cast<double>(m), pow2(-kScoreFractionBits));
}

// The integer M of a public rowmax. Values no row can have are clamped to the score range.
DET_HD int64_t rowmax_from_public(double m) {
  if (m != m) return kRowmaxPoisoned;
  if (m == double_of(0xfff0000000000000ull)) return kRowmaxEmpty;
  const double s = mul_f64(m, pow2(kScoreFractionBits));
  const double limit = static_cast<double>(kScoreLimit);
  return static_cast<int64_t>(s > limit ? limit : (s < -limit ? -limit : s));
}

// Of two shards, in the public form; NaN stays.
DET_HD double larger_rowmax(double a, double b) { return a != a || a > b ? a : b; }

// ---- Section 4: weights ----------------------------------------------------------------------------------------

constexpr int64_t kZeroWeightDistance = int64_t(1) << 29;  // W = 0 from here on
constexpr uint32_t kLog2eFixed = 1549082005u;              // round(log2(e) * 2^30)

// A float32 constant times 2^n; both normal.
constexpr uint32_t times_pow2(uint32_t bits, int n) { return bits + (static_cast<uint32_t>(n) << 23); }

// 2^-g for g in [-1/2, 1/2): the contract's polynomial. The result is a multiple of 2^-24 below 2. Given g * 2^G_SCALE
// it returns the result times 2^SCALE: the same roundings as long as every coefficient stays normal.
template <int G_SCALE = 0, int SCALE = 0>
DET_HD float exp2_poly(float g) {
  constexpr uint32_t c6 = times_pow2(0x3920fb96u, SCALE - 6 * G_SCALE);
  constexpr uint32_t c5 = times_pow2(0xbaaf9f01u, SCALE - 5 * G_SCALE);
  constexpr uint32_t c4 = times_pow2(0x3c1d96ceu, SCALE - 4 * G_SCALE);
  constexpr uint32_t c3 = times_pow2(0xbd635780u, SCALE - 3 * G_SCALE);
  constexpr uint32_t c2 = times_pow2(0x3e75fdecu, SCALE - 2 * G_SCALE);
  constexpr uint32_t c1 = times_pow2(0xbf317218u, SCALE - G_SCALE);
  constexpr uint32_t c0 = times_pow2(0x3f800000u, SCALE);
  float p = float_of(c6);
  p = fma_f32(g, p, float_of(c5));
  p = fma_f32(g, p, float_of(c4));
  p = fma_f32(g, p, float_of(c3));
  p = fma_f32(g, p, float_of(c2));
  p = fma_f32(g, p, float_of(c1));
  return fma_f32(g, p, float_of(c0));
}

// W of dist = M - S. A negative dist (a rowmax that is not the maximum) is read as 0.
DET_HD uint32_t weight_of(int64_t dist, int weight_bits) {
  if (dist >= kZeroWeightDistance) return 0;
  const uint32_t d = dist < 0 ? 0u : static_cast<uint32_t>(dist);
  const uint32_t u = static_cast<uint32_t>((static_cast<uint64_t>(d) * kLog2eFixed + (1u << 29)) >> 30);
  const int n = static_cast<int>((u + (1u << 23)) >> 24);
  const int fraction = static_cast<int>(u) - (n << 24);  // in [-2^23, 2^23): exact in float32
  const float g = mul_f32(static_cast<float>(fraction), 5.9604644775390625e-08f);
  const float p = exp2_poly(g);
  // p * 2^31 is an integer below 2^32; so is the rounded shift for every n + 31 - T >= 0.
  const uint32_t w = static_cast<uint32_t>(mul_f32(p, 2147483648.0f));
  const int shift = n + 31 - weight_bits;
  if (shift == 0) return w;
  if (shift > 33) return 0;
  return static_cast<uint32_t>((static_cast<uint64_t>(w) + (uint64_t(1) << (shift - 1))) >> shift);
}

// ---- Sections 5 and 7: special values --------------------------------------------------------------------------

constexpr int64_t kCountNan = int64_t(1) << 42;
constexpr int64_t kCountNegInf = int64_t(1) << 21;
constexpr int64_t kCountPosInf = 1;

// Digit 11's contribution of one value element of an attended key; 0 for a finite element.
DET_HD int64_t special_count(int32_t v) {
  if (v == kValueNan) return kCountNan;
  if (v == kValueNegInf) return kCountNegInf;
  if (v == kValuePosInf) return kCountPosInf;
  return 0;
}

// ---- Section 6: output -----------------------------------------------------------------------------------------

constexpr uint32_t kQuietNan = 0x7fc00000u;

// num: f64(NUM) in true units. den: DEN in units of 2^-T. special: digit 11. rescale: r of section 11.
DET_HD float output_of(double num, int64_t den, int64_t special, int weight_bits, double rescale = 1.0) {
  if (special != 0) {
    const bool nan = special >= kCountNan;
    const bool neg = (special & (kCountNan - 1)) >= kCountNegInf;
    const bool pos = (special & (kCountNegInf - 1)) != 0;
    if (nan || (neg && pos)) return float_of(kQuietNan);
    return float_of(neg ? 0xff800000u : 0x7f800000u);
  }
  if (den == 0 || num == 0.0) return 0.0f;
  const double quotient = div_f64(num, mul_f64(static_cast<double>(den), pow2(-weight_bits)));
  return static_cast<float>(mul_f64(quotient, rescale));
}

// ---- Section 8: gradients --------------------------------------------------------------------------------------

constexpr int kQueryGradientBits = 23;  // G of the terms of dQ,
constexpr int kKeyGradientBits = 24;    // of dK,
constexpr int kValueGradientBits = 24;  // of dV, which are never negative
constexpr int kMostGradientBits = 24;
static_assert(kQueryGradientBits <= kMostGradientBits && kKeyGradientBits <= kMostGradientBits &&
                  kValueGradientBits <= kMostGradientBits,
              "no gradient's terms may be longer");
// L, the largest a term can be: what the largest float32 below 2^G rounds to.
DET_HD constexpr int32_t largest_term(int gradient_bits) {
  return gradient_bits < 24 ? int32_t(1) << gradient_bits : (int32_t(1) << 24) - 1;
}
constexpr int32_t kLargestTerm = largest_term(kMostGradientBits);
// References as int32: no nonzero term; and a term that is not a number, which makes the gradient row NaN.
constexpr int32_t kReferenceEmpty = INT32_MIN;
constexpr int32_t kReferencePoisoned = INT32_MAX;

// E(x) with 2^(E-1) <= |x| < 2^E, for a finite x != 0 that is no float64 denormal.
DET_HD int exponent_of(double x) { return static_cast<int>((bits_of(x) >> 52) & 0x7ff) - 1022; }

// x * 2^n with one rounding, -2044 <= n <= 2046: two factors, since 2^n itself may not exist. The first is exact.
DET_HD double scale_pow2(double x, int n) {
  const int half = n / 2;
  return mul_f64(mul_f64(x, pow2(half)), pow2(n - half));
}

// rinv_i * 2^-T, which is exact beside rinv_i; 0 where nothing is attended.
DET_HD double inverse_den(int64_t den, int weight_bits) {
  if (den <= 0) return 0.0;
#if defined(__CUDA_ARCH__)
  const float rinv = __double2float_rn(__ddiv_rn(pow2(weight_bits), __ll2double_rn(den)));
#else
  const float rinv = static_cast<float>(pow2(weight_bits) / static_cast<double>(den));
#endif
  return mul_f64(static_cast<double>(rinv), pow2(-weight_bits));
}

// p_ij. W has at most 25 significant bits and rinv 24, so the float64 product is exact and f32 rounds it once.
DET_HD float probability_of(uint32_t weight, double inverse) {
  return static_cast<float>(mul_f64(static_cast<double>(weight), inverse));
}

// dP_ij of the exact dot product, rounded to float32 already. unit = 2^(eo + ev - 2(b-1)); the product is exact.
DET_HD float score_gradient_of(float dot, double unit) {
  return static_cast<float>(mul_f64(static_cast<double>(dot), unit));
}

// ds_ij; 0 where W_ij is 0, whatever dP and delta are.
DET_HD float score_term_of(uint32_t weight, float probability, float gradient, float delta) {
  if (weight == 0) return 0.0f;
#if defined(__CUDA_ARCH__)
  return __fmul_rn(probability, __fsub_rn(gradient, delta));
#else
  return probability * (gradient - delta);
#endif
}

// A reference as the sums read it: what no call can have had is clamped, so that every shift exists.
constexpr int kLowestReference = -400;
constexpr int kHighestReference = 1200;
DET_HD int reference_from_public(int32_t reference) {
  return reference < kLowestReference ? kLowestReference
                                      : (reference > kHighestReference ? kHighestReference : reference);
}

// A term of a gradient sum: x * 2^n, clamped to [-L, L] and rounded. A NaN ends at L.
DET_HD int32_t gradient_term(float x, int n, int gradient_bits) {
  const double limit = static_cast<double>(largest_term(gradient_bits));
  const double y = scale_pow2(static_cast<double>(x), n < -1200 ? -1200 : (n > 2000 ? 2000 : n));  // beyond: 0, limit
  const double below = y < limit ? y : limit;
  return static_cast<int32_t>(rne(below > -limit ? below : -limit));
}

// One row of a gradient: f64 of the exact integer sum -> float32. scale is 1 for dK and dV.
DET_HD float gradient_of(double sum, int32_t reference, double scale, int gradient_bits, int operand_bits) {
  if (reference == kReferencePoisoned) return float_of(kQuietNan);
  if (reference == kReferenceEmpty || sum == 0.0) return 0.0f;
  const int n = reference_from_public(reference) - gradient_bits - (operand_bits - 1);
  return static_cast<float>(mul_f64(scale, scale_pow2(sum, n)));
}

// ---- Section 10: score modifiers -------------------------------------------------------------------------------
// Scores are integers held in float64, |S| <= 2^52, so that host, device and vector code share the rules.

// What stands in place of a pair's S: as M they are already neutral and decisive under a maximum.
constexpr int64_t kScoreMasked = kRowmaxEmpty;       // the pair is not attended
constexpr int64_t kScorePoisoned = kRowmaxPoisoned;  // attended, and row i is NaN

// Nearest integer, ties to even, for |x| <= 2^52: adding 2^52 with x's sign leaves no fraction bits.
DET_HD double rne_wide(double x) {
  const double magic = x < 0.0 ? -4503599627370496.0 : 4503599627370496.0;
  return add_f64(add_f64(x, magic), -magic);
}
DET_HD double clamp_score(double x) {
  const double limit = static_cast<double>(kScoreLimit);
  x = x < limit ? x : limit;
  return x > -limit ? x : -limit;
}
// The score of x in true units: x * 2^24 saturated, then rounded. x is not NaN.
DET_HD double score_from(double x) { return rne_wide(clamp_score(mul_f64(x, pow2(kScoreFractionBits)))); }

// S + b for scores S and b; the sum is exact before it saturates.
DET_HD double add_score(double s, double b) { return clamp_score(add_f64(s, b)); }

// tanh(x) for x >= 0, infinity included: with E = exp(-2x), (1 - E) / (1 + E) by E - 1, which keeps small x accurate.
DET_HD double tanh_of(double x) {
  constexpr double kRoundToInteger = 6755399441055744.0;             // 1.5 * 2^52
  double z = mul_f64(x, double_of(0x40071547652b82feull));            // 2 log2(e)
  z = z < 64.0 ? z : 64.0;                                            // tanh rounds to 1 long before
  const double shifted = add_f64(z, kRoundToInteger);
  const double f = add_f64(z, -add_f64(shifted, -kRoundToInteger));   // exact, -1/2 <= f <= 1/2
  double p = double_of(0xbdfe9d3fe3952179ull);                        // 2^-f - 1 = f p
  p = fma_f64(f, p, double_of(0x3e3e6063f7217bc6ull));
  p = fma_f64(f, p, double_of(0xbe7b524fae627834ull));
  p = fma_f64(f, p, double_of(0x3eb62bfd47773353ull));
  p = fma_f64(f, p, double_of(0xbeeffcbfc670dcd4ull));
  p = fma_f64(f, p, double_of(0x3f2430913096fd9full));
  p = fma_f64(f, p, double_of(0xbf55d87fe78a5276ull));
  p = fma_f64(f, p, double_of(0x3f83b2ab6fba1ddaull));
  p = fma_f64(f, p, double_of(0xbfac6b08d704a0c2ull));
  p = fma_f64(f, p, double_of(0x3fcebfbdff82c598ull));
  p = fma_f64(f, p, double_of(0xbfe62e42fefa39efull));
  const double power = double_of((1023 - (bits_of(shifted) - bits_of(kRoundToInteger))) << 52);  // 2^(f - z)
  const double e = fma_f64(power, mul_f64(f, p), add_f64(power, -1.0));                          // E - 1
  return div_f64(-e, add_f64(2.0, e));
}

// S after the softcap c > 0. Odd, since it works on |S|; a zero is +0, as everywhere.
DET_HD double softcap_of(double s, double c) {
  const double size = s < 0.0 ? -s : s;
  const double capped = score_from(mul_f64(c, tanh_of(div_f64(mul_f64(size, pow2(-kScoreFractionBits)), c))));
  return s < 0.0 ? add_f64(0.0, -capped) : capped;
}

// The derivative of the softcap where it gave the score s: 1 - t^2, never below 0.
DET_HD float softcap_slope(double s, double c) {
  const double t = div_f64(mul_f64(s, pow2(-kScoreFractionBits)), c);
  const double d = fma_f64(-t, t, 1.0);
  return d > 0.0 ? static_cast<float>(d) : 0.0f;
}

// What ALiBi adds at a distance >= 0 from the query's own place. slope is finite.
DET_HD double alibi_of(double slope, double distance) { return score_from(-mul_f64(slope, distance)); }

// ---- Section 11: dropout ---------------------------------------------------------------------------------------

// Philox4x32 with ten rounds (Salmon, Moraes, Dror, Shaw 2011): x is the counter, then the four random words.
DET_HD void philox4x32(uint32_t (&x)[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(x[0]) * 0xd2511f53u, b = static_cast<uint64_t>(x[2]) * 0xcd9e8d57u;
    x[0] = static_cast<uint32_t>(b >> 32) ^ x[1] ^ key0;
    x[1] = static_cast<uint32_t>(b);
    x[2] = static_cast<uint32_t>(a >> 32) ^ x[3] ^ key1;
    x[3] = static_cast<uint32_t>(a);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// A weight is kept when its random word is at least this: 2^32, for p = 1, keeps none.
DET_HD uint64_t dropout_threshold(double p) { return static_cast<uint64_t>(mul_f64(p, 4294967296.0)); }
// r: what the kept ones are multiplied by.
DET_HD float dropout_rescale(double p) { return p < 1.0 ? static_cast<float>(div_f64(1.0, add_f64(1.0, -p))) : 0.0f; }

// p~ and dP~: the factor is r for a kept pair, 0 for a dropped one, whose dP may be infinite.
DET_HD float dropped(float x, float factor) { return factor == 0.0f ? 0.0f : mul_f32(x, factor); }

}  // namespace det_attn
