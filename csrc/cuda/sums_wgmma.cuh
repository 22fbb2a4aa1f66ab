// Sums kernel on wgmma (sm_90a): the same stage, arguments and results as sums_mma.cuh. A CTA stays on its multiprocessor
// and takes one piece of work after the other, 64 rows x kDims dims each. Two warpgroups multiply, half of the dims each;
// the others form weights ahead of them, so that neither waits for the other's arithmetic, nor for the rounding at the
// end of a piece.
#pragma once

#include "sums.cuh"
#include "wgmma.cuh"

namespace det_attn::cuda {

template <int V_PLANES, int DIMS>
struct SumsWgmmaTile {
  static constexpr int kValuePlanes = V_PLANES;
  static constexpr int kWeightPlanes = 4;  // 23 + 8 bits after the shift
  static_assert(V_PLANES == 2, "with three planes the digit positions do not fit the registers of two warpgroups");
  static constexpr int kPositions = kWeightPlanes + V_PLANES - 1;
  static constexpr int kWeightBits = kHigh.weight_bits;
  static constexpr int kRows = 64, kDims = DIMS, kGroupDims = DIMS / 2, kBlocks = kGroupDims / 8;
  // Weights cost the same at any head_dim, products do not. Registers: 5 positions of kGroupDims dims are 160 or 80.
  static constexpr bool kWide = DIMS > 64;
  static constexpr int kMultiplyGroups = 2, kFormingGroups = kWide ? 1 : 2;
  static constexpr int kMultiplyRegisters = kWide ? 192 : 120, kFormingRegisters = kWide ? 120 : 136;
  static constexpr int kMultiplyThreads = kMultiplyGroups * kWarpgroup, kFormingThreads = kFormingGroups * kWarpgroup;
  static constexpr int kThreads = kMultiplyThreads + kFormingThreads, kFormingWarps = kFormingThreads / kWarpSize;
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;  // of a thread, at the launch
  static_assert(kMultiplyRegisters * kMultiplyThreads + kFormingRegisters * kFormingThreads <= kRegisters * kThreads,
                "more would wait for ever");
  static constexpr int kStages = 4;
  static constexpr int kWeightPlaneBytes = kRows * kSumKeys, kValuePlaneBytes = DIMS * kSumKeys;
  static constexpr int kWeightBytes = kWeightPlanes * kWeightPlaneBytes, kValueBytes = V_PLANES * kValuePlaneBytes;
  static constexpr int kStageBytes = kWeightBytes + kValueBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

namespace sums_wgmma {

// What the two sides tell each other. A stage is one step: weights and values. It is full when they are there, and empty
// when they have been multiplied.
template <class Tile>
struct Stages {
  uint64_t full[Tile::kStages], empty[Tile::kStages];  // mbarriers
  int work[Tile::kStages];                     // the piece of work that begins with this step; kDone behind the last one
  OutputRow rows[Tile::kStages][Tile::kRows];  // of the piece of work that ends with this step
  // Among the forming threads: the next piece of work, and where the values of this one begin.
  int taken[2];
  const uint8_t* values;
};
constexpr int kDone = -1;

// Where one side is in the ring.
template <class Tile>
struct Place {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

// The piece of work again, found anew: what is needed once a piece is not worth the registers to keep it.
template <class Tile>
__device__ __forceinline__ SumsWork<Tile> work_of(const SumsArgs& args, int piece) {
  asm volatile("" : "+r"(piece));  // or the compiler keeps the first result after all
  const int pieces = SumsWork<Tile>::pieces(args);
  return SumsWork<Tile>(args, piece % pieces, piece / pieces);
}

// Issues one 64-key step: every weight plane times every value plane. Planes of zeros are not skipped: wgmma under a
// condition is serialised by the compiler.
template <class Tile>
__device__ __forceinline__ void issue_step(PositionSums<Tile::kPositions, Tile::kBlocks>& sums, uint32_t a_shared,
                                           uint32_t b_shared) {
  constexpr int V = Tile::kValuePlanes;
  const uint64_t a = operand(a_shared, 8 * kSumKeys), b = operand(b_shared, 8 * kSumKeys);
#pragma unroll
  for (int w = 0; w < Tile::kWeightPlanes; ++w) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < kSumKeys / 32; ++k) {
        const uint64_t from_a = a + (w * Tile::kWeightPlaneBytes >> 4) + k * kOperandStep;
        const uint64_t from_b = b + (v * Tile::kValuePlaneBytes >> 4) + k * kOperandStep;
        if (v == V - 1) {
          wgmma_bytes<false, true>(sums.acc[w + v], from_a, from_b);
        } else {
          wgmma_bytes<false, false>(sums.acc[w + v], from_a, from_b);
        }
      }
  }
}

// The forming warpgroups' whole run.
template <class Tile>
__device__ __forceinline__ void form_all(const SumsArgs& args, uint8_t* shared, Stages<Tile>& stages) {
  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % Tile::kFormingWarps;
  static_assert(Tile::kMultiplyThreads / kWarpSize % Tile::kFormingWarps == 0, "warps count from 0");
  const bool leader = threadIdx.x == Tile::kMultiplyThreads;
  const int all = SumsWork<Tile>::pieces(args) * args.splits;
  const int64_t step_bytes = int64_t(s.value_dims_pad) * kSumKeys, plane_bytes = (s.keys_pad / kSumKeys) * step_bytes;
  Place<Tile> place;
  // A stage is taken, given its values (if there are any), and handed over with this thread's part of the weights.
  const auto take = [&](bool first, int piece) {
    barrier_wait(&stages.empty[place.stage], place.parity ^ 1);
    if (leader && first) stages.work[place.stage] = piece;
  };
  const auto hand_over = [&] {
    wgmma_publish();
    barrier_arrive(&stages.full[place.stage]);
    place.advance();
  };

  int piece = blockIdx.x;
  for (int taken = 0; piece < all; taken ^= 1) {
    const SumsWork<Tile> work = work_of<Tile>(args, piece);
    if (leader) {
      stages.taken[taken] = static_cast<int>(gridDim.x) + atomicAdd(args.ticket, 1);
      stages.values = args.prepared.value + work.head * Tile::kValuePlanes * plane_bytes +
                      work.key_begin / kSumKeys * step_bytes + work.dim_block * Tile::kValuePlaneBytes;
    }
    if (work.row_base < s.rows) {
      WeightForming<Tile> weights(args, work.head, work.row_base, warp, lane);
      const int steps = work.steps, buckets = steps == 0 ? 0 : Exponents(args.prepared, work.head).buckets;
#pragma unroll 1
      for (int bucket = 0; bucket < buckets; ++bucket) {
        typename WeightForming<Tile>::Fetched fetched;
        weights.start(args, work_of<Tile>(args, piece), lane);
        weights.fetch(fetched, steps, lane);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          take(bucket == 0 && step == 0, piece);
          uint8_t* stage = shared + place.stage * Tile::kStageBytes;
          if (leader) {
            uint64_t* full = &stages.full[place.stage];
            barrier_expect(full, Tile::kValueBytes);
            const uint8_t* values = stages.values + step * step_bytes;
            for (int p = 0; p < Tile::kValuePlanes; ++p) {
              copy_bulk(shared_address(stage) + Tile::kWeightBytes + p * Tile::kValuePlaneBytes,
                        values + p * plane_bytes, Tile::kValuePlaneBytes, full);
            }
          }
          weights.template form<false>(fetched, steps - step - 1, stage, bucket, buckets > 1, lane, NoneDropped());
          if (step + 1 < steps || bucket + 1 < buckets) hand_over();
        }
      }
      if (buckets == 0) {  // rows that attend nothing here have a stage all the same
        take(true, piece);
        if (leader) barrier_arrive(&stages.full[place.stage]);
      }
      const SumsWork<Tile> done = work_of<Tile>(args, piece);
      weights.publish(args, done.head, done.row_base, lane, stages.rows[place.stage], done.dim_block == 0);
      hand_over();
    }
    asm volatile("bar.sync 1, %0;" ::"n"(Tile::kFormingThreads) : "memory");
    piece = stages.taken[taken];
  }
  take(true, kDone);
  if (leader) barrier_arrive(&stages.full[place.stage]);
  hand_over();
}

// The multiplying warpgroups' whole run. Registers are scarce in the loop over the steps, so what it does not need is
// found again behind it.
template <class Tile>
__device__ __forceinline__ void multiply_all(const SumsArgs& args, const uint8_t* shared, Stages<Tile>& stages) {
  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, group = threadIdx.x / kWarpgroup;
  const int r = threadIdx.x % kWarpgroup / kWarpSize * kBlockRows + lane / 4;  // and the row 8 further
  const auto dim_of = [&](const SumsWork<Tile>& work, int d) {
    return work.dim_block * Tile::kDims + group * Tile::kGroupDims + d;
  };
  Place<Tile> place;
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(&stages.empty[stage]);
  };

#pragma unroll 1
  while (true) {
    barrier_wait(&stages.full[place.stage], place.parity);
    const int piece = stages.work[place.stage];
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
        barrier_wait(&stages.full[place.stage], place.parity);
        const uint32_t stage = shared_address(shared) + place.stage * Tile::kStageBytes;
        wgmma_fence();
        issue_step<Tile>(sums, stage, stage + Tile::kWeightBytes + group * Tile::kGroupDims * kSumKeys);
        wgmma_commit();
        --left;
        rest = (rest == 0 ? steps : rest) - 1;
        const bool flush = rest == 0 ? flush_last || flushed : (steps - rest) % (kFlushKeys / kSumKeys) == 0;
        wgmma_wait<0>();  // the other warpgroup has the tensor cores meanwhile
        if (left > 0) {
          release(place.stage);
          place.advance();
        }
        if (flush) {
          const SumsWork<Tile> again = work_of<Tile>(args, piece);
          const Exponents of_head(args.prepared, again.head);
          const int position = of_head.position(of_head.buckets - 1 - left / steps, args.problem.precision);
          sums.template for_each<1>(lane, [&](int half, int d, int64_t low, int64_t high) {
            const int64_t row = again.row_base + r + 8 * half;
            const int dim = dim_of(again, d);
            if (row < s.rows && dim < s.dims)
              flush_sum(args, again.head * s.rows + row, dim, low, high, position, !flushed);
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
      const OutputRow* rows = stages.rows[place.stage] + r;
      sums.template for_each<4>(lane, [&](int half, int d, int64_t low, int64_t high) {
        const int dim = dim_of(work, d);
        const OutputRow& to = rows[8 * half];
        if (to.index >= 0 && dim < s.dims) emit_output(args, to, dim, low, high, position, flushed);
      });
      __syncwarp();
    }
    release(place.stage);
    place.advance();
  }
}

}  // namespace sums_wgmma

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) sums_wgmma_kernel(const __grid_constant__ SumsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) sums_wgmma::Stages<Tile> stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(&stages.full[i], Tile::kFormingThreads + 1);  // and one for the values
      barrier_init(&stages.empty[i], Tile::kMultiplyThreads / kWarpSize);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < Tile::kMultiplyThreads) {
    set_registers<Tile::kMultiplyRegisters, Tile::kRegisters>();
    sums_wgmma::multiply_all<Tile>(args, shared, stages);
  } else {
    set_registers<Tile::kFormingRegisters, Tile::kRegisters>();
    sums_wgmma::form_all<Tile>(args, shared, stages);
  }
#endif
}

}  // namespace det_attn::cuda
