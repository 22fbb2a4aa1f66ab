// Weights stage on the tensor-core path: the warps of a sums kernel that turn distances into byte planes of weights,
// and sum them for DEN, while other warps multiply (docs/contract.md sections 4, 5).
#pragma once

#include "sums.cuh"

namespace det_attn::cuda {

// What `dropped` of form() is without dropout; with it, see DroppedPairs in sums_mma.cuh.
struct NoneDropped {
  __device__ __forceinline__ unsigned operator()(int, int) const { return 0; }
};

// Several passes: keys of another one are shifted out. A byte for each of four keys.
__device__ __forceinline__ uint32_t select_shifts(uint32_t shifts, int bucket) {
  uint32_t word = 0;
#pragma unroll
  for (int c = 0; c < 4; ++c)
    word |= static_cast<uint32_t>(Exponents::shift(shifts >> (8 * c) & 0xff, bucket)) << (8 * c);
  return word;
}

// Forms the weights of a CTA's Tile::kRows rows step by step into stages of byte planes. A warp works for one half of a
// block of 16 rows, or for both, its kSlots, so a thread has one fixed row of each; it takes four keys of one A
// register at a time.
template <class Tile>
struct WeightForming {
  static constexpr int kSlots = Tile::kRows / 8 / Tile::kFormingWarps, kBlocks = kSumKeys / kBlockKeys;
  static_assert(kSlots * Tile::kFormingWarps * 8 == Tile::kRows && kSlots <= 2, "halves of one block");

  unsigned first_row;  // of slot 0, in the CTA's tile; slot 1 has the row 8 further
  int64_t rowmax[kSlots];
  // No row of slot 0 is real: there are no distances, and what is left in shared memory reaches no output.
  bool padding;
  uint64_t den[kSlots];

  __device__ __forceinline__ unsigned row(int slot) const { return first_row + 8 * slot; }

  __device__ __forceinline__ WeightForming(const SumsArgs& args, int64_t head, int64_t row_base, unsigned warp,
                                           unsigned lane) {
    first_row = warp * kSlots * 8 + lane / 4;
    padding = row_base + first_row / 8 * 8 >= args.shape.rows;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      rowmax[i] = args.rowmax(head, row_base + row(i));
      // Far above every block maximum, kNoScore and kPoisonedScore among them: such a row has no weights.
      if (rowmax[i] == kRowmaxPoisoned || rowmax[i] == kRowmaxEmpty) rowmax[i] = int64_t(1) << 62;
      den[i] = 0;
    }
  }

  // Writes the weights of a step, shifted, as byte planes. Returns which planes are not all zero, if WANTED. `source`
  // has the thread's part of the step: distance(slot, block, pair) of four keys, below(slot, block) the block maximum,
  // shift(block, pair) a byte for each of the four keys; load() is called before them, ahead(block, pair) before a
  // pair's distances are used, done(block) when a block's are. dropped(slot, key) has a bit for each of keys key, + 1,
  // + 8, + 9: a weight that is left out of the planes, not of DEN.
  template <bool WANTED, class Source, class Dropped>
  __device__ __forceinline__ unsigned form(Source& source, uint8_t* stage, int bucket, bool many, int lane,
                                           const Dropped& dropped) {
    if (padding) return 0;
    uint32_t any_low = 0, any_high = 0;
    // A step adds at most 16 weights of 2^T a row and thread.
    using StepSum = typename std::conditional<Tile::kWeightBits + 4 < 32, uint32_t, uint64_t>::type;
    static_assert(kBlocks * 8 <= 16, "a step's sum of weights must fit");
    StepSum step_den[kSlots] = {};
    uint8_t* row_at = stage + plane_offset(first_row, lane % 4 * 4, kSumKeys);
    source.load();
    uint32_t base[kBlocks][kSlots], shifts[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) base[b][i] = clamp_distance(rowmax[i] - source.below(i, b));
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) shifts[b][pair] = source.shift(b, pair);
    }
    if (many) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) shifts[b][pair] = select_shifts(shifts[b][pair], bucket);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int key = b * kBlockKeys + pair * 16;
        source.ahead(b, pair);
        uint32_t by[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) by[c] = __byte_perm(shifts[b][pair], 0, 0x4440 + c);
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
          const uint4 distance = source.distance(i, b, pair);
          const uint32_t d[4] = {distance.x, distance.y, distance.z, distance.w};
          uint32_t low[4], high = 0;
          const unsigned out = dropped(i, key + lane % 4 * 2);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            uint32_t w = weight_from_distance<Tile::kWeightBits>(min(base[b][i] + d[c], kFarDistance));
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
      source.done(b);
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (bucket == 0) den[i] += step_den[i];
    if (!WANTED) return 0;
    return planes_seen(__reduce_or_sync(kFullWarp, any_low), __reduce_or_sync(kFullWarp, any_high));
  }

  // Every row's sum of weights to rows, and `to_memory` where it belongs.
  __device__ __forceinline__ void publish(const SumsArgs& args, int64_t head, int64_t row_base, int lane,
                                          OutputRow* rows, bool to_memory) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {  // a row has a quad of a warp
      uint64_t sum = den[i] + __shfl_xor_sync(kFullWarp, den[i], 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (lane % 4 == 0) publish_row(args, head, row_base + row(i), sum, &rows[row(i)], to_memory);
    }
  }
};

// Where the distances of a piece of work begin: of the block of 16 rows that is `block16` in it.
__device__ __forceinline__ int64_t first_distance_block(const Distances& d, int64_t row16_base, unsigned block16,
                                                        int64_t key_begin, int tile_first) {
  return (row16_base + block16) * d.key_blocks + (key_begin - tile_first) / kBlockKeys;
}

}  // namespace det_attn::cuda
