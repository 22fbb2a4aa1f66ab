// The pairs kernel on wgmma for `highest`: 3 byte planes an operand.
#include "launch_pairs_wgmma.cuh"

namespace det_attn::cuda {

void launch_pairs_wgmma_highest(const Context& ctx, const PairsArgs& args) { launch_pairs_wgmma_planes<3>(ctx, args); }

}  // namespace det_attn::cuda
