// The pairs kernel on wgmma for `high`: 2 byte planes an operand.
#include "launch_pairs_wgmma.cuh"

namespace det_attn::cuda {

void launch_pairs_wgmma_high(const Context& ctx, const PairsArgs& args) { launch_pairs_wgmma_planes<2>(ctx, args); }

}  // namespace det_attn::cuda
