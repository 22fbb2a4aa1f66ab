// Launch of the sums kernel: a 64-dim tile for narrow heads, a 128-dim tile otherwise.
#pragma once

#include "../sums_mma.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile, bool DROPOUT>
void launch_sums_tile(const Context& ctx, SumsArgs args, int64_t tiles) {
  auto kernel = sums_kernel<Tile, DROPOUT>;
  allow_shared(kernel, Tile::kSharedBytes);
  args.dim_blocks = args.shape.value_dims_pad / Tile::kDims;
  args.tiles = static_cast<int>(tiles);
  const dim3 grid(grid_of(SumsWork<Tile>::pieces(args)), static_cast<unsigned>(args.splits));
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream_of(ctx)>>>(args);
  check_launch("sums_kernel");
}

template <int PLANES, bool DROPOUT>
void launch_sums_planes(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  if (args.shape.value_dims_pad % 128 == 0) {
    launch_sums_tile<SumsTile<PLANES, 128>, DROPOUT>(ctx, args, tiles);
  } else {
    launch_sums_tile<SumsTile<PLANES, 64>, DROPOUT>(ctx, args, tiles);
  }
}

}  // namespace det_attn::cuda
