// Launch of the kernels for few query rows: 64 or 128 dims, bfloat16 or float16.
#pragma once

#include "../scores_direct.cuh"
#include "../sums_direct.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile, bool BF16, bool GIVEN>
void launch_scores_direct_as(const Context& ctx, const ScoresArgs& args, int64_t tiles) {
  auto kernel = scores_direct_kernel<Tile, BF16, GIVEN>;
  allow_shared(kernel, Tile::kSharedBytes);
  const dim3 grid(grid_of(tiles), static_cast<unsigned>(ceil_div(args.shape.span, Tile::kSlab)));
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream_of(ctx)>>>(args);
  check_launch("scores_direct_kernel");
}

template <class Tile>
void launch_scores_direct_tile(const Context& ctx, const ScoresArgs& args, int64_t tiles,
                               bool given) {
  const bool bf16 = args.problem.k.dtype == DType::kBFloat16;
  if (given) {
    (bf16 ? launch_scores_direct_as<Tile, true, true> : launch_scores_direct_as<Tile, false, true>)(ctx, args, tiles);
  } else {
    (bf16 ? launch_scores_direct_as<Tile, true, false> : launch_scores_direct_as<Tile, false, false>)(ctx, args, tiles);
  }
}

template <int PLANES>
void launch_scores_direct_planes(const Context& ctx, const ScoresArgs& args, int64_t tiles,
                                 bool given) {
  if (args.shape.dims_pad == 64) {
    launch_scores_direct_tile<ScoresDirectTile<PLANES, 64>>(ctx, args, tiles, given);
  } else {
    launch_scores_direct_tile<ScoresDirectTile<PLANES, 128>>(ctx, args, tiles, given);
  }
}

template <class Tile, bool BF16>
void launch_sums_direct_as(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  auto kernel = sums_direct_kernel<Tile, BF16>;
  allow_shared(kernel, Tile::kSharedBytes);
  kernel<<<dim3(grid_of(tiles), static_cast<unsigned>(args.splits)), Tile::kThreads, Tile::kSharedBytes,
           stream_of(ctx)>>>(args);
  check_launch("sums_direct_kernel");
}

template <int PLANES>
void launch_sums_direct_planes(const Context& ctx, const SumsArgs& args, int64_t tiles) {
  const bool bf16 = args.problem.v.dtype == DType::kBFloat16;
  if (args.shape.value_dims_pad == 64) {
    using Tile = SumsDirectTile<PLANES, 64>;
    (bf16 ? launch_sums_direct_as<Tile, true> : launch_sums_direct_as<Tile, false>)(ctx, args, tiles);
  } else {
    using Tile = SumsDirectTile<PLANES, 128>;
    (bf16 ? launch_sums_direct_as<Tile, true> : launch_sums_direct_as<Tile, false>)(ctx, args, tiles);
  }
}

}  // namespace det_attn::cuda
