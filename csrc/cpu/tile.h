// The bodies behind isa.h, compiled once per instruction set. The including file sets the target, then defines
// DET_ISA (the namespace), kLanes, kVectors, kBlockRows, Vec, broadcast() and fma(). No templates with external
// linkage from here: a copy built for one instruction set must never be linked into another.
// Loops are plain so that the compiler vectorises them; every operation is exact or rounded as the contract says.

#if defined(__clang__)
#define DET_UNROLL _Pragma("clang loop unroll(full)")
#else
#define DET_UNROLL _Pragma("GCC unroll 16")
#endif

namespace det_attn {
namespace cpu {
namespace DET_ISA {
namespace {

// Adding and subtracting it leaves the nearest integer, ties to even, for |x| <= 2^51.
constexpr double kRoundMagic = 6755399441055744.0;  // 1.5 * 2^52

// ---- Section 1: rows -------------------------------------------------------------------------------------------

void load_row(const void* data, int64_t index, DType dtype, int n, double* out) {
  if (dtype == DType::kFloat32) {
    const float* x = static_cast<const float*>(data) + index;
    for (int i = 0; i < n; ++i) out[i] = x[i];
  } else if (dtype == DType::kBFloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(data) + index;
    for (int i = 0; i < n; ++i) out[i] = bfloat16_to_float(x[i]);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(data) + index;
    for (int i = 0; i < n; ++i) out[i] = float16_to_float(x[i]);
  }
}

// Finite magnitudes order as their bits do.
double max_abs(const double* x, int n, bool* special) {
  int64_t largest = 0;
  int64_t bad = 0;
  for (int i = 0; i < n; ++i) {
    const int64_t magnitude = static_cast<int64_t>(bits_of(x[i]) & 0x7fffffffffffffffull);
    const int64_t is_bad = magnitude >= 0x7ff0000000000000ll ? 1 : 0;
    const int64_t finite = is_bad ? 0 : magnitude;
    largest = finite > largest ? finite : largest;
    bad |= is_bad;
  }
  *special = bad != 0;
  return double_of(static_cast<uint64_t>(largest));
}

double quantise_row(double* x, int n, int e, int operand_bits, double unit) {
  const double scale = pow2(operand_bits - 1 - e);
  const double limit = static_cast<double>(1 << (operand_bits - 1));
  int64_t sum = 0;
  for (int i = 0; i < n; ++i) {
    double q = (x[i] * scale + kRoundMagic) - kRoundMagic;
    q = q > limit - 1 ? limit - 1 : q;
    q = q < -limit ? -limit : q;
    const int32_t integer = static_cast<int32_t>(q);
    sum += integer < 0 ? -integer : integer;
    x[i] = q * unit;
  }
  return static_cast<double>(sum);
}

void transpose(const double* rows, int64_t stride, int n, double* panel) {
  for (int d = 0; d < n; ++d) {
    for (int j = 0; j < kPanel; ++j) panel[d * kPanel + j] = rows[j * stride + d];
  }
}

// ---- Sections 2 and 5: exact float64 matrix products -----------------------------------------------------------

inline Vec load(const double* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(double* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

// R rows by kVectors vectors of c, held in registers over the whole depth. Three rows share a base pointer, so the
// addresses fit the integer registers.
template <int R>
inline void gemm_block(const double* a, int64_t a_stride, const double* b, int depth, double* c, int64_t c_stride,
                       bool add) {
  Vec acc[R][kVectors];
  const double* base[(R + 2) / 3];
  DET_UNROLL
  for (int r = 0; r < R; ++r) {
    DET_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Vec{};
    if (r % 3 == 0) base[r / 3] = a + r * a_stride;
  }
  for (int k = 0; k < depth; ++k) {
    Vec column[kVectors];
    DET_UNROLL
    for (int v = 0; v < kVectors; ++v) column[v] = load(b + v * kLanes);
    b += kPanel;
    DET_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec x = broadcast(base[r / 3][(r % 3) * a_stride]);
      DET_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(x, column[v], acc[r][v]);
    }
    DET_UNROLL
    for (int r = 0; r < R; r += 3) ++base[r / 3];
  }
  DET_UNROLL
  for (int r = 0; r < R; ++r) {
    DET_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      double* out = c + r * c_stride + v * kLanes;
      store(out, add ? load(out) + acc[r][v] : acc[r][v]);
    }
  }
}

void gemm(const double* a, int64_t a_stride, int rows, const double* b, int64_t b_panel_stride, int panels, int depth,
          double* c, int64_t c_stride, bool add) {
  constexpr int width = kVectors * kLanes;
  static_assert(kPanel % width == 0, "a panel is a whole number of register blocks");
  for (int strip = 0; strip < panels * (kPanel / width); ++strip) {
    const int column = strip * width;
    const double* bs = b + (column / kPanel) * b_panel_stride + column % kPanel;
    double* cs = c + column;
    int r = 0;
    for (; r + kBlockRows <= rows; r += kBlockRows) {
      gemm_block<kBlockRows>(a + r * a_stride, a_stride, bs, depth, cs + r * c_stride, c_stride, add);
    }
    for (; r + 4 <= rows; r += 4) {
      gemm_block<4>(a + r * a_stride, a_stride, bs, depth, cs + r * c_stride, c_stride, add);
    }
    if (r + 2 <= rows) {
      gemm_block<2>(a + r * a_stride, a_stride, bs, depth, cs + r * c_stride, c_stride, add);
      r += 2;
    }
    if (r < rows) gemm_block<1>(a + r * a_stride, a_stride, bs, depth, cs + r * c_stride, c_stride, add);
  }
}

// ---- Sections 2 and 3: rounding, mask, maximum -----------------------------------------------------------------

// rhu(t) is rne(t), one more where t lies exactly half above it. t - rne(t) is exact.
void round_scores(double* s, int n) {
  for (int j = 0; j < n; ++j) {
    const double t = s[j];
    const double nearest = (t + kRoundMagic) - kRoundMagic;
    s[j] = nearest + (t - nearest == 0.5 ? 1.0 : 0.0);
  }
}

void mask_scores(double* s, const int32_t* key_index, int32_t first, int32_t last, int n) {
  for (int j = 0; j < n; ++j) s[j] = key_index[j] >= first && key_index[j] < last ? s[j] : -__builtin_inf();
}

void mask_columns(double* s, const int32_t* first, const int32_t* last, int32_t row, int n) {
  for (int j = 0; j < n; ++j) s[j] = row >= first[j] && row < last[j] ? s[j] : -__builtin_inf();
}

double row_max(const double* s, int n) {
  constexpr int vectors = kPanel / kLanes;
  Vec lane[vectors];
  DET_UNROLL
  for (int v = 0; v < vectors; ++v) lane[v] = load(s + v * kLanes);
  for (int j = kPanel; j < n; j += kPanel) {
    DET_UNROLL
    for (int v = 0; v < vectors; ++v) {
      const Vec x = load(s + j + v * kLanes);
      lane[v] = x > lane[v] ? x : lane[v];
    }
  }
  double largest = lane[0][0];
  for (int v = 0; v < vectors; ++v) {
    for (int l = 0; l < kLanes; ++l) largest = lane[v][l] > largest ? lane[v][l] : largest;
  }
  return largest;
}

// ---- Section 4: weights ----------------------------------------------------------------------------------------

// weight_of() for 32-bit lanes. p * 2^31 = w24 * 2^7 with w24 = p * 2^24 < 2^25, so for n = halvings + 31 - T the
// rounded shift by n is a left shift for n <= 7 and rhu(w24, n - 7) above; from n - 7 = 26 on it is 0, so 31 will do.
// A distance clamped to kZeroWeightDistance has n >= 46, hence weight 0.
DET_MEMBER void weights_of(const uint32_t* distance, int n, int weight_bits, uint32_t* weight) {
  uint32_t u[kKeyTile];
  for (int j = 0; j < n; ++j) {
    u[j] = static_cast<uint32_t>((static_cast<uint64_t>(distance[j]) * kLog2eFixed + (1u << 29)) >> 30);
  }
  const int32_t extra = 31 - weight_bits - 7;
  for (int j = 0; j < n; ++j) {
    const int32_t halvings = static_cast<int32_t>((u[j] + (1u << 23)) >> 24);
    const int32_t fraction = static_cast<int32_t>(u[j] - (static_cast<uint32_t>(halvings) << 24));
    const float p = exp2_poly(static_cast<float>(fraction) * 5.9604644775390625e-08f);
    const uint32_t w24 = static_cast<uint32_t>(static_cast<int32_t>(p * 16777216.0f));
    const int32_t shift = halvings + extra;
    const int32_t left = shift < 0 ? -shift : 0;
    const int32_t right = shift < 0 ? 0 : (shift > 31 ? 31 : shift);
    weight[j] = ((w24 << left) + ((uint32_t(1) << right) >> 1)) >> right;
  }
}

int64_t weights(const double* s, int n, double m, int weight_bits, double* high, double* low) {
  uint32_t distance[kKeyTile];
  uint32_t weight[kKeyTile];
  const double zero_from = static_cast<double>(kZeroWeightDistance);
  for (int j = 0; j < n; ++j) {
    double x = m - s[j];
    x = x < zero_from ? x : zero_from;  // a NaN, a poisoned pair, weighs nothing
    x = x > 0.0 ? x : 0.0;
    distance[j] = static_cast<uint32_t>(static_cast<int32_t>(x));
  }
  weights_of(distance, n, weight_bits, weight);
  uint64_t sum = 0;
  for (int j = 0; j < n; ++j) sum += weight[j];
  if (low == nullptr) {
    for (int j = 0; j < n; ++j) high[j] = static_cast<int32_t>(weight[j]);
    return static_cast<int64_t>(sum);
  }
  for (int j = 0; j < n; ++j) {
    const uint32_t upper = (weight[j] + (1u << (kHalfBits - 1))) >> kHalfBits;
    high[j] = static_cast<int32_t>(upper);
    low[j] = static_cast<int32_t>(weight[j] - (upper << kHalfBits));
  }
  return static_cast<int64_t>(sum);
}

// ---- Section 5: into the long accumulator ----------------------------------------------------------------------

// An integer held in a float64, as an int64: the magic number's bits are the offset. |x| <= 2^51.
inline int64_t integer_of(double x) {
  return static_cast<int64_t>(bits_of(x + kRoundMagic) - bits_of(kRoundMagic));
}

// |x * 2^shift| < 2^85 is cut, nearest first, at 2^64 and 2^32; the remainders are exact and below 2^32 in size.
void flush(const double* x, int64_t n, int shift, int64_t* digit0, int64_t* digit1, int64_t* digit2) {
  const double up = pow2(shift);
  const double two32 = 4294967296.0;
  for (int64_t i = 0; i < n; ++i) {
    const double whole = x[i] * up;
    const double top = (whole * (1.0 / (two32 * two32)) + kRoundMagic) - kRoundMagic;
    const double rest = whole - top * (two32 * two32);
    const double middle = (rest * (1.0 / two32) + kRoundMagic) - kRoundMagic;
    const double bottom = rest - middle * two32;
    digit0[i] += integer_of(bottom);
    digit1[i] += integer_of(middle);
    digit2[i] += integer_of(top);
  }
}

// ---- Section 6: output -----------------------------------------------------------------------------------------

// high * 2^16 and low are exact, so their sum is the exact integer rounded once.
void finish_row(const double* high, const double* low, int n, double scale, double den, double rescale, float* out) {
  if (low == nullptr) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<float>(high[i] * scale / den * rescale);
  } else {
    const double half = static_cast<double>(1 << kHalfBits);
    for (int i = 0; i < n; ++i) out[i] = static_cast<float>((high[i] * half + low[i]) * scale / den * rescale);
  }
}

// ---- Section 8: gradients --------------------------------------------------------------------------------------

void scale_row(double* s, const double* column_unit, double row_unit, int n) {
  for (int j = 0; j < n; ++j) s[j] *= row_unit * column_unit[j];
}

template <bool kQueryIsRow, bool kChanged>
inline void pair_terms_of(const double* s, const double* dot, int n, const PairQuery& query, const PairKey& key,
                          const PairChange* change, int weight_bits, float* p, float* ds) {
  uint32_t distance[kKeyTile];
  uint32_t weight[kKeyTile];
  const double zero_from = static_cast<double>(kZeroWeightDistance);
  for (int j = 0; j < n; ++j) {
    double x = query.maximum[kQueryIsRow ? 0 : j] - s[j];
    x = x < zero_from ? x : zero_from;
    x = x > 0.0 ? x : 0.0;
    distance[j] = static_cast<uint32_t>(static_cast<int32_t>(x));
  }
  weights_of(distance, n, weight_bits, weight);
  for (int j = 0; j < n; ++j) {
    const int of_query = kQueryIsRow ? 0 : j;
    const int of_key = kQueryIsRow ? j : 0;
    const float probability = probability_of(weight[j], query.inverse[of_query]);
    const double unit = query.grad_unit[of_query] * key.value_unit[of_key];
    float gradient = score_gradient_of(static_cast<float>(dot[j]), unit);
    if (kChanged) gradient = dropped(gradient, change->factor[j]);
    float term = probability * (gradient - query.delta[of_query]);
    if (kChanged) term = term * change->slope[j];
    p[j] = kChanged ? dropped(probability, change->factor[j]) : probability;
    ds[j] = weight[j] != 0 ? term : 0.0f;
  }
}

void pair_terms(bool query_is_row, const double* s, const double* dot, int n, const PairQuery& query,
                const PairKey& key, const PairChange* change, int weight_bits, float* p, float* ds) {
  if (change != nullptr) {
    if (query_is_row) {
      pair_terms_of<true, true>(s, dot, n, query, key, change, weight_bits, p, ds);
    } else {
      pair_terms_of<false, true>(s, dot, n, query, key, change, weight_bits, p, ds);
    }
  } else if (query_is_row) {
    pair_terms_of<true, false>(s, dot, n, query, key, nullptr, weight_bits, p, ds);
  } else {
    pair_terms_of<false, false>(s, dot, n, query, key, nullptr, weight_bits, p, ds);
  }
}

double magnitudes(const float* p, const float* ds, int n, const double* key_unit, double query_unit, double grad_unit,
                  double* b, double* c) {
  double of_row[kKeyTile];
  for (int j = 0; j < n; ++j) {
    const double size = __builtin_fabs(static_cast<double>(ds[j]));
    const double x = size <= 3.4028234663852886e38 ? size : __builtin_inf();
    of_row[j] = x * key_unit[j];
    const double for_key = x * query_unit;
    const double for_value = static_cast<double>(p[j]) * grad_unit;
    b[j] = for_key > b[j] ? for_key : b[j];
    c[j] = for_value > c[j] ? for_value : c[j];
  }
  return row_max(of_row, n);
}

// Clamped before it is rounded, which gives the same and keeps the magic number's range. A NaN ends at the limit.
void short_terms(const float* x, const double* column_unit, double row_unit, double limit, int n, double* t) {
  for (int j = 0; j < n; ++j) {
    double y = static_cast<double>(x[j]) * column_unit[j] * row_unit;
    y = y < limit ? y : limit;
    y = y > -limit ? y : -limit;
    t[j] = (y + kRoundMagic) - kRoundMagic;
  }
}

void turn_pairs(const float* x, int n, float* out) {
  for (int j = 0; j < n; ++j) {
    for (int k = 0; k < kPanel; ++k) out[k * kKeyTile + j] = x[j * kKeyTile + k];
  }
}

void add_integers(const double* x, int64_t n, int64_t* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<int64_t>(x[i]);
}

// ---- Sections 10 and 11: modifiers and dropout -----------------------------------------------------------------

// Scores of poisoned pairs may be anything finite here: what they become is not read.
void softcap(double* s, int n, double c) {
  for (int j = 0; j < n; ++j) s[j] = softcap_of(s[j], c);
}

void softcap_slopes(const double* s, int n, double c, float* slope) {
  for (int j = 0; j < n; ++j) slope[j] = softcap_slope(s[j], c);
}

void add_alibi(double* s, int n, double slope, int64_t ahead, const int32_t* places) {
  for (int j = 0; j < n; ++j) {
    const int64_t distance = ahead - (places == nullptr ? j : places[j]);
    s[j] = add_score(s[j], alibi_of(slope, __builtin_fabs(static_cast<double>(distance))));
  }
}

void add_bias(double* s, int n, const double* b) {
  for (int j = 0; j < n; ++j) {
    const double sum = add_score(s[j], score_from(b[j]));
    const bool poisoned = s[j] != s[j] || b[j] != b[j] || b[j] == __builtin_inf();
    s[j] = b[j] == -__builtin_inf() ? -__builtin_inf() : (poisoned ? __builtin_nan("") : sum);
  }
}

bool any_nan(const double* s, int n) {
  bool found = false;
  for (int j = 0; j < n; ++j) found |= s[j] != s[j];
  return found;
}

void philox(const uint32_t* counter, int n, const uint32_t* seed, uint32_t* words) {
  for (int j = 0; j < n; ++j) {
    uint32_t x[4] = {counter[j], counter[kKeyTile + j], counter[2 * kKeyTile + j], counter[3 * kKeyTile + j]};
    philox4x32(x, seed[0], seed[1]);
    for (int w = 0; w < 4; ++w) words[w * kKeyTile + j] = x[w];
  }
}

constexpr TileKernels kKernels = {DET_ISA_NAME, load_row,     max_abs,     quantise_row, transpose,   gemm,
                                  round_scores, mask_scores,  mask_columns, row_max,     weights,     flush,
                                  finish_row,   scale_row,    pair_terms,  magnitudes,   short_terms, turn_pairs,
                                  add_integers, softcap,     softcap_slopes, add_alibi,  add_bias,    any_nan,
                                  philox};

}  // namespace
}  // namespace DET_ISA
}  // namespace cpu
}  // namespace det_attn
