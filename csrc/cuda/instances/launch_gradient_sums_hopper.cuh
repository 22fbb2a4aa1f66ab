// Launch of the gradient sums kernel of sm_90a: a 64-dim tile for narrow heads, a 128-dim tile otherwise.
#pragma once

#include "../gradient_sums_hopper.cuh"
#include "launch_gradient_sums.cuh"

namespace det_attn::cuda {

template <int PLANES>
void launch_gradient_sums_hopper_planes(const Context& ctx, const GradientSumsArgs& args) {
  if (args.shape.value_dims_pad % 128 == 0) {
    using Tile = GradientHopperTile<PLANES, 128>;
    launch_gradient_sums_kernel<Tile>(ctx, gradient_sums_hopper_kernel<Tile>, args);
  } else {
    using Tile = GradientHopperTile<PLANES, 64>;
    launch_gradient_sums_kernel<Tile>(ctx, gradient_sums_hopper_kernel<Tile>, args);
  }
}

}  // namespace det_attn::cuda
