// Gradient sums kernel for sm_90a: the same stage, arguments and results as gradient_sums_mma.cuh. Two warpgroups
// multiply on wgmma, one rounds terms ahead of them, one brings pairs and factors, as in sums_hopper.cuh.
#pragma once

#include "gradient_terms.cuh"
#include "wgmma.cuh"

namespace det_attn::cuda {

template <int V_PLANES, int DIMS>
struct GradientHopperTile : GradientStep<V_PLANES, DIMS, kPairStep> {
  using Step = GradientStep<V_PLANES, DIMS, kPairStep>;
  // A warpgroup multiplies the terms of all rows with half of the dims.
  static constexpr int kGroupDims = DIMS / 2, kBlocks = kGroupDims / 8;
  static constexpr int kMultiplyThreads = 2 * kWarpgroup, kFormingThreads = kWarpgroup, kBringingThreads = kWarpgroup;
  static constexpr int kThreads = kMultiplyThreads + kFormingThreads + kBringingThreads;
  static constexpr int kFormingWarps = kFormingThreads / kWarpSize, kMultiplyWarps = kMultiplyThreads / kWarpSize;
  static_assert(Step::kStep == kPairStep && kFormingWarps == 4, "a step is a square of pairs, a block a forming warp");
  // Of 128 a thread at the launch. The accumulators are 160 or 128, half of that for narrow heads.
  static constexpr int kRegisters = 65536 / kThreads;
  static constexpr int kMultiplyRegisters = DIMS <= 64 ? 128 : (V_PLANES == 3 ? 192 : 168);
  static constexpr int kBringingRegisters = 40;
  static constexpr int kFormingRegisters = 4 * kRegisters - 2 * kMultiplyRegisters - kBringingRegisters;

  static constexpr int kStages = 4;                      // of terms and factors
  static constexpr int kInputs = V_PLANES == 3 ? 2 : 4;  // of pairs and exponents
  static constexpr int kStageBytes = Step::kTermBytes + Step::kFactorBytes;
  static constexpr int kPairBytes = kPairBlock * kPairBlock * 4, kPairsBytes = 4 * kPairBytes;
  static constexpr int kInputBytes = kPairsBytes + Step::kStep * 4;
  static constexpr int kSharedBytes = kStages * kStageBytes + kInputs * kInputBytes;
  static constexpr int kMostSteps = static_cast<int>(kMostInnerRows / Step::kStep);
};

namespace gradient_sums_hopper {

// What the warpgroups tell each other. A stage is one step: terms and the factor's planes. It is full when they are
// there, empty when they have been multiplied. An input is what the terms of a step are rounded from.
template <class Tile>
struct Rings {
  uint64_t full[Tile::kStages], empty[Tile::kStages], input_full[Tile::kInputs], input_empty[Tile::kInputs];
  // Whether the fourth plane holds anything: of each block of 32 inner rows, for either 32 rows of the sums.
  alignas(4) uint8_t missing[Tile::kStages][Tile::kBlocksK][2];
  int steps[Tile::kMostSteps], shifts[Tile::kRows];
};

// OF_QUERY: dQ. SIGNED: terms are ds; otherwise p.
template <class Tile, bool OF_QUERY, bool SIGNED>
struct GradientSums {
  static constexpr int V = Tile::kFactorPlanes;
  const GradientSumsArgs& args;
  const SumJob& job;
  const GradientWork& work;
  uint8_t* shared;
  Rings<Tile>& rings;
  int count;  // of steps

  // ---- bringing: a lane of one warp the pairs, of another the factor ----
  __device__ __forceinline__ void bring_pairs() const {
    const uint32_t inputs = shared_address(shared) + Tile::kStages * Tile::kStageBytes;
    const float4* pairs = job.of_p ? args.pairs.p : args.pairs.ds;
    const int64_t inner_pad = OF_QUERY ? args.shape.keys_pad : args.shape.rows_pad;
    Place<Tile::kInputs> place;
#pragma unroll 1
    for (int i = 0; i < count; ++i, place.advance()) {
      const int inner = rings.steps[i], row = OF_QUERY ? work.row : inner, key = OF_QUERY ? inner : work.row;
      const uint32_t input = inputs + place.stage() * Tile::kInputBytes;
      uint64_t* full = &rings.input_full[place.stage()];
      barrier_wait(&rings.input_empty[place.stage()], place.parity() ^ 1);
      barrier_expect(full, Tile::kInputBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half)  // 32 rows by all 64 keys lie together: see Pairs
        copy_bulk(input + half * 2 * Tile::kPairBytes,
                  pairs + args.pairs.block(args.strip, work.head, row + half * kPairBlock, key), 2 * Tile::kPairBytes,
                  full);
      copy_bulk(input + Tile::kPairsBytes, job.exponent + work.head * inner_pad + inner, Tile::kStep * 4, full);
    }
  }
  __device__ __forceinline__ void bring_factor() const {
    const int block_bytes = args.shape.value_dims_pad * kPairBlock;
    const int64_t plane = (OF_QUERY ? args.shape.keys_pad : args.shape.rows_pad) / kPairBlock * block_bytes;
    const uint8_t* factor = job.factor + work.head * V * plane + work.dim_block * Tile::kFactorBlockBytes;
    Place<Tile::kStages> place;
#pragma unroll 1
    for (int i = 0; i < count; ++i, place.advance()) {
      const uint8_t* from = factor + static_cast<int64_t>(rings.steps[i] / kPairBlock) * block_bytes;
      const uint32_t to = shared_address(shared) + place.stage() * Tile::kStageBytes + Tile::kTermBytes;
      uint64_t* full = &rings.full[place.stage()];
      barrier_wait(&rings.empty[place.stage()], place.parity() ^ 1);
      barrier_expect(full, Tile::kFactorBytes);
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int b = 0; b < Tile::kBlocksK; ++b)
          copy_bulk(to + v * Tile::kFactorPlaneBytes + b * Tile::kFactorBlockBytes, from + v * plane + b * block_bytes,
                    Tile::kFactorBlockBytes, full);
    }
  }

  // ---- forming: a warp rounds one block of 32 x 32 pairs a step ----
  __device__ __forceinline__ void form() const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize - Tile::kMultiplyWarps;
    const int block_m = warp / Tile::kBlocksK, block_k = warp % Tile::kBlocksK;  // of the sums' rows, of the inner ones
    const uint8_t* inputs = shared + Tile::kStages * Tile::kStageBytes;
    Place<Tile::kStages> place;
    Place<Tile::kInputs> used;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const uint8_t* input = inputs + used.stage() * Tile::kInputBytes;
      const float4* pairs = reinterpret_cast<const float4*>(
          input + (OF_QUERY ? block_m * 2 + block_k : block_k * 2 + block_m) * Tile::kPairBytes) + lane;
      const int* exponents = reinterpret_cast<const int*>(input + Tile::kPairsBytes) + block_k * kPairBlock;
      uint8_t* terms = shared + place.stage() * Tile::kStageBytes + block_k * Tile::kTermBlockBytes;
      barrier_wait(&rings.input_full[used.stage()], used.parity());
      barrier_wait(&rings.empty[place.stage()], place.parity() ^ 1);
      uint8_t* to[2];  // the lane's words of either parity
      uint32_t fourth[2][4], any = 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const LaneTerms<OF_QUERY> own(lane, j);
        float x[4][4];
        int exponent[4], shift[4];
        int32_t t[4][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float4 four = pairs[(4 * j + m) * kWarpSize];
          x[m][0] = four.x, x[m][1] = four.y, x[m][2] = four.z, x[m][3] = four.w;
          exponent[m] = exponents[own.inner + 8 * m];
          shift[m] = rings.shifts[block_m * kPairBlock + own.row + 8 * m];
        }
        terms_of<OF_QUERY>(x, exponent, shift, job.bits, t);
        to[j] = terms + own.offset(block_m * kPairBlock);
        any |= store_terms<SIGNED>(t, to[j], Tile::kTermPlaneBytes, fourth[j]);
      }
      if constexpr (SIGNED) {
        // So far it says what the stage's last step left there.
        uint8_t& holds = rings.missing[place.stage()][block_k][block_m];
        const bool some = __any_sync(kFullWarp, any != 0);
        if (some || holds) {
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int m = 0; m < 4; ++m)
              *reinterpret_cast<uint32_t*>(to[j] + kTermPlanes * Tile::kTermPlaneBytes + 256 * m) = fourth[j][m];
        }
        __syncwarp();
        if (lane == 0) holds = some;
      }
      barrier_arrive(&rings.input_empty[used.stage()]);
      wgmma_publish();
      barrier_arrive(&rings.full[place.stage()]);
      place.advance(), used.advance();
    }
  }

  // ---- multiplying ----
  template <int PLANE, bool A_SIGNED>
  __device__ __forceinline__ void multiply_plane(int32_t (&sums)[Tile::kPositions][Tile::kBlocks][4], int position,
                                                 uint64_t a, uint64_t b) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const uint64_t from_a = a + (PLANE * Tile::kTermPlaneBytes >> 4), from_b = b + (v * Tile::kFactorPlaneBytes >> 4);
      if (v == V - 1) {
        wgmma_bytes<A_SIGNED, true>(sums[position + v], from_a, from_b);
      } else {
        wgmma_bytes<A_SIGNED, false>(sums[position + v], from_a, from_b);
      }
    }
  }

  __device__ __forceinline__ void multiply() const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
    const int group = uniform(threadIdx.x / kWarpgroup);
    constexpr int kEightRows = 8 * kPairBlock;
    int32_t sums[Tile::kPositions][Tile::kBlocks][4];
#pragma unroll
    for (int p = 0; p < Tile::kPositions; ++p)
#pragma unroll
      for (int n = 0; n < Tile::kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[p][n][i] = 0;
    Place<Tile::kStages> place;
#pragma unroll 1
    for (int i = 0; i < count; ++i, place.advance()) {
      const uint32_t stage = shared_address(shared) + place.stage() * Tile::kStageBytes;
      const uint64_t a = operand(stage, kEightRows),
                     b = operand(stage + Tile::kTermBytes + group * Tile::kGroupDims * kPairBlock, kEightRows);
      constexpr uint64_t kBlockA = Tile::kTermBlockBytes >> 4, kBlockB = Tile::kFactorBlockBytes >> 4;
      barrier_wait(&rings.full[place.stage()], place.parity());
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Tile::kBlocksK; ++k) {
        multiply_plane<0, false>(sums, 0, a + k * kBlockA, b + k * kBlockB);
        multiply_plane<1, false>(sums, 1, a + k * kBlockA, b + k * kBlockB);
        multiply_plane<2, SIGNED>(sums, 2, a + k * kBlockA, b + k * kBlockB);
      }
      wgmma_commit();
      wgmma_wait<0>();  // the other warpgroup has the tensor cores meanwhile
      if constexpr (SIGNED) {
#pragma unroll
        for (int k = 0; k < Tile::kBlocksK; ++k) {
          if (*reinterpret_cast<const uint16_t*>(rings.missing[place.stage()][k]) == 0) continue;
          wgmma_fence();
          multiply_plane<3, true>(sums, 2, a + k * kBlockA, b + k * kBlockB);
          multiply_plane<3, true>(sums, 2, a + k * kBlockA, b + k * kBlockB);
          wgmma_commit();
          wgmma_wait<0>();
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&rings.empty[place.stage()]);
    }
    const auto digit = [&](int e, int p) { return sums[p][e / 4][e % 4]; };
    const auto place_of = [&](int e) {
      const int row = work.row + warp * 16 + (e >> 1 & 1) * 8 + lane / 4;
      const int dim = work.dim_block * Tile::kDims + group * Tile::kGroupDims + e / 4 * 8 + (lane % 4) * 2 + (e & 1);
      return make_int2(row, dim);
    };
    add_sums<Tile, OF_QUERY, Tile::kBlocks * 4>(args, job, work, digit, place_of);
  }
};

template <class Tile, bool OF_QUERY, bool SIGNED>
__device__ __forceinline__ void run(const GradientSumsArgs& args, const SumJob& job, const GradientWork& work,
                                    uint8_t* shared, Rings<Tile>& rings) {
  const int count = list_steps<Tile, OF_QUERY>(args, work, rings.steps);
  if (count == 0) return;
  const GradientSums<Tile, OF_QUERY, SIGNED> sums{args, job, work, shared, rings, count};
  if (threadIdx.x < Tile::kMultiplyThreads) {
    set_registers<Tile::kMultiplyRegisters, Tile::kRegisters>();
    sums.multiply();
  } else if (threadIdx.x < Tile::kMultiplyThreads + Tile::kFormingThreads) {
    set_registers<Tile::kFormingRegisters, Tile::kRegisters>();
    sums.form();
  } else {
    set_registers<Tile::kBringingRegisters, Tile::kRegisters>();
    const int warp = threadIdx.x % kWarpgroup / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) {
      if (warp == 0) sums.bring_pairs();
      if (warp == 1) sums.bring_factor();
    }
  }
}

}  // namespace gradient_sums_hopper

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gradient_sums_hopper_kernel(const __grid_constant__ GradientSumsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ gradient_sums_hopper::Rings<Tile> rings;
  const SumJob& job = args.jobs[blockIdx.z];
  const GradientWork work = gradient_work<Tile>(args, job);
  if (work.inner_begin >= work.inner_end) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(&rings.full[i], Tile::kFormingThreads + 1);  // and one for the factor
      barrier_init(&rings.empty[i], Tile::kMultiplyWarps);
    }
    for (int i = 0; i < Tile::kInputs; ++i) {
      barrier_init(&rings.input_full[i], 1);
      barrier_init(&rings.input_empty[i], Tile::kFormingThreads);
    }
    barrier_init_fence();
  }
  if (threadIdx.x < Tile::kRows) rings.shifts[threadIdx.x] = shift_of_row(args, job, work, threadIdx.x);
  // No fourth plane holds anything.
  if (threadIdx.x < Tile::kStages * Tile::kFormingWarps) (&rings.missing[0][0][0])[threadIdx.x] = 0;
  for (int stage = 0; stage < Tile::kStages; ++stage)
    for (int i = threadIdx.x * 16; i < Tile::kTermPlaneBytes; i += Tile::kThreads * 16)
      *reinterpret_cast<uint4*>(shared + stage * Tile::kStageBytes + kTermPlanes * Tile::kTermPlaneBytes + i) =
          make_uint4(0, 0, 0, 0);
  wgmma_publish();
  __syncthreads();
  if (job.of_query) {
    gradient_sums_hopper::run<Tile, true, true>(args, job, work, shared, rings);
  } else if (!job.of_p) {
    gradient_sums_hopper::run<Tile, false, true>(args, job, work, shared, rings);
  } else {
    gradient_sums_hopper::run<Tile, false, false>(args, job, work, shared, rings);
  }
#endif
}

}  // namespace det_attn::cuda
