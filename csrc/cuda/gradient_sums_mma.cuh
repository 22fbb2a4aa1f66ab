// Gradient sums kernel on mma.sync (sm_80 and up): p or ds of a strip, references and transposed planes of K, Q or dO
// -> the exact sums of dQ, dK and dV (docs/contract.md section 8). One CTA owns kRows x kDims sums over a part of the
// inner dimension; four warps round terms while the other four multiply, then the reverse.
#pragma once

#include "gradient_terms.cuh"
#include "mma.cuh"

namespace det_attn::cuda {

// The warps' 32 x 32 sums cover the tile's rows and dims; a warp rounds half a block of pairs. FETCHES steps of pairs
// are on their way from memory at a time: two where shared memory has room for them.
constexpr int kGradientWarps = 8;
template <int V_PLANES, int DIMS, int FETCHES>
struct GradientTile : GradientStep<V_PLANES, DIMS, kGradientWarps * 32 * 32 / DIMS> {
  using Step = GradientStep<V_PLANES, DIMS, kGradientWarps * 32 * 32 / DIMS>;
  static constexpr int kWarps = kGradientWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpsM = Step::kRows / 32;
  static constexpr int kFetchBytes = Step::kRows * Step::kStep * 4;
  static constexpr int kFetches = FETCHES, kExponents = 2 * FETCHES;  // a slow warp may still read the step before
  static constexpr int kFetchAt = 2 * (Step::kTermBytes + Step::kFactorBytes);
  static constexpr int kExponentsAt = kFetchAt + FETCHES * kFetchBytes;
  static constexpr int kShiftsAt = kExponentsAt + kExponents * Step::kStep * 4;
  static constexpr int kMostSteps = 256, kStepsAt = kShiftsAt + Step::kRows * 4;
  static constexpr int kMissingAt = kStepsAt + kMostSteps * 4;
  static constexpr int kSharedBytes = kMissingAt + 2 * kWarps;
};
static_assert(GradientTile<3, 128, 1>::kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a block 99 KB");

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

  // Shared memory beside the stages: shift_of_row() of the tile's rows.
  __device__ __forceinline__ int* shifts() const { return reinterpret_cast<int*>(shared + Tile::kShiftsAt); }

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
    if (threadIdx.x < Tile::kRows) shifts()[threadIdx.x] = shift_of_row(args, job, work, threadIdx.x);
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

  __device__ __forceinline__ int* steps() const { return reinterpret_cast<int*>(shared + Tile::kStepsAt); }

  // Whether the block of pairs at (row, key) was kept. Where a step's rows and keys are one square it was, or the step
  // were not listed.
  __device__ __forceinline__ bool is_kept(int row, int key) const {
    if constexpr (Tile::kRows == kPairStep) return true;
    const int2 keys = kept_keys(args, work, row);
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

  // For each stage and warp, bit m: whether the fourth plane holds anything in rows 16 * m of the half block it rounds.
  __device__ __forceinline__ uint8_t* missing() const { return shared + Tile::kMissingAt; }

  // Terms of the fetched pairs into a stage, as byte planes.
  __device__ __forceinline__ void round_terms(int step) {
    const int stage = step & 1;
    const float4* fetched = reinterpret_cast<const float4*>(shared + Tile::kFetchAt +
                                                            step % Tile::kFetches * Tile::kFetchBytes) + threadIdx.x;
    const LaneTerms<OF_QUERY> own(lane, j);
    const int* exponents = reinterpret_cast<const int*>(shared + Tile::kExponentsAt) +
                           step % Tile::kExponents * Tile::kStep + block_k * 32 + own.inner;
    float x[4][4];  // [row / 8][key / 8]
    int exponent[4], shift[4];
    int32_t t[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = fetched[i * Tile::kThreads];
      x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
      exponent[i] = exponents[8 * i];
      shift[i] = shifts()[block_m * 32 + own.row + 8 * i];
    }
    terms_of<OF_QUERY>(x, exponent, shift, job.bits, t);

    uint8_t* const to = shared + stage * Tile::kTermBytes + block_k * Tile::kTermBlockBytes + own.offset(block_m * 32);
    uint32_t fourth[4];
    store_terms<SIGNED>(t, to, Tile::kTermPlaneBytes, fourth);
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
          load_matrices(a[m], a_lane + plane * Tile::kTermPlaneBytes + k * Tile::kTermBlockBytes + m * 512);
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
        const uint32_t fourth = a_lane + kTermPlanes * Tile::kTermPlaneBytes + k * Tile::kTermBlockBytes;
        if (two & 0x0101u) multiply_fourth<0>(fourth, a, b);
        if (two & 0x0202u) multiply_fourth<1>(fourth, a, b);
      }
    }
  }

  __device__ __forceinline__ void run() {
    constexpr int kFetches = Tile::kFetches;
    const int count = list_steps<Tile, OF_QUERY>(args, work, steps());
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
    const int warp_m = warp % Tile::kWarpsM, warp_d = warp / Tile::kWarpsM;
    const auto digit = [&](int e, int p) { return acc[p][e / 16][e / 4 % 4][e % 4]; };
    const auto place_of = [&](int e) {
      const int row = work.row + warp_m * 32 + e / 16 * 16 + (e >> 1 & 1) * 8 + lane / 4;
      const int dim = work.dim_block * Tile::kDims + warp_d * 32 + e / 4 % 4 * 8 + (lane % 4) * 2 + (e & 1);
      return make_int2(row, dim);
    };
    add_sums<Tile, OF_QUERY, 32>(args, job, work, digit, place_of);
  }
};

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
