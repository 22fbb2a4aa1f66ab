// Gradient sums kernel on mma.sync (sm_80 and up): p or ds of a strip, references and transposed planes of K, Q or dO
// -> the exact sums of dQ, dK and dV (docs/contract.md section 8). One CTA owns kRows x kDims sums over a part of the
// inner dimension; four warps round terms while the other four multiply, then the reverse.
#pragma once

#include "common.cuh"
#include "gradients.cuh"
#include "mma.cuh"

namespace det_attn::cuda {

// A term is three bytes: unsigned ones for dV, whose terms are never negative. Elsewhere the top one is signed and
// holds bits 16 to 22 and the sign, so +-2^23 is missing from terms beyond it: a fourth plane holds +-64 there, which
// is multiplied twice at the top plane's position, 2 * 64 * 2^16, wherever a block of terms has any.
constexpr int kTermPlanes = 3;
static_assert(kLargestTerm < 1 << 24, "terms must fit three bytes, and a sign");

// Four terms as planes, all four bytes of each: the top plane as above. Returns what the fourth plane holds.
__device__ __forceinline__ uint32_t split_sign(uint32_t (&planes)[4]) {
  const uint32_t missing = (planes[2] ^ planes[3]) & 0x80808080u;
  planes[2] ^= missing;
  return missing >> 1 | (missing & planes[3]);
}

// FETCHES steps of pairs are on their way from memory at a time: two where shared memory has room for them.
template <int V_PLANES, int DIMS, int FETCHES>
struct GradientTile {
  static constexpr int kFactorPlanes = V_PLANES, kDims = DIMS;
  static constexpr int kPositions = kTermPlanes + V_PLANES - 1;
  static constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpsD = DIMS / 32, kWarpsM = kWarps / kWarpsD;
  static constexpr int kRows = kWarpsM * 32;
  static constexpr int kStep = 4 * kPairBlock * kPairBlock / kRows;  // four blocks of pairs, half a block a warp
  static constexpr int kBlocksK = kStep / kPairBlock;
  static constexpr int kTermPlaneBytes = kRows * kStep;
  static constexpr int kTermBytes = (kTermPlanes + 1) * kTermPlaneBytes;
  static constexpr int kFactorBlockBytes = DIMS * kPairBlock;
  static constexpr int kFactorPlaneBytes = kBlocksK * kFactorBlockBytes;
  static constexpr int kFactorBytes = V_PLANES * kFactorPlaneBytes;
  static constexpr int kFetchBytes = kRows * kStep * 4;
  static constexpr int kFetches = FETCHES, kExponents = 2 * FETCHES;  // a slow warp may still read the step before
  static constexpr int kFetchAt = 2 * (kTermBytes + kFactorBytes), kExponentsAt = kFetchAt + FETCHES * kFetchBytes;
  static constexpr int kShiftsAt = kExponentsAt + kExponents * kStep * 4;
  static constexpr int kMostSteps = 256, kStepsAt = kShiftsAt + kRows * 4;
  static constexpr int kMissingAt = kStepsAt + kMostSteps * 4;
  static constexpr int kSharedBytes = kMissingAt + 2 * kWarps;
};
static_assert(GradientTile<3, 128, 1>::kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a block 99 KB");

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

// Which part of the sums a CTA has.
struct GradientWork {
  int64_t head;
  int row;  // the first of its rows: query rows (of_query) or keys; 2^31 of either fit no memory
  int inner_begin, inner_end;
  int dim_block;
};

// OF_QUERY: dQ. SIGNED: terms are ds; otherwise p.
template <class Tile, bool OF_QUERY, bool SIGNED>
struct GradientSums {
  static constexpr int V = Tile::kFactorPlanes;

  const GradientSumsArgs& args;
  const SumJob& job;
  const GradientWork& work;
  uint8_t* shared;
  int lane, warp;
  // The half block that this thread rounds: rows block_m, inner block block_k, columns of parity j.
  int block_m, block_k, j;
  const float4* pairs;    // its pairs, and
  const uint8_t* factor;  // its piece of the factor's planes, at inner row inner_zero and at inner row 0
  int inner_zero;
  unsigned dirty;  // bit 2 * s + m: the warp left something in the fourth plane of stage s, rows 16 * m to 16 * m + 15
  int32_t acc[Tile::kPositions][2][4][4];

  // Shared memory beside the stages: G - reference of the tile's rows, kNoTerms where they have none.
  static constexpr int kNoTerms = INT32_MIN;
  __device__ __forceinline__ int* shifts() const { return reinterpret_cast<int*>(shared + Tile::kShiftsAt); }

  __device__ __forceinline__ int row_in_tile(int i) const {  // of the sums' rows
    return block_m * 32 + 8 * i + (OF_QUERY ? lane / 4 : 2 * (lane % 4) + j);
  }

  __device__ __forceinline__ GradientSums(const GradientSumsArgs& args, const SumJob& job, const GradientWork& work,
                                          uint8_t* shared)
      : args(args), job(job), work(work), shared(shared) {
    lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    j = warp & 1, block_m = (warp >> 1) / Tile::kBlocksK, block_k = (warp >> 1) % Tile::kBlocksK;
    inner_zero = OF_QUERY ? 0 : static_cast<int>(args.strip.row);
    const int of_sum = work.row + block_m * 32, of_inner = inner_zero + block_k * 32;
    pairs = (job.of_p ? args.pairs.p : args.pairs.ds) + j * 4 * kWarpSize + lane +
            args.pairs.block(args.strip, work.head, OF_QUERY ? of_sum : of_inner, OF_QUERY ? of_inner : of_sum);
    const int64_t planes = work.head * V * ((OF_QUERY ? args.shape.keys_pad : args.shape.rows_pad) / kPairBlock);
    factor = job.factor + planes * args.shape.value_dims_pad * kPairBlock + work.dim_block * Tile::kFactorBlockBytes +
             threadIdx.x * 16;
    if (threadIdx.x < Tile::kRows) {
      const int64_t row = work.row + threadIdx.x, real = OF_QUERY ? args.shape.rows : args.shape.keys;
      const int32_t reference = row < real ? job.reference[work.head * job.reference_stride + row] : kReferenceEmpty;
      int shift;
      shifts()[threadIdx.x] = term_shift(reference, job.bits, shift) ? shift : kNoTerms;
    }
    dirty = 0;
    for (int i = threadIdx.x; i < Tile::kTermPlaneBytes / 4; i += Tile::kThreads) {
      for (int stage = 0; stage < 2; ++stage)
        reinterpret_cast<uint32_t*>(shared + stage * Tile::kTermBytes + kTermPlanes * Tile::kTermPlaneBytes)[i] = 0;
    }
#pragma unroll
    for (int p = 0; p < Tile::kPositions; ++p)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[p][m][n][i] = 0;
  }

  // Keys that some of the 64 query rows at `row` attend, whole steps: there pairs were kept.
  __device__ __forceinline__ int2 kept_keys(int row) const {
    const int64_t at = (work.head * args.shape.rows_pad + row / kPairStep * kPairStep) / 32;
    const int4 two = *reinterpret_cast<const int4*>(args.state.range + at);
    const int begin = min(two.x, two.z), end = max(two.y, two.w);
    return make_int2(begin / kPairStep * kPairStep, (end + kPairStep - 1) / kPairStep * kPairStep);
  }

  // Lists the steps of the CTA's part that have pairs, in order, and returns their number. All threads call it.
  __device__ __forceinline__ int list_steps() const {
    static_assert(kMostInnerRows / Tile::kStep <= Tile::kMostSteps && Tile::kMostSteps == Tile::kThreads, "one each");
    __shared__ int counts[Tile::kWarps];
    const int inner = work.inner_begin + threadIdx.x * Tile::kStep;
    bool active = inner < work.inner_end;
    if (!OF_QUERY && active) {  // of dQ, the part is cut to what its rows attend
      const int2 keys = kept_keys(inner);
      active = work.row < keys.y && work.row + Tile::kRows > keys.x;
    }
    const unsigned mask = __ballot_sync(kFullWarp, active);
    if (lane == 0) counts[warp] = __popc(mask);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll 1
    for (int w = 0; w < Tile::kWarps; ++w) {
      before += w < warp ? counts[w] : 0;
      all += counts[w];
    }
    if (active) steps()[before + __popc(mask & ((1u << lane) - 1))] = inner;
    __syncthreads();
    return all;
  }
  __device__ __forceinline__ int* steps() const { return reinterpret_cast<int*>(shared + Tile::kStepsAt); }

  // Whether the block of pairs at (row, key) was kept. Where a step's rows and keys are one square it was, or the step
  // were not listed.
  __device__ __forceinline__ bool is_kept(int row, int key) const {
    if constexpr (Tile::kRows == kPairStep) return true;
    const int2 keys = kept_keys(row);
    return key >= keys.x && key < keys.y;
  }

  // Brings the thread's own 4 x 4 pairs and the exponents of the inner rows of step number `step`, if it is one.
  __device__ __forceinline__ void fetch(int step, int count) const {
    if (step < count) fetch_step(steps()[step], step);
    commit_copies();
  }
  __device__ __forceinline__ void fetch_step(int inner, int step) const {
    float4* to = reinterpret_cast<float4*>(shared + Tile::kFetchAt + step % Tile::kFetches * Tile::kFetchBytes) +
                 threadIdx.x;
    const int of_sum = work.row + block_m * 32, of_inner = inner + block_k * 32;
    if (is_kept(OF_QUERY ? of_sum : of_inner, OF_QUERY ? of_inner : of_sum)) {
      // The block's place: see Pairs.
      const int64_t stride = OF_QUERY ? 8 * kWarpSize : args.pairs.key_blocks * 8 * kWarpSize;
      const float4* from = pairs + (inner - inner_zero) / kPairBlock * stride;
#pragma unroll
      for (int mh = 0; mh < 4; ++mh)
        copy_async16(shared_address(to + mh * Tile::kThreads), from + mh * kWarpSize);
    } else {
#pragma unroll
      for (int mh = 0; mh < 4; ++mh) to[mh * Tile::kThreads] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (threadIdx.x < Tile::kStep / 4) {
      const int64_t inner_pad = OF_QUERY ? args.shape.keys_pad : args.shape.rows_pad;
      copy_async16(shared_address(shared + Tile::kExponentsAt + step % Tile::kExponents * Tile::kStep * 4) +
                       threadIdx.x * 16,
                   job.exponent + work.head * inner_pad + inner + threadIdx.x * 4);
    }
  }

  // The thread's terms: t[row of the sums / 8][inner row / 8] from x[query row / 8][key / 8].
  __device__ __forceinline__ void terms_of(const float (&x)[4][4], const int (&exponent)[4], const int (&shift)[4],
                                           int32_t (&t)[4][4]) const {
    const float limit = static_cast<float>(largest_term(job.bits));
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

  // For each stage and warp, bit m: whether the fourth plane holds anything in rows 16 * m of the half block it rounds.
  __device__ __forceinline__ uint8_t* missing() const { return shared + Tile::kMissingAt; }

  // Terms of the fetched pairs into a stage, as byte planes.
  __device__ __forceinline__ void round_terms(int step) {
    const int stage = step & 1;
    const float4* fetched = reinterpret_cast<const float4*>(shared + Tile::kFetchAt +
                                                            step % Tile::kFetches * Tile::kFetchBytes) + threadIdx.x;
    const int* exponents = reinterpret_cast<const int*>(shared + Tile::kExponentsAt) +
                           step % Tile::kExponents * Tile::kStep + block_k * 32 +
                           (OF_QUERY ? 2 * (lane % 4) + j : lane / 4);
    float x[4][4];  // [row / 8][key / 8]
    int exponent[4], shift[4];
    int32_t t[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = fetched[i * Tile::kThreads];
      x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
      exponent[i] = exponents[8 * i];
      shift[i] = shifts()[row_in_tile(i)];
    }
    terms_of(x, exponent, shift, t);

    const int word = OF_QUERY ? 2 * (lane % 4) + j : lane / 4;
    uint8_t* const to = shared + stage * Tile::kTermBytes + block_k * Tile::kRows * 32 + (row_in_tile(0) >> 3) * 256 +
                        (word >> 2) * 128 + (row_in_tile(0) & 7) * 16 + (word & 3) * 4;  // of row i: 256 * i further
    uint32_t fourth[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4], planes[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = static_cast<uint32_t>(t[i][k]);
      byte_planes(words, planes);
      if (SIGNED) fourth[i] = split_sign(planes);
#pragma unroll
      for (int p = 0; p < kTermPlanes; ++p)
        *reinterpret_cast<uint32_t*>(to + p * Tile::kTermPlaneBytes + 256 * i) = planes[p];
    }
    if constexpr (SIGNED) {
      unsigned any = 0;
#pragma unroll
      for (int m = 0; m < 2; ++m)
        any |= __any_sync(kFullWarp, (fourth[2 * m] | fourth[2 * m + 1]) != 0) ? 1u << m : 0u;
      const unsigned write = any | (dirty >> 2 * stage & 3);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (write >> i / 2 & 1)
          *reinterpret_cast<uint32_t*>(to + kTermPlanes * Tile::kTermPlaneBytes + 256 * i) = fourth[i];
      }
      dirty = (dirty & ~(3u << 2 * stage)) | any << 2 * stage;
      if (lane == 0) missing()[stage * Tile::kWarps + warp] = static_cast<uint8_t>(any);
    }
  }

  // The factor's planes of a step into a stage. Pointers move from plane to plane: their addresses beside one another
  // would cost registers.
  __device__ __forceinline__ void copy_factor(int inner, int stage) const {
    constexpr int kPieces = Tile::kFactorBlockBytes / 16;
    static_assert(kPieces <= Tile::kThreads, "a thread copies one piece of a block");
    if (kPieces < Tile::kThreads && threadIdx.x >= kPieces) return;
    const int block_bytes = args.shape.value_dims_pad * kPairBlock;
    const int64_t plane = (OF_QUERY ? args.shape.keys_pad : args.shape.rows_pad) / kPairBlock * block_bytes;
    const uint8_t* from = factor + static_cast<int64_t>(inner / kPairBlock) * block_bytes;
    uint32_t to = shared_address(shared) + 2 * Tile::kTermBytes + stage * Tile::kFactorBytes + threadIdx.x * 16;
#pragma unroll
    for (int p = 0; p < V; ++p) {
#pragma unroll
      for (int b = 0; b < Tile::kBlocksK; ++b)
        copy_async16(to + p * Tile::kFactorPlaneBytes + b * Tile::kFactorBlockBytes, from + b * block_bytes);
      from += plane;
    }
  }

  template <bool A_SIGNED, int FIRST = 0, int END = 2>
  __device__ __forceinline__ void multiply_plane(int plane, const uint32_t (&a)[2][4], const uint32_t (&b)[V][2][4]) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int m = FIRST; m < END; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t b0 = b[v][n / 2][(n & 1) * 2], b1 = b[v][n / 2][(n & 1) * 2 + 1];
          if (v == V - 1) {
            mma_bytes<A_SIGNED, true>(acc[plane + v][m][n], a[m], b0, b1);
          } else {
            mma_bytes<A_SIGNED, false>(acc[plane + v][m][n], a[m], b0, b1);
          }
        }
  }

  // Twice the fourth plane's rows 16 * M to 16 * M + 15 of a block.
  template <int M>
  __device__ __forceinline__ void multiply_fourth(uint32_t address, uint32_t (&a)[2][4], const uint32_t (&b)[V][2][4]) {
    load_matrices(a[M], address + M * 512);
    multiply_plane<true, M, M + 1>(2, a, b);
    multiply_plane<true, M, M + 1>(2, a, b);
  }

  __device__ __forceinline__ void multiply(int stage) {
    const int matrix = lane / 8, matrix_row = lane % 8;
    const int warp_m = warp % Tile::kWarpsM, warp_d = warp / Tile::kWarpsM;
    const uint32_t base = shared_address(shared);
    const uint32_t a_lane = base + stage * Tile::kTermBytes + warp_m * 1024 + (matrix & 1) * 256 + (matrix >> 1) * 128 +
                            matrix_row * 16;
    const uint32_t b_lane = base + 2 * Tile::kTermBytes + stage * Tile::kFactorBytes + warp_d * 1024 +
                            (matrix >> 1) * 256 + (matrix & 1) * 128 + matrix_row * 16;
#pragma unroll 1  // the next block's operands would not find registers
    for (int k = 0; k < Tile::kBlocksK; ++k) {
      uint32_t b[V][2][4], a[2][4];
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          load_matrices(b[v][n], b_lane + v * Tile::kFactorPlaneBytes + k * Tile::kFactorBlockBytes + n * 512);
      const auto load_a = [&](int plane) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
          load_matrices(a[m], a_lane + plane * Tile::kTermPlaneBytes + k * Tile::kRows * 32 + m * 512);
      };
      load_a(0);
      multiply_plane<false>(0, a, b);
      load_a(1);
      multiply_plane<false>(1, a, b);
      load_a(2);
      multiply_plane<SIGNED>(2, a, b);
      if constexpr (SIGNED) {
        // Two warps rounded the block, and each knows of its half.
        const unsigned two = *reinterpret_cast<const uint16_t*>(missing() + stage * Tile::kWarps +
                                                                (warp_m * Tile::kBlocksK + k) * 2);
        const uint32_t fourth = a_lane + kTermPlanes * Tile::kTermPlaneBytes + k * Tile::kRows * 32;
        if (two & 0x0101u) multiply_fourth<0>(fourth, a, b);
        if (two & 0x0202u) multiply_fourth<1>(fourth, a, b);
      }
    }
  }

  __device__ __forceinline__ void run() {
    constexpr int kFetches = Tile::kFetches;
    const int count = list_steps();
    if (count == 0) return;
    copy_factor(steps()[0], 0);
#pragma unroll
    for (int i = 0; i < kFetches; ++i) fetch(i, count);
    wait_copies<kFetches - 1>();
    __syncthreads();
    round_terms(0);
    fetch(kFetches, count);
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      wait_copies<kFetches - 1>();
      __syncthreads();  // this step is there, and the one before has been read
      if (step + 1 < count) copy_factor(steps()[step + 1], (step + 1) & 1);
      commit_copies();
      // A scheduler's two warps do these in opposite order, so that one multiplies while the other rounds.
#pragma unroll 1
      for (int phase = 0; phase < 2; ++phase) {
        if ((phase == 0) == (warp < 4)) {
          multiply(step & 1);
        } else {
          if (step + 1 < count) round_terms(step + 1);
          fetch(step + 1 + kFetches, count);
        }
      }
    }
    add_sums();
  }

  // The thread's sums go to local memory first and are taken in a real loop: unrolled, addresses and parts of them all
  // would not find registers.
  __device__ __forceinline__ void add_sums() const {
    const int warp_m = warp % Tile::kWarpsM, warp_d = warp / Tile::kWarpsM;
    const int64_t real = OF_QUERY ? args.shape.rows : args.shape.keys;
    int32_t copy[32][Tile::kPositions];
#pragma unroll
    for (int e = 0; e < 32; ++e)
#pragma unroll
      for (int p = 0; p < Tile::kPositions; ++p) copy[e][p] = acc[p][e / 16][e / 4 % 4][e % 4];
#pragma unroll 1
    for (int e = 0; e < 32; ++e) {
      const int64_t row = work.row + warp_m * 32 + e / 16 * 16 + (e >> 1 & 1) * 8 + lane / 4;
      const int dim = work.dim_block * Tile::kDims + warp_d * 32 + e / 4 % 4 * 8 + (lane % 4) * 2 + (e & 1);
      int64_t sum = 0;
#pragma unroll
      for (int p = Tile::kPositions - 1; p >= 0; --p) sum = (sum << 8) + copy[e][p];
      if (row < real && dim < args.shape.dims)
        add_to_sum(job.at(work.head, row, args.shape.dims, dim), job.digit_stride, sum);
    }
  }
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

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gradient_sums_kernel(const __grid_constant__ GradientSumsArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const SumJob& job = args.jobs[blockIdx.z];
  const GradientWork work = gradient_work<Tile>(args, job);
  if (work.inner_begin >= work.inner_end) return;
  if (job.of_query) {
    GradientSums<Tile, true, true>(args, job, work, shared).run();
  } else if (!job.of_p) {
    GradientSums<Tile, false, true>(args, job, work, shared).run();
  } else {
    GradientSums<Tile, false, false>(args, job, work, shared).run();
  }
}

}  // namespace det_attn::cuda
