// The gradient sums kernel on mma.sync for `highest`: 3 byte planes an operand.
#include "launch_gradient_sums.cuh"

namespace det_attn::cuda {

void launch_gradient_sums_highest(const Context& ctx, const GradientSumsArgs& args) {
  launch_gradient_sums_planes<3>(ctx, args);
}

}  // namespace det_attn::cuda
