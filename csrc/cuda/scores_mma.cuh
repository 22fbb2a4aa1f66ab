// Scores kernel on mma.sync (sm_80 and up): query and key planes -> row maxima and, if asked, score distances
// (docs/contract.md sections 2, 3). One CTA keeps its query planes in shared memory and walks a slab of keys.
#pragma once

#include "common.cuh"
#include "mma.cuh"
#include "scores.cuh"

namespace det_attn::cuda {

// ROWS x KEYS pairs a step by (ROWS / 32) * (KEYS / 32) warps; STAGES key tiles in flight.
template <int PLANES, int ROWS, int KEYS, int STAGES>
struct ScoresTile {
  static constexpr int kRows = ROWS, kKeys = KEYS, kStages = STAGES, kPlanes = PLANES;
  static constexpr int kWarpsM = ROWS / kScoreWarpTile, kWarpsN = KEYS / kScoreWarpTile;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpSize;
  static int shared_bytes(int dims_pad) { return PLANES * (ROWS + STAGES * KEYS) * dims_pad; }
};

namespace scores_mma {

// A contiguous copy of `bytes` into shared memory by the whole CTA.
template <int THREADS>
__device__ __forceinline__ void copy_bytes(uint32_t shared, const uint8_t* global, int bytes) {
  for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16) copy_async16(shared + i, global + i);
}

// One k-step of a product of two planes, for a warp tile of M * 16 rows x 32 keys, added into c.
template <bool A_SIGNED, bool B_SIGNED, int M>
__device__ __forceinline__ void plane_step(int32_t (&c)[M][4][4], const uint32_t (&a)[M][4],
                                           const uint32_t (&b)[2][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
      mma_bytes<A_SIGNED, B_SIGNED>(c[m][n], a[m], b[n / 2][(n & 1) * 2], b[n / 2][(n & 1) * 2 + 1]);
}

template <int M>
__device__ __forceinline__ void shift_byte(int32_t (&c)[M][4][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][n][i] = static_cast<int32_t>(static_cast<uint32_t>(c[m][n][i]) << 8);
}

// Fragment addresses of a warp in the query and key tiles, which are laid out in core matrices: see plane_offset().
struct Fragments {
  uint32_t a, b;              // lane's address at plane 0, k-step 0
  uint32_t a_plane, b_plane;  // bytes from plane to plane
  uint32_t sixteen_rows;      // bytes from row to row + 16

  template <int M>
  __device__ __forceinline__ void load_a(uint32_t (&r)[M][4], int plane, int step) const {
#pragma unroll
    for (int m = 0; m < M; ++m) load_matrices(r[m], a + plane * a_plane + step * 256 + m * sixteen_rows);
  }
  __device__ __forceinline__ void load_b(uint32_t (&r)[2][4], int plane, int step) const {
    load_matrices(r[0], b + plane * b_plane + step * 256);
    load_matrices(r[1], b + plane * b_plane + step * 256 + sixteen_rows);
  }
};

// The exact dot products of a warp tile of M * 16 rows x 32 keys as int32 digit groups: acc[0] = hi, acc[1] = mid (3
// planes) or lo (2 planes), acc[2] = lo (3 planes), acc[3] = p0 when WIDE keeps lo's two positions apart. See
// dot_highest() and dot_high().
template <int PLANES, bool WIDE, int UNROLL = 2, int M, int GROUPS>
__device__ __forceinline__ void dot_tile(int32_t (&acc)[GROUPS][M][4][4], const Fragments& f, int steps) {
  constexpr int kTop = PLANES - 1;
  uint32_t a[M][4], b[2][4];
  // Phase 1: what the second phase adds on top of, one byte up.
#pragma unroll UNROLL
  for (int step = 0; step < steps; ++step) {
    f.load_a(a, kTop, step);
    f.load_b(b, kTop, step);
    plane_step<true, true>(acc[0], a, b);
    if constexpr (PLANES == 3 && !WIDE) {
      uint32_t a0[M][4], b0[2][4];
      f.load_a(a, 1, step);
      f.load_b(b0, 0, step);
      plane_step<false, false>(acc[2], a, b0);
      f.load_a(a0, 0, step);
      f.load_b(b, 1, step);
      plane_step<false, false>(acc[2], a0, b);
    }
  }
  shift_byte(acc[0]);
  if constexpr (PLANES == 3 && !WIDE) shift_byte(acc[2]);
  // Phase 2: the remaining products.
#pragma unroll UNROLL
  for (int step = 0; step < steps; ++step) {
    uint32_t a_top[M][4], b_top[2][4];
    f.load_a(a_top, kTop, step);
    f.load_b(b_top, kTop, step);
    if constexpr (PLANES == 2) {
      f.load_a(a, 0, step);
      f.load_b(b, 0, step);
      plane_step<true, false>(acc[0], a_top, b);
      plane_step<false, true>(acc[0], a, b_top);
      plane_step<false, false>(acc[1], a, b);
    } else {
      uint32_t a0[M][4], b0[2][4];
      f.load_a(a, 1, step);
      f.load_b(b, 1, step);
      plane_step<true, false>(acc[0], a_top, b);
      plane_step<false, true>(acc[0], a, b_top);
      plane_step<false, false>(acc[1], a, b);
      f.load_b(b0, 0, step);
      plane_step<true, false>(acc[1], a_top, b0);
      if constexpr (WIDE) plane_step<false, false>(acc[2], a, b0);
      f.load_a(a0, 0, step);
      plane_step<false, true>(acc[1], a0, b_top);
      if constexpr (WIDE) plane_step<false, false>(acc[2], a0, b);
      plane_step<false, false>(acc[WIDE ? 3 : 2], a0, b0);
    }
  }
}

}  // namespace scores_mma

// GIVEN: prepared.rowmax is an input, distances are taken from it. Otherwise it is raised to the maxima found here.
// MODIFIED: scores pass through docs/contract.md section 10.
template <class Tile, bool WIDE, bool GIVEN, bool MODIFIED>
__global__ void __launch_bounds__(Tile::kThreads, 1) scores_kernel(const __grid_constant__ ScoresArgs args) {
  using namespace scores_mma;
  constexpr int kPlanes = Tile::kPlanes, kRows = Tile::kRows, kKeys = Tile::kKeys, kStages = Tile::kStages;
  constexpr int kGroups = Groups<kPlanes, WIDE>::kCount;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) int key_exponents[kStages][kKeys];
  __shared__ WarpRows shared_rows[Tile::kThreads / kWarpSize];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_m = warp % Tile::kWarpsM, warp_n = warp / Tile::kWarpsM;
  constexpr int kSubTiles = kRowPad / kRows;
  const int64_t tile = args.first_tile + blockIdx.x / kSubTiles;
  const int64_t head = tile / (s.rows_pad / kRowPad);
  const int64_t row_base = (tile % (s.rows_pad / kRowPad)) * kRowPad + (blockIdx.x % kSubTiles) * kRows;
  const int64_t warp_row = row_base + warp_m * kScoreWarpTile;

  const int tile_first = args.prepared.tile_first[tile];
  const int64_t slab = tile_first + int64_t(blockIdx.y) * args.slab_keys;
  // Whole steps of the sums kernel, which reads every block of a step it enters.
  const KeyRange keys = keys_of_rows<kSumKeys>(args, head, row_base, kRows, slab, slab + args.slab_keys);
  if (keys.first >= keys.last) return;
  const int tiles = (keys.last - keys.first) / kKeys;
  BlockRows rows[2];
  WarpRows& warp_rows = shared_rows[warp];
  load_rows<kScoreWarpTile>(args, head, warp_row, lane, rows, &warp_rows);

  // ---- query planes, resident; key planes, kStages deep ----
  const uint32_t query_shared = shared_address(shared);
  const uint32_t key_shared = query_shared + kPlanes * kRows * s.dims_pad;
  const uint8_t* query = args.prepared.query + (head * kPlanes * s.rows_pad + row_base) * s.dims_pad;
  const uint8_t* key = args.prepared.key + (head * kPlanes * s.keys_pad) * s.dims_pad;
  const int32_t* exponents = args.prepared.key_exponent + head * s.keys_pad;
  auto load_keys = [&](int t) {
    const int stage = t % kStages;
    const int64_t base = keys.first + t * kKeys;
    for (int p = 0; p < kPlanes; ++p) {
      copy_bytes<Tile::kThreads>(key_shared + (stage * kPlanes + p) * kKeys * s.dims_pad,
                                 key + (p * s.keys_pad + base) * s.dims_pad, kKeys * s.dims_pad);
    }
    copy_bytes<Tile::kThreads>(shared_address(key_exponents[stage]), reinterpret_cast<const uint8_t*>(exponents + base),
                               kKeys * 4);
  };
  for (int p = 0; p < kPlanes; ++p) {
    copy_bytes<Tile::kThreads>(query_shared + p * kRows * s.dims_pad, query + p * s.rows_pad * s.dims_pad,
                               kRows * s.dims_pad);
  }
  load_keys(0);
  commit_copies();

  Fragments f;
  const int matrix = lane / 8, matrix_row = lane % 8;
  f.a_plane = kRows * s.dims_pad;
  f.b_plane = kKeys * s.dims_pad;
  f.sixteen_rows = 16 * s.dims_pad;
  // A: matrices are (rows 0-7, 8-15) x (bytes 0-15, 16-31), rows first. B: bytes first, then the next 8 keys.
  f.a = query_shared + warp_m * kScoreWarpTile * s.dims_pad + (matrix & 1) * 8 * s.dims_pad + (matrix >> 1) * 128 +
        matrix_row * 16;
  const uint32_t b_lane =
      warp_n * kScoreWarpTile * s.dims_pad + (matrix >> 1) * 8 * s.dims_pad + (matrix & 1) * 128 + matrix_row * 16;

  RowMaxima row_max[2];
#pragma unroll
  for (int m = 0; m < 2; ++m)
    row_max[m] = start_of_rowmax<GIVEN>(args, head * s.rows_pad + warp_row + m * 16 + lane / 4);
  const int blocks = first_block(
      args.distances, (tile - args.first_tile) * s.tile_blocks + (warp_row % kRowPad) / kBlockRows, tile_first);
  for (int t = 0; t < tiles; ++t) {
    if constexpr (kStages > 1) {
      if (t + 1 < tiles) load_keys(t + 1);
      commit_copies();
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const int stage = t % kStages;
    f.b = key_shared + stage * kPlanes * kKeys * s.dims_pad + b_lane;
    int32_t acc[kGroups][2][4][4] = {};
    if (warp_row < s.rows) dot_tile<kPlanes, WIDE>(acc, f, s.dims_pad / 32);

    const int key_base = keys.first + t * kKeys + warp_n * kScoreWarpTile;
    const auto finish = [&](int m, const auto& group) {
      if (warp_row + m * 16 >= s.rows) return;  // padding rows have no block
      const Block block = block_at(args.distances, blocks + m * static_cast<int>(args.distances.key_blocks), key_base,
                                   key_exponents[stage] + warp_n * kScoreWarpTile, warp_rows, lane);
      finish_block<kPlanes, WIDE, GIVEN, MODIFIED>(group, warp_rows, rows[m], block, lane, row_max[m]);
    };
    if constexpr (MODIFIED) {
      // Modifiers call functions. In local memory and a real loop, nothing has to be saved around the calls.
      int32_t waiting[2][kGroups][4][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) waiting[m][g][n][i] = acc[g][m][n][i];
#pragma unroll 1
      for (int m = 0; m < 2; ++m) finish(m, [&](int g, int n, int i) { return waiting[m][g][n][i]; });
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) finish(m, [&](int g, int n, int i) { return acc[g][m][n][i]; });
    }
    __syncthreads();
    if constexpr (kStages == 1) {
      if (t + 1 < tiles) load_keys(t + 1);
      commit_copies();
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t top = max_over_quad(row_max[m].of(h));
      const int64_t row = warp_row + m * 16 + h * 8 + lane / 4;
      if (lane % 4 == 0) publish_rowmax<GIVEN>(args.prepared.rowmax + head * s.rows_pad + row, top);
    }
}

}  // namespace det_attn::cuda
