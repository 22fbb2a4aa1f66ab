// Sums kernel for few query rows: score distances, row maxima, and values as the caller has them -> NUM and DEN of a
// part of the keys, added to the long accumulators (docs/contract.md sections 1, 4, 5). A CTA has one block of query
// rows and all dims. Step by step its warps turn 128 value rows into transposed byte planes and form the weights, then
// multiply, each for its share of the dims; CTAs of one multiprocessor fill each other's waits.
#pragma once

#include "direct.cuh"
#include "mma.cuh"

namespace det_attn::cuda {

template <int V_PLANES, int DIMS>
struct SumsDirectTile : SumsDigits<V_PLANES> {
  using SumsDigits<V_PLANES>::kWeightPlanes;
  static constexpr int kDims = DIMS;
  static constexpr int kWarps = 8, kThreads = kWarps * kWarpSize, kMultiplyThreads = kThreads;
  static constexpr int kRows = kBlockRows, kKeys = 128, kWarpKeys = kKeys / kWarps;  // a step's; quantised by a warp
  static constexpr int kBlocks = DIMS / 8 / kWarps;                                  // 8-dim blocks a warp multiplies
  static constexpr int kLaneDims = DIMS / kWarpSize;                                 // of a value row being quantised
  static constexpr int kWeightPlaneBytes = kRows * kKeys;
  // Core matrices of 8 dims; 16 bytes apart from a multiple of 128, so that a warp's stores spread over the banks.
  static constexpr int kDimBlockBytes = 8 * kKeys + 16, kValuePlaneBytes = DIMS / 8 * kDimBlockBytes;
  static constexpr int kWarpRawBytes = kWarpKeys * DIMS * 2;
  static constexpr int kSharedBytes =
      kWeightPlanes * kWeightPlaneBytes + V_PLANES * kValuePlaneBytes + kWarps * kWarpRawBytes;
  static_assert(kFlushKeys % kKeys == 0 && kKeyPad % kKeys == 0 && kWarpKeys == 16, "whole steps, whole 16-key groups");
};

namespace sums_direct {


// Brings sixteen value rows, a warp's share of a step, to its part of shared memory as they are.
template <class Tile>
__device__ __forceinline__ void load_values(uint32_t raw, const uint16_t* from, int64_t stride_row, int key, int keys,
                                            int dims, int lane) {
  constexpr int kPieces = Tile::kDims / 8;  // of a row
#pragma unroll
  for (int i = 0; i < Tile::kWarpKeys * kPieces / kWarpSize; ++i) {
    const int piece = i * kWarpSize + lane, row = piece / kPieces, d = piece % kPieces * 8;
    const bool real = key + row < keys && d < dims;
    copy_async16_or_zero(raw + piece * 16, real ? from + (key + row) * stride_row + d : from, real);
  }
  commit_copies();
}

// Their integers as transposed byte planes, their exponents, and whether any element is not finite (one bit a key).
template <class Tile, bool BF16>
__device__ __forceinline__ unsigned quantise_values(const uint8_t* raw, uint8_t* planes, int* exponents, int warp_key,
                                                    int lane) {
  constexpr int kOperandBits = Tile::kValuePlanes * 8, kWords = Tile::kLaneDims / 2;
  using Pair = Packed<BF16>;
  unsigned special = 0;
  int own_exponent = 0;
#pragma unroll 1  // the sums leave few registers
  for (int word = 0; word < 2; ++word) {  // two quads: eight keys that lie side by side in value_slot() order
    uint2 out[Tile::kLaneDims][Tile::kValuePlanes];
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      uint32_t q[Tile::kLaneDims][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = word * 4 + quad * 2 + value_key(i);
        uint32_t w[kWords];  // a lane has the same few dims of each key
        const uint8_t* at = raw + key * (Tile::kDims * 2) + lane * (kWords * 4);
        if constexpr (kWords == 2) {
          const uint2 both = *reinterpret_cast<const uint2*>(at);
          w[0] = both.x, w[1] = both.y;
        } else {
          w[0] = *reinterpret_cast<const uint32_t*>(at);
        }
        const auto largest_of = [&] {
          return __reduce_max_sync(kFullWarp, Pair::larger(Pair::max_magnitude(w[0], w[kWords - 1])));
        };
        int largest = largest_of();
        if (largest >= Pair::kInfinity) {  // section 7: the finite elements count
          special |= 1u << key;
#pragma unroll
          for (int c = 0; c < kWords; ++c) {
            if ((w[c] & 0x7fffu) >= Pair::kInfinity) w[c] &= 0xffff0000u;
            if ((w[c] >> 16 & 0x7fffu) >= Pair::kInfinity) w[c] &= 0xffffu;
          }
          largest = largest_of();
        }
        const int e = exponent_of_largest_16<BF16>(largest);
        if (lane == key) own_exponent = largest == 0 ? kZeroRow : e;
        const RowScale scale(e, kOperandBits);
#pragma unroll
        for (int c = 0; c < kWords; ++c) {
          q[2 * c][i] = static_cast<uint32_t>(scale.round(Pair::low(w[c])));
          q[2 * c + 1][i] = static_cast<uint32_t>(scale.round(Pair::high(w[c])));
        }
      }
#pragma unroll
      for (int d = 0; d < Tile::kLaneDims; ++d) {
        uint32_t bytes[4];
        byte_planes(q[d], bytes);
#pragma unroll
        for (int p = 0; p < Tile::kValuePlanes; ++p) (quad == 0 ? out[d][p].x : out[d][p].y) = bytes[p];
      }
    }
#pragma unroll
    for (int d = 0; d < Tile::kLaneDims; ++d) {
      const int dim = lane * Tile::kLaneDims + d;
#pragma unroll
      for (int p = 0; p < Tile::kValuePlanes; ++p)
        *reinterpret_cast<uint2*>(planes + p * Tile::kValuePlaneBytes + dim / 8 * Tile::kDimBlockBytes +
                                  warp_key / 16 * 128 + dim % 8 * 16 + word * 8) = out[d][p];
    }
  }
  if (lane < 16) exponents[warp_key + lane] = own_exponent;
  return special;
}

// The distances a lane turns into weights in one step: 8 rows x 32 keys a warp.
struct Fetched {
  uint4 distance[2];
  int64_t below;

  __device__ __forceinline__ void fetch(const Distances& d, int64_t block, int half, int lane) {
    below = d.block_max[block * kBlockRows + half * 8 + lane / 4];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      distance[pair] = __ldcs(d.distance + (block * 4 + half + pair * 2) * kWarpSize + lane);
  }
};

// Their weights, shifted by how far the keys' exponents lie above `base`, as byte planes; keys further off are left
// out. Returns which planes hold anything, and adds up DEN.
template <class Tile>
__device__ __forceinline__ unsigned form_weights(const Fetched& fetched, int64_t rowmax, bool live, uint8_t* planes,
                                                 const int* exponents, int base, int half, int block, int lane,
                                                 uint64_t& den) {
  const uint32_t above = live ? clamp_distance(rowmax - fetched.below) : kFarDistance;
  uint32_t any_low = 0, any_high = 0;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint4& f = fetched.distance[pair];
    const uint32_t d[4] = {f.x, f.y, f.z, f.w};
    const int first = block * kBlockKeys + pair * 16 + lane % 4 * 2;  // keys first, + 1, + 8, + 9
    const int2 e01 = *reinterpret_cast<const int2*>(exponents + first),
               e23 = *reinterpret_cast<const int2*>(exponents + first + 8);
    const int e[4] = {e01.x, e01.y, e23.x, e23.y};
    uint32_t low[4], high = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t w = weight_from_distance<Tile::kWeightBits>(min(above + d[c], kFarDistance));
      den += w;
      uint32_t by = static_cast<uint32_t>(e[c]) - static_cast<uint32_t>(base);
      by = by <= kMaxWeightShift ? by : 64;
      low[c] = shift_left(w, by);
      if (Tile::kWeightPlanes == 5) high |= shift_right(w, 32 - by) << (8 * c);
      any_low |= low[c];
    }
    any_high |= high;
    uint32_t bytes[4];
    byte_planes(low, bytes);
    uint8_t* at =
        planes + plane_offset(half * 8 + lane / 4, block * kBlockKeys + pair * 16 + lane % 4 * 4, Tile::kKeys);
#pragma unroll
    for (int p = 0; p < 4; ++p) *reinterpret_cast<uint32_t*>(at + p * Tile::kWeightPlaneBytes) = bytes[p];
    if constexpr (Tile::kWeightPlanes == 5) *reinterpret_cast<uint32_t*>(at + 4 * Tile::kWeightPlaneBytes) = high;
  }
  return planes_seen(__reduce_or_sync(kFullWarp, any_low), __reduce_or_sync(kFullWarp, any_high));
}

// One step: every nonzero weight plane times every value plane, for the warp's dims.
template <class Tile>
__device__ __forceinline__ void multiply(PositionSums<Tile::kPositions, Tile::kBlocks>& sums, uint32_t a_lane,
                                         uint32_t b_lane, unsigned planes) {
  constexpr int V = Tile::kValuePlanes;
#pragma unroll Tile::kBlocks  // as far as the registers go
  for (int k = 0; k < Tile::kKeys / 32; ++k) {
    uint32_t b[V][4];  // two blocks of 8 dims, or, of one block, two matrices to spare
#pragma unroll
    for (int v = 0; v < V; ++v) load_matrices(b[v], b_lane + v * Tile::kValuePlaneBytes + k * 256);
#pragma unroll
    for (int w = 0; w < Tile::kWeightPlanes; ++w) {
      if (!(planes >> w & 1)) continue;  // every byte of this plane is 0: nothing to add
      uint32_t a[4];
      load_matrices(a, a_lane + w * Tile::kWeightPlaneBytes + k * 256);
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int n = 0; n < Tile::kBlocks; ++n) {
          if (v == V - 1) {
            mma_bytes<false, true>(sums.acc[w + v][n], a, b[v][n * 2], b[v][n * 2 + 1]);
          } else {
            mma_bytes<false, false>(sums.acc[w + v][n], a, b[v][n * 2], b[v][n * 2 + 1]);
          }
        }
    }
  }
}

// A warp's sums onto the long accumulators. Out of line: it happens every few thousand keys.
template <class Tile>
static __device__ __noinline__ void flush_sums(const SumsArgs& args,
                                               const PositionSums<Tile::kPositions, Tile::kBlocks>& sums, int64_t head,
                                               int warp, int lane, int position) {
  sums.template for_each<1>(lane, [&](int half, int d, int64_t low, int64_t high) {
    const int r = lane / 4 + 8 * half, dim = warp * Tile::kBlocks * 8 + d;
    if (r < args.shape.rows && dim < args.shape.dims)
      flush_sum(args, head * args.shape.rows + r, dim, low, high, position, false);
  });
}

}  // namespace sums_direct

template <class Tile, bool BF16>
__global__ void __launch_bounds__(Tile::kThreads, kSumsDirectCtas)
    sums_direct_kernel(const __grid_constant__ SumsArgs args) {
  using namespace sums_direct;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) int exponents[Tile::kKeys];
  __shared__ unsigned planes_of[Tile::kWarps];
  __shared__ unsigned long long den_shared[Tile::kRows];

  const Shape& s = args.shape;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t head = args.first_tile + blockIdx.x;
  const int tile_first = args.prepared.tile_first[head];
  const int64_t part = tile_first + blockIdx.y * args.split_keys;
  const KeyRange range =
      keys_of_rows<Tile::kKeys>(args, head, 0, kBlockRows, part, part + args.split_keys);
  if (range.first >= range.last) return;
  if (threadIdx.x < Tile::kRows) den_shared[threadIdx.x] = 0;
  uint8_t* weight_planes = shared;
  uint8_t* value_planes = weight_planes + Tile::kWeightPlanes * Tile::kWeightPlaneBytes;
  uint8_t* raw = value_planes + Tile::kValuePlanes * Tile::kValuePlaneBytes + warp * Tile::kWarpRawBytes;

  const int half = warp & 1, block = warp >> 1;  // the weights this warp forms
  const bool padding = half * 8 >= s.rows;       // rows that reach no output: their planes may hold anything
  const int64_t rowmax = args.rowmax(head, half * 8 + lane / 4);
  const bool live = rowmax != kRowmaxPoisoned && rowmax != kRowmaxEmpty;
  uint64_t den = 0;

  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t a_lane = shared_address(weight_planes) + (matrix & 1) * 8 * Tile::kKeys + (matrix >> 1) * 128 +
                          matrix_row * 16;
  const uint32_t b_lane = shared_address(value_planes) +
                          (warp * Tile::kBlocks + (Tile::kBlocks > 1 ? matrix >> 1 : 0)) * Tile::kDimBlockBytes +
                          (matrix & 1) * 128 + matrix_row * 16;
  PositionSums<Tile::kPositions, Tile::kBlocks> sums;
  sums.clear();
  const auto flush = [&](int base) {
    const PositionSums<Tile::kPositions, Tile::kBlocks> copy = sums;  // so that `sums` itself needs no address
    flush_sums<Tile>(args, copy, head, warp, lane, digit_position(base, args.problem.precision));
    sums.clear();
  };

  const Problem& problem = args.problem;
  const View& v = problem.v;
  const int keys = static_cast<int>(s.keys), warp_key = warp * Tile::kWarpKeys;
  const uint16_t* from = static_cast<const uint16_t*>(v.data) + head / problem.kv_heads * v.stride_batch +
                         head % problem.kv_heads * v.stride_head + problem.mask.kv_lo * v.stride_row;
  uint8_t* special_key = args.prepared.special_key + head * s.keys_pad;
  load_values<Tile>(shared_address(raw), from, v.stride_row, range.first + warp_key, keys, s.dims, lane);
  // The exponent that the sums in the registers are relative to; keys from there up to kMaxWeightShift more can join.
  int base = 0;
  int gathered = 0;  // keys in those sums
#pragma unroll 1
  for (int key = range.first; key < range.last; key += Tile::kKeys) {
    wait_copies<0>();
    __syncwarp();
    const unsigned special = quantise_values<Tile, BF16>(raw, value_planes, exponents, warp_key, lane);
    if (lane < Tile::kWarpKeys) special_key[key + warp_key + lane] = special >> lane & 1;
    if (special != 0 && lane == 0) args.prepared.value_special[head] = 1;
    __syncwarp();
    if (key + Tile::kKeys < range.last) {  // the next values travel while this step is multiplied
      load_values<Tile>(shared_address(raw), from, v.stride_row, key + Tile::kKeys + warp_key, keys, s.dims, lane);
    }
    Fetched fetched;
    if (!padding) {
      const int64_t first = blockIdx.x * args.distances.key_blocks + (key - tile_first) / kBlockKeys;
      fetched.fetch(args.distances, first + block, half, lane);
    }
    __syncthreads();
    // Every thread reaches the same decision: one pass over the step's keys, or one for each stretch of exponents.
    int least = INT32_MAX, greatest = INT32_MIN;
#pragma unroll
    for (int i = lane; i < Tile::kKeys; i += kWarpSize) {
      const int e = exponents[i];
      if (e != kZeroRow) least = min(least, e), greatest = max(greatest, e);
    }
    least = __reduce_min_sync(kFullWarp, least);
    greatest = __reduce_max_sync(kFullWarp, greatest);
    const bool none = least > greatest;  // the weights still count
    if (none) least = greatest = base;
    const int room = max(0, (kMaxWeightShift - (greatest - least)) / 2);  // below, for the steps to come
    bool joins = gathered > 0 && gathered + Tile::kKeys <= kFlushKeys && least >= base &&
                 greatest <= base + kMaxWeightShift;
    int bottom = joins ? base : max(least - room, kMinExponent);
#pragma unroll 1
    for (bool first = true;; first = joins = false, bottom += kMaxWeightShift + 1) {
      if (!joins && gathered > 0) {
        flush(base);
        gathered = 0;
      }
      base = bottom;
      uint64_t step_den = 0;
      unsigned seen = 0;
      if (!padding)
        seen = form_weights<Tile>(fetched, rowmax, live, weight_planes, exponents, base, half, block, lane, step_den);
      if (first) den += step_den;
      if (lane == 0) planes_of[warp] = seen;
      __syncthreads();
      unsigned planes = 0;
#pragma unroll
      for (int w = 0; w < Tile::kWarps; ++w) planes |= planes_of[w];
      multiply<Tile>(sums, a_lane, b_lane, planes);
      __syncthreads();  // before the planes are written again
      gathered += Tile::kKeys;
      if (greatest <= base + kMaxWeightShift) break;
    }
  }
  if (gathered > 0) flush(base);
  if (den != 0) atomicAdd(&den_shared[half * 8 + lane / 4], static_cast<unsigned long long>(den));
  __syncthreads();
  if (threadIdx.x < Tile::kRows) publish_den(args, head, threadIdx.x, den_shared[threadIdx.x]);
}

}  // namespace det_attn::cuda
