// Gradient sums, the part every tensor-core path shares: which part of the sums a CTA has, the rounding of p and ds to
// terms, and what becomes of the accumulators (docs/contract.md section 8).
#pragma once

#include "common.cuh"
#include "gradients.cuh"

namespace det_attn::cuda {

// ---- the work ----

// Which part of the sums a CTA has.
struct GradientWork {
  int64_t head;
  int row;  // the first of its rows: query rows (of_query) or keys; 2^31 of either fit no memory
  int inner_begin, inner_end;
  int dim_block;
};

// The CTA's part; inner_begin >= inner_end where there is nothing to do.
template <class Tile>
__device__ __forceinline__ GradientWork gradient_work(const GradientSumsArgs& args, const SumJob& job) {
  const Shape& s = args.shape;
  const Strip& strip = args.strip;
  GradientWork w;
  w.dim_block = blockIdx.x % args.dim_blocks;
  const int64_t tiles = (job.of_query ? strip.rows : s.keys_pad) / Tile::kRows, tile = blockIdx.x / args.dim_blocks;
  w.inner_begin = w.inner_end = 0;
  if (tile >= tiles * strip.heads) return w;
  w.head = strip.head + tile / tiles;
  if (job.of_query) {  // the longest rows of a causal call first
    w.row = static_cast<int>(strip.row + (tiles - 1 - tile % tiles) * Tile::kRows);
    int begin = INT32_MAX, end = 0;
    for (int i = 0; i < Tile::kRows / 32; ++i) {
      const int2 range = args.state.range[(w.head * s.rows_pad + w.row) / 32 + i];
      begin = min(begin, range.x), end = max(end, range.y);
    }
    const int part = static_cast<int>(blockIdx.y * args.split_keys);
    w.inner_begin = max(begin / kPairStep * kPairStep, part);
    w.inner_end = static_cast<int>(min(static_cast<int64_t>(end), part + args.split_keys));
  } else {
    w.row = static_cast<int>(tile % tiles * Tile::kRows);
    const int64_t part = strip.row + blockIdx.y * args.split_rows;
    w.inner_begin = static_cast<int>(min(part, s.rows));
    w.inner_end = static_cast<int>(min(min(strip.row + strip.rows, s.rows), part + args.split_rows));
  }
  return w;
}

// Keys that some of the 64 query rows at `row` attend, whole steps: there pairs were kept.
__device__ __forceinline__ int2 kept_keys(const GradientSumsArgs& args, const GradientWork& work, int row) {
  const int64_t at = (work.head * args.shape.rows_pad + row / kPairStep * kPairStep) / 32;
  const int4 two = *reinterpret_cast<const int4*>(args.state.range + at);
  const int begin = min(two.x, two.z), end = max(two.y, two.w);
  return make_int2(begin / kPairStep * kPairStep, (end + kPairStep - 1) / kPairStep * kPairStep);
}

// Lists the steps of the CTA's part that have pairs, in order, and returns their number. All threads call it.
template <class Tile, bool OF_QUERY>
__device__ __forceinline__ int list_steps(const GradientSumsArgs& args, const GradientWork& work, int* steps) {
  static_assert(kMostInnerRows / Tile::kStep <= Tile::kMostSteps && Tile::kMostSteps <= Tile::kThreads, "one each");
  constexpr int kWarps = Tile::kThreads / kWarpSize;
  __shared__ int counts[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int inner = work.inner_begin + threadIdx.x * Tile::kStep;
  bool active = inner < work.inner_end;
  if (!OF_QUERY && active) {  // of dQ, the part is cut to what its rows attend
    const int2 keys = kept_keys(args, work, inner);
    active = work.row < keys.y && work.row + Tile::kRows > keys.x;
  }
  const unsigned mask = __ballot_sync(kFullWarp, active);
  if (lane == 0) counts[warp] = __popc(mask);
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll 1
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? counts[w] : 0;
    all += counts[w];
  }
  if (active) steps[before + __popc(mask & ((1u << lane) - 1))] = inner;
  __syncthreads();
  return all;
}

// ---- terms ----

// A term is three bytes: unsigned ones for dV, whose terms are never negative. Elsewhere the top one is signed and
// holds bits 16 to 22 and the sign, so +-2^23 is missing from terms beyond it: a fourth plane holds +-64 there, which
// is multiplied twice at the top plane's position, 2 * 64 * 2^16, wherever a block of terms has any.
constexpr int kTermPlanes = 3;
static_assert(kLargestTerm < 1 << 24, "terms must fit three bytes, and a sign");

// What a step multiplies, in shared memory: planes of terms, kRows x kStep, and of the factor, kStep x kDims, both in
// blocks of kPairBlock inner rows, as plane_offset() lays out rows of such blocks. A step is four blocks of pairs.
template <int V_PLANES, int DIMS, int ROWS>
struct GradientStep {
  static constexpr int kFactorPlanes = V_PLANES, kDims = DIMS, kPositions = kTermPlanes + V_PLANES - 1;
  static constexpr int kRows = ROWS, kStep = 4 * kPairBlock * kPairBlock / ROWS, kBlocksK = kStep / kPairBlock;
  static constexpr int kTermBlockBytes = kRows * kPairBlock, kTermPlaneBytes = kBlocksK * kTermBlockBytes;
  static constexpr int kTermBytes = (kTermPlanes + 1) * kTermPlaneBytes;
  static constexpr int kFactorBlockBytes = kDims * kPairBlock, kFactorPlaneBytes = kBlocksK * kFactorBlockBytes;
  static constexpr int kFactorBytes = kFactorPlanes * kFactorPlaneBytes;
};

// The 4 x 4 pairs that a lane has of parity j of a block, see Pairs: rows `row + 8 * i` of the sums by inner rows
// `inner + 8 * k`. As terms, those of one row are one word; see sum_slot().
template <bool OF_QUERY>
struct LaneTerms {
  int row, inner;

  __device__ __forceinline__ LaneTerms(int lane, int j)
      : row(OF_QUERY ? lane / 4 : 2 * (lane % 4) + j), inner(OF_QUERY ? 2 * (lane % 4) + j : lane / 4) {}
  // Where the first row's word lies in a block of a plane, the pairs' block beginning at its row `block_row`.
  __device__ __forceinline__ int offset(int block_row) const {
    return static_cast<int>(plane_offset(block_row + row, 4 * inner, kPairBlock));
  }
};

// Four terms as planes, all four bytes of each: the top plane as above. Returns what the fourth plane holds.
__device__ __forceinline__ uint32_t split_sign(uint32_t (&planes)[4]) {
  const uint32_t missing = (planes[2] ^ planes[3]) & 0x80808080u;
  planes[2] ^= missing;
  return missing >> 1 | (missing & planes[3]);
}

// x * 2^n clamped to [-L, L] and rounded, as gradient_term(), in float32: scaling by a power of two is exact, or
// ends below 2^-126, where the term is 0, or above 2^127, where it is clamped. Two factors, since n leaves float32's
// exponents; beyond [-252, 254] the term is 0 or clamped whatever x is.
__device__ __forceinline__ int32_t quick_term(float x, int n, float limit) {
  n = max(-252, min(n, 254));
  const int half = n >> 1;
  const float y = mul_f32(mul_f32(x, __uint_as_float(static_cast<uint32_t>(half + 127) << 23)),
                          __uint_as_float(static_cast<uint32_t>(n - half + 127) << 23));
  return __float2int_rn(fmaxf(fminf(y, limit), -limit));  // fminf() takes a NaN to the limit
}

// G - reference of a row of the sums, kNoTerms where it has none.
constexpr int kNoTerms = INT32_MIN;
__device__ __forceinline__ int shift_of_row(const GradientSumsArgs& args, const SumJob& job, const GradientWork& work,
                                            int row) {
  const int64_t real = job.of_query ? args.shape.rows : args.shape.keys;
  const int32_t reference =
      work.row + row < real ? job.reference[work.head * job.reference_stride + work.row + row] : kReferenceEmpty;
  int shift;
  return term_shift(reference, job.bits, shift) ? shift : kNoTerms;
}

// The thread's terms: t[row of the sums / 8][inner row / 8] from x[query row / 8][key / 8].
template <bool OF_QUERY>
__device__ __forceinline__ void terms_of(const float (&x)[4][4], const int (&exponent)[4], const int (&shift)[4],
                                         int bits, int32_t (&t)[4][4]) {
  const float limit = static_cast<float>(largest_term(bits));
  int least = INT32_MAX, most = INT32_MIN, lowest = INT32_MAX, highest = INT32_MIN;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    least = min(least, shift[i]), most = max(most, shift[i]);
    lowest = min(lowest, exponent[i]), highest = max(highest, exponent[i]);
  }
  // Ordinary numbers: every power of two below is a float32, so one product scales exactly; see quick_term().
  if (least >= -60 && most <= 60 && lowest >= -60 && highest <= 60) {
    float of_row[4], of_inner[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of_row[i] = __uint_as_float(static_cast<uint32_t>(shift[i] + 127) << 23);
      of_inner[i] = __uint_as_float(static_cast<uint32_t>(exponent[i] + 127) << 23);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float y = mul_f32(OF_QUERY ? x[i][k] : x[k][i], mul_f32(of_row[i], of_inner[k]));
        t[i][k] = __float2int_rn(fmaxf(fminf(y, limit), -limit));
      }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int32_t term = quick_term(OF_QUERY ? x[i][k] : x[k][i], exponent[k] + shift[i], limit);
      t[i][k] = shift[i] == kNoTerms ? 0 : term;
    }
}

// The thread's terms as byte planes `plane_bytes` apart: row i of the sums lies 256 * i behind `to`. Returns nonzero if
// the fourth plane, whose words are left to the caller, holds anything.
template <bool SIGNED>
__device__ __forceinline__ uint32_t store_terms(const int32_t (&t)[4][4], uint8_t* to, int plane_bytes,
                                                uint32_t (&fourth)[4]) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t words[4], planes[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = static_cast<uint32_t>(t[i][k]);
    byte_planes(words, planes);
    if (SIGNED) any |= fourth[i] = split_sign(planes);
#pragma unroll
    for (int p = 0; p < kTermPlanes; ++p) *reinterpret_cast<uint32_t*>(to + p * plane_bytes + 256 * i) = planes[p];
  }
  return any;
}

// ---- sums ----

// Adds a thread's COUNT sums to the job's. `digit(e, p)` is digit position p of sum e, `place_of(e)` its row of the
// head and its dim. The digits go to local memory first and are taken in a real loop: unrolled, addresses and parts of
// all sums would not find registers.
template <class Tile, bool OF_QUERY, int COUNT, class Digit, class PlaceOf>
__device__ __forceinline__ void add_sums(const GradientSumsArgs& args, const SumJob& job, const GradientWork& work,
                                         Digit digit, PlaceOf place_of) {
  const int64_t real = OF_QUERY ? args.shape.rows : args.shape.keys;
  int32_t copy[COUNT][Tile::kPositions];
#pragma unroll
  for (int e = 0; e < COUNT; ++e)
#pragma unroll
    for (int p = 0; p < Tile::kPositions; ++p) copy[e][p] = digit(e, p);
#pragma unroll 1
  for (int e = 0; e < COUNT; ++e) {
    const int2 at = place_of(e);
    const int64_t row = at.x;
    const int dim = at.y;
    int64_t sum = 0;
#pragma unroll
    for (int p = Tile::kPositions - 1; p >= 0; --p) sum = (sum << 8) + copy[e][p];
    if (row < real && dim < args.shape.dims)
      add_to_sum(job.at(work.head, row, args.shape.dims, dim), job.digit_stride, sum);
  }
}

}  // namespace det_attn::cuda
