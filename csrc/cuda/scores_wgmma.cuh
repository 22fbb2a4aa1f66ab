// Scores kernel on wgmma (sm_90a): the same stage, arguments and results as scores_mma.cuh. Two warpgroups of 64 rows
// keep their query planes in shared memory and walk a slab of keys that bulk copies bring in ahead of them; while one
// warpgroup turns dots into scores, the other has the tensor cores.
#pragma once

#include "scores.cuh"
#include "wgmma.cuh"

namespace det_attn::cuda {

// STEPS k-steps of 32 dims are known at compile time, so that no product waits for a loop.
template <int PLANES, int STEPS, int STAGES>
struct ScoresWgmmaTile {
  static constexpr int kPlanes = PLANES, kSteps = STEPS, kStages = STAGES, kDimsPad = STEPS * kDimPad;
  static constexpr bool kWide = PLANES == 3 && kDimsPad > 128;
  // Per multiprocessor: two where the digit groups leave the registers for it.
  static constexpr int kCtas = PLANES == 2 && kDimsPad <= 128 ? 2 : 1;
  static constexpr int kRows = 128, kKeys = 64, kGroupRows = 64;
  static constexpr int kThreads = kRows / kGroupRows * kWarpgroup;
  static constexpr int kSharedBytes = PLANES * (kRows + STAGES * kKeys) * kDimsPad;
};

namespace scores_wgmma {

// Operands of one warpgroup and one key tile; planes lie `a_plane` and `b_plane` descriptor units apart.
struct Operands {
  uint64_t a, b, a_plane, b_plane;
};

template <int STEPS, bool A_SIGNED, bool B_SIGNED>
__device__ __forceinline__ void plane_product(int32_t (&c)[8][4], const Operands& o, int a_plane, int b_plane) {
  const uint64_t a = o.a + a_plane * o.a_plane, b = o.b + b_plane * o.b_plane;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma_bytes<A_SIGNED, B_SIGNED>(c, a + step * kOperandStep, b + step * kOperandStep);
}

__device__ __forceinline__ void shift_byte(int32_t (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = static_cast<int32_t>(static_cast<uint32_t>(c[n][i]) << 8);
}

// The digit groups of 64 x 64 dot products; see Groups in scores.cuh. On return every product is done.
template <int PLANES, bool WIDE, int STEPS, int GROUPS>
__device__ __forceinline__ void dot_tile(int32_t (&acc)[GROUPS][8][4], const Operands& o) {
  constexpr int kTop = PLANES - 1;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[g][n][i] = 0;
  wgmma_fence();
  // First what the rest is added to one byte up.
  plane_product<STEPS, true, true>(acc[kGroupHi], o, kTop, kTop);
  if constexpr (PLANES == 3 && !WIDE) {
    plane_product<STEPS, false, false>(acc[kGroupLo], o, 1, 0);
    plane_product<STEPS, false, false>(acc[kGroupLo], o, 0, 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
  shift_byte(acc[kGroupHi]);
  if constexpr (PLANES == 3 && !WIDE) shift_byte(acc[kGroupLo]);
  wgmma_fence();
  plane_product<STEPS, true, false>(acc[kGroupHi], o, kTop, kTop - 1);
  plane_product<STEPS, false, true>(acc[kGroupHi], o, kTop - 1, kTop);
  plane_product<STEPS, false, false>(acc[kGroupMid], o, kTop - 1, kTop - 1);
  if constexpr (PLANES == 3) {
    plane_product<STEPS, true, false>(acc[kGroupMid], o, 2, 0);
    plane_product<STEPS, false, true>(acc[kGroupMid], o, 0, 2);
    if constexpr (WIDE) {
      plane_product<STEPS, false, false>(acc[kGroupLo], o, 1, 0);
      plane_product<STEPS, false, false>(acc[kGroupLo], o, 0, 1);
      plane_product<STEPS, false, false>(acc[kGroupLowest], o, 0, 0);
    } else {
      plane_product<STEPS, false, false>(acc[kGroupLo], o, 0, 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
}

}  // namespace scores_wgmma

template <class Tile, bool GIVEN>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    scores_wgmma_kernel(const __grid_constant__ ScoresArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace scores_wgmma;
  constexpr int kPlanes = Tile::kPlanes, kKeys = Tile::kKeys, kStages = Tile::kStages;
  constexpr bool kWide = Tile::kWide;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) int key_exponents[kStages][kKeys];
  __shared__ __align__(8) uint64_t query_ready, ready[kStages], free_again[kStages];
  __shared__ WarpRows shared_rows[Tile::kThreads / kWarpSize];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize,
            group = threadIdx.x / kWarpgroup;
  const int64_t tile = args.first_tile + blockIdx.x;
  const int64_t head = tile / (s.rows_pad / kRowPad), row_base = tile % (s.rows_pad / kRowPad) * kRowPad;
  const int64_t warp_row = row_base + group * Tile::kGroupRows + warp * kBlockRows;
  const int tile_first = args.prepared.tile_first[tile];
  const int64_t slab = tile_first + int64_t(blockIdx.y) * args.slab_keys;
  const KeyRange keys =
      keys_of_rows<kSumKeys>(args, head, row_base, Tile::kRows, slab, slab + args.slab_keys);
  if (keys.first >= keys.last) return;
  const int tiles = (keys.last - keys.first) / kKeys;
  static_assert(kKeys == kSumKeys, "a whole step of the sums kernel is written");

  // A warpgroup of padding rows leaves, after the barriers are set.
  const int groups = s.rows - row_base > Tile::kGroupRows ? 2 : 1;

  // ---- copies: query planes once, key tiles kStages deep ----
  const uint32_t query_shared = shared_address(shared),
                 key_shared = query_shared + kPlanes * Tile::kRows * Tile::kDimsPad;
  constexpr int key_plane = kKeys * Tile::kDimsPad, query_plane = Tile::kRows * Tile::kDimsPad;
  auto load_keys = [&](int t) {
    const int stage = t % kStages;
    const int64_t key = keys.first + t * kKeys;
    barrier_expect(&ready[stage], kPlanes * key_plane + kKeys * 4);
    for (int p = 0; p < kPlanes; ++p) {
      copy_bulk(key_shared + (stage * kPlanes + p) * key_plane,
                args.prepared.key + ((head * kPlanes + p) * s.keys_pad + key) * Tile::kDimsPad, key_plane,
                &ready[stage]);
    }
    copy_bulk(shared_address(key_exponents[stage]), args.prepared.key_exponent + head * s.keys_pad + key, kKeys * 4,
              &ready[stage]);
  };
  if (threadIdx.x == 0) {
    barrier_init(&query_ready, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&ready[i], 1);
      barrier_init(&free_again[i], groups * kWarpgroup);
    }
    barrier_init_fence();
    barrier_expect(&query_ready, kPlanes * query_plane);
    for (int p = 0; p < kPlanes; ++p) {
      copy_bulk(query_shared + p * query_plane,
                args.prepared.query + ((head * kPlanes + p) * s.rows_pad + row_base) * Tile::kDimsPad, query_plane,
                &query_ready);
    }
    for (int t = 0; t < min(kStages - 1, tiles); ++t) load_keys(t);
  }
  BlockRows rows[1];
  WarpRows& warp_rows = shared_rows[threadIdx.x / kWarpSize];
  load_rows<kBlockRows>(args, head, warp_row, lane, rows, &warp_rows);
  RowMaxima row_max = start_of_rowmax<GIVEN>(args, head * s.rows_pad + warp_row + lane / 4);
  __syncthreads();
  if (group >= groups) return;
  barrier_wait(&query_ready, 0);

  Operands o;
  o.a = operand(query_shared + group * Tile::kGroupRows * Tile::kDimsPad, 8 * Tile::kDimsPad);
  o.a_plane = query_plane >> 4;
  o.b_plane = key_plane >> 4;
  const bool real = warp_row < s.rows;  // padding rows have no block
  const int blocks = first_block(
      args.distances, (tile - args.first_tile) * s.tile_blocks + (warp_row - row_base) / kBlockRows, tile_first);
  for (int t = 0; t < tiles; ++t) {
    const int stage = t % kStages;
    const int ahead = t + kStages - 1;
    if (threadIdx.x == 0 && ahead < tiles) {
      if (ahead >= kStages) barrier_wait(&free_again[ahead % kStages], (ahead / kStages - 1) & 1);
      load_keys(ahead);
    }
    __syncwarp();
    barrier_wait(&ready[stage], (t / kStages) & 1);
    o.b = operand(key_shared + stage * kPlanes * key_plane, 8 * Tile::kDimsPad);
    int32_t acc[Groups<kPlanes, kWide>::kCount][8][4];
    dot_tile<kPlanes, kWide, Tile::kSteps>(acc, o);
#pragma unroll
    for (int half = 0; half < kKeys / kBlockKeys; ++half) {
      if (!real) continue;
      const int key_base = keys.first + t * kKeys + half * kBlockKeys;
      const Block block = block_at(args.distances, blocks, key_base, key_exponents[stage] + half * kBlockKeys,
                                   warp_rows, lane);
      const auto group = [&](int g, int n, int i) { return acc[g][half * 4 + n][i]; };
      finish_block<kPlanes, kWide, GIVEN, false>(group, warp_rows, rows[0], block, lane, row_max);
    }
    barrier_arrive(&free_again[stage]);  // after the exponents were read
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t top = max_over_quad(row_max.of(h));
    if (lane % 4 == 0) publish_rowmax<GIVEN>(args.prepared.rowmax + warp_rows.first + h * 8 + lane / 4, top);
  }
#endif
}

}  // namespace det_attn::cuda
