// Sums kernel on wgmma (sm_90a): the same stage, arguments and results as sums_mma.cuh. A CTA owns 64 rows x kDims
// dims; its two warpgroups take half of the dims each. While the tensor cores multiply one key step, the same warps
// form the weights of the next.
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
  static constexpr int kThreads = 2 * kWarpgroup, kMultiplyThreads = kThreads, kFormingWarps = kThreads / kWarpSize;
  static constexpr int kValueStages = 3;  // one multiplied, one whose weights are formed, one arriving
  static constexpr int kWeightPlaneBytes = kRows * kSumKeys, kValuePlaneBytes = DIMS * kSumKeys;
  static constexpr int kWeightBytes = kWeightPlanes * kWeightPlaneBytes,
                       kValueBytes = V_PLANES * kValuePlaneBytes;  // a stage
  static constexpr int kSharedBytes = 2 * kWeightBytes + kValueStages * kValueBytes;
};

// Issues one 64-key step: every weight plane times every value plane. Planes of zeros are not skipped: wgmma under a
// condition is serialised by the compiler.
template <class Tile>
__device__ __forceinline__ void issue_step(PositionSums<Tile::kPositions, Tile::kBlocks>& sums, uint64_t a,
                                           uint64_t b) {
  constexpr int V = Tile::kValuePlanes;
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

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) sums_wgmma_kernel(const __grid_constant__ SumsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = Tile::kValueStages;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t ready[kStages];
  __shared__ unsigned long long den_shared[Tile::kRows];
  __shared__ int shared_keys[2];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, group = threadIdx.x / kWarpgroup;
  for (int r = threadIdx.x; r < Tile::kRows; r += Tile::kThreads) den_shared[r] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&ready[i], 1);
    barrier_init_fence();
  }
  const SumsWork<Tile> work(args, shared_keys);  // synchronises
  if (work.row_base >= s.rows) return;
  const Exponents exponents(args.prepared, work.head);

  // ---- copies of values, by thread 0 ----
  const int64_t step_bytes = int64_t(s.value_dims_pad) * kSumKeys, plane_bytes = (s.keys_pad / kSumKeys) * step_bytes;
  const uint8_t* value = args.prepared.value + work.head * Tile::kValuePlanes * plane_bytes +
                         work.key_begin / kSumKeys * step_bytes + work.dim_block * Tile::kValuePlaneBytes;
  const uint32_t weight_shared = shared_address(shared), value_shared = weight_shared + 2 * Tile::kWeightBytes;
  auto load_values = [&](int step, int stage) {
    barrier_expect(&ready[stage], Tile::kValueBytes);
    for (int p = 0; p < Tile::kValuePlanes; ++p) {
      copy_bulk(value_shared + stage * Tile::kValueBytes + p * Tile::kValuePlaneBytes,
                value + p * plane_bytes + step * step_bytes, Tile::kValuePlaneBytes, &ready[stage]);
    }
  };

  WeightForming<Tile> weights(args, work.head, work.row_base, warp, lane);
  PositionSums<Tile::kPositions, Tile::kBlocks> sums;
  sums.clear();
  bool flushed = false;
  const bool many = exponents.buckets > 1;
  const uint64_t a_operand = operand(weight_shared, 8 * kSumKeys);
  const uint64_t b_operand = operand(value_shared + group * Tile::kGroupDims * kSumKeys, 8 * kSumKeys);

  // ---- main loop ----
  // Keys whose value exponents differ by more than a shift can bridge go in separate passes, each flushed to its
  // position.
  int stage = 0, parity = 0;  // of the values multiplied next; they run on over the passes
#pragma unroll 1
  for (int bucket = 0; bucket < exponents.buckets && work.steps > 0; ++bucket) {
    if (threadIdx.x == 0) load_values(0, stage);
    weights.start(args, work, lane);
    typename WeightForming<Tile>::Fetched fetched;
    weights.fetch(args.distances, fetched);
    weights.template form<false>(fetched, shared, bucket, many, lane, NoneDropped());
    if (work.steps > 1) weights.fetch(args.distances, fetched);
    wgmma_publish();
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      const bool more = step + 1 < work.steps;
      barrier_wait(&ready[stage], parity);
      wgmma_fence();
      issue_step<Tile>(sums, a_operand + (step & 1) * (Tile::kWeightBytes >> 4),
                       b_operand + stage * (Tile::kValueBytes >> 4));
      wgmma_commit();
      stage = stage + 1 == kStages ? 0 : stage + 1;
      parity ^= stage == 0;
      if (more) {
        if (threadIdx.x == 0) load_values(step + 1, stage);  // the stage was read two steps ago
        uint8_t* next = shared + ((step + 1) & 1) * Tile::kWeightBytes;
        weights.template form<false>(fetched, next, bucket, many, lane, NoneDropped());
        if (step + 2 < work.steps) weights.fetch(args.distances, fetched);
        wgmma_publish();
      }
      wgmma_wait<0>();
      __syncthreads();  // the next weights are written, this step's are read
      const bool full = ((step + 1) & (kFlushKeys / kSumKeys - 1)) == 0;
      if (more ? full : many || args.into_digits || flushed) {
        const int position = exponents.position(bucket, args.problem.precision);
        sums.template for_each<1>(lane, [&](int r, int d, int64_t low, int64_t high) {
          const int64_t row = work.row_base + warp % 4 * kBlockRows + r;
          const int dim = work.dim_block * Tile::kDims + group * Tile::kGroupDims + d;
          if (row < s.rows && dim < s.dims) flush_sum(args, work.head, row, dim, low, high, position, !flushed);
        });
        sums.clear();
        flushed = true;
      }
    }
  }

  // ---- DEN ----
  weights.publish(den_shared);
  __syncthreads();
  if (work.dim_block == 0) publish_den<Tile>(args, work.head, work.row_base, den_shared);
  if (args.into_digits) return;

  // ---- output ----
  const int position = exponents.position(0, args.problem.precision);
  sums.template for_each<4>(lane, [&](int r, int d, int64_t low, int64_t high) {
    const int row = warp % 4 * kBlockRows + r, dim = work.dim_block * Tile::kDims + group * Tile::kGroupDims + d;
    if (work.row_base + row < s.rows && dim < s.dims) {
      emit_output(args, work.head, work.row_base + row, dim, low, high, position, flushed,
                  static_cast<int64_t>(den_shared[row]));
    }
  });
#endif
}

}  // namespace det_attn::cuda
