// Weights and exact sums of the reference path (docs/contract.md sections 4 to 7). In: prepared rows and the rowmax.
// Out: DEN; NUM, or the output. Sums are float64 FMAs of integers, exact by a budget, that go into the digits when the
// budget is spent or the values' exponents leave the window.
#pragma once

#include "scores_reference.cuh"

namespace det_attn::cuda::reference {

// ---- Budget ----------------------------------------------------------------------------------------------------

constexpr int kValueKeys = 32;  // keys of the value operand in shared memory at once
constexpr int kWindow = 8;      // value exponents [base, base + kWindow) share the float64 sums
constexpr int kHalfBits = 16;   // `highest` sums the low 16 bits of a weight and the rest apart
static_assert(kKeys % kValueKeys == 0, "chunks must tile");
static_assert(kHighest.operand_bits - 1 + kWindow - 1 < 31, "a shifted value must fit an int32");

// A key of exponent ev spends 2^(ev - base) of this: |weight part * v^ * 2^(ev - base)| summed stays within 2^53.
template <int kHalves>
struct SumBudget {
  static constexpr Precision kPrecision = kHalves == 2 ? kHighest : kHigh;
  static constexpr int kWeightBits = kHalves == 2 ? kHalfBits : kPrecision.weight_bits;
  static constexpr int kTotal = 1 << (kMantissaBits - kWeightBits - (kPrecision.operand_bits - 1));
  static_assert(kPrecision.weight_bits - kHalfBits < kWeightBits, "the high half must fit the budget of the low one");
  static_assert(kKeys << (kWindow - 1) <= kTotal, "one step must fit the budget");
};
static_assert((128 - (kHigh.operand_bits - 1) - kHigh.weight_bits + kUnitExponent + kHalfBits) / kDigitBits + 2 <
                  kSumDigits, "the largest term of either half must land inside the digits");

// ---- Sums: state -----------------------------------------------------------------------------------------------

// Where the digits of a block's rows and dims lie.
struct DigitTile {
  int64_t* digits;
  int64_t row_pitch, dim_pitch, stride;
  __device__ __forceinline__ int64_t* at(int row, int d) const { return digits + row * row_pitch + d * dim_pitch; }
};

// kDims: dims of NUM that a block keeps, 64 or 128. kHalves: parts of a weight, 2 for `highest` and 1 for `high`.
template <int kHalves, int kDims>
struct SumShared {
  union {  // the scores have become weights before the values come
    ScoreShared scores;
    double values[kValueKeys][kDims];  // v^ * 2^(ev - base)
  };
  double weights[kHalves][kKeys][kQueries];  // groups of 4 queries lie at weight_slot()
  int64_t rowmax[kQueries];                  // M
  RowKeys keys;                              // those that weigh
  int64_t den[kQueries];
  int32_t query_exponents[kQueries];
  int32_t poisoned[kQueries];                // section 7: the row is NaN
  int32_t value_exponents[kKeys];            // kZeroRow where there is nothing to add
  Work work;                                 // here and not in registers, which the sums need
  DigitTile tile;
};
static_assert(sizeof(SumShared<2, 128>) <= 99 * 1024, "sm_86 and sm_89 give a block 99 KB");

// Spreads the stores of 16 threads with the same queries and different keys over the banks.
__device__ __forceinline__ int weight_slot(int key, int ty) { return (ty ^ (key / 2 % kSide)) * kThreadRows; }

struct SumTask {
  Problem problem;
  PreparedRows q, k, v;
  const double* rowmax;
  int64_t* den;
  int64_t* num;      // the result of `accumulate`; null for `forward`
  int64_t* scratch;  // `forward`: digits of one tile a block
  MutableView out;   // `forward`
  int64_t items;
};

// Scratch keeps digit k of all elements together, so neighbouring threads touch neighbouring addresses and digits
// that no sum reaches cost nothing but their zeroing.
template <int kDims>
__device__ DigitTile digit_tile(const SumTask& task, const Work& w) {
  const int64_t tile = kQueries * kDims;
  if (task.num == nullptr) return DigitTile{task.scratch + blockIdx.x * tile * kDigits, kDims, 1, tile};
  const int64_t head_dim = task.problem.head_dim;
  const int64_t first = ((w.head_row * task.problem.q_len + w.query) * head_dim + w.dim) * kDigits;
  return DigitTile{task.num + first, head_dim * kDigits, kDigits, 1};
}

template <int kDims>
__device__ void clear_digits(const DigitTile& tile, const Work& w) {
  for (int i = threadIdx.x; i < w.rows * kDims; i += kThreads) {
    if (i % kDims >= w.dims) continue;
    int64_t* digits = tile.at(i / kDims, i % kDims);
    for (int n = 0; n < kDigits; ++n) digits[n * tile.stride] = 0;
  }
}

template <typename Shared>
__device__ void load_rows(Shared& shared, const SumTask& task, const Work& w) {
  const int row = threadIdx.x;
  if (row < kQueries) {
    const bool exists = row < w.rows;
    const int64_t index = w.head_row * task.problem.q_len + w.query + row;
    const int64_t m = exists ? rowmax_from_public(task.rowmax[index]) : kRowmaxEmpty;
    const int eq = exists ? task.q.exponents[index] : kMinExponent;
    const bool poisoned = m == kRowmaxPoisoned || eq == kPoisonedExponent;
    shared.rowmax[row] = m;
    shared.query_exponents[row] = eq;
    shared.poisoned[row] = poisoned;
    shared.den[row] = 0;
  }
  load_row_keys(shared.keys, task.problem, w,
                [&](int r) { return !shared.poisoned[r] && shared.rowmax[r] != kRowmaxEmpty; });
}

// ---- Sums: one step of keys --------------------------------------------------------------------------------------

// Weights of the thread's four queries and one key into shared memory, their sums into den. Returns whether any is
// nonzero.
template <typename Shared, int kHalves, bool kModified>
__device__ __forceinline__ bool weigh_key(Shared& shared, const SumTask& task, const Work& w, int c, int64_t key0,
                                          int ek, int64_t (&den)[kThreadRows]) {
  const Precision precision = task.problem.precision;
  const int ty = thread_y(), key = pair_index(thread_x(), c);
  uint32_t weight[kThreadRows];
  uint32_t any = 0;
#pragma unroll
  for (int a = 0; a < kThreadRows; ++a) {
    const int row = kThreadRows * ty + a;
    weight[a] = 0;
    if (key0 + key < shared.keys.begin[row] || key0 + key >= shared.keys.end[row]) continue;
    const int64_t dot = shared.scores.dots[c][a][threadIdx.x];
    int64_t s = ek == kPoisonedExponent
                    ? kScorePoisoned
                    : score_of(dot, score_shift(shared.query_exponents[row], ek, precision.operand_bits));
    if constexpr (kModified) {
      s = modify(task.problem, w, row, key0 + key, s);
      if (s == kScoreMasked) continue;
    }
    if (s == kScorePoisoned) {  // a rowmax that was not taken over this key: the row is NaN all the same
      shared.poisoned[row] = 1;
      continue;
    }
    weight[a] = weight_of(shared.rowmax[row] - s, precision.weight_bits);
    den[a] += weight[a];
    if constexpr (kModified) {
      const bool dropout = task.problem.modifiers.dropout.on && weight[a] != 0;
      if (dropout && !is_kept(task.problem, pair_of(task.problem, w, row, key0 + key))) weight[a] = 0;
    }
    any |= weight[a];
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    double part[kThreadRows];
#pragma unroll
    for (int a = 0; a < kThreadRows; ++a) {
      const uint32_t low = kHalves == 2 ? weight[a] & ((1u << kHalfBits) - 1) : weight[a];
      part[a] = static_cast<double>(h == 0 ? low : weight[a] >> kHalfBits);
    }
    double2* slot = reinterpret_cast<double2*>(&shared.weights[h][key][weight_slot(key, ty)]);
    slot[0] = make_double2(part[0], part[1]);
    slot[1] = make_double2(part[2], part[3]);
  }
  return any != 0;
}

// Those of the thread's four keys.
template <typename Shared, int kHalves, bool kModified>
__device__ __forceinline__ bool weigh_thread(Shared& shared, const SumTask& task, const Work& w, int64_t key0,
                                             int keys) {
  const int64_t first_key = w.kv_row * task.problem.kv_len + key0;
  bool any = false;
  int64_t den[kThreadRows] = {};
#pragma unroll 1
  for (int c = 0; c < kThreadKeys; ++c) {
    const int key = pair_index(thread_x(), c);
    const int ek = key < keys ? task.k.exponents[first_key + key] : kMinExponent;
    any = weigh_key<Shared, kHalves, kModified>(shared, task, w, c, key0, ek, den) || any;
  }
#pragma unroll
  for (int a = 0; a < kThreadRows; ++a) {
    const int64_t sum = side_sum(den[a]);
    if (thread_x() == 0) shared.den[kThreadRows * thread_y() + a] += sum;
  }
  return any;
}

// The same with modifiers. Out of line, so that they cost no registers where there are none.
template <typename Shared, int kHalves>
__device__ __noinline__ bool weigh_modified(Shared& shared, const SumTask& task, const Work& w, int64_t key0,
                                            int keys) {
  return weigh_thread<Shared, kHalves, true>(shared, task, w, key0, keys);
}

// Weights of a step of keys, and their sums. Returns, to every thread alike, whether any is nonzero.
template <typename Shared, int kHalves>
__device__ __forceinline__ bool weigh_keys(Shared& shared, const SumTask& task, const Work& w, int64_t key0, int keys) {
  const Problem& p = task.problem;
  const int64_t first_key = w.kv_row * p.kv_len + key0;
  __syncthreads();  // the last step has read its value exponents
  if (threadIdx.x < kKeys) {
    const int key = threadIdx.x;
    shared.value_exponents[key] = key < keys ? task.v.exponents[first_key + key] : kZeroRow;
  }
  score_dots(shared.scores, task.q.integers + (w.head_row * p.q_len + w.query) * task.q.pitch, w.rows,
             task.k.integers + first_key * task.k.pitch, keys, task.q.pitch);
  const bool any = p.modifiers.any() ? weigh_modified<Shared, kHalves>(shared, task, w, key0, keys)
                                     : weigh_thread<Shared, kHalves, false>(shared, task, w, key0, keys);
  return __syncthreads_or(any);
}

// The keys of a step whose exponents lie in [least, limit).
struct Exponents {
  int least, limit;
  __device__ __forceinline__ bool has(int ev) const { return ev >= least && ev < limit; }
};

// Values of kValueKeys keys into shared memory as v^ * 2^(ev - base); keys outside `range`, dims beyond the row and
// non-finite elements are zeros.
template <typename Shared, int kDims>
__device__ __forceinline__ void load_values(Shared& shared, const PreparedRows& v, int64_t first_key, int key0, int dim,
                                            Exponents range, int base) {
  constexpr int kQuads = kDims / 4;
  for (int i = threadIdx.x; i < kValueKeys * kQuads; i += kThreads) {
    const int key = i / kQuads, d = i % kQuads * 4;
    const int ev = shared.value_exponents[key0 + key];
    int4 x = make_int4(0, 0, 0, 0);
    if (range.has(ev) && dim + d < v.pitch) {
      x = *reinterpret_cast<const int4*>(v.integers + (first_key + key0 + key) * v.pitch + dim + d);
    }
    const int scale = range.has(ev) ? 1 << (ev - base) : 0;
    const auto finite = [scale](int32_t e) { return static_cast<double>(special_count(e) != 0 ? 0 : e * scale); };
    double2* slot = reinterpret_cast<double2*>(&shared.values[key][d]);
    slot[0] = make_double2(finite(x.x), finite(x.y));
    slot[1] = make_double2(finite(x.z), finite(x.w));
  }
}

template <typename Shared, int kHalves, int kDims>
__device__ __forceinline__ void add_products(const Shared& shared, int key0,
                                             double (&sums)[kHalves][kThreadRows][kDims / kSide]) {
  const int tx = thread_x(), ty = thread_y();
#pragma unroll 2
  for (int k = 0; k < kValueKeys; ++k) {
    double value[kDims / kSide];
#pragma unroll
    for (int i = 0; i < kDims / kSide; i += 2) {
      const double2 pair = *reinterpret_cast<const double2*>(&shared.values[k][pair_index(tx, i)]);
      value[i] = pair.x;
      value[i + 1] = pair.y;
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const double2* slot = reinterpret_cast<const double2*>(&shared.weights[h][key0 + k][weight_slot(key0 + k, ty)]);
      const double2 w0 = slot[0], w1 = slot[1];
      const double weight[kThreadRows] = {w0.x, w0.y, w1.x, w1.y};
#pragma unroll
      for (int a = 0; a < kThreadRows; ++a) {
#pragma unroll
        for (int i = 0; i < kDims / kSide; ++i) sums[h][a][i] = __fma_rn(weight[a], value[i], sums[h][a][i]);
      }
    }
  }
}

// The float64 sums, integers in units of the window's base, into the digits. They pass through the thread's own slots
// of the values' shared memory, free at this point, so that a plain loop can index them: fewer registers, less code.
template <int kHalves, int kDims>
__device__ __forceinline__ void flush_sums(SumShared<kHalves, kDims>& shared, const DigitTile& tile, const Work& w,
                                           int position, double (&sums)[kHalves][kThreadRows][kDims / kSide]) {
  const int tx = thread_x(), ty = thread_y();
  static_assert(sizeof(shared.values) >= kThreads * kDims / kSide * sizeof(double), "a row of sums must fit");
  double* own = &shared.values[0][0] + threadIdx.x;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int a = 0; a < kThreadRows; ++a) {
#pragma unroll
      for (int i = 0; i < kDims / kSide; ++i) {
        own[i * kThreads] = sums[h][a][i];
        sums[h][a][i] = 0.0;
      }
      const int row = kThreadRows * ty + a;
#pragma unroll 1
      for (int i = 0; i < kDims / kSide; ++i) {
        const int d = pair_index(tx, i);
        const int64_t x = __double2ll_rn(own[i * kThreads]);
        if (row < w.rows && d < w.dims && x != 0) {
          digits_add(tile.at(row, d), tile.stride, x, position + h * kHalfBits);
        }
      }
    }
  }
}

// ---- Sums: the exponent window -----------------------------------------------------------------------------------

// The least value exponent of the step that is at least `least`; kZeroRow if none. Every thread gets the same answer:
// each warp looks at all keys.
template <typename Shared>
__device__ __forceinline__ int least_exponent(const Shared& shared, int least) {
  static_assert(kKeys == 2 * kWarpSize, "a lane looks at two keys");
  const int lane = threadIdx.x % kWarpSize;
  const int first = shared.value_exponents[lane], second = shared.value_exponents[lane + kWarpSize];
  return __reduce_min_sync(kFullWarp, min(first >= least ? first : kZeroRow,
                                          second >= least ? second : kZeroRow));
}

// What the keys of `range` spend of the budget in a window at `base`.
template <typename Shared>
__device__ __forceinline__ int cost_of(const Shared& shared, Exponents range, int base) {
  const int lane = threadIdx.x % kWarpSize;
  const int first = shared.value_exponents[lane], second = shared.value_exponents[lane + kWarpSize];
  const int cost = (range.has(first) ? 1 << (first - base) : 0) + (range.has(second) ? 1 << (second - base) : 0);
  return __reduce_add_sync(kFullWarp, cost);
}

// Counts of section 7 for one element: every attended key with a non-finite element there, whatever its weight.
__device__ inline int64_t count_specials(const SumTask& task, const Work& w, const RowKeys& keys, int row, int d) {
  const int64_t first_key = w.kv_row * task.problem.kv_len;
  const bool maskable = task.problem.modifiers.bias.data != nullptr;
  int64_t count = 0;
  for (int64_t key = keys.begin[row]; key < keys.end[row]; ++key) {
    if (!task.v.special_rows[first_key + key]) continue;
    if (maskable && modify(task.problem, w, row, key, 0) == kScoreMasked) continue;
    count += special_count(task.v.integers[(first_key + key) * task.v.pitch + w.dim + d]);
  }
  return count;
}

// One element out of its digits. Not inlined: its limbs would take registers from the sums.
static __device__ __noinline__ void write_element(const SumTask& task, const Work& w, const DigitTile& tile, int row,
                                                  int d, int64_t den, int64_t special, bool poisoned) {
  int64_t* digits = tile.at(row, d);
  if (task.num != nullptr) {
    if (poisoned) {
      for (int n = 0; n < kSumDigits; ++n) digits[n * tile.stride] = 0;
    } else {
      digits_normalise(digits, tile.stride);
    }
    digits[kSpecialDigit * tile.stride] = special;
    return;
  }
  const double num = poisoned ? 0.0 : digits_round(digits, tile.stride);
  const int64_t q_heads = task.problem.q_heads;
  const int64_t index = w.head_row / q_heads * task.out.stride_batch + w.head_row % q_heads * task.out.stride_head +
                        (w.query + row) * task.out.stride_row + w.dim + d;
  store_element(task.out.data, index, task.out.dtype,
                output_of(num, den, special, task.problem.precision.weight_bits, task.problem.modifiers.rescale()));
}

// DEN and the block's part of NUM or of the output.
template <int kDims, typename Shared>
__device__ void write_tile(Shared& shared, const SumTask& task, const Work& w, const DigitTile& tile) {
  const bool specials = task.problem.kv_len > 0 && task.v.special_heads[w.kv_row] != 0;
  for (int i = threadIdx.x; i < w.rows * kDims; i += kThreads) {
    const int row = i / kDims, d = i % kDims;
    const bool poisoned = shared.poisoned[row] != 0;
    const int64_t den = poisoned ? 0 : shared.den[row];
    if (d == 0 && w.dim == 0) task.den[w.head_row * task.problem.q_len + w.query + row] = den;
    if (d >= w.dims) continue;
    int64_t special = 0;
    if (poisoned) {
      special = kCountNan;
    } else if (specials) {
      special = count_specials(task, w, shared.keys, row, d);
    }
    write_element(task, w, tile, row, d, den, special, poisoned);
  }
}

// ---- Sums: the kernel ----------------------------------------------------------------------------------------------

// NUM of one Work into its digits, DEN into shared memory.
template <int kHalves, int kDims>
__device__ __forceinline__ void sum_keys(SumShared<kHalves, kDims>& shared, const SumTask& task) {
  using Shared = SumShared<kHalves, kDims>;
  const Problem& p = task.problem;
  const Work& w = shared.work;
  const int64_t key_end = static_cast<int64_t>(shared.keys.last);
  double sums[kHalves][kThreadRows][kDims / kSide] = {};
  int base = 0, spent = SumBudget<kHalves>::kTotal;  // no window is open yet
  for (int64_t key0 = key_end == 0 ? 0 : static_cast<int64_t>(shared.keys.first);; key0 += kKeys) {
    const bool done = key0 >= key_end;
    if (!done) {
      const int keys = static_cast<int>(min(static_cast<int64_t>(kKeys), key_end - key0));
      if (!weigh_keys<Shared, kHalves>(shared, task, w, key0, keys)) continue;
    }
    int least = INT32_MIN;
    while (true) {
      // Every thread agrees on all of this: it comes from shared memory that no one writes before the next step.
      least = done ? kZeroRow : least_exponent(shared, least);
      if (!done && least == kZeroRow) break;
      Exponents range{least, base + kWindow};
      int cost = least >= base && range.has(least) ? cost_of(shared, range, base) : 0;
      if (cost == 0 || spent + cost > SumBudget<kHalves>::kTotal) {
        flush_sums<kHalves, kDims>(shared, shared.tile, w, digit_position(base, p.precision), sums);
        __syncthreads();  // its slots are free for the values
        if (done) break;
        base = least;
        spent = 0;
        range.limit = base + kWindow;
        cost = cost_of(shared, range, base);
      }
      spent += cost;
#pragma unroll 1
      for (int chunk = 0; chunk < kKeys; chunk += kValueKeys) {
        if (chunk != 0) __syncthreads();  // the chunk before it has been read; the first follows a barrier
        load_values<Shared, kDims>(shared, task.v, w.kv_row * p.kv_len + key0, chunk, w.dim, range, base);
        __syncthreads();
        add_products<Shared, kHalves, kDims>(shared, chunk, sums);
      }
      __syncthreads();  // the values have been read
      least = range.limit;
    }
    if (done) break;
  }
}

template <int kHalves, int kDims>
__global__ void __launch_bounds__(kThreads, 1) sum_kernel(const __grid_constant__ SumTask task) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<SumShared<kHalves, kDims>*>(shared_bytes);
  for (int64_t item = blockIdx.x; item < task.items; item += gridDim.x) {
    __syncthreads();  // the item before has been written
    if (threadIdx.x == 0) {
      shared.work = work_of(task.problem, item, kDims);
      shared.tile = digit_tile<kDims>(task, shared.work);
    }
    __syncthreads();
    load_rows(shared, task, shared.work);
    clear_digits<kDims>(shared.tile, shared.work);
    __syncthreads();
    sum_keys<kHalves, kDims>(shared, task);
    __syncthreads();
    write_tile<kDims>(shared, task, shared.work, shared.tile);
  }
}

}  // namespace det_attn::cuda::reference
