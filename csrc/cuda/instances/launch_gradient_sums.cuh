// Launch of the gradient sums kernel: a 64-dim tile for narrow heads, a 128-dim tile otherwise.
#pragma once

#include <algorithm>

#include "../gradient_sums_mma.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile, class Kernel>
void launch_gradient_sums_kernel(const Context& ctx, Kernel kernel, GradientSumsArgs args) {
  allow_shared(kernel, Tile::kSharedBytes);
  args.dim_blocks = args.shape.value_dims_pad / Tile::kDims;
  const int64_t blocks =
      args.strip.heads * (std::max(args.strip.rows, args.shape.keys_pad) / Tile::kRows) * args.dim_blocks;
  const int64_t parts =
      std::max(ceil_div(args.shape.keys, args.split_keys), ceil_div(args.strip.rows, args.split_rows));
  const dim3 grid(grid_of(blocks), static_cast<unsigned>(parts), args.job_count);
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream_of(ctx)>>>(args);
  check_launch("gradient_sums_kernel");
}

template <class Tile>
bool launch_gradient_sums_tile(const Context& ctx, const GradientSumsArgs& args) {
  if (Tile::kSharedBytes > shared_limit(ctx.device)) return false;
  launch_gradient_sums_kernel<Tile>(ctx, gradient_sums_kernel<Tile>, args);
  return true;
}

template <int PLANES>
void launch_gradient_sums_planes(const Context& ctx, const GradientSumsArgs& args) {
  if (args.shape.value_dims_pad % 128 == 0) {
    if (!launch_gradient_sums_tile<GradientTile<PLANES, 128, 2>>(ctx, args))
      launch_gradient_sums_tile<GradientTile<PLANES, 128, 1>>(ctx, args);  // 99 KB parts: sm_86, sm_89, sm_120
  } else {
    launch_gradient_sums_tile<GradientTile<PLANES, 64, 2>>(ctx, args);
  }
}

}  // namespace det_attn::cuda
