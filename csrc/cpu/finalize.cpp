// Stage `finalize` on the CPU (docs/contract.md section 6). In: NUM digits and DEN. Out: the output in its dtype.
#include "tile_worker.h"

namespace det_attn {
namespace cpu {

double round_digits(const int64_t* digits, int64_t stride, int lo, int hi) {
  constexpr int kWideDigits = 4;
  const int64_t top = hi - lo == kWideDigits ? digits[(hi - 1) * stride] : 0;
  // With |digits| < 2^61 (fewer than 2^28 flushes of 2^33) and a top digit below 2^29, four digits fit 128 bits.
  if (hi - lo <= kWideDigits && top < (1 << 29) && top > -(1 << 29)) {
    unsigned __int128 sum = 0;
    for (int k = hi - 1; k >= lo; --k) {
      sum = (sum << kDigitBits) + static_cast<unsigned __int128>(static_cast<__int128>(digits[k * stride]));
    }
    const int64_t high = static_cast<int64_t>(static_cast<uint64_t>(sum >> 64));
    return mul_f64(round_wide(high, static_cast<uint64_t>(sum)), pow2(lo * kDigitBits - kUnitExponent));
  }
  int64_t all[kSumDigits] = {0};
  for (int k = lo; k < hi; ++k) all[k] = digits[k * stride];
  return digits_round(all, 1);
}

void finalize(const int64_t* num, const int64_t* den, int64_t count, int64_t head_dim, Precision precision,
              double rescale, void* out, DType out_dtype) {
  run_ranges(count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * head_dim; i < end * head_dim; ++i) {
      const int64_t* digits = num + i * kDigits;
      const double sum = digits_round(digits, 1);
      const float value = output_of(sum, den[i / head_dim], digits[kSpecialDigit], precision.weight_bits, rescale);
      store_element(out, i, out_dtype, value);
    }
  });
}

}  // namespace cpu
}  // namespace det_attn
