// What the backward kernels share (docs/contract.md section 8): what they know of a query row and of a key, where the
// pairs' p and ds lie between the kernels, and what each kernel is told.
//
// The pairs kernel turns a strip of query rows into p, ds and reference exponents; the gradient sums kernel turns p and
// ds into exact sums. Both see rows stacked and padded as Shape says, keys from kv_lo on.
#pragma once

#include "paths.h"
#include "planes.cuh"

namespace det_attn::cuda {

// ---- what is known of rows and keys ----

struct alignas(16) RowState {
  int64_t maximum;  // M; kFarMaximum where the row takes no part, so that every weight is 0
  double inverse;   // rinv * 2^-T
  float delta;
  int32_t query_exponent, grad_exponent;  // kMinExponent for bad and padding rows
  int32_t begin, end;                     // attended keys; none in padding rows
  uint32_t flags;
};
constexpr int64_t kFarMaximum = int64_t(1) << 60;
constexpr uint32_t kBadRow = 1;   // q or dO hold a NaN or an infinity
constexpr uint32_t kDeadRow = 2;  // bad, or M or out are not numbers: gives nothing to others

// Everything the kernels derive from the inputs once. Exponents of bad and padding rows are kMinExponent.
struct GradientState {
  RowState* rows;               // [heads][rows_pad]
  int32_t* query_exponent;      // [heads][rows_pad]
  int32_t* grad_exponent;       // [heads][rows_pad]
  int2* range;                  // [heads][rows_pad / 32]: attended keys of 32 rows, begin >= end where there are none
  int2* key_exponents;          // [heads][keys_pad]: of k and v
  int32_t* key_exponent;        // [heads][keys_pad]
  uint8_t* bad_key;             // [heads][keys_pad]: k or v hold a NaN or an infinity
};

// References under way, in the public layouts: a [heads * rows]; b and c [heads][kv_len], from kv_lo on.
struct References {
  int32_t *a, *b, *c;
  int64_t key_stride;  // kv_len
};

// ---- pairs between the kernels ----

// Query rows of some heads: all rows of several, or some of one.
struct Strip {
  int64_t head, heads;
  int64_t row, rows;  // padded rows of each, multiples of kRowPad
};

// The pairs of a strip in blocks of 32 x 32: [head][row32][key32][8][32 lanes] float4. Lane l's entry 4 * j + mh holds
// row 8 * mh + l / 4 and the keys 2 * (l % 4) + j + 8 * n, n = 0..3: what a thread has of a warp's C fragments. A word
// of four rows (over mh) or of four keys (over n) can then be packed without a shuffle; see sum_slot().
constexpr int kPairBlock = 32;
constexpr int kPairSlab = 1024;  // keys that one CTA of the pairs kernels walks
constexpr int kPairStep = 64;  // pairs are there for whole squares of this size wherever a row attends a key
struct Pairs {
  float4 *p, *ds;      // null: not kept
  int64_t key_blocks;  // keys_pad / 32
  DET_MEMBER int64_t block(const Strip& strip, int64_t head, int64_t row, int64_t key) const {
    const int64_t row_block = (head - strip.head) * (strip.rows / kPairBlock) + (row - strip.row) / kPairBlock;
    return (row_block * key_blocks + key / kPairBlock) * 8 * kWarpSize;
  }
  // Of one pair, in floats.
  DET_MEMBER int64_t element(const Strip& strip, int64_t head, int64_t row, int64_t key) const {
    const int r = row % kPairBlock, k = key % kPairBlock;
    const int lane = r % 8 * 4 + k % 8 / 2;
    return (block(strip, head, row, key) + (k % 2 * 4 + r / 8) * kWarpSize + lane) * 4 + k / 8;
  }
};

// The inner dimension of the gradient sums (keys or rows) is stored in this order inside every 32.
DET_HD int sum_slot(int i) { return i % 8 * 4 + i / 8; }

// ---- the kernels' arguments ----

struct PairsArgs {
  Problem problem;  // for the modifiers
  Shape shape;
  const uint8_t *query, *grad, *key, *value;  // row planes
  GradientState state;
  Strip strip;
  Pairs pairs;            // p == nullptr: references only
  References references;  // a == nullptr: none are raised
};

// One of dQ, dK, dV: sum over the inner dimension of rne(x * 2^(exponent + G - reference)) * factor^.
struct SumJob {
  bool of_query;            // the sum's rows are query rows, and keys are the inner dimension; otherwise the reverse
  bool of_p;                // x is p, which is never negative; otherwise ds
  int bits;                 // G
  const uint8_t* factor;    // transposed planes [heads][planes][inner_pad / 32][value_dims_pad x 32], see sum_slot()
  const int32_t* exponent;  // of the inner rows, [heads][inner_pad]
  const int32_t* reference;
  int64_t reference_stride;  // from head to head
  // Digits 0 and 1 of sum (head - first_head, row, dim) lie at element * element_stride and digit_stride further.
  // digit_stride == 0: the whole sum is one int64, which kMostInOneWord inner rows cannot fill.
  int64_t* digits;
  int64_t first_head, row_stride, element_stride, digit_stride;

  __device__ __forceinline__ int64_t* at(int64_t head, int64_t row, int dims, int dim) const {
    return digits + (((head - first_head) * row_stride + row) * dims + dim) * element_stride;
  }
};

// What a CTA sums at most: an int32 digit position takes at most 3 products of an inner row, each at most 256 * 255
// (the top digit of a term reaches -256), and an int64 the whole sum. kMostInOneWord rows fit an int64, 2^16 of them.
constexpr int64_t kMostInnerRows = 8192;
static_assert(kMostInnerRows * 3 * 256 * 255 < (int64_t(1) << 31), "an int32 position must hold a CTA's part");
constexpr int64_t kMostInOneWord = INT64_MAX / (int64_t(kLargestTerm) << (kHighest.operand_bits - 1));
static_assert(kMostInnerRows < kMostInOneWord, "and an int64 its sum");

struct GradientSumsArgs {
  Shape shape;
  GradientState state;
  Strip strip;
  Pairs pairs;
  SumJob jobs[3];
  int job_count, dim_blocks;
  int64_t split_keys, split_rows;  // inner rows of one CTA
};

// G - reference of a row as the terms read it; false where the row has no terms.
__device__ __forceinline__ bool term_shift(int32_t reference, int bits, int& shift) {
  shift = bits - reference_from_public(reference);
  return reference != kReferenceEmpty && reference != kReferencePoisoned;
}

// sum += x by integer atomics, so in any order.
__device__ __forceinline__ void add_to_sum(int64_t* digits, int64_t digit_stride, int64_t x) {
  if (x == 0) return;
  if (digit_stride == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(digits), static_cast<unsigned long long>(x));
    return;
  }
  int64_t part[kGradientDigits] = {0, 0, 0};
  gradient_digits_add(part, x);
  atomicAdd(reinterpret_cast<unsigned long long*>(digits), static_cast<unsigned long long>(part[0]));
  if (part[1] != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(digits + digit_stride), static_cast<unsigned long long>(part[1]));
  }
}

// What differs between the paths: the kernels over a strip.
struct GradientEngine {
  virtual ~GradientEngine() = default;
  virtual void pairs(const Context&, const PairsArgs&) const = 0;
  virtual void sums(const Context&, GradientSumsArgs) const = 0;
};

// One backward call: what was derived from its inputs, and the kernels to use.
struct BackwardCall {
  const Context& ctx;
  const Gradient& call;
  const GradientEngine& engine;
  Shape shape;
  GradientState state;
  const uint8_t *query, *grad, *key, *value;                     // row planes; null on the reference path
  const uint8_t *query_factor, *grad_factor, *key_factor;        // transposed planes; null as well
};

// backward.cu: the stages in terms of the above.
void run_grad_reference(const BackwardCall&, int32_t* a, int32_t* b, int32_t* c);
void run_grad_accumulate(const BackwardCall&, const int32_t* a, const int32_t* b, const int32_t* c, int64_t* dq,
                         int64_t* dk, int64_t* dv);
void run_backward(const BackwardCall&, const MutableView& dq, const MutableView& dk, const MutableView& dv);

// ---- references ----

// E(x), and what stands for it where x is 0 or not finite: far beyond any exponent, also after one is added.
constexpr int kNoTerm = -(1 << 28), kNotFinite = 1 << 28;
__device__ __forceinline__ int term_exponent(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  int e = static_cast<int>(bits >> 23) - 126;
  if (bits < 0x00800000u) e = bits == 0 ? kNoTerm : -117 - __clz(static_cast<int>(bits));  // m * 2^-149
  return bits >= 0x7f800000u ? kNotFinite : e;
}

__device__ __forceinline__ void raise(int32_t* reference, int e) {
  if (e <= kNoTerm / 2) return;
  atomicMax(reference, e >= kNotFinite / 2 ? kReferencePoisoned : e);
}

// ---- gradient_rows.cu ----
// Exponents of rows come as `row_stride` per head, of keys as `key_stride` per head; bad ones are kPoisonedInTile or
// more.
struct RowExponents {
  const int32_t *query, *grad, *key, *value;
  int64_t row_stride, key_stride;
};
GradientState make_gradient_state(const Context&, const Gradient&, const Shape&, const RowExponents&);
// References empty, or section 7's where a bad row or key is attended.
void reset_references(const Context&, const Problem&, const Shape&, const GradientState&, const References&);
// [heads][planes][rows x dims_pad] -> [heads][planes][rows / 32][value_dims_pad x 32].
uint8_t* transpose_planes(const Context&, const Shape&, const uint8_t* planes, int64_t rows_pad);
// Sums of dQ, or of dK or dV, of `heads` heads to the output; see SumJob for where they lie.
void round_gradient(const Context&, const Problem&, const Shape&, const SumJob&, const int32_t* reference,
                    int64_t heads, double scale, const MutableView& out);
void normalise_sums(const Context&, int64_t* digits, int64_t count);

}  // namespace det_attn::cuda
