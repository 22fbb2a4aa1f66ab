// The gradient sums kernel on mma.sync for `high`: 2 byte planes an operand.
#include "launch_gradient_sums.cuh"

namespace det_attn::cuda {

void launch_gradient_sums_high(const Context& ctx, const GradientSumsArgs& args) {
  launch_gradient_sums_planes<2>(ctx, args);
}

}  // namespace det_attn::cuda
