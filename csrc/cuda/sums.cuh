// Exact sums stage, the part every tensor-core path shares: what a sums kernel is told, and where its int32 digit
// positions go (docs/contract.md sections 5, 6): into long accumulators, or straight to the output.
#pragma once

#include <type_traits>

#include "weights.cuh"

namespace det_attn::cuda {

struct SumsArgs {
  Problem problem;
  Shape shape;
  Prepared prepared;
  Distances distances;
  int64_t first_tile;  // row tiles of kRowPad rows over all heads, as in the scores kernel
  int tiles;           // of this launch
  int dim_blocks;      // CTAs side by side over head_dim
  int splits;          // parts of the key range; more than one adds into `digits` atomically
  int64_t split_keys;  // keys of a part
  int64_t digits_row;  // row (over heads * rows) of digits[0]
  // Long accumulators [row][head_dim][12]. into_digits: CTAs add their sums here and in den. Otherwise scratch, of this
  // chunk's rows or of resident CTAs, for rows whose sums do not fit one run of int32 positions.
  int64_t* digits;
  int64_t* den;     // [heads * rows]
  bool into_digits;
  int* ticket;      // 0 before the launch: counts the pieces of work that CTAs took, where a kernel shares them out so
  MutableView out;  // data == nullptr: leave the sums in digits and den
  __device__ __forceinline__ int64_t* digits_of(int64_t index, int dim) const {  // of a row over heads * rows
    return digits + ((index - digits_row) * shape.dims + dim) * kDigits;
  }
  __device__ __forceinline__ int64_t out_offset(int64_t head, int64_t row) const {  // of dim 0
    const Pair at = pair_of(head, row, 0);
    return at.batch * out.stride_batch + at.head * out.stride_head + at.query * out.stride_row;
  }
  // A row of a head and a key relative to kv_lo, as the call counts them.
  __device__ __forceinline__ Pair pair_of(int64_t head, int64_t row, int64_t key) const {
    return pair_in_call(problem, head, row, key);
  }
  __device__ __forceinline__ int64_t rowmax(int64_t head, int64_t row) const {
    return prepared.rowmax[head * shape.rows_pad + row];
  }
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
      atomicAdd(reinterpret_cast<unsigned long long*>(digits + (position >> 5) + k),
                static_cast<unsigned long long>(part[k]));
    }
  }
}

// One output's sum, low + high * 2^24, onto its long accumulator. Out of line: most rows never come here.
static __device__ __noinline__ void flush_sum(const SumsArgs& args, int64_t index, int dim, int64_t low, int64_t high,
                                              int position, bool first) {
  int64_t* digits = args.digits_of(index, dim);
  if (args.into_digits) {
    digits_add_atomic(digits, low, position);
    digits_add_atomic(digits, high, position + 24);
    return;
  }
  if (first)
    for (int k = 0; k < kDigits; ++k) digits[k] = 0;
  digits_add(digits, 1, low, position);
  digits_add(digits, 1, high, position + 24);
}

// Out of line: most rows never come here.
static __device__ __noinline__ double flushed_sum(const SumsArgs& args, int64_t index, int dim) {
  return digits_round(args.digits_of(index, dim), 1);
}

// A row's sum of weights, where it belongs.
__device__ __forceinline__ void publish_den(const SumsArgs& args, int64_t head, int64_t row, uint64_t den) {
  if (row >= args.shape.rows) return;
  int64_t* to = args.den + head * args.shape.rows + row;
  if (!args.into_digits) {
    *to = static_cast<int64_t>(den);
  } else if (den != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(den));
  }
}

// What the outputs of a row have in common; it waits for them in shared memory.
struct OutputRow {
  int64_t index;   // over heads * rows; < 0 if there is no such row
  int64_t offset;  // of dim 0, in out
  int64_t den, special;

  __device__ __forceinline__ static OutputRow of(const SumsArgs& args, int64_t head, int64_t row, int64_t den) {
    if (row >= args.shape.rows) return {-1, 0, 0, 0};
    return {head * args.shape.rows + row, args.out_offset(head, row), den,
            args.rowmax(head, row) == kRowmaxPoisoned ? kCountNan : 0};
  }
};

// A row's sum of weights to an OutputRow, and `to_memory` where it belongs. Out of line: once a piece of work.
static __device__ __noinline__ void publish_row(const SumsArgs& args, int64_t head, int64_t row, uint64_t den,
                                                OutputRow* to, bool to_memory) {
  *to = OutputRow::of(args, head, row, static_cast<int64_t>(den));
  if (to_memory) publish_den(args, head, row, den);
}

// One output from its sum, which `flushed` says lies in the long accumulator of flushed_row.
__device__ __forceinline__ void emit_output(const SumsArgs& args, const OutputRow& to, int64_t flushed_row, int dim,
                                            int64_t low, int64_t high, int position, bool flushed) {
  double num;
  if (flushed) {
    num = flushed_sum(args, flushed_row, dim);
  } else {
    // 128 bits: |low| < 2^48, |high| < 2^57.
    const uint64_t shifted = static_cast<uint64_t>(high) << 24;
    const uint64_t sum = shifted + static_cast<uint64_t>(low);
    const int64_t carry = (sum < shifted ? 1 : 0) + (low >> 63);
    num = mul_f64(round_wide((high >> 40) + carry, sum), pow2(position - kUnitExponent));
  }
  store_element(args.out.data, to.offset + dim, args.out.dtype,
                output_of(num, to.den, to.special, args.problem.precision.weight_bits,
                          args.problem.modifiers.rescale()));
}

// The byte planes and digit positions of sums over values of V_PLANES planes; the sums kernels' tiles build on it.
template <int V_PLANES>
struct SumsDigits {
  static constexpr int kValuePlanes = V_PLANES;
  static constexpr int kWeightPlanes = V_PLANES == 3 ? 5 : 4;  // 31 + 8 or 23 + 8 bits after the shift
  static constexpr int kPositions = kWeightPlanes + V_PLANES - 1;
  static constexpr int kWeightBits = V_PLANES == 3 ? kHighest.weight_bits : kHigh.weight_bits;
};

// The accumulators of a warp: 16 rows x 8 * BLOCKS dims in every digit position, as C fragments.
template <int POSITIONS, int BLOCKS>
struct PositionSums {
  int32_t acc[POSITIONS][BLOCKS][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < POSITIONS; ++p)
#pragma unroll
      for (int n = 0; n < BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[p][n][i] = 0;
  }
  // f(half, dim in the warp's dims, low, high) for every sum of the thread, in row lane / 4 + 8 * half of the warp's
  // 16. The sum is low + high * 2^24: low holds positions 0 to 2 and is below 2^48, high the others, four at most, and
  // is below 2^57. The sums are copied to local memory first and taken in a real loop, AT_ONCE of them together: one
  // where f calls functions, which registers would have to be saved around, more where f waits for memory or divisions.
  template <int AT_ONCE, class F>
  __device__ __forceinline__ void for_each(int lane, F f) const {
    int32_t copy[BLOCKS * 4][POSITIONS];
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p) copy[n * 4 + i][p] = acc[p][n][i];
#pragma unroll AT_ONCE
    for (int e = 0; e < BLOCKS * 4; ++e) {
      const int32_t* x = copy[e];
      const int64_t low =
          static_cast<int64_t>(x[0]) + (static_cast<int64_t>(x[1]) << 8) + (static_cast<int64_t>(x[2]) << 16);
      int64_t high = 0;
#pragma unroll
      for (int p = POSITIONS - 1; p >= 3; --p) high = (high << 8) + x[p];
      f(e >> 1 & 1, (e >> 2) * 8 + (lane % 4) * 2 + (e & 1), low, high);
    }
  }
};

// A piece of the work of a sums kernel: rows, dims and keys.
template <class Tile>
struct SumsWork {
  int dim_block, steps;
  int64_t head, row_base, row16_base, key_begin;
  int tile_first;

  // Pieces of one part of the keys; the long ones come first.
  DET_HD static int pieces(const SumsArgs& args) {
    return args.tiles * (kRowPad / Tile::kRows) * args.dim_blocks;
  }

  __device__ __forceinline__ SumsWork(const SumsArgs& args, int piece, int part) {
    const Shape& s = args.shape;
    constexpr int kSubTiles = kRowPad / Tile::kRows;
    // Later rows attend more keys when causal: the long ones first, of all heads at once where a chunk is whole heads.
    const int tiles_per_head = static_cast<int>(s.rows_pad / kRowPad), subs = args.tiles * kSubTiles;
    const int heads = args.tiles % tiles_per_head == 0 ? args.tiles / tiles_per_head : 1;
    dim_block = piece % args.dim_blocks;
    const int work = piece / args.dim_blocks, sub = subs / heads - 1 - work / heads;
    const int tile = static_cast<int>(args.first_tile) + work % heads * tiles_per_head + sub / kSubTiles;
    head = tile / tiles_per_head;
    row_base = int64_t(tile % tiles_per_head) * kRowPad + (sub % kSubTiles) * Tile::kRows;
    row16_base = (tile - args.first_tile) * s.tile_blocks + (sub % kSubTiles) * (Tile::kRows / kBlockRows);
    tile_first = args.prepared.tile_first[tile];
    const int64_t begin = tile_first + int64_t(part) * args.split_keys;
    const KeyRange keys = keys_of_rows<kSumKeys>(args, head, row_base, Tile::kRows, begin, begin + args.split_keys);
    key_begin = keys.first;
    steps = max(0, keys.last - keys.first) / kSumKeys;
  }
};

}  // namespace det_attn::cuda
