// The gradient sums kernel of sm_90a for `high`: 2 byte planes an operand.
#include "launch_gradient_sums_hopper.cuh"

namespace det_attn::cuda {

void launch_gradient_sums_hopper_high(const Context& ctx, const GradientSumsArgs& args) {
  launch_gradient_sums_hopper_planes<2>(ctx, args);
}

}  // namespace det_attn::cuda
