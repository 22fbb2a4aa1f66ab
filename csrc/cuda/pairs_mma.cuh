// Pairs kernel on mma.sync (sm_80 and up): planes of Q, K, dO and V -> p and ds of a strip, and reference exponents
// (docs/contract.md section 8). One CTA keeps the planes of its query rows in shared memory, where they fit, and walks
// a slab of keys: a step brings the planes of K for a key tile, the next one those of V.
#pragma once

#include "common.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "scores_mma.cuh"

namespace det_attn::cuda {

// ROWS x KEYS pairs by warps of 32 x 32; STAGES steps in flight. RESIDENT: the planes of the rows stay; otherwise each
// step brings those it needs, too. WAITS: p waits in shared memory for the second product, whose accumulators leave few
// registers. MODIFIED: the softcap's slopes wait behind it.
template <int PLANES, int ROWS, int KEYS, int STAGES, bool RESIDENT, bool WAITS, bool MODIFIED = false>
struct PairsTile {
  static constexpr int kPlanes = PLANES, kRows = ROWS, kKeys = KEYS, kStages = STAGES;
  static constexpr bool kResident = RESIDENT;
  static constexpr int kWarpsM = ROWS / kPairBlock, kWarpsN = KEYS / kPairBlock;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpSize;
  static constexpr int kRowBytes = PLANES * ROWS, kKeyBytes = PLANES * KEYS;  // of one side, times dims_pad
  static constexpr int kStageBytes = kKeyBytes + (RESIDENT ? 0 : kRowBytes);
  static constexpr int kPlaneBytes = STAGES * kStageBytes + (RESIDENT ? 2 * kRowBytes : 0);  // times dims_pad
  static constexpr bool kWaits = WAITS, kModified = MODIFIED;
  static_assert(WAITS || !MODIFIED, "slopes wait behind p");
  static int shared_bytes(int dims_pad) { return kPlaneBytes * dims_pad + (WAITS + MODIFIED) * ROWS * KEYS * 4; }
  // Parts from sm_90 on have the shared memory for p to wait in, and may lack the registers otherwise.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kCompiled = WAITS || PLANES == 2;
#else
  static constexpr bool kCompiled = true;
#endif
};

// Wide rows keep the two lowest digit positions apart; see Groups. Once they are summed, what lies above 2^16 goes to
// mid and both fit one group, so that from here on they are as narrow ones: fewer registers beside everything else.
template <int GROUPS>
__device__ __forceinline__ void join_lowest(int32_t (&acc)[GROUPS][2][4][4]) {
  if constexpr (GROUPS == 4) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t lowest = static_cast<uint32_t>(acc[kGroupLowest][m][n][i]);
          const uint32_t above = static_cast<uint32_t>(acc[kGroupLo][m][n][i]) + (lowest >> 8);
          acc[kGroupMid][m][n][i] += static_cast<int32_t>(above >> 8);
          acc[kGroupLo][m][n][i] = static_cast<int32_t>(above << 8 & 0xff00u | lowest & 0xffu);
        }
  }
}

// A warp's dot products, once the lowest positions are joined.
template <int PLANES, int GROUPS>
__device__ __forceinline__ void take_dots(const int32_t (&acc)[GROUPS][2][4][4], Dots (&dots)[2]) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dots[m].dot[n][i] = dot_of<PLANES, false>([&](int g, int n, int i) { return acc[g][m][n][i]; }, n, i);
}

template <class Tile, bool WIDE>
__device__ __forceinline__ void run_pairs(const PairsArgs& args) {
  using namespace scores_mma;
  constexpr int kPlanes = Tile::kPlanes, kRows = Tile::kRows, kKeys = Tile::kKeys, kStages = Tile::kStages;
  constexpr int kGroups = Groups<kPlanes, WIDE>::kCount;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) RowState row_states[kRows];
  __shared__ __align__(16) int2 key_exponents[2][kKeys];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_m = warp % Tile::kWarpsM, warp_n = warp / Tile::kWarpsM;
  const PairsWork work = pairs_work<kRows>(args, blockIdx.x, blockIdx.y, kPairSlab);
  if (work.begin >= work.end) return;
  const int tiles = (work.end - work.begin) / kKeys;

  // ---- copies ----
  const uint32_t stages = shared_address(shared), resident = stages + kStages * Tile::kStageBytes * s.dims_pad;
  auto load_rows_of = [&](int side, uint32_t to) {
    const uint8_t* from = side == 0 ? args.query : args.grad;
    from += (work.head * kPlanes * s.rows_pad + work.row) * s.dims_pad;
    for (int p = 0; p < kPlanes; ++p)
      copy_bytes<Tile::kThreads>(to + p * kRows * s.dims_pad, from + p * s.rows_pad * s.dims_pad, kRows * s.dims_pad);
  };
  // Step 2 * t multiplies queries and keys of tile t, step 2 * t + 1 dO and values.
  auto load_step = [&](int step) {
    if (step < 2 * tiles) {
      const int side = step & 1;
      const int64_t key = work.begin + step / 2 * kKeys;
      const uint32_t to = stages + step % kStages * Tile::kStageBytes * s.dims_pad;
      const uint8_t* from = (side == 0 ? args.key : args.value) + (work.head * kPlanes * s.keys_pad + key) * s.dims_pad;
      for (int p = 0; p < kPlanes; ++p)
        copy_bytes<Tile::kThreads>(to + p * kKeys * s.dims_pad, from + p * s.keys_pad * s.dims_pad, kKeys * s.dims_pad);
      if (!Tile::kResident) load_rows_of(side, to + Tile::kKeyBytes * s.dims_pad);
      if (side == 0) {
        copy_bytes<Tile::kThreads>(
            shared_address(key_exponents[step / 2 & 1]),
            reinterpret_cast<const uint8_t*>(args.state.key_exponents + work.head * s.keys_pad + key), kKeys * 8);
      }
    }
    commit_copies();
  };
  copy_bytes<Tile::kThreads>(shared_address(row_states),
                             reinterpret_cast<const uint8_t*>(args.state.rows + work.head * s.rows_pad + work.row),
                             kRows * static_cast<int>(sizeof(RowState)));
  if (Tile::kResident) {
    load_rows_of(0, resident);
    load_rows_of(1, resident + Tile::kRowBytes * s.dims_pad);
  }
  for (int step = 0; step < kStages - 1; ++step) load_step(step);
  if (kStages == 1) load_step(0);

  Fragments f;
  const int matrix = lane / 8, matrix_row = lane % 8;
  f.a_plane = kRows * s.dims_pad;
  f.b_plane = kKeys * s.dims_pad;
  f.sixteen_rows = 16 * s.dims_pad;
  const uint32_t a_lane = warp_m * kPairBlock * s.dims_pad + (matrix & 1) * 8 * s.dims_pad + (matrix >> 1) * 128 +
                          matrix_row * 16;
  const uint32_t b_lane = warp_n * kPairBlock * s.dims_pad + (matrix >> 1) * 8 * s.dims_pad + (matrix & 1) * 128 +
                          matrix_row * 16;
  // Brings a step in, computes its dots; the step before it has been read by everyone after the barrier.
  auto multiply = [&](int step, int32_t(&acc)[kGroups][2][4][4]) {
    wait_copies<(kStages > 1 ? kStages - 2 : 0)>();
    __syncthreads();
    if (kStages > 1) load_step(step + kStages - 1);
    const uint32_t stage = stages + step % kStages * Tile::kStageBytes * s.dims_pad;
    f.a = a_lane + (Tile::kResident ? resident + (step & 1) * Tile::kRowBytes * s.dims_pad
                                    : stage + Tile::kKeyBytes * s.dims_pad);
    f.b = b_lane + stage;
    if (work.row + warp_m * kPairBlock < s.rows) dot_tile<kPlanes, WIDE>(acc, f, s.dims_pad / 32);
    join_lowest(acc);
    if (kStages == 1) {
      __syncthreads();
      load_step(step + 1);
    }
  };

  const int64_t warp_row = work.row + warp_m * kPairBlock;
  const RowState* rows = row_states + warp_m * kPairBlock;
  const References& references = args.references;
  int row_max[2][2] = {};
  PairWarp warp_rows;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    const int key_base = work.begin + t * kKeys + warp_n * kPairBlock;
    const int2* keys = key_exponents[t & 1] + warp_n * kPairBlock;
    float p[2][4][4];
    float4* const waiting = reinterpret_cast<float4*>(shared + Tile::kPlaneBytes * s.dims_pad) + threadIdx.x;
    {
      int32_t acc[kGroups][2][4][4] = {};
      multiply(2 * t, acc);
      if (t == 0) warp_rows = pair_warp<kPairBlock>(rows, lane);
      if constexpr (Tile::kModified) {
        Dots dots[2];
        take_dots<kPlanes>(acc, dots);
        modified_probabilities(dots, args, WarpPairs{work.head, warp_row, key_base, rows, keys}, lane, waiting,
                               Tile::kThreads);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if constexpr (Tile::kModified) continue;
        block_probabilities<kPlanes>([&](int g, int n, int i) { return acc[g][m][n][i]; }, warp_rows, rows + 16 * m,
                                     keys, key_base, lane, p[m]);
        if constexpr (Tile::kWaits) {
#pragma unroll
          for (int n = 0; n < 4; ++n)
            waiting[(4 * m + n) * Tile::kThreads] = make_float4(p[m][n][0], p[m][n][1], p[m][n][2], p[m][n][3]);
        }
      }
    }
    int32_t acc[kGroups][2][4][4] = {};
    multiply(2 * t + 1, acc);
    [[maybe_unused]] BlockPairs changed[2];
    if constexpr (Tile::kModified) {
      Dots dots[2];
      take_dots<kPlanes>(acc, dots);
      modified_terms(dots, args, WarpPairs{work.head, warp_row, key_base, rows, keys}, lane, waiting, Tile::kThreads,
                     changed);
    }
    const bool ordinary = is_ordinary_block(warp_rows, keys, lane);
    const int64_t block = args.pairs.block(args.strip, work.head, warp_row, key_base);
    const int64_t first_key = work.head * references.key_stride + key_base;
    PairMaxima maxima;
    maxima.clear();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if constexpr (Tile::kWaits && !Tile::kModified) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float4 x = waiting[(4 * m + n) * Tile::kThreads];
          p[m][n][0] = x.x, p[m][n][1] = x.y, p[m][n][2] = x.z, p[m][n][3] = x.w;
        }
      }
      float ds[4][4];
      if constexpr (Tile::kModified) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) p[m][n][i] = changed[m].p[n][i], ds[n][i] = changed[m].ds[n][i];
      }
      const LaneKeys columns(keys, lane);
      if constexpr (!Tile::kModified)
        block_terms<kPlanes>([&](int g, int n, int i) { return acc[g][m][n][i]; }, ordinary, rows + 16 * m, keys,
                             columns, lane, p[m], ds);
      if (args.pairs.p != nullptr) {
        keep_block(args.pairs.p + block, m, lane, p[m]);
        keep_block(args.pairs.ds + block, m, lane, ds);
      }
      if (references.a == nullptr) continue;
      if (!ordinary || !maxima.add(rows + 16 * m, columns, lane, p[m], ds, row_max[m])) {
        BlockPairs pairs;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs.p[n][i] = p[m][n][i], pairs.ds[n][i] = ds[n][i];
        const int64_t row = warp_row + 16 * m;
        raise_carefully(pairs, references, rows + 16 * m, keys, work.head * s.rows + row, first_key,
                        static_cast<int>(min(s.rows - row, static_cast<int64_t>(kPairBlock))), lane);
      }
    }
    if (references.a != nullptr) maxima.publish(references, first_key, lane);
  }
  if (references.a == nullptr) return;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = warp_row + m * 16 + h * 8 + lane / 4;
      PairMaxima::publish_row(references.a + work.head * s.rows + row, row_max[m][h], row < s.rows, lane);
    }
}

template <class Tile, bool WIDE>
__global__ void __launch_bounds__(Tile::kThreads, 1) pairs_kernel(const __grid_constant__ PairsArgs args) {
  if constexpr (Tile::kCompiled) run_pairs<Tile, WIDE>(args);
}

}  // namespace det_attn::cuda
