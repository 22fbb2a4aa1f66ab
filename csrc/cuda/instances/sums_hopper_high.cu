// The sums kernel of sm_90a for `high`: 2 byte planes a value.
#include "launch_sums_hopper.cuh"

namespace det_attn::cuda {

void launch_sums_hopper_high(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  launch_sums_hopper_planes<2>(ctx, args, tiles);
}

}  // namespace det_attn::cuda
