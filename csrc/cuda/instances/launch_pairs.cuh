// Launch of the pairs kernel: picks the tile that the card's shared memory holds.
#pragma once

#include "../pairs_mma.cuh"
#include "../tensor_core.cuh"

namespace det_attn::cuda {

inline int capability(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

template <class Tile, bool WIDE>
bool launch_pairs_tile(const Context& ctx, const PairsArgs& args) {
  const int bytes = Tile::shared_bytes(args.shape.dims_pad);
  auto kernel = pairs_kernel<Tile, WIDE>;
  // Beside it the kernel's own arrays, at most 8 KB.
  if (bytes + 8192 > shared_limit(ctx.device)) return false;
  allow_shared(kernel, bytes);
  const dim3 grid(grid_of(args.strip.heads * (args.strip.rows / Tile::kRows)),
                  static_cast<unsigned>(ceil_div(args.shape.keys_pad, kPairSlab)));
  kernel<<<grid, Tile::kThreads, bytes, stream_of(ctx)>>>(args);
  check_launch("pairs_kernel");
  return true;
}

// The large tiles keep their rows and use each key tile for all of them; the small one fits 99 KB parts (sm_86, sm_89,
// sm_120) at any head_dim, and the second of the large ones sm_80. 128 dims are as many as two digit positions of three
// planes can share an int32 in: see Groups.
template <int PLANES>
void launch_pairs_planes(const Context& ctx, const PairsArgs& args) {
  using Small = PairsTile<PLANES, 64, 32, 1, false, true>;
  if constexpr (PLANES == 2) {
    if (launch_pairs_tile<PairsTile<PLANES, 128, 64, 2, true, false>, false>(ctx, args)) return;
    launch_pairs_tile<Small, false>(ctx, args);
  } else if (args.shape.dims_pad > 128) {
    if (launch_pairs_tile<PairsTile<PLANES, 64, 64, 2, true, true>, true>(ctx, args)) return;
    launch_pairs_tile<Small, true>(ctx, args);
  } else {
    if (launch_pairs_tile<PairsTile<PLANES, 128, 64, 2, true, true>, false>(ctx, args)) return;
    if (capability(ctx.device) < 90 && launch_pairs_tile<PairsTile<PLANES, 128, 64, 2, true, false>, false>(ctx, args))
      return;
    launch_pairs_tile<Small, false>(ctx, args);
  }
}

// The slopes take shared memory, too: a tile of fewer rows is next where the large one does not fit. The kernels of
// wide rows serve narrow ones as well.
template <int PLANES>
void launch_pairs_modified(const Context& ctx, const PairsArgs& args) {
  constexpr bool kWide = PLANES == 3;
  if ((!kWide || args.shape.dims_pad <= 128) &&
      launch_pairs_tile<PairsTile<PLANES, 128, 64, 2, true, true, true>, false>(ctx, args))
    return;
  if (launch_pairs_tile<PairsTile<PLANES, 64, 64, 1, true, true, true>, kWide>(ctx, args)) return;
  launch_pairs_tile<PairsTile<PLANES, 64, 32, 1, false, true, true>, kWide>(ctx, args);
}

}  // namespace det_attn::cuda
