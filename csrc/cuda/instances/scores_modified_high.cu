// The scores kernel on mma.sync with modifiers, for `high`: 2 byte planes an operand.
#include "launch_scores.cuh"

namespace det_attn::cuda {

void launch_scores_modified_high(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  launch_scores_planes<2, true>(ctx, args, tiles, given);
}

}  // namespace det_attn::cuda
