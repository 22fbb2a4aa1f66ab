// The vector kernels of the CPU as one table per instruction set. In: rows and packed panels. Out: score tiles,
// weights, partial sums. Serves docs/contract.md sections 1, 2, 4, 5, 6, 8, 10, 11; the callers (rows.cpp,
// modifiers.cpp, *_worker.cpp) hold no SIMD.
#pragma once

#include "../problem.h"

namespace det_attn {
namespace cpu {

// Tile sizes. Panels are kPanel columns wide whatever the instruction set, so packing does not depend on it.
constexpr int kPanel = 16;             // two AVX-512 registers, four AVX2 registers
constexpr int kRowTile = 48;           // four blocks of 12 rows: 12 x 16 accumulators fill 24 of 32 AVX-512 registers
constexpr int kKeyTile = 128;          // a panel of values is 16 KB, so it stays in L1 beside a block of weights
constexpr int kScoreStride = kKeyTile + 8;  // not a power of two: 12 rows must not share an L1 set

static constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// The float64 rounding takes scores up to 2^51 in units of 2^-24: D * 2^(eq + ek) <= 2^(51 - 24).
static inline int fast_exponent_sum(int depth) {
  int log2_depth = 0;
  while ((1 << log2_depth) < depth) ++log2_depth;
  return 51 - kScoreFractionBits - log2_depth;
}

// A weight is split as W = high * 2^kHalfBits + low with |low|, high <= 2^(kHalfBits - 1).
constexpr int kHalfBits = 16;

// What belongs to the query of a pair and what to its key, in a row of pairs (section 8). One of the two is the row, so
// its pointers have one element; the other's have one for each column.
struct PairQuery {
  const double* maximum;  // M; +infinity for a query that takes no part
  const double* inverse;  // rinv * 2^-T
  const float* delta;
  const double* grad_unit;  // 2^(eo - 2(b-1))
};
struct PairKey {
  const double* value_unit;  // 2^ev
};

// What softcap and dropout change of a row of pairs: d and r (or 0) of sections 10 and 11, one element a column.
struct PairChange {
  const float* slope;
  const float* factor;
};

struct TileKernels {
  const char* isa;

  // out[i] = element (index + i) as float64, exactly.
  void (*load_row)(const void* data, int64_t index, DType dtype, int n, double* out);

  // The largest |x_i| over the finite elements; *special tells whether there is a non-finite one.
  double (*max_abs)(const double* x, int n, bool* special);

  // x_i <- x^_i * unit for a row with exponent e; returns sum |x^_i|. unit is a power of two.
  double (*quantise_row)(double* x, int n, int e, int operand_bits, double unit);

  // panel[d][kPanel] <- rows[kPanel][stride], d < n.
  void (*transpose)(const double* rows, int64_t stride, int n, double* panel);

  // c[rows][panels * kPanel] (+)= a[rows][depth] * b, b as panels of [depth][kPanel]. Exact by the caller's budget.
  void (*gemm)(const double* a, int64_t a_stride, int rows, const double* b, int64_t b_panel_stride, int panels,
               int depth, double* c, int64_t c_stride, bool add);

  // s_j, a score with fraction bits and |s_j| <= 2^51, is rounded to the grid, ties up. n is a multiple of kPanel.
  void (*round_scores)(double* s, int n);

  // Keys whose key_index is not in [first, last) leave the row: s_j <- -inf.
  void (*mask_scores)(double* s, const int32_t* key_index, int32_t first, int32_t last, int n);

  // The same where each column has its own interval: s_j <- -inf unless first_j <= row < last_j.
  void (*mask_columns)(double* s, const int32_t* first, const int32_t* last, int32_t row, int n);

  double (*row_max)(const double* s, int n);

  // Weights of a row of scores under the row maximum m: W_j = high_j * 2^16 + low_j, or W_j = high_j if low is null.
  // Returns sum_j W_j. n is a multiple of kPanel, at most kKeyTile.
  int64_t (*weights)(const double* s, int n, double m, int weight_bits, double* high, double* low);

  // digit0/1/2[i] += the 32-bit pieces of x_i * 2^shift, x_i an integer, |x_i| <= 2^53, 0 <= shift < 32.
  void (*flush)(const double* x, int64_t n, int shift, int64_t* digit0, int64_t* digit1, int64_t* digit2);

  // out_i = f32(f64(high_i * 2^16 + low_i) * scale / den * rescale), or high_i alone if low is null. den > 0.
  void (*finish_row)(const double* high, const double* low, int n, double scale, double den, double rescale,
                     float* out);

  // s_j *= row_unit * column_unit_j, powers of two.
  void (*scale_row)(double* s, const double* column_unit, double row_unit, int n);

  // p and ds of a row of pairs from scores and from the exact products o^ v^. n is a multiple of kPanel. change is null
  // without softcap and dropout.
  void (*pair_terms)(bool query_is_row, const double* s, const double* dot, int n, const PairQuery& query,
                     const PairKey& key, const PairChange* change, int weight_bits, float* p, float* ds);

  // Magnitudes for the references: returns max_j |ds_j| * key_unit_j, and raises b_j to |ds_j| * query_unit and c_j to
  // p_j * grad_unit. A ds that is not finite counts as infinity. n is a multiple of kPanel.
  double (*magnitudes)(const float* p, const float* ds, int n, const double* key_unit, double query_unit,
                       double grad_unit, double* b, double* c);

  // t_j = rne(x_j * column_unit_j * row_unit), clamped to [-limit, limit]; limit is an integer.
  void (*short_terms)(const float* x, const double* column_unit, double row_unit, double limit, int n, double* t);

  // out_kj = x_jk for kPanel k and n j, rows of kKeyTile on both sides.
  void (*turn_pairs)(const float* x, int n, float* out);

  // sum_i += x_i, x_i an integer, |x_i| <= 2^53.
  void (*add_integers)(const double* x, int64_t n, int64_t* sum);

  // Section 10 on a row of scores, in its order. A score may be -inf or NaN and stays so.
  void (*softcap)(double* s, int n, double c);
  void (*softcap_slopes)(const double* s, int n, double c, float* slope);  // of capped scores
  // Distances are |ahead - places_j|; places null: |ahead - j|.
  void (*add_alibi)(double* s, int n, double slope, int64_t ahead, const int32_t* places);
  // b in true units: s_j <- -inf where b_j is -inf, NaN where it is NaN or +inf.
  void (*add_bias)(double* s, int n, const double* b);
  bool (*any_nan)(const double* s, int n);

  // Section 11: counter [4][kKeyTile], of which n columns count -> words [4][kKeyTile].
  void (*philox)(const uint32_t* counter, int n, const uint32_t* seed, uint32_t* words);
};

// The kernels for this machine, chosen once; the environment's DET_ATTN_CPU_ISA may name others.
const TileKernels& tile_kernels();

const TileKernels& tile_kernels_generic();
// Other compilers spell the per-file target differently; they get the portable kernels.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DET_CPU_X86_KERNELS 1
const TileKernels& tile_kernels_avx2();
const TileKernels& tile_kernels_avx512();
#endif

}  // namespace cpu
}  // namespace det_attn
