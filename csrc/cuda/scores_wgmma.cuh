// Scores kernel on wgmma (sm_90a): the same stage, arguments and results as scores_mma.cuh. A CTA keeps the query
// planes of 128 rows in shared memory and walks a slab of keys that bulk copies bring in ahead of it. Two or three
// warpgroups take units of 64 rows and a key tile; while one has the tensor cores, the others turn dots into scores.
#pragma once

#include "scores.cuh"
#include "wgmma.cuh"

namespace det_attn::cuda {

// STEPS k-steps of 32 dims are known at compile time, so that no product waits for a loop.
template <int PLANES, int STEPS, int STAGES>
struct ScoresWgmmaTile {
  static constexpr int kPlanes = PLANES, kSteps = STEPS, kStages = STAGES, kDimsPad = STEPS * kDimPad;
  static constexpr bool kWide = PLANES == 3 && kDimsPad > 128;
  // CTAs of a multiprocessor and their warpgroups: as many as the digit groups leave registers for.
  static constexpr int kCtas = PLANES == 2 && kDimsPad <= 128 ? 2 : 1;
  static constexpr int kGroups = PLANES == 3 && !kWide ? 3 : 2, kThreads = kGroups * kWarpgroup;
  // Warpgroups issue their products in turn, so that some finish their scores while another has the tensor cores. With
  // two stages a key tile that is late would hold all of them up.
  static constexpr bool kInTurn = STAGES > 2;
  static constexpr int kRows = 128, kKeys = 64, kGroupRows = 64;
  static constexpr int kSharedBytes = PLANES * (kRows + STAGES * kKeys) * kDimsPad;
};

namespace scores_wgmma {

// Operands of one warpgroup and one key tile; planes lie `a_plane` and `b_plane` descriptor units apart.
struct Operands {
  uint64_t a, b, a_plane, b_plane;
};

// c += a plane times a plane, or c = it if FIRST.
template <int STEPS, bool A_SIGNED, bool B_SIGNED, bool FIRST = false>
__device__ __forceinline__ void plane_product(int32_t (&c)[8][4], const Operands& o, int a_plane, int b_plane) {
  const uint64_t a = o.a + a_plane * o.a_plane, b = o.b + b_plane * o.b_plane;
  wgmma_bytes<A_SIGNED, B_SIGNED, FIRST>(c, a, b);
#pragma unroll
  for (int step = 1; step < STEPS; ++step)
    wgmma_bytes<A_SIGNED, B_SIGNED>(c, a + step * kOperandStep, b + step * kOperandStep);
}

__device__ __forceinline__ void shift_byte(int32_t (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = static_cast<int32_t>(static_cast<uint32_t>(c[n][i]) << 8);
}

// The digit groups of 64 x 64 dot products; see Groups in scores.cuh. On return every product is done. meanwhile() is
// called while products run, issued() when all are issued.
template <int PLANES, bool WIDE, int STEPS, int GROUPS, class Meanwhile, class Issued>
__device__ __forceinline__ void dot_tile(int32_t (&acc)[GROUPS][8][4], const Operands& o, const Meanwhile& meanwhile,
                                         const Issued& issued) {
  constexpr int kTop = PLANES - 1;
  wgmma_fence();
  // First what the rest is added to one byte up.
  plane_product<STEPS, true, true, true>(acc[kGroupHi], o, kTop, kTop);
  if constexpr (PLANES == 3 && !WIDE) {
    plane_product<STEPS, false, false, true>(acc[kGroupLo], o, 1, 0);
    plane_product<STEPS, false, false>(acc[kGroupLo], o, 0, 1);
  }
  wgmma_commit();
  // The tensor cores have these to do while the first are shifted.
  plane_product<STEPS, false, false, true>(acc[kGroupMid], o, kTop - 1, kTop - 1);
  if constexpr (PLANES == 3) {
    plane_product<STEPS, true, false>(acc[kGroupMid], o, 2, 0);
    plane_product<STEPS, false, true>(acc[kGroupMid], o, 0, 2);
    if constexpr (WIDE) {
      plane_product<STEPS, false, false, true>(acc[kGroupLo], o, 1, 0);
      plane_product<STEPS, false, false>(acc[kGroupLo], o, 0, 1);
      plane_product<STEPS, false, false, true>(acc[kGroupLowest], o, 0, 0);
    }
  }
  wgmma_commit();
  meanwhile();
  wgmma_wait<1>();
  shift_byte(acc[kGroupHi]);
  if constexpr (PLANES == 3 && !WIDE) shift_byte(acc[kGroupLo]);
  wgmma_fence();
  plane_product<STEPS, true, false>(acc[kGroupHi], o, kTop, kTop - 1);
  plane_product<STEPS, false, true>(acc[kGroupHi], o, kTop - 1, kTop);
  if constexpr (PLANES == 3 && !WIDE) plane_product<STEPS, false, false>(acc[kGroupLo], o, 0, 0);
  wgmma_commit();
  issued();
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
  __shared__ WarpRows shared_rows[Tile::kRows / kBlockRows];
  __shared__ int small_max[Tile::kRows];  // row maxima over ordinary blocks
  __shared__ int2 half_tiles[Tile::kRows / Tile::kGroupRows];  // key tiles that the 64 rows attend
  __shared__ int64_t given_max[GIVEN ? Tile::kRows : 1];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize,
            group = uniform(threadIdx.x / kWarpgroup);
  const int64_t tile = args.first_tile + blockIdx.x;
  const int64_t head = tile / (s.rows_pad / kRowPad), row_base = tile % (s.rows_pad / kRowPad) * kRowPad;
  const int tile_first = args.prepared.tile_first[tile];
  const int64_t slab = tile_first + int64_t(blockIdx.y) * args.slab_keys;
  KeyRange keys = keys_of_rows<kSumKeys>(args, head, row_base, Tile::kRows, slab, slab + args.slab_keys);
  if (keys.first >= keys.last) return;
  keys.first = uniform(keys.first), keys.last = uniform(keys.last);
  const int tiles = (keys.last - keys.first) / kKeys;
  static_assert(kKeys == kSumKeys, "a whole step of the sums kernel is written");

  // A unit is 64 rows and a key tile; the warpgroups take them by turns.
  const int halves = s.rows - row_base > Tile::kGroupRows ? 2 : 1, units = tiles * halves;

  // ---- copies: query planes once, key tiles kStages deep ----
  const uint32_t query_shared = shared_address(shared),
                 key_shared = query_shared + kPlanes * Tile::kRows * Tile::kDimsPad;
  constexpr int key_plane = kKeys * Tile::kDimsPad, query_plane = Tile::kRows * Tile::kDimsPad;
  const uint8_t* key_global = args.prepared.key + (head * kPlanes * s.keys_pad + keys.first) * Tile::kDimsPad;
  const int* exponents_global = args.prepared.key_exponent + head * s.keys_pad + keys.first;
  const int64_t plane_bytes = s.keys_pad * Tile::kDimsPad;
  const auto load_keys = [&](int t, int stage) {
    barrier_expect(&ready[stage], kPlanes * key_plane + kKeys * 4);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      copy_bulk(key_shared + (stage * kPlanes + p) * key_plane, key_global + p * plane_bytes + int64_t(t) * key_plane,
                key_plane, &ready[stage]);
    }
    copy_bulk(shared_address(key_exponents[stage]), exponents_global + t * kKeys, kKeys * 4, &ready[stage]);
  };
  if (threadIdx.x == 0) {
    barrier_init(&query_ready, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&ready[i], 1);
      barrier_init(&free_again[i], halves * kWarpgroup);
    }
    barrier_init_fence();
    barrier_expect(&query_ready, kPlanes * query_plane);
    for (int p = 0; p < kPlanes; ++p) {
      copy_bulk(query_shared + p * query_plane,
                args.prepared.query + ((head * kPlanes + p) * s.rows_pad + row_base) * Tile::kDimsPad, query_plane,
                &query_ready);
    }
    for (int t = 0; t < min(kStages, tiles); ++t) load_keys(t, t);
  }
  for (int block = threadIdx.x / kWarpSize; block < Tile::kRows / kBlockRows; block += Tile::kThreads / kWarpSize) {
    BlockRows rows[1];
    load_rows<kBlockRows>(args, head, row_base + block * kBlockRows, lane, rows, &shared_rows[block]);
  }
  if (threadIdx.x < halves) {
    const KeyRange own = keys_of_rows<kKeys>(args, head, row_base + threadIdx.x * Tile::kGroupRows, Tile::kGroupRows,
                                             keys.first, keys.last);
    half_tiles[threadIdx.x] = make_int2((own.first - keys.first) / kKeys, (own.last - keys.first) / kKeys);
  }
  for (int r = threadIdx.x; r < Tile::kRows; r += Tile::kThreads) {
    small_max[r] = kNone;
    if constexpr (GIVEN) given_max[r] = given_rowmax(args, head * s.rows_pad + row_base + r);
  }
  __syncthreads();
  barrier_wait(&query_ready, 0);

  // From the tile whose last unit was just issued, back to one that no warpgroup should still be reading: its stage is
  // filled again without a wait.
  const int lag = min(kStages - 1, (Tile::kGroups + halves - 1) / halves + (Tile::kInTurn ? 0 : 1));
  constexpr int kBlocks = kKeys / kBlockKeys;
  if (Tile::kInTurn && group == Tile::kGroups - 1) named_barrier_arrive(1, 2 * kWarpgroup);
#pragma unroll 1
  for (int unit = group; unit < units; unit += Tile::kGroups) {
    const int t = halves == 2 ? unit >> 1 : unit, half = uniform(halves == 2 ? unit & 1 : 0);
    const int stage = uniform(t % kStages);
    const int block_row = half * (Tile::kGroupRows / kBlockRows) + warp;
    const WarpRows& warp_rows = shared_rows[block_row];
    Operands o;
    o.a = operand(query_shared + half * Tile::kGroupRows * Tile::kDimsPad, 8 * Tile::kDimsPad);
    o.b = operand(key_shared + stage * kPlanes * key_plane, 8 * Tile::kDimsPad);
    o.a_plane = query_plane >> 4;
    o.b_plane = key_plane >> 4;
    barrier_wait(&ready[stage], (t / kStages) & 1);

    int32_t acc[Groups<kPlanes, kWide>::kCount][8][4];
    Block block;
    const auto look_at_block = [&] {
      const int first = first_block(args.distances, (tile - args.first_tile) * s.tile_blocks + block_row, tile_first);
      block = block_at<kBlocks>(args.distances, first, keys.first + t * kKeys, key_exponents[stage], warp_rows, lane);
    };
    const auto after_issue = [&] {
      if (Tile::kInTurn && unit + 1 < units)
        named_barrier_arrive(1 + (group + 1 == Tile::kGroups ? 0 : group + 1), 2 * kWarpgroup);
      const int done = t - lag;
      if (half == halves - 1 && threadIdx.x % kWarpgroup == 0 && done >= 0 && done + kStages < tiles) {
        barrier_wait(&free_again[done % kStages], (done / kStages) & 1);
        load_keys(done + kStages, done % kStages);
      }
      __syncwarp();
    };
    if (Tile::kInTurn) named_barrier_wait(1 + group, 2 * kWarpgroup);
    const int2 attended = half_tiles[half];
    if (t < attended.x || t >= attended.y) {  // at an edge of a mask: nobody reads the distances
      after_issue();
      barrier_arrive(&free_again[stage]);
      continue;
    }
    dot_tile<kPlanes, kWide, Tile::kSteps>(acc, o, look_at_block, after_issue);
    if (row_base + block_row * kBlockRows < s.rows) {  // padding rows have no block
      const int row = block_row * kBlockRows + lane / 4;
      const BlockRows rows{{warp_rows.exponent[lane / 4], warp_rows.exponent[lane / 4 + 8]}, 0};
      RowMaxima row_max{{kNoScore, kNoScore}, {kNone, kNone}};
      if constexpr (GIVEN) row_max.any[0] = given_max[row], row_max.any[1] = given_max[row + 8];
      finish_block<kPlanes, kWide, GIVEN, false, kBlocks>([&](int g, int n, int i) { return acc[g][n][i]; }, warp_rows,
                                                          rows, block, lane, row_max);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        publish_rowmax<GIVEN>(args.prepared.rowmax + warp_rows.first + lane / 4 + 8 * h, row_max.any[h]);
      // The maxima of ordinary blocks are those of the quad: a lane for each row writes them.
      const int small = lane & 1 ? row_max.small[1] : row_max.small[0];
      if (!GIVEN && lane % 4 < 2) atomicMax(&small_max[row + 8 * (lane & 1)], small);
    }
    barrier_arrive(&free_again[stage]);  // after the exponents were read
  }
  if constexpr (!GIVEN) {
    __syncthreads();
    for (int r = threadIdx.x; r < Tile::kRows && row_base + r < s.rows; r += Tile::kThreads) {
      if (small_max[r] != kNone)
        publish_rowmax<GIVEN>(args.prepared.rowmax + head * s.rows_pad + row_base + r, small_max[r]);
    }
  }
#endif
}

}  // namespace det_attn::cuda
