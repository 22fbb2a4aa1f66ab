// The sums kernel of sm_90a for `highest`: 3 byte planes a value.
#include "launch_sums_hopper.cuh"

namespace det_attn::cuda {

void launch_sums_hopper_highest(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  launch_sums_hopper_planes<3>(ctx, args, tiles);
}

}  // namespace det_attn::cuda
