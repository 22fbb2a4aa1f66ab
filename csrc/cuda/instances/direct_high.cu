// The kernels for few query rows for `high`: 2 byte planes an operand.
#include "launch_direct.cuh"

namespace det_attn::cuda {

void launch_scores_direct_high(const Context& ctx, const ScoresArgs& args, int64_t tiles,
                               bool given) {
  launch_scores_direct_planes<2>(ctx, args, tiles, given);
}

void launch_sums_direct_high(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  launch_sums_direct_planes<2>(ctx, args, tiles);
}

}  // namespace det_attn::cuda
