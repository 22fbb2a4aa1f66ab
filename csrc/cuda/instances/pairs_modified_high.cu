// The pairs kernel on mma.sync with modifiers, for `high`: 2 byte planes an operand.
#include "launch_pairs.cuh"

namespace det_attn::cuda {

void launch_pairs_modified_high(const Context& ctx, const PairsArgs& args) { launch_pairs_modified<2>(ctx, args); }

}  // namespace det_attn::cuda
