// Sums kernel on mma.sync (sm_80 and up): score distances, row maxima and value planes -> DEN and NUM, and where one CTA
// sees every key, the output (docs/contract.md sections 4 to 6). One CTA owns kRows rows x kDims dims; while its warps
// multiply the weights of one key step they form those of the next.
#pragma once

#include "mma.cuh"
#include "sums.cuh"

namespace det_attn::cuda {

template <int V_PLANES, int DIMS>
struct SumsTile {
  static constexpr int kValuePlanes = V_PLANES;
  static constexpr int kWeightPlanes = V_PLANES == 3 ? 5 : 4;  // 31 + 8 or 23 + 8 bits after the shift
  static constexpr int kPositions = kWeightPlanes + V_PLANES - 1;
  static constexpr int kWeightBits = V_PLANES == 3 ? kHighest.weight_bits : kHigh.weight_bits;
  static constexpr int kDims = DIMS;
  static constexpr int kWarpsD = DIMS / kSumWarpDims, kWarpsM = kSumWarps / kWarpsD;
  static constexpr int kRows = kWarpsM * kBlockRows;
  static constexpr int kThreads = kSumWarps * kWarpSize;
  static constexpr int kWeightPlaneBytes = kRows * kSumKeys;
  static constexpr int kValuePlaneBytes = DIMS * kSumKeys;
  static constexpr int kWeightBytes = kWeightPlanes * kWeightPlaneBytes;  // one stage
  static constexpr int kValueBytes = V_PLANES * kValuePlaneBytes;         // one stage
  static constexpr int kSharedBytes = 2 * (kWeightBytes + kValueBytes);

  // Forming weights: a warp works for one (16-row block, row half), on four keys of one A register at a time.
  static constexpr int kRowSlots = kWarpsM * 2;
  static constexpr int kWarpsPerSlot = kSumWarps / kRowSlots;
  static constexpr int kRegisters = kSumKeys / kBlockKeys * 2;  // A registers of one row half over a step's keys
  static constexpr int kPerWarp = kRegisters / kWarpsPerSlot;
  static_assert(kRowSlots * kWarpsPerSlot == kSumWarps && kPerWarp * kWarpsPerSlot == kRegisters, "work must divide evenly");
};

// The accumulators of a warp: 16 rows x 32 dims in every digit position, C fragments of four 8-dim blocks.
template <int POSITIONS>
struct PositionSums {
  int32_t acc[POSITIONS][4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < POSITIONS; ++p)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[p][n][i] = 0;
  }
  // Positions 0 to 2: below 2^48.
  __device__ __forceinline__ int64_t low(int n, int i) const {
    return static_cast<int64_t>(acc[0][n][i]) + (static_cast<int64_t>(acc[1][n][i]) << 8) + (static_cast<int64_t>(acc[2][n][i]) << 16);
  }
  // Positions 3 and up in units of 2^24: below 2^57.
  __device__ __forceinline__ int64_t high(int n, int i) const {
    int64_t x = 0;
#pragma unroll
    for (int p = POSITIONS - 1; p >= 3; --p) x = (x << 8) + acc[p][n][i];
    return x;
  }
  // f(row in the warp's 16, dim in the warp's 32, low, high) for every sum of the thread.
  template <class F>
  __device__ __forceinline__ void for_each(int lane, F f) const {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(lane / 4 + 8 * (i >> 1), n * 8 + (lane % 4) * 2 + (i & 1), low(n, i), high(n, i));
  }
};

// One 64-key step: every nonzero weight plane times every value plane, from shared memory.
template <class Tile>
__device__ __forceinline__ void multiply_step(PositionSums<Tile::kPositions>& sums, uint32_t a_stage, uint32_t b_stage, unsigned planes) {
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

// What a thread needs to form its weights: one fixed row.
template <class Tile>
struct WeightForming {
  int row, half, part;     // row in the CTA's tile, its half of a 16-row block, which registers are this warp's
  int64_t rowmax;
  bool live;               // the row attends something and is not poisoned
  int64_t first_block;     // block of the row's 16 at key 0
  uint64_t den = 0;
  const uint4* next_distance;
  const int64_t* next_max;
  uint4 distance[Tile::kPerWarp];
  int64_t below[Tile::kPerWarp / 2];  // block maxima
  static_assert(Tile::kPerWarp % 2 == 0, "a warp takes both registers of a block");

  __device__ __forceinline__ WeightForming(const SumsArgs& args, int64_t head, int64_t row_base, int64_t row16_base, int warp, int lane) {
    const int slot = warp % Tile::kRowSlots, block16 = slot >> 1;
    part = warp / Tile::kRowSlots;
    half = slot & 1;
    row = block16 * 16 + half * 8 + lane / 4;
    rowmax = args.rowmax(head, row_base + row);
    live = rowmax != kRowmaxPoisoned && rowmax != kRowmaxEmpty;
    first_block = (row16_base + block16) * args.distances.key_blocks;
  }

  // Register j of the warp: key block j >> 1 of the step, A register (j & 1) * 2 + half.
  __device__ __forceinline__ int register_of(int j) const { return part * Tile::kPerWarp + j; }

  // Points at the blocks of `key`; fetch() then reads them step by step.
  __device__ __forceinline__ void start(const Distances& d, int64_t key, int lane) {
    const int r = register_of(0);
    const int64_t block = first_block + key / kBlockKeys + (r >> 1);
    next_distance = d.distance + (block * 4 + (r & 1) * 2 + half) * kWarpSize + lane;
    next_max = d.block_max + block * kBlockRows + half * 8 + lane / 4;
  }

  __device__ __forceinline__ void fetch(const Distances& d) {
#pragma unroll
    for (int j = 0; j < Tile::kPerWarp; ++j) {
      // kPerWarp is even, so register j lies j >> 1 blocks and j & 1 register pairs after register 0.
      distance[j] = __ldcs(next_distance + ((j >> 1) * 4 + (j & 1) * 2) * kWarpSize);
      if (j % 2 == 0) below[j / 2] = next_max[(j >> 1) * kBlockRows];
    }
    next_distance += kSumKeys / kBlockKeys * 4 * kWarpSize;
    next_max += kSumKeys / kBlockKeys * kBlockRows;
  }

  // Writes the weights of the fetched distances, shifted, as byte planes; returns which planes are not all zero.
  __device__ __forceinline__ unsigned form(uint8_t* stage, const int* shifts, int bucket, bool many, int lane) {
    uint32_t any_low = 0, any_high = 0;
#pragma unroll
    for (int j = 0; j < Tile::kPerWarp; ++j) {
      const int r = register_of(j), key = (r >> 1) * kBlockKeys + (r & 1) * 16;
      const uint32_t base = live ? clamp_distance(rowmax - below[j / 2]) : kFarDistance;
      const int2 s0 = *reinterpret_cast<const int2*>(shifts + key + (lane % 4) * 2);
      const int2 s1 = *reinterpret_cast<const int2*>(shifts + key + (lane % 4) * 2 + 8);
      int shift[4] = {s0.x, s0.y, s1.x, s1.y};
      if (many) {
#pragma unroll
        for (int c = 0; c < 4; ++c) shift[c] = Exponents::shift(shift[c], bucket);
      }
      const uint32_t d[4] = {distance[j].x, distance[j].y, distance[j].z, distance[j].w};
      uint32_t low[4], high = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint32_t w = weight_from_distance<Tile::kWeightBits>(min(base + d[c], kDistanceLimit));
        if (bucket == 0) den += w;
        low[c] = shift_left(w, shift[c]);
        if (Tile::kWeightPlanes == 5) high |= shift_right(w, 32 - shift[c]) << (8 * c);
        any_low |= low[c];
      }
      any_high |= high;
      uint32_t planes[4];
      byte_planes(low, planes);
      uint8_t* at = stage + plane_offset(row, key + (lane % 4) * 4, kSumKeys);
#pragma unroll
      for (int p = 0; p < 4; ++p) *reinterpret_cast<uint32_t*>(at + p * Tile::kWeightPlaneBytes) = planes[p];
      if constexpr (Tile::kWeightPlanes == 5) *reinterpret_cast<uint32_t*>(at + 4 * Tile::kWeightPlaneBytes) = high;
    }
    return planes_seen(__reduce_or_sync(kFullWarp, any_low), __reduce_or_sync(kFullWarp, any_high));
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) sums_kernel(const __grid_constant__ SumsArgs args) {
  constexpr int kRows = Tile::kRows;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) int shifts[3][kSumKeys];  // a step's shifts are read a step before its values: one stage more
  __shared__ unsigned planes_of[2];  // which weight planes of a stage hold a nonzero byte
  __shared__ unsigned long long den_shared[kRows];
  __shared__ int shared_end;

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;

  // ---- which rows, dims and keys ----
  constexpr int kSubTiles = kRowPad / kRows;
  // Later rows attend more keys when causal: start the long ones first.
  const int64_t work = gridDim.x - 1 - blockIdx.x;
  const int dim_block = static_cast<int>(work % args.dim_blocks);
  const int64_t sub = work / args.dim_blocks, tile = args.first_tile + sub / kSubTiles;
  const int64_t head = tile / (s.rows_pad / kRowPad);
  const int64_t row_base = (tile % (s.rows_pad / kRowPad)) * kRowPad + (sub % kSubTiles) * kRows;
  const int64_t row16_base = (tile - args.first_tile) * (kRowPad / 16) + (sub % kSubTiles) * (kRows / 16);
  if (threadIdx.x < 2) planes_of[threadIdx.x] = 0;
  for (int r = threadIdx.x; r < kRows; r += Tile::kThreads) den_shared[r] = 0;
  const int64_t key_begin = blockIdx.y * args.split_keys;
  const int64_t cta_end = end_of_rows(args.mask, s, args.q_len, row_base, kRows, &shared_end);
  const int64_t key_end = min(cta_end, key_begin + args.split_keys);
  const int steps = key_end > key_begin ? static_cast<int>((key_end - key_begin + kSumKeys - 1) / kSumKeys) : 0;

  // ---- addresses ----
  const Exponents exponents(args.prepared, head);
  const int32_t* value_shift = args.prepared.value_shift + head * s.keys_pad + key_begin;
  const int64_t value_tile = int64_t(s.value_dims_pad) * kSumKeys;  // bytes of a plane's key step
  const uint8_t* value = args.prepared.value + (head * Tile::kValuePlanes * (s.keys_pad / kSumKeys) + key_begin / kSumKeys) * value_tile +
                         dim_block * Tile::kValuePlaneBytes;
  const uint32_t weight_shared = shared_address(shared), value_shared = weight_shared + 2 * Tile::kWeightBytes;
  const int matrix = lane / 8, matrix_row = lane % 8;
  const int warp_m = warp % Tile::kWarpsM, warp_d = warp / Tile::kWarpsM;
  const uint32_t a_lane = weight_shared + (warp_m * kBlockRows + (matrix & 1) * 8) * kSumKeys + (matrix >> 1) * 128 + matrix_row * 16;
  const uint32_t b_lane = value_shared + (warp_d * kSumWarpDims + (matrix >> 1) * 8) * kSumKeys + (matrix & 1) * 128 + matrix_row * 16;

  // A thread copies the same 16-byte pieces of every step; `from` moves on with the steps.
  const uint8_t* from = value + threadIdx.x * 16;
  const int64_t plane_bytes = (s.keys_pad / kSumKeys) * value_tile;
  auto load_values = [&](int step) {
    const uint32_t to = value_shared + (step & 1) * Tile::kValueBytes + threadIdx.x * 16;
#pragma unroll
    for (int p = 0; p < Tile::kValuePlanes; ++p) {
      const uint8_t* plane = from + p * plane_bytes;
#pragma unroll
      for (int i = 0; i < Tile::kValuePlaneBytes; i += Tile::kThreads * 16) copy_async16(to + p * Tile::kValuePlaneBytes + i, plane + i);
    }
    from += value_tile;
  };
  static_assert(Tile::kValuePlaneBytes % (Tile::kThreads * 16) == 0, "every thread copies whole pieces");
  auto load_shifts = [&](int step) {
    if (threadIdx.x < kSumKeys / 4) {
      copy_async16(shared_address(shifts[step % 3]) + threadIdx.x * 16, value_shift + int64_t(step) * kSumKeys + threadIdx.x * 4);
    }
  };

  WeightForming<Tile> weights(args, head, row_base, row16_base, warp, lane);
  PositionSums<Tile::kPositions> sums;
  sums.clear();
  bool flushed = false;

  // ---- main loop ----
  // Keys whose value exponents differ by more than a shift can bridge go in separate passes, each flushed to its position.
  // Step -1 only forms the first weights; distances are fetched a step before they are formed, to cover their latency.
  const bool many = exponents.buckets > 1;
  const int first_phase = __shfl_sync(kFullWarp, warp >> 2, 0) & 1;  // uniform in the warp, and known to be
#pragma unroll 1
  for (int bucket = 0; bucket < exponents.buckets && steps > 0; ++bucket) {
    from = value + threadIdx.x * 16;
    weights.start(args.distances, key_begin, lane);
    weights.fetch(args.distances);
    load_shifts(0);
    commit_copies();
#pragma unroll 1
    for (int step = -1; step < steps; ++step) {
      const bool more = step + 1 < steps;
      wait_copies<0>();
      __syncthreads();  // this step's weights and values and the next step's shifts are visible; the other stages are free
      if (more) load_values(step + 1);
      if (step + 2 < steps) load_shifts(step + 2);
      commit_copies();
      const unsigned planes = step >= 0 ? planes_of[step & 1] : 0;
      // Half of the warps multiply first and half form weights first, so that both pipes have work.
#pragma unroll 1
      for (int phase = first_phase; phase < first_phase + 2; ++phase) {
        if (phase & 1) {
          if (!more) continue;
          const unsigned seen = weights.form(shared + ((step + 1) & 1) * Tile::kWeightBytes, shifts[(step + 1) % 3], bucket, many, lane);
          if (step + 2 < steps) weights.fetch(args.distances);
          if (lane == 0 && seen != 0) atomicOr(&planes_of[(step + 1) & 1], seen);
        } else if (planes != 0) {
          multiply_step<Tile>(sums, a_lane + (step & 1) * Tile::kWeightBytes, b_lane + (step & 1) * Tile::kValueBytes, planes);
        }
      }
      __syncthreads();
      if (threadIdx.x == 0) planes_of[step & 1] = 0;
      const bool full = ((step + 1) & (kFlushKeys / kSumKeys - 1)) == 0 && step >= 0;
      if (more ? full : many || args.shared_digits() || flushed) {
        const int position = exponents.position(bucket, args.precision);
        sums.for_each(lane, [&](int r, int d, int64_t low, int64_t high) {
          const int64_t row = row_base + warp_m * kBlockRows + r;
          const int dim = dim_block * Tile::kDims + warp_d * kSumWarpDims + d;
          if (row < s.rows && dim < s.dims) flush_sum(args, head, row, dim, low, high, position, !flushed);
        });
        sums.clear();
        flushed = true;
      }
    }
  }

  // ---- DEN ----
  if (weights.den != 0) atomicAdd(&den_shared[weights.row], static_cast<unsigned long long>(weights.den));
  __syncthreads();
  if (dim_block == 0) {
    for (int r = threadIdx.x; r < kRows && row_base + r < s.rows; r += Tile::kThreads) {
      int64_t* to = args.den + head * s.rows + row_base + r;
      if (args.shared_digits()) {
        if (den_shared[r] != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), den_shared[r]);
      } else {
        *to = static_cast<int64_t>(den_shared[r]);
      }
    }
  }
  if (args.shared_digits()) return;

  // ---- output ----
  const int position = exponents.position(0, args.precision);
  sums.for_each(lane, [&](int r, int d, int64_t low, int64_t high) {
    const int row = warp_m * kBlockRows + r, dim = dim_block * Tile::kDims + warp_d * kSumWarpDims + d;
    if (row_base + row < s.rows && dim < s.dims) {
      emit_output(args, head, row_base + row, dim, low, high, position, flushed, static_cast<int64_t>(den_shared[row]));
    }
  });
}

}  // namespace det_attn::cuda
