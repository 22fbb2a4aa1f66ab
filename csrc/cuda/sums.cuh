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
  // Long accumulators [row][head_dim][12]. into_digits: CTAs add their sums here and in den. Otherwise scratch of this
  // chunk, for rows whose sums do not fit one run of int32 positions.
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

// One output from its sum, which `flushed` says lies in its long accumulator.
__device__ __forceinline__ void emit_output(const SumsArgs& args, const OutputRow& to, int dim, int64_t low,
                                            int64_t high, int position, bool flushed) {
  double num;
  if (flushed) {
    num = flushed_sum(args, to.index, dim);
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
  // f(half, dim in the warp's dims, low, high) for every sum of the thread, in row lane / 4 + 8 * half of the warp's 16;
  // it is low + high * 2^24:
  // low holds positions 0 to 2 and is below 2^48, high the others and is below 2^57. The sums are copied to local
  // memory first and taken in a real loop, AT_ONCE of them together: one where f calls functions, which registers would
  // have to be saved around, more where f waits for memory or divisions.
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

// ---- the warps that form weights, while others multiply ----

// The barrier of both kinds of warps, once a step; barrier 0 is __syncthreads().
template <class Tile>
__device__ __forceinline__ void step_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kThreads) : "memory");
}

// What `dropped` of form() is without dropout; with it, see Dropout in sums_mma.cuh.
struct NoneDropped {
  __device__ __forceinline__ unsigned operator()(int, int) const { return 0; }
};

// Forms the weights of a CTA's Tile::kRows rows step by step into stages of byte planes. A warp works for one half of a
// block of 16 rows, or for both, its kSlots, so a thread has one fixed row of each; it takes four keys of one A register
// at a time.
template <class Tile>
struct WeightForming {
  static constexpr int kSlots = Tile::kRows / 8 / Tile::kFormingWarps, kBlocks = kSumKeys / kBlockKeys;
  static_assert(kSlots * Tile::kFormingWarps * 8 == Tile::kRows && kSlots <= 2, "halves of one block");

  unsigned first_row;  // of slot 0, in the CTA's tile; slot 1 has the row 8 further
  int64_t rowmax[kSlots];
  bool live[kSlots];     // the row attends something and is not poisoned
  bool padding;          // no row of slot 0 is real: there are no distances, and what is left in shared memory reaches
                         // no output
  uint64_t den[kSlots];
  // Of the step that is fetched next.
  const uint4* next;
  const int64_t* next_max;
  const uint32_t* next_shift;
  int next_key;  // of the step that is formed next; under dropout
  static constexpr int kAhead = 3;  // steps
  // What one step needs from memory; fetched as soon as the same block of the step before is formed.
  struct Fetched {
    uint4 distance[kSlots][kBlocks][2];
    int64_t below[kSlots][kBlocks];  // block maxima
    uint32_t shift[kBlocks][2];      // a byte for each of the four keys
  };

  __device__ __forceinline__ int row(int slot) const { return first_row + 8 * slot; }

  __device__ __forceinline__ WeightForming(const SumsArgs& args, int64_t head, int64_t row_base, int warp, int lane) {
    first_row = warp * kSlots * 8 + lane / 4;
    padding = row_base + first_row / 8 * 8 >= args.shape.rows;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      rowmax[i] = args.rowmax(head, row_base + row(i));
      live[i] = rowmax[i] != kRowmaxPoisoned && rowmax[i] != kRowmaxEmpty;
      den[i] = 0;
    }
  }

  // Points at the first step's blocks; fetch() then reads them step by step.
  template <class Work>
  __device__ __forceinline__ void start(const SumsArgs& args, const Work& work, int lane) {
    const Distances& d = args.distances;
    const int64_t block = (work.row16_base + first_row / kBlockRows) * d.key_blocks +
                          (work.key_begin - work.tile_first) / kBlockKeys;
    next = d.distance + (block * 4 + first_row / 8 % 2) * kWarpSize + lane;
    next_max = d.block_max + block * kBlockRows + first_row % kBlockRows;
    const uint8_t* shifts = args.prepared.value_shift + work.head * args.shape.keys_pad + work.key_begin;
    next_shift = reinterpret_cast<const uint32_t*>(shifts) + lane % 4;
    next_key = static_cast<int>(work.key_begin);
  }

  // Fetches one block of the step that `next` points at.
  __device__ __forceinline__ void fetch_block(Fetched& f, int b) const {
    if (padding) return;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      f.below[i][b] = next_max[b * kBlockRows + 8 * i];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) f.distance[i][b][pair] = __ldcs(next + (b * 4 + pair * 2 + i) * kWarpSize);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) f.shift[b][pair] = __ldg(next_shift + b * (kBlockKeys / 4) + pair * 4);
  }
  __device__ __forceinline__ void advance() {
    next += kBlocks * 4 * kWarpSize;
    next_max += kBlocks * kBlockRows;
    next_shift += kSumKeys / 4;
  }
  // The first step, and what the cache should bring meanwhile.
  __device__ __forceinline__ void fetch(Fetched& f, int steps, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) fetch_block(f, b);
#pragma unroll
    for (int ahead = 1; ahead <= kAhead; ++ahead)
      if (ahead < steps) ask(ahead, lane);
    advance();
  }
  // Asks the L2 cache for the distances and block maxima of the step `ahead` of the one that `next` points at: a line a
  // lane. Memory answers later than a step takes.
  __device__ __forceinline__ void ask(int ahead, int lane) const {
    if (padding) return;
    const auto* blocks = reinterpret_cast<const char*>(next + ahead * (kBlocks * 4 * kWarpSize)) -
                         (first_row / 8 % 2 * kWarpSize + lane) * sizeof(uint4);
    static_assert(kBlocks * 4 * kWarpSize * sizeof(uint4) == kWarpSize * 128, "a line a lane");
    asm volatile("prefetch.global.L2 [%0];" ::"l"(blocks + lane * 128));
    if (lane < 4) asm volatile("prefetch.global.L2 [%0];" ::"l"(next_max + ahead * kBlocks * kBlockRows));
  }

  // Several passes: keys of another one are shifted out.
  __device__ __forceinline__ static void select_shifts(uint32_t (&shift)[2], int bucket) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t word = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        word |= static_cast<uint32_t>(Exponents::shift(shift[pair] >> (8 * c) & 0xff, bucket)) << (8 * c);
      shift[pair] = word;
    }
  }

  // Writes the weights of the fetched distances, shifted, as byte planes, and fetches the next step's in their place, if
  // there is one among the `left` steps from there on. Returns which planes are not all zero, if WANTED. dropped(slot, key) has a bit for each of keys key, + 1, + 8, + 9: a weight that is left out of the planes,
  // not of DEN.
  template <bool WANTED, class Dropped>
  __device__ __forceinline__ unsigned form(Fetched& f, int left, uint8_t* stage, int bucket, bool many, int lane,
                                           const Dropped& dropped) {
    if (padding) return 0;
    uint32_t any_low = 0, any_high = 0;
    // A step adds at most 16 weights of 2^T a row and thread.
    using StepSum = typename std::conditional<Tile::kWeightBits + 4 < 32, uint32_t, uint64_t>::type;
    static_assert(kBlocks * 8 <= 16, "a step's sum of weights must fit");
    StepSum step_den[kSlots] = {};
    uint8_t* row_at = stage + plane_offset(first_row, lane % 4 * 4, kSumKeys);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (many) select_shifts(f.shift[b], bucket);
      uint32_t base[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i)
        base[i] = live[i] ? clamp_distance(rowmax[i] - f.below[i][b]) : kFarDistance;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int key = b * kBlockKeys + pair * 16;
        uint32_t by[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) by[c] = __byte_perm(f.shift[b][pair], 0, 0x4440 + c);
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
          const uint32_t d[4] = {f.distance[i][b][pair].x, f.distance[i][b][pair].y, f.distance[i][b][pair].z,
                                 f.distance[i][b][pair].w};
          uint32_t low[4], high = 0;
          const unsigned out = dropped(i, next_key + key + lane % 4 * 2);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            uint32_t w = weight_from_distance<Tile::kWeightBits>(min(base[i] + d[c], kFarDistance));
            step_den[i] += w;
            w = out >> c & 1 ? 0 : w;
            low[c] = shift_left(w, by[c]);
            if (Tile::kWeightPlanes == 5) high |= shift_right(w, 32 - by[c]) << (8 * c);
            if (WANTED) any_low |= low[c];
          }
          if (WANTED) any_high |= high;
          uint32_t planes[4];
          byte_planes(low, planes);
          uint8_t* at = row_at + plane_offset(8 * i, key, kSumKeys);
#pragma unroll
          for (int p = 0; p < 4; ++p) *reinterpret_cast<uint32_t*>(at + p * Tile::kWeightPlaneBytes) = planes[p];
          if constexpr (Tile::kWeightPlanes == 5) *reinterpret_cast<uint32_t*>(at + 4 * Tile::kWeightPlaneBytes) = high;
        }
      }
      if (left > 0) fetch_block(f, b);
      __syncwarp();  // or the compiler asks for both blocks at the end of the step
    }
    if (left > kAhead) ask(kAhead, lane);
    advance();
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (bucket == 0) den[i] += step_den[i];
    next_key += kSumKeys;
    if (!WANTED) return 0;
    return planes_seen(__reduce_or_sync(kFullWarp, any_low), __reduce_or_sync(kFullWarp, any_high));
  }

  // A row has one warp, and a quad of it: its sum of weights to rows, and `to_memory` where it belongs.
  __device__ __forceinline__ void publish(const SumsArgs& args, int64_t head, int64_t row_base, int lane,
                                          OutputRow* rows, bool to_memory) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      uint64_t sum = den[i] + __shfl_xor_sync(kFullWarp, den[i], 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (lane % 4 != 0) continue;
      publish_row(args, head, row_base + row(i), sum, rows + row(i), to_memory);
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

// The weight warps' whole run. planes_of[stage][warp] tells the multiplying warps which planes hold anything. `values`
// may bring the values of each step along: load(step, all) starts a copy, wait<pending>() waits for all but the last
// ones.
template <class Tile, class Values, class Dropped>
__device__ __forceinline__ void run_weights(const SumsArgs& args, const SumsWork<Tile>& work,
                                            const Exponents& exponents, uint8_t* shared,
                                            unsigned (*planes_of)[kWeightWarps], OutputRow* rows,
                                            Values values, const Dropped& dropped, int warp, int lane) {
  WeightForming<Tile> weights(args, work.head, work.row_base, warp, lane);
  const bool many = exponents.buckets > 1;
  const int total = exponents.buckets * work.steps;
  int formed = 0;  // steps so far, over all passes
  if (total > 0) values.load(0, 0);
#pragma unroll 1
  for (int bucket = 0; formed < total; ++bucket) {
    weights.start(args, work, lane);
    typename WeightForming<Tile>::Fetched fetched;
    weights.fetch(fetched, work.steps, lane);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step, ++formed) {
      const int stage = formed & 1;
      const unsigned seen = weights.template form<true>(
          fetched, work.steps - step - 1, shared + stage * Tile::kWeightBytes, bucket, many, lane, dropped);
      if (lane == 0) planes_of[stage][warp] = seen;
      if (formed + 1 < total) {
        values.load(step + 1 < work.steps ? step + 1 : 0, formed + 1);
        values.template wait<1>();
      } else {
        values.template wait<0>();
      }
      step_barrier<Tile>();  // the others multiply this step now, and have read the one before
    }
  }
  weights.publish(args, work.head, work.row_base, lane, rows, work.dim_block == 0);
}

}  // namespace det_attn::cuda
