// Pairs kernel on wgmma (sm_90a): the same stage, arguments and results as pairs_mma.cuh, for rows of up to 128 dims
// and no modifiers. A CTA keeps the planes of 128 rows of Q and dO in shared memory and walks a slab of keys; planes of
// K and of V are brought in by turns. Two warpgroups take units of 64 rows and a key tile: while one has the tensor
// cores, the other turns dots into p and ds.
#pragma once

#include "pairs.cuh"
#include "scores_wgmma.cuh"

namespace det_attn::cuda {

// STEPS k-steps of 32 dims.
template <int PLANES, int STEPS>
struct PairsWgmmaTile {
  static constexpr int kPlanes = PLANES, kSteps = STEPS, kDimsPad = STEPS * kDimPad;
  static constexpr int kRows = 128, kKeys = 64, kGroups = 2, kGroupRows = 64, kThreads = kGroups * kWarpgroup;
  static constexpr int kStages = 4;  // of K or V of a key tile: two tiles, which is what a CTA of 64 rows has at work
  static constexpr int kRowBytes = PLANES * kRows * kDimsPad, kKeyBytes = PLANES * kKeys * kDimsPad;
  static constexpr int kSharedBytes = 2 * kRowBytes + kStages * kKeyBytes;
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) pairs_wgmma_kernel(const __grid_constant__ PairsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace scores_wgmma;
  constexpr int kPlanes = Tile::kPlanes, kStages = Tile::kStages, kKeys = Tile::kKeys, kDimsPad = Tile::kDimsPad;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) RowState rows[Tile::kRows];
  __shared__ __align__(16) int2 key_exponents[kStages][kKeys];  // of a tile: read longer than its stages are
  __shared__ __align__(8) uint64_t rows_ready, ready[kStages], free_again[kStages];

  const Shape& s = args.shape;
  const PairsWork work = pairs_work<Tile::kRows>(args, blockIdx.x, blockIdx.y, kPairSlab);
  if (work.begin >= work.end) return;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize,
            group = uniform(threadIdx.x / kWarpgroup);
  // A unit is 64 rows and a key tile; the warpgroups take them by turns.
  const int tiles = uniform((work.end - work.begin) / kKeys), halves = s.rows - work.row > Tile::kGroupRows ? 2 : 1,
            units = tiles * halves, half = halves == 2 ? group : 0;

  // ---- copies: rows once, key tiles two ahead ----
  const uint32_t row_shared = shared_address(shared), key_shared = row_shared + 2 * Tile::kRowBytes;
  constexpr int kRowPlane = Tile::kRows * kDimsPad, kKeyPlane = kKeys * kDimsPad;
  // Step 2 * t has the keys of tile t, step 2 * t + 1 its values.
  const auto load_step = [&](int step) {
    const int stage = step % kStages, side = step & 1;
    const int64_t key = work.head * s.keys_pad + work.begin + step / 2 * kKeys;  // over all heads
    const uint8_t* from = (side == 0 ? args.key : args.value) +
                          (work.head * (kPlanes - 1) * s.keys_pad + key) * kDimsPad;
    barrier_expect(&ready[stage], Tile::kKeyBytes + (side == 0 ? kKeys * 8 : 0));
#pragma unroll
    for (int p = 0; p < kPlanes; ++p)
      copy_bulk(key_shared + stage * Tile::kKeyBytes + p * kKeyPlane, from + p * s.keys_pad * kDimsPad, kKeyPlane,
                &ready[stage]);
    if (side == 0)
      copy_bulk(shared_address(key_exponents[step / 2 % kStages]), args.state.key_exponents + key, kKeys * 8,
                &ready[stage]);
  };
  if (threadIdx.x == 0) {
    barrier_init(&rows_ready, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&ready[i], 1);
      barrier_init(&free_again[i], halves * kWarpgroup);
    }
    barrier_init_fence();
    barrier_expect(&rows_ready, 2 * Tile::kRowBytes + static_cast<int>(sizeof(rows)));
    const int64_t row = work.head * s.rows_pad + work.row;
    copy_bulk(shared_address(rows), args.state.rows + row, sizeof(rows), &rows_ready);
    for (int side = 0; side < 2; ++side) {
      const uint8_t* from =
          (side == 0 ? args.query : args.grad) + (work.head * (kPlanes - 1) * s.rows_pad + row) * kDimsPad;
      for (int p = 0; p < kPlanes; ++p)
        copy_bulk(row_shared + side * Tile::kRowBytes + p * kRowPlane, from + p * s.rows_pad * kDimsPad, kRowPlane,
                  &rows_ready);
    }
    for (int step = 0; step < min(kStages, 2 * tiles); ++step) load_step(step);
  }
  __syncthreads();
  barrier_wait(&rows_ready, 0);

  const int first = half * Tile::kGroupRows + warp * kBlockRows;  // of the warp's rows
  const auto place = [&](int t, int b) {
    return WarpPairs{lane,
                     work.head,
                     work.row + first,
                     work.begin + t * kKeys + b * kPairBlock,
                     rows + first,
                     key_exponents[t % kStages] + b * kPairBlock};
  };
  const PairWarp warp_rows = pair_warp(place(0, 0));
  int row_max[2] = {0, 0};
  constexpr int kBlocks = kKeys / kPairBlock;
  if (group == 1) named_barrier_arrive(1, 2 * kWarpgroup);
#pragma unroll 1
  for (int unit = group; unit < units; unit += Tile::kGroups) {
    const int t = halves == 2 ? unit >> 1 : unit;
    const bool partner = (unit | 1) < units;  // both warpgroups have a unit of this round
    const auto multiply = [&](int side, int32_t(&acc)[Groups<kPlanes, false>::kCount][8][4]) {
      const int step = 2 * t + side, stage = uniform(step % kStages);
      Operands o;
      o.a = operand(row_shared + side * Tile::kRowBytes + half * Tile::kGroupRows * kDimsPad, 8 * kDimsPad);
      o.b = operand(key_shared + stage * Tile::kKeyBytes, 8 * kDimsPad);
      o.a_plane = kRowPlane >> 4;
      o.b_plane = kKeyPlane >> 4;
      const auto after_issue = [&] {
        // The other warpgroup's turn, if it has one.
        if (group == 0 ? partner : side == 0 || unit + 1 < units)
          named_barrier_arrive(group == 0 ? 2 : 1, 2 * kWarpgroup);
        // This warpgroup has done its step before, and where there are two, the other one too.
        const int done = side == 1 ? step - 1 : step - (halves == 2 ? 1 : 3);
        if (half == halves - 1 && threadIdx.x % kWarpgroup == 0 && done >= 0 && done + kStages < 2 * tiles) {
          barrier_wait(&free_again[done % kStages], (done / kStages) & 1);
          load_step(done + kStages);
        }
        __syncwarp();
      };
      barrier_wait(&ready[stage], (step / kStages) & 1);
      if (group == 1 || side == 0 || partner) named_barrier_wait(1 + group, 2 * kWarpgroup);
      dot_tile<kPlanes, false, Tile::kSteps>(acc, o, [] {}, after_issue);
      barrier_arrive(&free_again[stage]);
    };
    float p[kBlocks][4][4];
    {
      int32_t acc[Groups<kPlanes, false>::kCount][8][4];
      multiply(0, acc);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        block_probabilities<kPlanes>([&](int g, int n, int i) { return acc[g][b * 4 + n][i]; }, warp_rows, place(t, b),
                                     p[b]);
    }
    int32_t acc[Groups<kPlanes, false>::kCount][8][4];
    multiply(1, acc);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const WarpPairs at = place(t, b);
      const bool ordinary = is_ordinary_block(warp_rows, at);
      BlockPairs x;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x.p[n][i] = p[b][n][i];
      block_terms<kPlanes>([&](int g, int n, int i) { return acc[g][b * 4 + n][i]; }, ordinary, at, x.p, x.ds);
      keep_and_raise(args, at, x, ordinary, row_max);
    }
  }
  raise_rows(args, place(0, 0), row_max);
#endif
}

}  // namespace det_attn::cuda
