// Sums kernel for sm_90a: the same stage, arguments and results as sums_mma.cuh. A CTA stays on its multiprocessor and
// takes one piece of work after the other. Two warpgroups multiply, on wgmma where the digit positions fit its
// registers and on mma.sync where they do not; one forms weights ahead of them; one brings what both need. So nobody
// waits for memory, for the other side's arithmetic, or for the rounding at the end of a piece.
#pragma once

#include "forming.cuh"
#include "sums_mma.cuh"
#include "wgmma.cuh"

namespace det_attn::cuda {

template <int V_PLANES, int DIMS>
struct SumsHopperTile : SumsDigits<V_PLANES> {
  using SumsDigits<V_PLANES>::kWeightPlanes;
  // Two planes have 5 digit positions, three have 7: too many for wgmma, whose 64 rows are one warpgroup's.
  static constexpr bool kOnWgmma = V_PLANES == 2;
  static constexpr int kDims = DIMS;
  static constexpr int kMultiplyWarps = 8, kFormingWarps = 4, kBringingWarps = 4;
  // A multiplying warp has 16 rows and kWarpDims dims.
  static constexpr int kWarpDims = kOnWgmma ? DIMS / 2 : kSumWarpDims, kBlocks = kWarpDims / 8;
  static constexpr int kWarpsD = DIMS / kWarpDims, kWarpsM = kMultiplyWarps / kWarpsD, kRows = kWarpsM * kBlockRows;
  static_assert(!kOnWgmma || kRows == 64, "a warpgroup has the rows of one wgmma");
  static constexpr int kMultiplyThreads = kMultiplyWarps * kWarpSize, kFormingThreads = kFormingWarps * kWarpSize,
                       kBringingThreads = kBringingWarps * kWarpSize;
  static constexpr int kThreads = kMultiplyThreads + kFormingThreads + kBringingThreads;
  // Of 128 a thread at the launch. The accumulators are 160, 80 or 112.
  static constexpr int kRegisters = 65536 / kThreads;
  static constexpr int kMultiplyRegisters = kOnWgmma ? (DIMS > 64 ? 192 : 120) : 160;
  static constexpr int kBringingRegisters = 40;
  static constexpr int kFormingRegisters = 4 * kRegisters - 2 * kMultiplyRegisters - kBringingRegisters;
  static_assert(kMultiplyThreads == 2 * kFormingThreads && kFormingThreads == kBringingThreads, "the sum above");

  static constexpr int kStages = 4;  // of weights and values
  static constexpr int kInputs = 4;  // of distances, block maxima and shifts
  static constexpr int kWeightPlaneBytes = kRows * kSumKeys, kValuePlaneBytes = DIMS * kSumKeys;
  static constexpr int kWeightBytes = kWeightPlanes * kWeightPlaneBytes, kValueBytes = V_PLANES * kValuePlaneBytes;
  static constexpr int kStageBytes = kWeightBytes + kValueBytes;
  // One block of 16 rows and a step's keys, as they lie in memory.
  static constexpr int kKeyBlocks = kSumKeys / kBlockKeys, kRowBlocks = kRows / kBlockRows;
  static constexpr int kDistanceBytes = kKeyBlocks * kBlockRows * kBlockKeys * 4,
                       kMaxBytes = kKeyBlocks * kBlockRows * 8;
  static constexpr int kInputBytes = kRowBlocks * (kDistanceBytes + kMaxBytes) + 128;  // 64 of shifts
  static constexpr int kSharedBytes = kStages * kStageBytes + kInputs * kInputBytes;
};

namespace sums_hopper {

// What the three sides tell each other. A stage is one step: weights and values. It is full when they are there, and
// empty when they have been multiplied. An input is what the weights of a step are formed from.
template <class Tile>
struct Rings {
  uint64_t full_[Tile::kStages], empty_[Tile::kStages];              // mbarriers, as the next two
  uint64_t input_full_[Tile::kInputs], input_empty_[Tile::kInputs];
  int work[Tile::kStages], input_work[Tile::kInputs];               // the piece that begins here; kDone behind the last
  alignas(16) unsigned planes[Tile::kStages][Tile::kFormingWarps];  // that hold anything, as each warp saw it
  OutputRow rows[Tile::kStages][Tile::kRows];                       // of the piece that ends here
  int taken[2];                                                     // among the bringing warps: the next piece
};
constexpr int kDone = -1;

// Addresses of its barriers, from one register: the compiler would find the whole address anew for each use.
template <class Tile>
struct Barriers {
  uint32_t at;
  __device__ __forceinline__ explicit Barriers(Rings<Tile>& rings) : at(anew(shared_address(&rings))) {}
  __device__ __forceinline__ uint32_t full(unsigned i) const { return at + i * 8; }
  __device__ __forceinline__ uint32_t empty(unsigned i) const { return full(Tile::kStages + i); }
  __device__ __forceinline__ uint32_t input_full(unsigned i) const { return full(2 * Tile::kStages + i); }
  __device__ __forceinline__ uint32_t input_empty(unsigned i) const { return input_full(Tile::kInputs + i); }
};

// The piece that the ring announces, for all lanes of a warp: read by the lane that will arrive on the barrier behind
// which the next one is written.
__device__ __forceinline__ int announced(const int& piece, unsigned lane) {
  return __shfl_sync(kFullWarp, lane == 0 ? piece : 0, 0);
}

// A piece of work. What is needed only once is found anew instead of kept in registers.
template <class Tile>
__device__ __forceinline__ SumsWork<Tile> work_of(const SumsArgs& args, int piece) {
  piece = static_cast<int>(anew(piece));  // or the compiler keeps the first result after all
  const int pieces = SumsWork<Tile>::pieces(args);
  return SumsWork<Tile>(args, piece % pieces, piece / pieces);
}

// ---- forming ----

// A source of WeightForming in shared memory. Beside the tensor cores' own reads an answer takes long, so distances are
// asked for while those before them are used.
template <class Tile>
class StagedStep {
 public:
  __device__ __forceinline__ StagedStep(const uint8_t* input, const WeightForming<Tile>& weights, unsigned lane) {
    const unsigned block = weights.first_row / kBlockRows, half = weights.first_row / 8 % 2;
    distances_ = input + block * Tile::kDistanceBytes + (half * kWarpSize + lane) * 16;
    maxima_ = input + Tile::kRowBlocks * Tile::kDistanceBytes + block * Tile::kMaxBytes +
              weights.first_row % kBlockRows * 8;
    shifts_ = input + Tile::kRowBlocks * (Tile::kDistanceBytes + Tile::kMaxBytes) + lane % 4 * 4;
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i)
        below_[i][b] = *reinterpret_cast<const int64_t*>(maxima_ + (b * kBlockRows + 8 * i) * 8);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair)
        shift_[b][pair] = *reinterpret_cast<const uint32_t*>(shifts_ + b * kBlockKeys + pair * 16);
    }
    ask(0, 0);
  }
  __device__ __forceinline__ void ahead(int b, int pair) {
    if (pair == 0) {
      ask(b, 1);
    } else if (b + 1 < kBlocks) {
      ask(b + 1, 0);
    }
    __syncwarp();  // or the compiler asks where they are used
  }
  __device__ __forceinline__ int64_t below(int slot, int b) const { return below_[slot][b]; }
  __device__ __forceinline__ uint4 distance(int slot, int, int pair) const { return distance_[slot][pair]; }
  __device__ __forceinline__ uint32_t shift(int b, int pair) const { return shift_[b][pair]; }
  __device__ __forceinline__ void done(int) const {}

 private:
  static constexpr int kSlots = WeightForming<Tile>::kSlots, kBlocks = WeightForming<Tile>::kBlocks;
  __device__ __forceinline__ void ask(int b, int pair) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      distance_[i][pair] = *reinterpret_cast<const uint4*>(distances_ + (b * 4 + pair * 2 + i) * kWarpSize * 16);
  }
  const uint8_t* distances_;  // the warp's block of 16 rows, its half, the lane
  const uint8_t* maxima_;     // the warp's block, the thread's row
  const uint8_t* shifts_;     // the lane's
  uint4 distance_[kSlots][2];
  int64_t below_[kSlots][kBlocks];
  uint32_t shift_[kBlocks][2];
};

// The forming warps' whole run.
template <class Tile>
__device__ __forceinline__ void form_all(const SumsArgs& args, uint8_t* shared, Rings<Tile>& rings) {
  const uint8_t* inputs = shared + Tile::kStages * Tile::kStageBytes;
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize - Tile::kMultiplyWarps;
  const Barriers<Tile> barriers(rings);
  Place<Tile::kStages> place;
  Place<Tile::kInputs> used;
  const auto hand_over = [&] {
    wgmma_publish();
    barrier_arrive(barriers.full(place.stage()));
    place.advance();
  };

#pragma unroll 1
  while (true) {
    barrier_wait(barriers.input_full(used.stage()), used.parity());
    const int piece = announced(rings.input_work[used.stage()], lane);
    if (piece == kDone) {
      barrier_wait(barriers.empty(place.stage()), place.parity() ^ 1);
      return hand_over();
    }
    const SumsWork<Tile> work = work_of<Tile>(args, piece);
    WeightForming<Tile> weights(args, work.head, work.row_base, warp, lane);
    const int steps = work.steps, buckets = Exponents(args.prepared, work.head).buckets;
    int step = 0, bucket = 0;
#pragma unroll 1
    for (int left = max(1, buckets * steps); left > 0; --left) {  // a piece without keys has a stage, too
      barrier_wait(barriers.empty(place.stage()), place.parity() ^ 1);
      barrier_wait(barriers.input_full(used.stage()), used.parity());
      unsigned seen = 0;
      if (steps > 0) {
        StagedStep<Tile> source(inputs + used.stage() * Tile::kInputBytes, weights, lane);
        seen = weights.template form<!Tile::kOnWgmma>(source, shared + place.stage() * Tile::kStageBytes, bucket,
                                                      buckets > 1, lane, NoneDropped());
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(barriers.input_empty(used.stage()));
        if (!Tile::kOnWgmma) rings.planes[place.stage()][warp] = seen;
      }
      used.advance();
      if (left > 1) hand_over();
      step = step + 1 >= steps ? 0 : step + 1;
      bucket += step == 0;
    }
    const SumsWork<Tile> done = work_of<Tile>(args, piece);
    weights.publish(args, done.head, done.row_base, lane, rings.rows[place.stage()], done.dim_block == 0);
    hand_over();
  }
}

// ---- bringing ----

// The bringing warps' whole run; their lanes 0 work. The first warps bring the blocks of 16 rows, the next one (or the
// first again) the shifts, the last one the values.
template <class Tile>
__device__ __forceinline__ void bring_all(const SumsArgs& args, uint8_t* shared, Rings<Tile>& rings) {
  constexpr unsigned kShiftWarp = Tile::kRowBlocks % Tile::kBringingWarps, kValueWarp = Tile::kBringingWarps - 1;
  static_assert(Tile::kRowBlocks <= Tile::kBringingWarps, "a block a warp");
  const Shape& s = args.shape;
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % Tile::kBringingWarps;
  const uint32_t inputs = shared_address(shared) + Tile::kStages * Tile::kStageBytes;
  const int all = SumsWork<Tile>::pieces(args) * args.splits;
  const int64_t step_bytes = int64_t(s.value_dims_pad) * kSumKeys, plane_bytes = s.keys_pad / kSumKeys * step_bytes;
  const Barriers<Tile> barriers(rings);
  Place<Tile::kStages> place;
  Place<Tile::kInputs> brought;

  // One step, or none (a piece without keys, or the end) with `any` false. `begins`: the piece that does so here.
  const auto bring = [&](bool any, int step, int64_t block, const uint8_t* shifts, const uint8_t* values, bool begins,
                         int piece) {
    if (warp < Tile::kRowBlocks || warp == kShiftWarp) {
      barrier_wait(barriers.input_empty(brought.stage()), brought.parity() ^ 1);
      const uint32_t input = inputs + brought.stage() * Tile::kInputBytes, full = barriers.input_full(brought.stage());
      if (begins && warp == kShiftWarp) rings.input_work[brought.stage()] = piece;
      if (warp < Tile::kRowBlocks) {
        if (any && block >= 0) {
          const int64_t at = block + step * Tile::kKeyBlocks;
          barrier_expect(full, Tile::kDistanceBytes + Tile::kMaxBytes);
          copy_bulk(input + warp * Tile::kDistanceBytes, args.distances.distance + at * 4 * kWarpSize,
                    Tile::kDistanceBytes, full);
          copy_bulk(input + Tile::kRowBlocks * Tile::kDistanceBytes + warp * Tile::kMaxBytes,
                    args.distances.block_max + at * kBlockRows, Tile::kMaxBytes, full);
        } else {
          barrier_arrive(full);
        }
      }
      if (warp == kShiftWarp) {
        if (any) {
          barrier_expect(full, kSumKeys);
          copy_bulk(input + Tile::kRowBlocks * (Tile::kDistanceBytes + Tile::kMaxBytes), shifts + step * kSumKeys,
                    kSumKeys, full);
        } else {
          barrier_arrive(full);
        }
      }
    }
    if (warp == kValueWarp) {
      barrier_wait(barriers.empty(place.stage()), place.parity() ^ 1);
      const uint32_t full = barriers.full(place.stage());
      if (begins) rings.work[place.stage()] = piece;
      if (any) {
        barrier_expect(full, Tile::kValueBytes);
        for (int p = 0; p < Tile::kValuePlanes; ++p) {
          copy_bulk(shared_address(shared) + place.stage() * Tile::kStageBytes + Tile::kWeightBytes +
                        p * Tile::kValuePlaneBytes,
                    values + p * plane_bytes + step * step_bytes, Tile::kValuePlaneBytes, full);
        }
      } else {
        barrier_arrive(full);
      }
    }
    brought.advance();
    place.advance();
  };

  int piece = blockIdx.x;
  for (int taken = 0; piece < all; taken ^= 1) {
    if (lane == 0) {
      const SumsWork<Tile> work = work_of<Tile>(args, piece);
      if (work.row_base < s.rows) {
        const int64_t block =
            work.row_base + warp * kBlockRows < s.rows  // blocks of padding rows do not exist
                ? first_distance_block(args.distances, work.row16_base, warp, work.key_begin, work.tile_first)
                : -1;
        const uint8_t* shifts = args.prepared.value_shift + work.head * s.keys_pad + work.key_begin;
        const uint8_t* values = args.prepared.value + work.head * Tile::kValuePlanes * plane_bytes +
                                work.key_begin / kSumKeys * step_bytes + work.dim_block * Tile::kValuePlaneBytes;
        const int steps = work.steps, total = Exponents(args.prepared, work.head).buckets * steps;
        int step = 0;
#pragma unroll 1
        for (int i = 0; i < max(1, total); ++i) {
          bring(total > 0, step, block, shifts, values, i == 0, piece);
          step = step + 1 == steps ? 0 : step + 1;
        }
      }
      // Taken only now, so that who is done first goes on first.
      if (warp == 0) rings.taken[taken] = static_cast<int>(gridDim.x) + atomicAdd(args.ticket, 1);
    }
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(Tile::kBringingThreads) : "memory");
    piece = rings.taken[taken];
  }
  if (lane == 0) bring(false, 0, 0, nullptr, nullptr, true, kDone);
}

// ---- multiplying ----

// Issues one 64-key step: every weight plane times every value plane. Planes of zeros are not skipped: wgmma under a
// condition is serialised by the compiler.
template <class Tile>
__device__ __forceinline__ void issue_step(PositionSums<Tile::kPositions, Tile::kBlocks>& sums, uint32_t a_shared,
                                           uint32_t b_shared) {
  constexpr int V = Tile::kValuePlanes, kEightRows = 8 * kSumKeys;
  // Operands differ in their low words alone, so as few registers as possible cross to the uniform ones.
  constexpr uint64_t kHighWord = operand(0, kEightRows) >> 32 << 32;
  const uint32_t a = static_cast<uint32_t>(operand(a_shared, kEightRows)),
                 b = static_cast<uint32_t>(operand(b_shared, kEightRows));
#pragma unroll
  for (int w = 0; w < Tile::kWeightPlanes; ++w) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < kSumKeys / 32; ++k) {
        constexpr auto kStep = static_cast<uint32_t>(kOperandStep);
        const uint64_t from_a = kHighWord | (a + (w * Tile::kWeightPlaneBytes >> 4) + k * kStep);
        const uint64_t from_b = kHighWord | (b + (v * Tile::kValuePlaneBytes >> 4) + k * kStep);
        if (v == V - 1) {
          wgmma_bytes<false, true>(sums.acc[w + v], from_a, from_b);
        } else {
          wgmma_bytes<false, false>(sums.acc[w + v], from_a, from_b);
        }
      }
  }
}

// The multiplying warps' whole run. Registers are scarce in the loop over the steps, so what it does not need is found
// again behind it.
template <class Tile>
__device__ __forceinline__ void multiply_all(const SumsArgs& args, const uint8_t* shared, Rings<Tile>& rings) {
  const Shape& s = args.shape;
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const unsigned warp_m = warp % Tile::kWarpsM, warp_d = warp / Tile::kWarpsM;
  const unsigned r = warp_m * kBlockRows + lane / 4;  // and the row 8 further
  // Where mma.sync's fragments begin in a stage.
  const unsigned matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t a_lane = shared_address(shared) + (warp_m * kBlockRows + (matrix & 1) * 8) * kSumKeys +
                          (matrix >> 1) * 128 + matrix_row * 16;
  const uint32_t b_lane = shared_address(shared) + Tile::kWeightBytes +
                          (warp_d * Tile::kWarpDims + (matrix >> 1) * 8) * kSumKeys + (matrix & 1) * 128 +
                          matrix_row * 16;
  const auto dim_of = [&](const SumsWork<Tile>& work, int d) {
    return work.dim_block * Tile::kDims + static_cast<int>(warp_d) * Tile::kWarpDims + d;
  };
  // Whose long accumulator takes a row's flushed sums: the row's, or the CTA's own for its rows.
  const auto flushed_row = [&](const SumsWork<Tile>& work, int half) {
    const unsigned row = r + 8 * half;
    return args.into_digits ? work.head * s.rows + work.row_base + row
                            : args.digits_row + int64_t(blockIdx.x) * Tile::kRows + row;
  };
  const Barriers<Tile> barriers(rings);
  Place<Tile::kStages> place;
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.empty(place.stage()));
    place.advance();
  };

#pragma unroll 1
  while (true) {
    barrier_wait(barriers.full(place.stage()), place.parity());
    const int piece = announced(rings.work[place.stage()], lane);
    if (piece == kDone) return;
    PositionSums<Tile::kPositions, Tile::kBlocks> sums;
    bool flushed = false;
    {
      const SumsWork<Tile> work = work_of<Tile>(args, piece);
      const Exponents exponents(args.prepared, work.head);
      const int steps = work.steps;
      const bool flush_last = exponents.buckets > 1 || args.into_digits;
      // Keys whose value exponents differ by more than a shift can bridge go in separate passes, each flushed to its
      // position.
      int left = exponents.buckets * steps, rest = 0;  // steps, of all passes and of this one
      sums.clear();
#pragma unroll 1
      while (left > 0) {
        barrier_wait(barriers.full(place.stage()), place.parity());
        if constexpr (Tile::kOnWgmma) {
          const uint32_t stage = shared_address(shared) + place.stage() * Tile::kStageBytes;
          wgmma_fence();
          issue_step<Tile>(sums, stage, stage + Tile::kWeightBytes + warp_d * Tile::kWarpDims * kSumKeys);
          wgmma_commit();
        } else {
          static_assert(Tile::kFormingWarps == 4, "a vector of theirs");
          const uint4 seen = *reinterpret_cast<const uint4*>(rings.planes[place.stage()]);
          const unsigned planes = seen.x | seen.y | seen.z | seen.w;
          if (planes != 0)
            multiply_step<Tile>(sums, a_lane + place.stage() * Tile::kStageBytes,
                                b_lane + place.stage() * Tile::kStageBytes, planes);
        }
        --left;
        rest = (rest == 0 ? steps : rest) - 1;
        const bool flush = rest == 0 ? flush_last || flushed : (steps - rest) % (kFlushKeys / kSumKeys) == 0;
        if constexpr (Tile::kOnWgmma) wgmma_wait<0>();  // the other warpgroup has the tensor cores meanwhile
        if (left > 0) release();
        if (flush) {
          const SumsWork<Tile> again = work_of<Tile>(args, piece);
          const Exponents of_head(args.prepared, again.head);
          const int position = of_head.position(of_head.buckets - 1 - left / steps, args.problem.precision);
          sums.template for_each<1>(lane, [&](int half, int d, int64_t low, int64_t high) {
            const int64_t row = again.row_base + r + 8 * half;
            const int dim = dim_of(again, d);
            if (row < s.rows && dim < s.dims)
              flush_sum(args, flushed_row(again, half), dim, low, high, position, !flushed);
          });
          sums.clear();
          flushed = true;
        }
      }
    }

    // ---- output ----
    if (!args.into_digits) {
      const SumsWork<Tile> work = work_of<Tile>(args, piece);
      const int position = Exponents(args.prepared, work.head).position(0, args.problem.precision);
      const OutputRow* rows = rings.rows[place.stage()] + r;
      sums.template for_each<4>(lane, [&](int half, int d, int64_t low, int64_t high) {
        const int dim = dim_of(work, d);
        const OutputRow& to = rows[8 * half];
        if (to.index >= 0 && dim < s.dims)
          emit_output(args, to, flushed_row(work, half), dim, low, high, position, flushed);
      });
    }
    release();
  }
}

}  // namespace sums_hopper

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) sums_hopper_kernel(const __grid_constant__ SumsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ sums_hopper::Rings<Tile> rings;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(&rings.full_[i], Tile::kFormingThreads + 1);  // and one for the values
      barrier_init(&rings.empty_[i], Tile::kMultiplyWarps);
    }
    for (int i = 0; i < Tile::kInputs; ++i) {
      barrier_init(&rings.input_full_[i], Tile::kRowBlocks + 1);  // and the shifts
      barrier_init(&rings.input_empty_[i], Tile::kFormingWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < Tile::kMultiplyThreads) {
    set_registers<Tile::kMultiplyRegisters, Tile::kRegisters>();
    sums_hopper::multiply_all<Tile>(args, shared, rings);
  } else if (threadIdx.x < Tile::kMultiplyThreads + Tile::kFormingThreads) {
    set_registers<Tile::kFormingRegisters, Tile::kRegisters>();
    sums_hopper::form_all<Tile>(args, shared, rings);
  } else {
    set_registers<Tile::kBringingRegisters, Tile::kRegisters>();
    sums_hopper::bring_all<Tile>(args, shared, rings);
  }
#endif
}

}  // namespace det_attn::cuda
