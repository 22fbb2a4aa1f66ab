// Exact sums stage, the part every tensor-core path shares: what a sums kernel is told, and where its int32 digit
// positions go (docs/contract.md sections 5, 6): into long accumulators, or straight to the output.
#pragma once

#include "weights.cuh"

namespace det_attn::cuda {

struct SumsArgs {
  Shape shape;
  Prepared prepared;
  Distances distances;
  Mask mask;
  Precision precision;
  int64_t kv_heads, q_heads, q_len;
  int64_t first_tile;    // row tiles of kRowPad rows over all heads, as in the scores kernel
  int dim_blocks;        // CTAs side by side over head_dim
  int splits;            // parts of the key range; more than one adds into `digits` atomically
  int64_t split_keys;    // keys of a part
  int64_t digits_row;    // row (over heads * rows) of digits[0]
  // Long accumulators [row][head_dim][12]. splits > 1 or no `out`: sums are added here and in den. Otherwise scratch of
  // this chunk, for rows whose sums do not fit one run of int32 positions.
  int64_t* digits;
  int64_t* den;          // [heads * rows]
  MutableView out;       // data == nullptr: leave the sums in digits and den

  __device__ __forceinline__ bool shared_digits() const { return splits > 1 || out.data == nullptr; }
  __device__ __forceinline__ int64_t* digits_of(int64_t head, int64_t row, int dim) const {
    return digits + ((head * shape.rows + row - digits_row) * shape.dims + dim) * kDigits;
  }
  __device__ __forceinline__ int64_t out_offset(int64_t head, int64_t row, int dim) const {
    const int64_t batch = head / kv_heads, group = q_heads / kv_heads;
    return batch * out.stride_batch + (head % kv_heads * group + row / q_len) * out.stride_head + row % q_len * out.stride_row + dim;
  }
  __device__ __forceinline__ int64_t rowmax(int64_t head, int64_t row) const { return prepared.rowmax[head * shape.rows_pad + row]; }
};

// The value exponents of one head: their least, and how many passes of kMaxWeightShift + 1 exponents cover them.
struct Exponents {
  int base, buckets;
  __device__ __forceinline__ Exponents(const Prepared& p, int64_t head) {
    const int least = p.value_range[2 * head], greatest = p.value_range[2 * head + 1];
    const bool none = greatest < least;
    base = none ? kMinExponent : least;
    buckets = none ? 1 : (greatest - least) / (kMaxWeightShift + 1) + 1;
  }
  // A key's shift in pass `bucket`, from its shift above the base; a key of another pass is shifted out altogether.
  __device__ __forceinline__ static int shift(int above, int bucket) {
    above -= bucket * (kMaxWeightShift + 1);
    return above >= 0 && above <= kMaxWeightShift ? above : 64;
  }
  __device__ __forceinline__ int position(int bucket, Precision p) const {
    return digit_position(base + bucket * (kMaxWeightShift + 1), p);
  }
};

// digits += x * 2^position by integer atomics, so in any order.
__device__ __forceinline__ void digits_add_atomic(int64_t* digits, int64_t x, int position) {
  if (x == 0) return;
  int64_t part[3];
  digit_parts(x, position, part);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    if (part[k] != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(digits + (position >> 5) + k), static_cast<unsigned long long>(part[k]));
    }
  }
}

// One output's sum, low + high * 2^24, onto its long accumulator. Out of line: most rows never come here.
static __device__ __noinline__ void flush_sum(const SumsArgs& args, int64_t head, int64_t row, int dim, int64_t low, int64_t high, int position,
                                       bool first) {
  int64_t* digits = args.digits_of(head, row, dim);
  if (args.shared_digits()) {
    digits_add_atomic(digits, low, position);
    digits_add_atomic(digits, high, position + 24);
    return;
  }
  if (first)
    for (int k = 0; k < kDigits; ++k) digits[k] = 0;
  digits_add(digits, 1, low, position);
  digits_add(digits, 1, high, position + 24);
}

// One output from its sum, which `flushed` says lies in its long accumulator.
static __device__ __noinline__ void emit_output(const SumsArgs& args, int64_t head, int64_t row, int dim, int64_t low, int64_t high,
                                         int position, bool flushed, int64_t den) {
  double num;
  if (flushed) {
    num = digits_round(args.digits_of(head, row, dim), 1);
  } else {
    // 128 bits: |low| < 2^48, |high| < 2^57.
    const uint64_t shifted = static_cast<uint64_t>(high) << 24;
    const uint64_t sum = shifted + static_cast<uint64_t>(low);
    const int64_t carry = (sum < shifted ? 1 : 0) + (low >> 63);
    num = mul_f64(round_wide((high >> 40) + carry, sum), pow2(position - kUnitExponent));
  }
  const int64_t special = args.rowmax(head, row) == kRowmaxPoisoned ? kCountNan : 0;
  store_element(args.out.data, args.out_offset(head, row, dim), args.out.dtype, output_of(num, den, special, args.precision.weight_bits));
}

}  // namespace det_attn::cuda
