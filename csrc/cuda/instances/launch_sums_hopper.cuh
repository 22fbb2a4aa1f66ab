// Launch of the sums kernel of sm_90a: a 64-dim tile for narrow heads, a 128-dim tile otherwise.
#pragma once

#include <algorithm>

#include "../sums_hopper.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile>
void launch_sums_hopper_tile(const Context& ctx, SumsArgs args, int64_t tiles) {
  auto kernel = sums_hopper_kernel<Tile>;
  allow_shared(kernel, Tile::kSharedBytes);
  args.dim_blocks = args.shape.value_dims_pad / Tile::kDims;
  args.tiles = static_cast<int>(tiles);
  const int64_t pieces = int64_t(SumsWork<Tile>::pieces(args)) * args.splits;
  const unsigned grid = std::min(grid_of(pieces), static_cast<unsigned>(processors(ctx.device)));
  check(cudaMemsetAsync(args.ticket, 0, sizeof(int), stream_of(ctx)), "cudaMemsetAsync");
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream_of(ctx)>>>(args);
  check_launch("sums_hopper_kernel");
}

template <int PLANES>
void launch_sums_hopper_planes(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  if (args.shape.value_dims_pad % 128 == 0) {
    launch_sums_hopper_tile<SumsHopperTile<PLANES, 128>>(ctx, args, tiles);
  } else {
    launch_sums_hopper_tile<SumsHopperTile<PLANES, 64>>(ctx, args, tiles);
  }
}

}  // namespace det_attn::cuda
