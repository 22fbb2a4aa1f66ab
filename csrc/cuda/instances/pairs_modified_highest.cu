// The pairs kernel on mma.sync with modifiers, for `highest`: 3 byte planes an operand.
#include "launch_pairs.cuh"

namespace det_attn::cuda {

void launch_pairs_modified_highest(const Context& ctx, const PairsArgs& args) { launch_pairs_modified<3>(ctx, args); }

}  // namespace det_attn::cuda
