// Launch of the scores kernel: picks the tile that the card's shared memory holds.
#pragma once

#include "../scores_mma.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile, bool WIDE, bool GIVEN, bool MODIFIED>
void launch_scores_tile(const Context& ctx, const ScoresArgs& args, int64_t tiles) {
  auto kernel = scores_kernel<Tile, WIDE, GIVEN, MODIFIED>;
  const int bytes = Tile::shared_bytes(args.shape.dims_pad);
  allow_shared(kernel, bytes);
  const dim3 grid(grid_of(tiles * (kRowPad / Tile::kRows)),
                  static_cast<unsigned>(ceil_div(args.shape.span, args.slab_keys)));
  kernel<<<grid, Tile::kThreads, bytes, stream_of(ctx)>>>(args);
  check_launch("scores_kernel");
}

template <class Tile, bool MODIFIED>
void launch_scores_as(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  // 128 dims are as many as two digit positions of three planes can share an int32 in; see Groups.
  constexpr bool kCanBeWide = Tile::kPlanes == 3;
  if (kCanBeWide && args.shape.dims_pad > 128) {
    if (given)
      launch_scores_tile<Tile, kCanBeWide, true, MODIFIED>(ctx, args, tiles);
    else
      launch_scores_tile<Tile, kCanBeWide, false, MODIFIED>(ctx, args, tiles);
  } else {
    if (given)
      launch_scores_tile<Tile, false, true, MODIFIED>(ctx, args, tiles);
    else
      launch_scores_tile<Tile, false, false, MODIFIED>(ctx, args, tiles);
  }
}

// The wide tile reuses each key tile for 128 rows; the small one fits 99 KB parts (sm_86, sm_89, sm_120) at any
// head_dim.
template <int PLANES, bool MODIFIED>
void launch_scores_planes(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  using Large = ScoresTile<PLANES, 128, 64, 2>;
  using Small = ScoresTile<PLANES, 64, 32, 1>;
  if (Large::shared_bytes(args.shape.dims_pad) <= shared_limit(ctx.device)) {
    launch_scores_as<Large, MODIFIED>(ctx, args, tiles, given);
  } else {
    launch_scores_as<Small, MODIFIED>(ctx, args, tiles, given);
  }
}

}  // namespace det_attn::cuda
