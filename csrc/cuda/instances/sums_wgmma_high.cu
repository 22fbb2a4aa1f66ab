// The sums kernel on wgmma for `high`: 2 byte planes a value.
#include "launch_sums_wgmma.cuh"

namespace det_attn::cuda {

void launch_sums_wgmma_high(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  launch_sums_wgmma_planes<2>(ctx, args, tiles);
}

}  // namespace det_attn::cuda
