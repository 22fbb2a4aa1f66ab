// The scores kernel on mma.sync with modifiers, for `highest`: 3 byte planes an operand.
#include "launch_scores.cuh"

namespace det_attn::cuda {

void launch_scores_modified_highest(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  launch_scores_planes<3, true>(ctx, args, tiles, given);
}

}  // namespace det_attn::cuda
