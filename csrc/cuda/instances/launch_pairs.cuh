// Launch of the pairs kernel: picks the tile that the card's shared memory holds.
#pragma once

#include "../pairs_mma.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

template <class Tile, bool WIDE>
bool launch_pairs_tile(const Context& ctx, const PairsArgs& args) {
  const int bytes = Tile::shared_bytes(args.shape.dims_pad);
  auto kernel = pairs_kernel<Tile, WIDE>;
  if (bytes + static_cast<int>(sizeof(PairsShared<Tile>)) > shared_limit(ctx.device)) return false;
  allow_shared(kernel, bytes);
  const dim3 grid(grid_of(args.strip.heads * (args.strip.rows / Tile::kRows)),
                  static_cast<unsigned>(ceil_div(args.shape.keys_pad, kPairSlab)));
  kernel<<<grid, Tile::kThreads, bytes, stream_of(ctx)>>>(args);
  check_launch("pairs_kernel");
  return true;
}

// The large tiles keep their rows and use each key tile for all of them; the small one fits 99 KB parts (sm_86, sm_89,
// sm_120) at any head_dim. 128 dims are as many as two digit positions of three planes can share an int32 in: see
// Groups.
template <int PLANES>
void launch_pairs_planes(const Context& ctx, const PairsArgs& args) {
  using Small = PairsTile<PLANES, 64, 32, 1, false, 1>;
  const int dims_pad = args.shape.dims_pad;
  if (dims_pad > 128) {
    constexpr bool kWide = PLANES == 3;
    if (!launch_pairs_tile<PairsTile<PLANES, kWide ? 64 : 128, 64, 2, true, 1>, kWide>(ctx, args))
      launch_pairs_tile<Small, kWide>(ctx, args);
    return;
  }
  if (dims_pad == 128 && launch_pairs_tile<PairsTile<PLANES, 64, 64, 2, true, 2, 128>, false>(ctx, args)) return;
  if (dims_pad == 64 && launch_pairs_tile<PairsTile<PLANES, 64, 64, 2, true, 2, 64>, false>(ctx, args)) return;
  if (launch_pairs_tile<PairsTile<PLANES, 64, 64, 2, true, 2>, false>(ctx, args)) return;
  launch_pairs_tile<Small, false>(ctx, args);
}

// p and slopes take shared memory, too: a tile of fewer rows is next where the large one does not fit. The kernels of
// wide rows serve narrow ones as well.
template <int PLANES>
void launch_pairs_modified(const Context& ctx, const PairsArgs& args) {
  constexpr bool kWide = PLANES == 3;
  if ((!kWide || args.shape.dims_pad <= 128) &&
      launch_pairs_tile<PairsTile<PLANES, 128, 64, 2, true, 1, 0, true>, false>(ctx, args))
    return;
  if (launch_pairs_tile<PairsTile<PLANES, 64, 64, 1, true, 1, 0, true>, kWide>(ctx, args)) return;
  launch_pairs_tile<PairsTile<PLANES, 64, 32, 1, false, 1, 0, true>, kWide>(ctx, args);
}

}  // namespace det_attn::cuda
