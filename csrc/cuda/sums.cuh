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
  int dim_blocks;      // CTAs side by side over head_dim
  int splits;          // parts of the key range; more than one adds into `digits` atomically
  int64_t split_keys;  // keys of a part
  int64_t digits_row;  // row (over heads * rows) of digits[0]
  // Long accumulators [row][head_dim][12]. into_digits: CTAs add their sums here and in den. Otherwise scratch of this
  // chunk, for rows whose sums do not fit one run of int32 positions.
  int64_t* digits;
  int64_t* den;     // [heads * rows]
  bool into_digits;
  MutableView out;  // data == nullptr: leave the sums in digits and den
  __device__ __forceinline__ int64_t* digits_of(int64_t head, int64_t row, int dim) const {
    return digits + ((head * shape.rows + row - digits_row) * shape.dims + dim) * kDigits;
  }
  __device__ __forceinline__ int64_t out_offset(int64_t head, int64_t row, int dim) const {
    const Pair at = pair_of(head, row, 0);
    return at.batch * out.stride_batch + at.head * out.stride_head + at.query * out.stride_row + dim;
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
static __device__ __noinline__ void flush_sum(const SumsArgs& args, int64_t head, int64_t row, int dim, int64_t low,
                                              int64_t high, int position, bool first) {
  int64_t* digits = args.digits_of(head, row, dim);
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
static __device__ __noinline__ double flushed_sum(const SumsArgs& args, int64_t head, int64_t row, int dim) {
  return digits_round(args.digits_of(head, row, dim), 1);
}

// One output from its sum, which `flushed` says lies in its long accumulator.
__device__ __forceinline__ void emit_output(const SumsArgs& args, int64_t head, int64_t row, int dim, int64_t low,
                                            int64_t high, int position, bool flushed, int64_t den) {
  double num;
  if (flushed) {
    num = flushed_sum(args, head, row, dim);
  } else {
    // 128 bits: |low| < 2^48, |high| < 2^57.
    const uint64_t shifted = static_cast<uint64_t>(high) << 24;
    const uint64_t sum = shifted + static_cast<uint64_t>(low);
    const int64_t carry = (sum < shifted ? 1 : 0) + (low >> 63);
    num = mul_f64(round_wide((high >> 40) + carry, sum), pow2(position - kUnitExponent));
  }
  const int64_t special = args.rowmax(head, row) == kRowmaxPoisoned ? kCountNan : 0;
  store_element(args.out.data, args.out_offset(head, row, dim), args.out.dtype,
                output_of(num, den, special, args.problem.precision.weight_bits,
                          args.problem.modifiers.rescale()));
}

// The CTA's sums of weights, where they belong; the multiplying threads call it.
template <class Tile>
__device__ __forceinline__ void publish_den(const SumsArgs& args, int64_t head, int64_t row_base,
                                            const unsigned long long* den) {
  for (int r = threadIdx.x; r < Tile::kRows && row_base + r < args.shape.rows; r += Tile::kMultiplyThreads) {
    int64_t* to = args.den + head * args.shape.rows + row_base + r;
    if (!args.into_digits) {
      *to = static_cast<int64_t>(den[r]);
    } else if (den[r] != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(to), den[r]);
    }
  }
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
  // f(row in the warp's 16, dim in the warp's dims, low, high) for every sum of the thread, which is low + high * 2^24:
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
      f(lane / 4 + 8 * (e >> 1 & 1), (e >> 2) * 8 + (lane % 4) * 2 + (e & 1), low, high);
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

// Forms the weights of a CTA's Tile::kRows rows step by step into two stages of byte planes. A warp works for kSlots
// (16-row block, row half) pairs, so a thread has one fixed row of each; it takes four keys of one A register at a
// time.
template <class Tile>
struct WeightForming {
  static constexpr int kSlots = Tile::kRows / 8 / Tile::kFormingWarps, kBlocks = kSumKeys / kBlockKeys;
  static_assert(kSlots * Tile::kFormingWarps * 8 == Tile::kRows, "rows must divide evenly");

  int row[kSlots];  // in the CTA's tile
  int64_t rowmax[kSlots];
  bool live[kSlots];     // the row attends something and is not poisoned
  bool padding[kSlots];  // none of the slot's rows is real: what it leaves in shared memory reaches no output
  uint64_t den[kSlots];
  const uint4* next[kSlots];
  const uint32_t* next_shift;
  int next_key;  // of the step that is formed next; under dropout
  // What one step needs from memory; fetched as soon as the step before is formed.
  struct Fetched {
    uint4 distance[kSlots][kBlocks][2];
    int64_t below[kSlots][kBlocks];  // block maxima
    uint32_t shift[kBlocks][2];      // a byte for each of the four keys
  };

  __device__ __forceinline__ WeightForming(const SumsArgs& args, int64_t head, int64_t row_base, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int slot = warp * kSlots + i;
      row[i] = slot * 8 + lane / 4;
      rowmax[i] = args.rowmax(head, row_base + row[i]);
      live[i] = rowmax[i] != kRowmaxPoisoned && rowmax[i] != kRowmaxEmpty;
      padding[i] = row_base + slot * 8 >= args.shape.rows;
      den[i] = 0;
    }
  }

  // Points at the first step's blocks; fetch() then reads them step by step.
  template <class Work>
  __device__ __forceinline__ void start(const SumsArgs& args, const Work& work, int lane) {
    const Distances& d = args.distances;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int64_t block = (work.row16_base + row[i] / kBlockRows) * d.key_blocks +
                            (work.key_begin - work.tile_first) / kBlockKeys;
      next[i] = d.distance + (block * 4 + row[i] / 8 % 2) * kWarpSize + lane;
    }
    const uint8_t* shifts = args.prepared.value_shift + work.head * args.shape.keys_pad + work.key_begin;
    next_shift = reinterpret_cast<const uint32_t*>(shifts) + lane % 4;
    next_key = static_cast<int>(work.key_begin);
  }

  __device__ __forceinline__ void fetch(const Distances& d, Fetched& f) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (padding[i]) continue;  // there are no distances of padding rows
      // The block maxima lie as the distances do, so one pointer serves both.
      const int64_t* next_max =
          d.block_max + ((next[i] - d.distance) / (4 * kWarpSize)) * kBlockRows + row[i] % kBlockRows;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        f.below[i][b] = next_max[b * kBlockRows];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) f.distance[i][b][pair] = __ldcs(next[i] + (b * 4 + pair * 2) * kWarpSize);
      }
      next[i] += kBlocks * 4 * kWarpSize;
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) f.shift[b][pair] = __ldg(next_shift + b * (kBlockKeys / 4) + pair * 4);
    next_shift += kSumKeys / 4;
  }

  // Several passes: keys of another one are shifted out.
  __device__ __forceinline__ static void select_shifts(Fetched& f, int bucket) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t word = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c)
          word |= static_cast<uint32_t>(Exponents::shift(f.shift[b][pair] >> (8 * c) & 0xff, bucket)) << (8 * c);
        f.shift[b][pair] = word;
      }
  }

  // Writes the weights of the fetched distances, shifted, as byte planes. Returns which planes are not all zero, if
  // WANTED.
  // WANTED. dropped(slot, key) has a bit for each of keys key, + 1, + 8, + 9: a weight that is left out of the planes,
  // not of DEN.
  template <bool WANTED, class Dropped>
  __device__ __forceinline__ unsigned form(Fetched& f, uint8_t* stage, int bucket, bool many, int lane,
                                           const Dropped& dropped) {
    if (many) select_shifts(f, bucket);
    uint32_t any_low = 0, any_high = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (padding[i]) continue;
      // A step adds at most 16 weights of 2^T a row and thread.
      using StepSum = typename std::conditional<Tile::kWeightBits + 4 < 32, uint32_t, uint64_t>::type;
      static_assert(kBlocks * 8 <= 16, "a step's sum of weights must fit");
      StepSum step_den = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint32_t base = live[i] ? clamp_distance(rowmax[i] - f.below[i][b]) : kFarDistance;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t d[4] = {f.distance[i][b][pair].x, f.distance[i][b][pair].y, f.distance[i][b][pair].z,
                                 f.distance[i][b][pair].w};
          uint32_t low[4], high = 0;
          const unsigned out = dropped(i, next_key + b * kBlockKeys + pair * 16 + lane % 4 * 2);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            uint32_t w = weight_from_distance<Tile::kWeightBits>(min(base + d[c], kDistanceLimit));
            step_den += w;
            w = out >> c & 1 ? 0 : w;
            const uint32_t by = f.shift[b][pair] >> (8 * c) & 0xff;
            low[c] = shift_left(w, by);
            if (Tile::kWeightPlanes == 5) high |= shift_right(w, 32 - by) << (8 * c);
            if (WANTED) any_low |= low[c];
          }
          if (WANTED) any_high |= high;
          uint32_t planes[4];
          byte_planes(low, planes);
          uint8_t* at = stage + plane_offset(row[i], b * kBlockKeys + pair * 16 + (lane % 4) * 4, kSumKeys);
#pragma unroll
          for (int p = 0; p < 4; ++p) *reinterpret_cast<uint32_t*>(at + p * Tile::kWeightPlaneBytes) = planes[p];
          if constexpr (Tile::kWeightPlanes == 5) *reinterpret_cast<uint32_t*>(at + 4 * Tile::kWeightPlaneBytes) = high;
        }
      }
      if (bucket == 0) den[i] += step_den;
    }
    next_key += kSumKeys;
    if (!WANTED) return 0;
    return planes_seen(__reduce_or_sync(kFullWarp, any_low), __reduce_or_sync(kFullWarp, any_high));
  }

  __device__ __forceinline__ void publish(unsigned long long* den_shared) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (den[i] != 0) atomicAdd(&den_shared[row[i]], static_cast<unsigned long long>(den[i]));
  }
};

// Which rows, dims and keys a sums CTA has.
template <class Tile>
struct SumsWork {
  int dim_block, steps;
  int64_t head, row_base, row16_base, key_begin;
  int tile_first;

  // All threads call it; `shared` is two ints.
  __device__ __forceinline__ SumsWork(const SumsArgs& args, int* shared) {
    const Shape& s = args.shape;
    constexpr int kSubTiles = kRowPad / Tile::kRows;
    // Later rows attend more keys when causal: the long ones first, of all heads at once where a chunk is whole heads.
    const int64_t tiles_per_head = s.rows_pad / kRowPad, subs = gridDim.x / args.dim_blocks;
    const int64_t heads = subs % (tiles_per_head * kSubTiles) == 0 ? subs / (tiles_per_head * kSubTiles) : 1;
    dim_block = static_cast<int>(blockIdx.x % args.dim_blocks);
    const int64_t work = blockIdx.x / args.dim_blocks, sub = subs / heads - 1 - work / heads;
    const int64_t tile = args.first_tile + work % heads * tiles_per_head + sub / kSubTiles;
    head = tile / tiles_per_head;
    row_base = (tile % tiles_per_head) * kRowPad + (sub % kSubTiles) * Tile::kRows;
    row16_base = (tile - args.first_tile) * s.tile_blocks + (sub % kSubTiles) * (Tile::kRows / kBlockRows);
    tile_first = args.prepared.tile_first[tile];
    const int64_t part = tile_first + blockIdx.y * args.split_keys;
    const KeyRange keys =
        keys_of_rows<kSumKeys>(args, head, row_base, Tile::kRows, part, part + args.split_keys, shared);
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
                                            unsigned (*planes_of)[kWeightWarps], unsigned long long* den_shared,
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
    weights.fetch(args.distances, fetched);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step, ++formed) {
      const int stage = formed & 1;
      const unsigned seen =
          weights.template form<true>(fetched, shared + stage * Tile::kWeightBytes, bucket, many, lane, dropped);
      if (step + 1 < work.steps) weights.fetch(args.distances, fetched);
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
  weights.publish(den_shared);
}

}  // namespace det_attn::cuda
