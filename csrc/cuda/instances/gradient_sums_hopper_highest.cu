// The gradient sums kernel of sm_90a for `highest`: 3 byte planes an operand.
#include "launch_gradient_sums_hopper.cuh"

namespace det_attn::cuda {

void launch_gradient_sums_hopper_highest(const Context& ctx, const GradientSumsArgs& args) {
  launch_gradient_sums_hopper_planes<3>(ctx, args);
}

}  // namespace det_attn::cuda
