// Pairs kernel on mma.sync (sm_80 and up): planes of Q, K, dO and V -> p and ds of a strip, and reference exponents
// (docs/contract.md section 8). One CTA keeps the planes of its query rows in shared memory, where they fit, and walks
// a slab of keys: a step brings the planes of K for a key tile, the next one those of V.
#pragma once

#include "common.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "scores_mma.cuh"

namespace det_attn::cuda {

// ROWS x KEYS pairs by warps of 16 x 32; STAGES steps in flight. RESIDENT: the planes of the rows stay; otherwise each
// step brings those it needs, too. MODIFIED: p and the softcap's slopes wait in shared memory for the second product.
// DIMS: the padded head_dim where it is known when this is compiled, which takes a fifth of the instructions away.
template <int PLANES, int ROWS, int KEYS, int STAGES, bool RESIDENT, int CTAS, int DIMS = 0, bool MODIFIED = false>
struct PairsTile {
  static constexpr int kPlanes = PLANES, kRows = ROWS, kKeys = KEYS, kStages = STAGES;
  static constexpr bool kResident = RESIDENT;
  static constexpr int kWarpsM = ROWS / kBlockRows, kWarpsN = KEYS / kPairBlock;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpSize;
  // Of a multiprocessor: while one has the tensor cores the other does its arithmetic.
  static constexpr int kCtas = CTAS;
  static constexpr int kRowBytes = PLANES * ROWS, kKeyBytes = PLANES * KEYS;  // of one side, times dims_pad
  static constexpr int kStageBytes = kKeyBytes + (RESIDENT ? 0 : kRowBytes);
  static constexpr int kPlaneBytes = STAGES * kStageBytes + (RESIDENT ? 2 * kRowBytes : 0);  // times dims_pad
  static constexpr bool kModified = MODIFIED;
  static constexpr int kDims = DIMS;
  static constexpr int kUnroll = DIMS != 0 && PLANES == 2 ? DIMS / kDimPad : (DIMS != 0 ? 2 : 1);  // of the k-steps
  static int shared_bytes(int dims_pad) { return kPlaneBytes * dims_pad + (MODIFIED ? 2 * ROWS * KEYS * 4 : 0); }
};

// Beside the planes. The last three are here for want of registers.
template <class Tile>
struct PairsShared {
  alignas(16) RowState rows[Tile::kRows];
  alignas(16) int2 key_exponents[2][Tile::kKeys];
  PairsWork work;
  PairWarp warps[Tile::kThreads / kWarpSize];
  int row_maxima[Tile::kThreads][2];  // of each thread's two rows
};

__device__ __forceinline__ int own_thread() { return static_cast<int>(anew(threadIdx.x)); }

// A contiguous part of each plane, `bytes` long, into shared memory by the whole CTA; the planes lie `apart`.
template <int THREADS, int PLANES>
__device__ __forceinline__ void copy_planes(uint32_t shared, const uint8_t* global, int64_t apart, int bytes) {
  int i = own_thread() * 16;
  global += i, shared += i;
#pragma unroll 1
  for (; i < bytes; i += THREADS * 16) {
    const uint8_t* from = global;
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
      copy_async16(shared + p * bytes, from);
      from += apart;
    }
    global += THREADS * 16, shared += THREADS * 16;
  }
}

// Wide rows keep the two lowest digit positions apart; see Groups. Once they are summed, what lies above 2^16 goes to
// mid and both fit one group, so that from here on they are as narrow ones: fewer registers beside everything else.
template <int GROUPS>
__device__ __forceinline__ void join_lowest(int32_t (&acc)[GROUPS][1][4][4]) {
  if constexpr (GROUPS == 4) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t lowest = static_cast<uint32_t>(acc[kGroupLowest][0][n][i]);
        const uint32_t above = static_cast<uint32_t>(acc[kGroupLo][0][n][i]) + (lowest >> 8);
        acc[kGroupMid][0][n][i] += static_cast<int32_t>(above >> 8);
        acc[kGroupLo][0][n][i] = static_cast<int32_t>(above << 8 & 0xff00u | lowest & 0xffu);
      }
  }
}

template <class Tile, bool WIDE>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas) pairs_kernel(const __grid_constant__ PairsArgs args) {
  using namespace scores_mma;
  constexpr int kPlanes = Tile::kPlanes, kRows = Tile::kRows, kKeys = Tile::kKeys, kStages = Tile::kStages;
  constexpr int kGroups = Groups<kPlanes, WIDE>::kCount;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ PairsShared<Tile> own;

  const Shape& s = args.shape;
  const int dims_pad = Tile::kDims != 0 ? Tile::kDims : s.dims_pad;
  if (threadIdx.x == 0) own.work = pairs_work<kRows>(args, blockIdx.x, blockIdx.y, kPairSlab);
  __syncthreads();
  const PairsWork& work = own.work;
  if (work.begin >= work.end) return;
  const auto tiles = [&] { return (work.end - work.begin) / kKeys; };

  // ---- copies ----
  const auto stage_at = [&](int step) {
    return anew(shared_address(shared)) + step % kStages * Tile::kStageBytes * dims_pad;
  };
  const auto resident_at = [&](int side) {
    return anew(shared_address(shared)) + (kStages * Tile::kStageBytes + side * Tile::kRowBytes) * dims_pad;
  };
  auto load_rows_of = [&](int side, uint32_t to) {
    const uint8_t* from = side == 0 ? args.query : args.grad;
    from += (work.head * kPlanes * s.rows_pad + work.row) * dims_pad;
    copy_planes<Tile::kThreads, kPlanes>(to, from, s.rows_pad * dims_pad, kRows * dims_pad);
  };
  // Step 2 * t multiplies queries and keys of tile t, step 2 * t + 1 dO and values.
  auto load_step = [&](int step) {
    if (step < 2 * tiles()) {
      const int side = step & 1;
      const int64_t key = work.begin + step / 2 * kKeys;
      const uint32_t to = stage_at(step);
      const uint8_t* from = (side == 0 ? args.key : args.value) + (work.head * kPlanes * s.keys_pad + key) * dims_pad;
      copy_planes<Tile::kThreads, kPlanes>(to, from, s.keys_pad * dims_pad, kKeys * dims_pad);
      if (!Tile::kResident) load_rows_of(side, to + Tile::kKeyBytes * dims_pad);
      if (side == 0) {
        copy_bytes<Tile::kThreads>(
            shared_address(own.key_exponents[step / 2 & 1]),
            reinterpret_cast<const uint8_t*>(args.state.key_exponents + work.head * s.keys_pad + key), kKeys * 8);
      }
    }
    commit_copies();
  };
  copy_bytes<Tile::kThreads>(shared_address(own.rows),
                             reinterpret_cast<const uint8_t*>(args.state.rows + work.head * s.rows_pad + work.row),
                             kRows * static_cast<int>(sizeof(RowState)));
  if (Tile::kResident) {
    load_rows_of(0, resident_at(0));
    load_rows_of(1, resident_at(1));
  }
  for (int step = 0; step < kStages - 1; ++step) load_step(step);
  if (kStages == 1) load_step(0);

  // Brings a step in, computes its dots; the step before it has been read by everyone after the barrier.
  auto multiply = [&](int step, int32_t(&acc)[kGroups][1][4][4]) {
    wait_copies<(kStages > 1 ? kStages - 2 : 0)>();
    __syncthreads();
    if (kStages > 1) load_step(step + kStages - 1);
    const uint32_t stage = stage_at(step);
    const int thread = own_thread(), matrix = thread % kWarpSize / 8, matrix_row = thread % 8;
    const int m = thread / kWarpSize % Tile::kWarpsM, n = thread / kWarpSize / Tile::kWarpsM;
    Fragments f;
    f.a_plane = kRows * dims_pad;
    f.b_plane = kKeys * dims_pad;
    f.sixteen_rows = 16 * dims_pad;
    f.a = (Tile::kResident ? resident_at(step & 1) : stage + Tile::kKeyBytes * dims_pad) +
          (m * kBlockRows + (matrix & 1) * 8) * dims_pad + (matrix >> 1) * 128 + matrix_row * 16;
    f.b = stage + (n * kPairBlock + (matrix >> 1) * 8) * dims_pad + (matrix & 1) * 128 + matrix_row * 16;
    dot_tile<kPlanes, WIDE, Tile::kUnroll>(acc, f, dims_pad / kDimPad);
    join_lowest(acc);
    if (kStages == 1) {
      __syncthreads();
      load_step(step + 1);
    }
  };

  const auto place = [&](int tile) {
    const int thread = own_thread(), warp = thread / kWarpSize, m = warp % Tile::kWarpsM, n = warp / Tile::kWarpsM;
    return WarpPairs{thread % kWarpSize,
                     work.head,
                     work.row + m * kBlockRows,
                     work.begin + tile * kKeys + n * kPairBlock,
                     own.rows + m * kBlockRows,
                     own.key_exponents[tile & 1] + n * kPairBlock,
                     reinterpret_cast<float4*>(shared + Tile::kPlaneBytes * dims_pad) + thread,
                     Tile::kThreads};
  };
  const auto warp_rows = [&]() -> PairWarp& { return own.warps[own_thread() / kWarpSize]; };
  const auto row_max = [&]() -> int(&)[2] { return own.row_maxima[own_thread()]; };
  row_max()[0] = row_max()[1] = 0;
#pragma unroll 1
  for (int t = 0; t < tiles(); ++t) {
    BlockPairs x;
    {
      int32_t acc[kGroups][1][4][4] = {};
      multiply(2 * t, acc);
      const auto group = [&](int g, int n, int i) { return acc[g][0][n][i]; };
      const WarpPairs at = place(t);
      if (t == 0) {
        const PairWarp found = pair_warp(at);
        if (at.lane == 0) warp_rows() = found;
        __syncwarp();
      }
      if constexpr (Tile::kModified) {
        modified_probabilities(dots_of<kPlanes, false>(group), args, at);
      } else {
        block_probabilities<kPlanes>(group, warp_rows(), at, x.p);
      }
    }
    int32_t acc[kGroups][1][4][4] = {};
    multiply(2 * t + 1, acc);
    const auto group = [&](int g, int n, int i) { return acc[g][0][n][i]; };
    const WarpPairs at = place(t);
    const bool ordinary = is_ordinary_block(warp_rows(), at);
    if constexpr (Tile::kModified) {
      x = modified_terms(dots_of<kPlanes, false>(group), args, at);
    } else {
      block_terms<kPlanes>(group, ordinary, at, x.p, x.ds);
    }
    keep_and_raise(args, at, x, ordinary, row_max());
  }
  raise_rows(args, place(0), row_max());
}

}  // namespace det_attn::cuda
