// Scores stage of the reference path (docs/contract.md section 2): which queries and keys a block takes, and the exact
// dot products of a tile. In: prepared rows. Out: I as int64. Products are float64 FMAs whose partial sums are integers
// that float64 holds, so any order gives the same number.
#pragma once

#include "rows.cuh"

namespace det_attn::cuda::reference {

// ---- Tiles -----------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kSide = 16;       // threads are a kSide x kSide square over (queries, keys) and over (queries, dims)
constexpr int kQueries = 64;    // query rows of a block: 4 a thread
constexpr int kKeys = 64;       // keys of a step: 4 a thread
constexpr int kThreadRows = kQueries / kSide;
constexpr int kThreadKeys = kKeys / kSide;
constexpr int kChunkDims = kDimPad;  // dims of the score operands in shared memory at once
constexpr int kExactDims = 128;      // dims whose dot product stays exact in float64

constexpr int kMantissaBits = 53;  // integers up to 2^53 are exact in float64, and so is every partial sum of them
static_assert(kThreads == kSide * kSide && kThreadRows == 4 && kThreadKeys == 4, "thread tiles are 4 x 4");
static_assert(2 * (kHighest.operand_bits - 1) + 7 <= kMantissaBits && kExactDims <= 1 << 7, "scores must be exact");
static_assert(kExactDims % kChunkDims == 0, "chunks must tile");

// A block's share of the work: kQueries rows of one query head, and up to 128 dims of NUM.
struct Work {
  int64_t head_row, kv_row;  // batch * heads + head, of queries and of keys
  int64_t query;             // the first query
  int rows, dim, dims;       // rows and dims that exist
};

// Blocks that run together take the same queries of neighbouring heads; the longest causal rows come first.
__device__ inline Work work_of(const Problem& p, int64_t item, int slice_dims) {
  const int64_t heads = p.batch * p.q_heads;
  const int64_t tiles = ceil_div(p.q_len, kQueries);
  Work w;
  w.head_row = item % heads;
  w.kv_row = w.head_row / p.q_heads * p.kv_heads + p.kv_head(w.head_row % p.q_heads);
  const int64_t tile = item / heads;
  w.query = (tiles - 1 - tile % tiles) * kQueries;
  w.rows = static_cast<int>(min(static_cast<int64_t>(kQueries), p.q_len - w.query));
  w.dim = static_cast<int>(tile / tiles) * slice_dims;
  w.dims = min(slice_dims, static_cast<int>(p.head_dim) - w.dim);
  return w;
}

// ---- Masks and modifiers ---------------------------------------------------------------------------------------

// The keys of each of a block's rows, and the interval that holds them all. Rows without a key have begin = end = 0.
struct RowKeys {
  int64_t begin[kQueries], end[kQueries];
  unsigned long long first, last;
};

// Every thread calls it; barriers on both sides are inside. `attends(row)` says whether a row counts at all.
template <class Attends>
__device__ __forceinline__ void load_row_keys(RowKeys& keys, const Problem& p, const Work& w, Attends attends) {
  if (threadIdx.x == 0) keys.first = ~0ull, keys.last = 0;
  __syncthreads();
  if (threadIdx.x < kQueries) {
    const int row = threadIdx.x;
    const int64_t batch = w.head_row / p.q_heads;
    int64_t begin = 0, end = 0;
    if (row < w.rows && attends(row)) {
      begin = p.mask.begin(batch, w.query + row);
      end = p.mask.end(batch, w.query + row);
    }
    if (end <= begin) begin = end = 0;
    keys.begin[row] = begin;
    keys.end[row] = end;
    if (end > begin) {
      atomicMin(&keys.first, static_cast<unsigned long long>(begin));
      atomicMax(&keys.last, static_cast<unsigned long long>(end));
    }
  }
  __syncthreads();
}

__device__ inline Pair pair_of(const Problem& p, const Work& w, int row, int64_t key) {
  return {w.head_row / p.q_heads, w.head_row % p.q_heads, w.query + row, key};
}

// S of section 10 for an attended pair of the block, kScoreMasked or kScorePoisoned; s is kScorePoisoned for a bad key
// or query. Out of line: few calls need it.
static __device__ __noinline__ int64_t modify(const Problem& p, const Work& w, int row, int64_t key, int64_t s) {
  const int64_t changed = modified_score(p, s == kScorePoisoned ? 0 : s, pair_of(p, w, row, key));
  return s == kScorePoisoned && changed != kScoreMasked ? s : changed;
}

// ---- Scores ----------------------------------------------------------------------------------------------------

// Chunks of the integers as float64, dims outermost, so that a thread reads its rows and keys as pairs.
struct ScoreChunk {
  double query[kChunkDims][kQueries];
  double key[kChunkDims][kKeys];
};

// The scores of a step pass through shared memory, each thread its own, so that a plain loop over keys can index them.
union ScoreShared {
  ScoreChunk chunk;
  int64_t dots[kThreadKeys][kThreadRows][kThreads];
};

// Where thread (tx, ty) stands: queries 4 ty + a; keys and dims 2 tx + 32 (i / 2) + i % 2, so that neighbouring
// threads read neighbouring 16 bytes of shared memory.
__device__ __forceinline__ int thread_x() { return threadIdx.x % kSide; }
__device__ __forceinline__ int thread_y() { return threadIdx.x / kSide; }
__device__ __forceinline__ int pair_index(int tx, int i) { return 2 * tx + 2 * kSide * (i / 2) + i % 2; }

// Four integers of a row; rows that do not exist are zeros.
__device__ __forceinline__ int4 fetch(const int32_t* rows, int pitch, int count, int row, int dim) {
  if (row >= count) return make_int4(0, 0, 0, 0);
  return *reinterpret_cast<const int4*>(rows + static_cast<int64_t>(row) * pitch + dim);
}

__device__ __forceinline__ void place(double (*chunk)[kQueries], int row, int dim, int4 x) {
  chunk[dim][row] = static_cast<double>(x.x);
  chunk[dim + 1][row] = static_cast<double>(x.y);
  chunk[dim + 2][row] = static_cast<double>(x.z);
  chunk[dim + 3][row] = static_cast<double>(x.w);
}
static_assert(kQueries == kKeys && kChunkDims == 32, "both operands of a chunk are placed alike, two steps a thread");

// Loads a chunk of both operands. 16 lanes take neighbouring rows: stores without bank conflicts, whole sectors read.
__device__ __forceinline__ void load_chunk(ScoreChunk& chunk, const int32_t* queries, int query_count,
                                           const int32_t* keys, int key_count, int pitch, int dim) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int4 q[2], k[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int block = warp + i * (kThreads / kWarpSize);  // 4 blocks of 16 rows, times 4 blocks of 8 dims
    const int row = block % 4 * 16 + lane % 16, d = block / 4 * 8 + lane / 16 * 4;
    q[i] = fetch(queries, pitch, query_count, row, dim + d);
    k[i] = fetch(keys, pitch, key_count, row, dim + d);
  }
  __syncthreads();  // everyone has read what this shared memory held before
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int block = warp + i * (kThreads / kWarpSize);
    const int row = block % 4 * 16 + lane % 16, d = block / 4 * 8 + lane / 16 * 4;
    place(chunk.query, row, d, q[i]);
    place(chunk.key, row, d, k[i]);
  }
  __syncthreads();
}

// shared.dots[c][a] = I of the thread's query a and key c, exact, for that thread to read. Every thread of the block
// must call it.
__device__ __forceinline__ void score_dots(ScoreShared& shared, const int32_t* queries, int query_count,
                                           const int32_t* keys, int key_count, int pitch) {
  const int tx = thread_x(), ty = thread_y();
  int64_t dots[kThreadRows][kThreadKeys] = {};
  for (int first = 0; first < pitch; first += kExactDims) {
    double sum[kThreadRows][kThreadKeys] = {};
    const int stop = min(pitch, first + kExactDims);
    for (int dim = first; dim < stop; dim += kChunkDims) {
      load_chunk(shared.chunk, queries, query_count, keys, key_count, pitch, dim);
#pragma unroll 4
      for (int d = 0; d < kChunkDims; ++d) {
        const double2* q = reinterpret_cast<const double2*>(&shared.chunk.query[d][kThreadRows * ty]);
        const double2* k = reinterpret_cast<const double2*>(&shared.chunk.key[d][2 * tx]);
        const double2 q0 = q[0], q1 = q[1], k0 = k[0], k1 = k[kSide];
        const double qs[kThreadRows] = {q0.x, q0.y, q1.x, q1.y};
        const double ks[kThreadKeys] = {k0.x, k0.y, k1.x, k1.y};
#pragma unroll
        for (int a = 0; a < kThreadRows; ++a) {
#pragma unroll
          for (int c = 0; c < kThreadKeys; ++c) sum[a][c] = __fma_rn(qs[a], ks[c], sum[a][c]);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kThreadRows; ++a) {
#pragma unroll
      for (int c = 0; c < kThreadKeys; ++c) dots[a][c] += __double2ll_rn(sum[a][c]);
    }
  }
  __syncthreads();  // the chunk has been read
#pragma unroll
  for (int a = 0; a < kThreadRows; ++a) {
#pragma unroll
    for (int c = 0; c < kThreadKeys; ++c) shared.dots[c][a][threadIdx.x] = dots[a][c];
  }
}

// Maximum or sum over the kSide threads that share a query row: they are one half of a warp.
__device__ __forceinline__ int64_t side_max(int64_t x) {
  for (int step = kSide / 2; step > 0; step /= 2) {
    const int64_t other = __shfl_xor_sync(kFullWarp, static_cast<long long>(x), step);
    x = other > x ? other : x;
  }
  return x;
}
__device__ __forceinline__ int64_t side_sum(int64_t x) {
  for (int step = kSide / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, static_cast<long long>(x), step);
  return x;
}

}  // namespace det_attn::cuda::reference
