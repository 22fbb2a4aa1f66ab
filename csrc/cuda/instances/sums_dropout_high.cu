// The sums kernel on mma.sync under dropout, for `high`: 2 byte planes an operand.
#include "launch_sums.cuh"

namespace det_attn::cuda {

void launch_sums_dropout_high(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  launch_sums_planes<2, true>(ctx, args, tiles);
}

}  // namespace det_attn::cuda
