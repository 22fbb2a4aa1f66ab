// The scores kernel on mma.sync for `highest`: 3 byte planes an operand.
#include "launch_scores.cuh"

namespace det_attn::cuda {

void launch_scores_highest(const Context& ctx, const ScoresArgs& args, int64_t tiles, bool given) {
  launch_scores_planes<3, false>(ctx, args, tiles, given);
}

}  // namespace det_attn::cuda
