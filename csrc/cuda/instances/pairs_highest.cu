// The pairs kernel on mma.sync for `highest`: 3 byte planes an operand.
#include "launch_pairs.cuh"

namespace det_attn::cuda {

void launch_pairs_highest(const Context& ctx, const PairsArgs& args) { launch_pairs_planes<3>(ctx, args); }

}  // namespace det_attn::cuda
