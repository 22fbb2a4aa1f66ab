// Launch of the wgmma scores kernel.
#pragma once

#include "../scores_wgmma.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile, bool GIVEN>
void launch_scores_wgmma_tile(const Context& ctx, const ScoresArgs& args, int64_t tiles) {
  auto kernel = scores_wgmma_kernel<Tile, GIVEN>;
  allow_shared(kernel, Tile::kSharedBytes);
  const dim3 grid(grid_of(tiles), static_cast<unsigned>(ceil_div(args.shape.span, args.slab_keys)));
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream_of(ctx)>>>(args);
  check_launch("scores_wgmma_kernel");
}

template <class Tile>
void launch_scores_wgmma_as(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  if (given)
    launch_scores_wgmma_tile<Tile, true>(ctx, args, tiles);
  else
    launch_scores_wgmma_tile<Tile, false>(ctx, args, tiles);
}

// Key tiles in flight: as many as shared memory holds beside the query planes, for one or two CTAs
// (ScoresWgmmaTile::kCtas).
template <int PLANES>
void launch_scores_wgmma_planes(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  switch (args.shape.dims_pad) {
    case 64:
      return launch_scores_wgmma_as<ScoresWgmmaTile<PLANES, 2, 4>>(ctx, args, tiles, given);
    case 128:
      return launch_scores_wgmma_as<ScoresWgmmaTile<PLANES, 4, PLANES == 3 ? 4 : 3>>(ctx, args, tiles, given);
    default:
      return launch_scores_wgmma_as<ScoresWgmmaTile<PLANES, 8, 2>>(ctx, args, tiles, given);
  }
}

}  // namespace det_attn::cuda
