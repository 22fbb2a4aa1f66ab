// The scores kernel on wgmma for `highest`: 3 byte planes an operand.
#include "launch_scores_wgmma.cuh"

namespace det_attn::cuda {

void launch_scores_wgmma_highest(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  launch_scores_wgmma_planes<3>(ctx, args, tiles, given);
}

}  // namespace det_attn::cuda
