// Sums kernel on mma.sync (sm_80 and up): score distances, row maxima and value planes -> DEN and NUM, and where one
// CTA sees every key, the output (docs/contract.md sections 4 to 6). One CTA owns kRows rows x kDims dims; eight warps
// multiply the weights of one key step while four others form those of the next.
#pragma once

#include "forming.cuh"
#include "mma.cuh"
#include "modified_pairs.cuh"

namespace det_attn::cuda {

template <int V_PLANES, int DIMS>
struct SumsTile : SumsDigits<V_PLANES> {
  using SumsDigits<V_PLANES>::kWeightPlanes;
  static constexpr int kDims = DIMS;
  static constexpr int kWarpsD = DIMS / kSumWarpDims, kWarpsM = kSumWarps / kWarpsD;
  static constexpr int kRows = kWarpsM * kBlockRows;
  static constexpr int kFormingWarps = kWeightWarps;
  static constexpr int kMultiplyThreads = kSumWarps * kWarpSize;
  static constexpr int kThreads = kMultiplyThreads + kWeightWarps * kWarpSize;
  static constexpr int kWeightPlaneBytes = kRows * kSumKeys;
  static constexpr int kValuePlaneBytes = DIMS * kSumKeys;
  static constexpr int kWeightBytes = kWeightPlanes * kWeightPlaneBytes;  // one stage
  static constexpr int kValueBytes = V_PLANES * kValuePlaneBytes;         // one stage
  static constexpr int kValueStages = 3;  // values are brought a step before their weights
  static constexpr int kSharedBytes = 2 * kWeightBytes + kValueStages * kValueBytes;
};

// One 64-key step: every nonzero weight plane times every value plane, from shared memory.
template <class Tile>
__device__ __forceinline__ void multiply_step(PositionSums<Tile::kPositions, 4>& sums, uint32_t a_stage,
                                              uint32_t b_stage, unsigned planes) {
  constexpr int V = Tile::kValuePlanes;
#pragma unroll
  for (int k = 0; k < kSumKeys / 32; ++k) {
    uint32_t b[V][2][4];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      load_matrices(b[v][0], b_stage + v * Tile::kValuePlaneBytes + k * 256);
      load_matrices(b[v][1], b_stage + v * Tile::kValuePlaneBytes + k * 256 + 16 * kSumKeys);
    }
#pragma unroll
    for (int w = 0; w < Tile::kWeightPlanes; ++w) {
      if (!(planes >> w & 1)) continue;  // every byte of this plane is 0: nothing to add
      uint32_t a[4];
      load_matrices(a, a_stage + w * Tile::kWeightPlaneBytes + k * 256);
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t b0 = b[v][n / 2][(n & 1) * 2], b1 = b[v][n / 2][(n & 1) * 2 + 1];
          if (v == V - 1) {
            mma_bytes<false, true>(sums.acc[w + v][n], a, b0, b1);
          } else {
            mma_bytes<false, false>(sums.acc[w + v][n], a, b0, b1);
          }
        }
    }
  }
}

// The barrier of both kinds of warps, once a step; barrier 0 is __syncthreads().
template <class Tile>
__device__ __forceinline__ void step_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kThreads) : "memory");
}

// A source of WeightForming in registers: a block of the next step is fetched as soon as this step's is used.
template <class Tile>
class FetchedStep {
 public:
  // Fetches the first of `steps` steps.
  __device__ __forceinline__ FetchedStep(const SumsArgs& args, const SumsWork<Tile>& work,
                                         const WeightForming<Tile>& weights, int lane)
      : left_(work.steps), padding_(weights.padding) {
    const Distances& d = args.distances;
    const int64_t block = first_distance_block(d, work.row16_base, weights.first_row / kBlockRows, work.key_begin,
                                               work.tile_first);
    next_ = d.distance + (block * 4 + weights.first_row / 8 % 2) * kWarpSize + lane;
    next_max_ = d.block_max + block * kBlockRows + weights.first_row % kBlockRows;
    const uint8_t* shifts = args.prepared.value_shift + work.head * args.shape.keys_pad + work.key_begin;
    next_shift_ = reinterpret_cast<const uint32_t*>(shifts) + lane % 4;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) fetch(b);
    advance();
  }
  __device__ __forceinline__ void load() const {}
  __device__ __forceinline__ void ahead(int, int) const {}
  __device__ __forceinline__ int64_t below(int slot, int b) const { return below_[slot][b]; }
  __device__ __forceinline__ uint4 distance(int slot, int b, int pair) const { return distance_[slot][b][pair]; }
  __device__ __forceinline__ uint32_t shift(int b, int pair) const { return shift_[b][pair]; }
  __device__ __forceinline__ void done(int b) {
    if (left_ > 0) fetch(b);
    __syncwarp();  // or the compiler asks for all blocks at the end of the step
    if (b + 1 == kBlocks) advance();
  }

 private:
  static constexpr int kSlots = WeightForming<Tile>::kSlots, kBlocks = WeightForming<Tile>::kBlocks;
  __device__ __forceinline__ void fetch(int b) {
    if (padding_) return;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      below_[i][b] = next_max_[b * kBlockRows + 8 * i];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) distance_[i][b][pair] = __ldcs(next_ + (b * 4 + pair * 2 + i) * kWarpSize);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) shift_[b][pair] = __ldg(next_shift_ + b * (kBlockKeys / 4) + pair * 4);
  }
  __device__ __forceinline__ void advance() {
    --left_;
    next_ += kBlocks * 4 * kWarpSize;
    next_max_ += kBlocks * kBlockRows;
    next_shift_ += kSumKeys / 4;
  }
  uint4 distance_[kSlots][kBlocks][2];
  int64_t below_[kSlots][kBlocks];
  uint32_t shift_[kBlocks][2];
  const uint4* next_;
  const int64_t* next_max_;
  const uint32_t* next_shift_;
  int left_;  // steps not fetched
  bool padding_;
};

// The weight warps copy the values of each step, too: the multiplying warps have no registers to spare for addresses.
template <class Tile>
struct ValueCopies {
  static constexpr int kThreads = kWeightWarps * kWarpSize;
  uint32_t to;  // the thread's first 16-byte piece
  const uint8_t* from;
  int64_t step_bytes, plane_bytes;

  __device__ __forceinline__ ValueCopies(const SumsArgs& args, const SumsWork<Tile>& work, uint32_t shared,
                                         int thread) {
    step_bytes = int64_t(args.shape.value_dims_pad) * kSumKeys;
    plane_bytes = (args.shape.keys_pad / kSumKeys) * step_bytes;
    from = args.prepared.value + work.head * Tile::kValuePlanes * plane_bytes + work.key_begin / kSumKeys * step_bytes +
           work.dim_block * Tile::kValuePlaneBytes + thread * 16;
    to = shared + thread * 16;
  }
  // `all` counts the steps of every pass.
  __device__ __forceinline__ void load(int step, int all) const {
    static_assert(Tile::kValuePlaneBytes % (kThreads * 16) == 0, "every thread copies whole pieces");
    const uint8_t* piece = from + step * step_bytes;
    const uint32_t stage = to + all % Tile::kValueStages * Tile::kValueBytes;
#pragma unroll
    for (int p = 0; p < Tile::kValuePlanes; ++p)
#pragma unroll
      for (int i = 0; i < Tile::kValuePlaneBytes; i += kThreads * 16)
        copy_async16(stage + p * Tile::kValuePlaneBytes + i, piece + p * plane_bytes + i);
    commit_copies();
  }
  template <int PENDING>
  __device__ __forceinline__ void wait() const {
    wait_copies<PENDING>();
  }
};

// A thread's rows, one a slot of WeightForming.
template <class Tile>
struct DroppedPairs {
  const SumsArgs& args;
  int64_t row_id[WeightForming<Tile>::kSlots];
  int head[WeightForming<Tile>::kSlots];

  __device__ __forceinline__ DroppedPairs(const SumsArgs& a, const SumsWork<Tile>& work, int warp, int lane) : args(a) {
    const Problem& p = args.problem;
#pragma unroll
    for (int i = 0; i < WeightForming<Tile>::kSlots; ++i) {
      const int64_t row = work.row_base + (warp * WeightForming<Tile>::kSlots + i) * 8 + lane / 4;
      const Pair at = args.pair_of(work.head, min(row, args.shape.rows - 1), 0);
      row_id[i] = p.modifiers.dropout.row_id(at.batch, at.query, p.q_len);
      head[i] = static_cast<int>(at.head);
    }
  }
  __device__ __forceinline__ unsigned operator()(int slot, int key) const {
    return dropped_keys(args, row_id[slot], head[slot], key);
  }
};

// The weight warps' whole run. planes_of[stage][warp] tells the multiplying warps which planes hold anything. `values`
// may bring the values of each step along: load(step, all) starts a copy, wait<pending>() waits for all but the last
// ones.
template <class Tile, class Values, class Dropped>
__device__ __forceinline__ void run_weights(const SumsArgs& args, const SumsWork<Tile>& work,
                                            const Exponents& exponents, uint8_t* shared,
                                            unsigned (*planes_of)[kWeightWarps], OutputRow* rows, Values values,
                                            const Dropped& dropped, int warp, int lane) {
  WeightForming<Tile> weights(args, work.head, work.row_base, warp, lane);
  const bool many = exponents.buckets > 1;
  const int total = exponents.buckets * work.steps;
  int formed = 0;  // steps so far, over all passes
  if (total > 0) values.load(0, 0);
#pragma unroll 1
  for (int bucket = 0; formed < total; ++bucket) {
    FetchedStep<Tile> fetched(args, work, weights, lane);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step, ++formed) {
      const int stage = formed & 1, first_key = static_cast<int>(work.key_begin) + step * kSumKeys;
      const unsigned seen = weights.template form<true>(
          fetched, shared + stage * Tile::kWeightBytes, bucket, many, lane,
          [&](int slot, int key) { return dropped(slot, first_key + key); });
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

template <class Tile, bool DROPOUT>
__global__ void __launch_bounds__(Tile::kThreads, 1) sums_kernel(const __grid_constant__ SumsArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) unsigned planes_of[2][kWeightWarps];
  __shared__ OutputRow rows[Tile::kRows];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const SumsWork<Tile> work(args, blockIdx.x, blockIdx.y);
  if (work.row_base >= s.rows) return;
  const Exponents exponents(args.prepared, work.head);
  const uint32_t weight_shared = shared_address(shared), value_shared = weight_shared + 2 * Tile::kWeightBytes;
  if (warp >= kSumWarps) {
    const ValueCopies<Tile> values(args, work, value_shared, threadIdx.x - Tile::kMultiplyThreads);
    if constexpr (DROPOUT) {
      run_weights<Tile>(args, work, exponents, shared, planes_of, rows, values,
                        DroppedPairs<Tile>(args, work, warp - kSumWarps, lane), warp - kSumWarps, lane);
    } else {
      run_weights<Tile>(args, work, exponents, shared, planes_of, rows, values, NoneDropped(), warp - kSumWarps,
                        lane);
    }
    __syncthreads();
    return;
  }

  const int matrix = lane / 8, matrix_row = lane % 8;
  const int warp_m = warp % Tile::kWarpsM, warp_d = warp / Tile::kWarpsM;
  const uint32_t a_lane =
      weight_shared + (warp_m * kBlockRows + (matrix & 1) * 8) * kSumKeys + (matrix >> 1) * 128 + matrix_row * 16;
  const uint32_t b_lane =
      value_shared + (warp_d * kSumWarpDims + (matrix >> 1) * 8) * kSumKeys + (matrix & 1) * 128 + matrix_row * 16;
  PositionSums<Tile::kPositions, 4> sums;
  sums.clear();
  bool flushed = false;

  // ---- main loop ----
  // Keys whose value exponents differ by more than a shift can bridge go in separate passes, each flushed to its
  // position.
  const bool many = exponents.buckets > 1;
  const int total = exponents.buckets * work.steps;
  int step = 0, bucket = 0, value_stage = 0;
#pragma unroll 1
  for (int g = 0; g < total; ++g) {
    const int stage = g & 1;
    step_barrier<Tile>();  // this step's weights and values are there
    const uint4 seen = *reinterpret_cast<const uint4*>(planes_of[stage]);
    const unsigned planes = seen.x | seen.y | seen.z | seen.w;
    if (planes != 0)
      multiply_step<Tile>(sums, a_lane + stage * Tile::kWeightBytes, b_lane + value_stage * Tile::kValueBytes, planes);
    value_stage = value_stage + 1 == Tile::kValueStages ? 0 : value_stage + 1;
    const bool more = step + 1 < work.steps;
    const bool full = ((step + 1) & (kFlushKeys / kSumKeys - 1)) == 0;
    if (more ? full : many || args.into_digits || flushed) {
      const int position = exponents.position(bucket, args.problem.precision);
      sums.template for_each<1>(lane, [&](int half, int d, int64_t low, int64_t high) {
        const int64_t row = work.row_base + warp_m * kBlockRows + lane / 4 + 8 * half;
        const int dim = work.dim_block * Tile::kDims + warp_d * kSumWarpDims + d;
        if (row < s.rows && dim < s.dims)
          flush_sum(args, work.head * s.rows + row, dim, low, high, position, !flushed);
      });
      sums.clear();
      flushed = true;
    }
    step = more ? step + 1 : 0;
    bucket += !more;
  }

  // ---- output ----
  __syncthreads();  // the rows are there
  if (args.into_digits) return;
  const int position = exponents.position(0, args.problem.precision);
  const int r = warp_m * kBlockRows + lane / 4;
  const OutputRow to[2] = {rows[r], rows[r + 8]};
  sums.template for_each<4>(lane, [&](int half, int d, int64_t low, int64_t high) {
    const int dim = work.dim_block * Tile::kDims + warp_d * kSumWarpDims + d;
    if (to[half].index >= 0 && dim < s.dims)
      emit_output(args, to[half], to[half].index, dim, low, high, position, flushed);
  });
}

}  // namespace det_attn::cuda
