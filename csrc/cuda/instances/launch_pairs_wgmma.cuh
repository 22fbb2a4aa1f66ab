// Launch of the wgmma pairs kernel, for the padded dims that it is compiled for: 64, 96 and 128.
#pragma once

#include "../pairs_wgmma.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile>
void launch_pairs_wgmma_tile(const Context& ctx, const PairsArgs& args) {
  auto kernel = pairs_wgmma_kernel<Tile>;
  allow_shared(kernel, Tile::kSharedBytes);
  const dim3 grid(grid_of(args.strip.heads * (args.strip.rows / Tile::kRows)),
                  static_cast<unsigned>(ceil_div(args.shape.keys_pad, kPairSlab)));
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream_of(ctx)>>>(args);
  check_launch("pairs_wgmma_kernel");
}

template <int PLANES>
void launch_pairs_wgmma_planes(const Context& ctx, const PairsArgs& args) {
  switch (args.shape.dims_pad) {
    case 64:
      return launch_pairs_wgmma_tile<PairsWgmmaTile<PLANES, 2>>(ctx, args);
    case 96:
      return launch_pairs_wgmma_tile<PairsWgmmaTile<PLANES, 3>>(ctx, args);
    default:
      return launch_pairs_wgmma_tile<PairsWgmmaTile<PLANES, 4>>(ctx, args);
  }
}

}  // namespace det_attn::cuda
