// The CPU's backward stages over whole problems: references, exact sums, rounding and the fused call
// (docs/contract.md section 8). Work is cut into blocks of rows, queries for dQ and keys for dK and dV; when these are
// too few for the threads, the sums along the columns are cut too. References meet by max and sums by +, so no cut
// changes a bit.
#include "backward.h"

#include <algorithm>
#include <limits>

#include "pair_worker.h"

namespace det_attn {
namespace cpu {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kPackedBytes = int64_t(1) << 26;  // packed rows held at a time, unless one head has more
constexpr int64_t kPairBytes = int64_t(1) << 27;    // p and ds kept at a time between the passes of the fused call
constexpr int64_t kUnitsPerThread = 4;              // enough to balance causal blocks
constexpr int64_t kTilesPerSplit = 4;               // shorter ranges are not worth meeting again

// Terms of at most 2^G times integers of 2^(b-1) are summed in float64 over so many columns, and then in int64.
constexpr int exact_columns(int gradient_bits) { return 1 << (53 - gradient_bits - (kHighest.operand_bits - 1)); }
static_assert(exact_columns(kMostGradientBits) % kPanel == 0, "a cut tile must keep whole panels of columns");
constexpr int64_t kTilesPerFlush = 256;
static_assert(kTilesPerFlush * kKeyTile <= int64_t(1) << (62 - kMostGradientBits - (kHighest.operand_bits - 1)),
              "the tiles of one flush must sum exactly in int64");

enum Wanted : int { kReferences = 1, kQueryGradient = 2, kKeyGradient = 4 };

struct Layouts {
  int q = 0, k = 0;  // grad as q, v as k
};
Layouts layouts_of(int wanted) {
  Layouts need;
  if (wanted & (kReferences | kQueryGradient)) need.q |= kRowMajor, need.k |= kTransposed;
  if (wanted & kQueryGradient) need.k |= kPanels;
  if (wanted & kKeyGradient) need.q |= kTransposed | kPanels, need.k |= kRowMajor;
  return need;
}

// ---- Rounds of key heads ---------------------------------------------------------------------------------------

void note_ends(BackwardPack& pack) {
  const int64_t tiles = (pack.set_hi - pack.set_lo) * pack.q.tiles;
  for (Buffer<int64_t>* x : {&pack.all_begin, &pack.all_end, &pack.any_begin, &pack.any_end}) x->resize(tiles);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t all_begin = 0, all_end = INT64_MAX, any_begin = INT64_MAX, any_end = 0;
    for (int64_t i = tile * kKeyTile; i < (tile + 1) * kKeyTile; ++i) {
      const int64_t begin = pack.query.begin[i], end = pack.query.end[i];
      all_begin = std::max(all_begin, begin);
      all_end = std::min(all_end, end);
      if (end <= begin) continue;
      any_begin = std::min(any_begin, begin);
      any_end = std::max(any_end, end);
    }
    pack.all_begin[tile] = all_begin, pack.all_end[tile] = all_end;
    pack.any_begin[tile] = any_begin, pack.any_end[tile] = any_end;
  }
}

void pack_round(const Gradient& call, int64_t lo, int64_t hi, const Layouts& need, BackwardPack& pack) {
  const Problem& p = call.problem;
  const int depth = static_cast<int>(p.head_dim);
  const int bits = p.precision.operand_bits;
  pack.set_lo = lo, pack.set_hi = hi;
  pack.queries = {p.q_heads / p.kv_heads, p.q_len, 0, p.kv_heads};
  pack.keys = {1, p.mask.kv_hi - p.mask.kv_lo, p.mask.kv_lo, p.kv_heads};
  pack.q.pack(p.q, pack.queries, lo, hi, depth, &p.scale, bits, need.q);
  pack.grad.pack(call.grad, pack.queries, lo, hi, depth, nullptr, bits, need.q);
  pack.k.pack(p.k, pack.keys, lo, hi, depth, nullptr, bits, need.k);
  pack.v.pack(p.v, pack.keys, lo, hi, depth, nullptr, bits, need.k & ~kPanels);
  pack.query.fill(call, pack.queries, lo, hi, pack.q, pack.grad);
  pack.key.fill(pack.k, pack.v, (hi - lo) * pack.k.padded);
  note_ends(pack);
}

int64_t pairs_of_head(const Problem& p) {
  const auto padded = [](int64_t rows) { return (rows + kKeyTile - 1) / kKeyTile * kKeyTile; };
  return padded(p.q_heads / p.kv_heads * p.q_len) * padded(p.mask.kv_hi - p.mask.kv_lo);
}

// Room for the pairs of a round; those of padding queries are 0 and nobody else writes them.
void prepare_pairs(BackwardPack& pack) {
  for (Buffer<float>* x : {&pack.pairs.p, &pack.pairs.ds}) {
    x->resize(pack.pair_count());
    for (int64_t set = pack.set_lo; set < pack.set_hi; ++set) {
      for (int64_t tile = 0; tile < pack.k.tiles; ++tile) {
        std::fill(x->data() + pack.pair_offset(set, tile, pack.queries.rows()),
                  x->data() + pack.pair_offset(set, tile, pack.q.padded), 0.0f);
      }
    }
  }
}

template <class Body>
void for_each_round(const Gradient& call, int wanted, const Body& body) {
  const Problem& p = call.problem;
  const int64_t heads = p.batch * p.kv_heads;
  if (heads == 0) return;
  const Layouts need = layouts_of(wanted);
  const int64_t query_rows = p.q_heads / p.kv_heads * p.q_len;
  const int64_t head_bytes = 2 * (query_rows * PackedRows::bytes_per_row(p.head_dim, need.q) +
                                  p.kv_len * PackedRows::bytes_per_row(p.head_dim, need.k));
  int64_t step = std::max<int64_t>(1, std::min(heads, kPackedBytes / std::max<int64_t>(1, head_bytes)));
  const int64_t pair_bytes = 2 * static_cast<int64_t>(sizeof(float)) * std::max<int64_t>(1, pairs_of_head(p));
  BackwardPack pack;  // its memory serves every round
  pack.pairs.kept = wanted & kReferences && wanted != kReferences && pair_bytes <= kPairBytes;
  if (pack.pairs.kept) step = std::min(step, kPairBytes / pair_bytes);
  for (int64_t lo = 0; lo < heads; lo += step) {
    pack_round(call, lo, std::min(heads, lo + step), need, pack);
    if (pack.pairs.kept) prepare_pairs(pack);
    body(pack);
  }
}

// Blocks of rows of one side times ranges of tiles of the other. Calls work(block, first tile, last tile, alone).
template <class Worker, class Work>
void run_blocks(const BackwardPack& pack, bool query_is_row, const Worker& make, const Work& work) {
  const int64_t sets = pack.set_hi - pack.set_lo;
  const int64_t rows = (query_is_row ? pack.queries : pack.keys).rows();
  const int64_t tiles = query_is_row ? pack.k.tiles : pack.q.tiles;
  const int64_t blocks = (rows + kRowTile - 1) / kRowTile;
  const int64_t units = sets * blocks;
  if (units == 0 || tiles == 0) return;
  const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t cuts = units >= threads ? 1 : kUnitsPerThread * threads / units;
  const int64_t splits = std::max<int64_t>(1, std::min(cuts, tiles / kTilesPerSplit));
  run_units(units * splits, [&](const auto& next) {
    auto worker = make();
    for (int64_t i = next(); i >= 0; i = next()) {
      // The longest blocks of a causal call come first: the last queries, the first keys.
      const int64_t number = i / splits / sets, split = i % splits;
      const int64_t first = (query_is_row ? blocks - 1 - number : number) * kRowTile;
      const RowBlock block{pack.set_lo + i / splits % sets, first,
                           static_cast<int>(std::min<int64_t>(kRowTile, rows - first))};
      work(worker, block, tiles * split / splits, tiles * (split + 1) / splits, splits == 1);
    }
  });
}

// ---- References ------------------------------------------------------------------------------------------------

void raise(int32_t* reference, double magnitude, int bias) {
  if (magnitude == 0.0) return;
  const int32_t e = magnitude == kInfinity ? kReferencePoisoned : exponent_of(magnitude) + bias;
  int32_t old = __atomic_load_n(reference, __ATOMIC_RELAXED);
  while (e > old && !__atomic_compare_exchange_n(reference, &old, e, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Section 7: an attended pair with a bad row makes all three gradient rows NaN.
void mark_bad_pairs(const BackwardPack& pack, const PairWorker& pairs, const RowBlock& block, int64_t tile, double* a,
                    double* b, double* c) {
  const int64_t query = (block.set - pack.set_lo) * pack.q.padded + block.first;
  const uint8_t* bad_key = pack.key.bad.data() + ((block.set - pack.set_lo) * pack.k.tiles + tile) * kKeyTile;
  for (int r = 0; r < block.rows; ++r) {
    const double* s = pairs.scores(r);
    for (int j = 0; j < pairs.columns(); ++j) {
      if (s[j] == -kInfinity) continue;
      if (pack.query.dead[query + r]) a[r] = kInfinity;
      if (pack.query.bad[query + r] || bad_key[j] || s[j] != s[j]) a[r] = b[j] = c[j] = kInfinity;
    }
  }
}

// a, b, c start at the round's first query row and key row, and hold kReferenceEmpty or what came before.
void reference_round(const Problem& problem, const BackwardPack& pack, int32_t* a, int32_t* b, int32_t* c) {
  const TileKernels& kernels = tile_kernels();
  const auto make = [&] { return PairWorker(problem, pack, true); };
  run_blocks(pack, true, make, [&](PairWorker& pairs, const RowBlock& block, int64_t begin, int64_t end, bool) {
    const int64_t set = block.set - pack.set_lo;
    const int64_t query = set * pack.q.padded + block.first;
    const bool dead = std::any_of(pack.query.dead.data() + query, pack.query.dead.data() + query + block.rows,
                                  [](uint8_t x) { return x != 0; });
    double of_row[kRowTile] = {0.0};
    for (int64_t tile = begin; tile < end; ++tile) {
      if (!pairs.compute(block, tile)) continue;
      double of_key[kKeyTile] = {0.0}, of_value[kKeyTile] = {0.0};
      const int64_t tile_id = set * pack.k.tiles + tile;
      for (int r = 0; r < block.rows; ++r) {
        const double largest = kernels.magnitudes(
            pairs.p(r), pairs.ds(r), pairs.columns(), pack.key.score_unit.data() + tile_id * kKeyTile,
            pack.query.key_term_unit[query + r], pack.query.value_term_unit[query + r], of_key, of_value);
        of_row[r] = std::max(of_row[r], largest);
      }
      bool bad = dead || pack.k.has_bad(tile_id) || pack.v.has_bad(tile_id);
      for (int r = 0; r < block.rows && !bad && problem.modifiers.of_scores(); ++r) {
        bad = kernels.any_nan(pairs.scores(r), pairs.columns());
      }
      if (bad) {
        mark_bad_pairs(pack, pairs, block, tile, of_row, of_key, of_value);
      }
      const int64_t key = set * problem.kv_len + tile * kKeyTile;
      for (int64_t j = 0; j < std::min<int64_t>(kKeyTile, pack.keys.rows() - tile * kKeyTile); ++j) {
        raise(b + key + j, of_key[j], kQueryExponentBias);
        raise(c + key + j, of_value[j], 0);
      }
    }
    for (int r = 0; r < block.rows; ++r) raise(a + set * pack.queries.rows() + block.first + r, of_row[r], 0);
  });
}

// ---- Exact sums ------------------------------------------------------------------------------------------------

// One of dQ, dK, dV: sum over columns of rne(term * column unit * 2^(G - reference)) * factor.
struct Target {
  const PackedRows& factor;
  const Buffer<double>& column_unit;
  const int32_t* reference;  // of the round's first row
  int bias;                  // the column unit is 2^(exponent - bias)
  bool of_p;                 // the term is p, not ds
  int bits;                  // G
  int64_t set_stride;        // rows from one set to the next
  int64_t* digits;           // [.., head_dim, kGradientDigits]
};

class SumWorker {
 public:
  SumWorker(const Problem& problem, const BackwardPack& pack, bool query_is_row)
      : pack_(pack), kernels_(tile_kernels()), pairs_(problem, pack, query_is_row), width_(pack.q.width) {
    terms_.resize(kRowTile * kScoreStride);
    acc_.resize(kRowTile * width_);
    sums_.resize(2 * kRowTile * width_);
  }

  void run(const RowBlock& block, int64_t begin, int64_t end, const std::vector<Target>& targets, bool alone) {
    std::fill(sums_.data(), sums_.data() + 2 * kRowTile * width_, 0);
    int64_t tiles = 0;
    for (int64_t tile = begin; tile < end; ++tile) {
      if (!pairs_.get(block, tile)) continue;
      for (size_t t = 0; t < targets.size(); ++t) add(block, tile, targets[t], sums(t));
      if (++tiles % kTilesPerFlush == 0) flush(block, targets, alone);
    }
    flush(block, targets, alone);
  }

 private:
  int64_t* sums(size_t target) { return sums_.data() + static_cast<int64_t>(target) * kRowTile * width_; }

  void add(const RowBlock& block, int64_t tile, const Target& target, int64_t* sums) {
    const int64_t set = block.set - pack_.set_lo;
    const int64_t tile_id = set * target.factor.tiles + tile;
    const int32_t* reference = target.reference + set * target.set_stride + block.first;
    const int columns = pairs_.columns();
    const double limit = static_cast<double>(largest_term(target.bits));
    for (int r = 0; r < block.rows; ++r) {
      double* t = terms_.data() + r * kScoreStride;
      if (reference[r] == kReferenceEmpty || reference[r] == kReferencePoisoned) {
        std::fill(t, t + columns, 0.0);
        continue;
      }
      const int up = target.bits - (reference_from_public(reference[r]) - target.bias);
      const double unit = pow2(std::max(-1000, up));  // from there on every term is 0
      kernels_.short_terms(target.of_p ? pairs_.p(r) : pairs_.ds(r), target.column_unit.data() + tile_id * kKeyTile,
                           unit, limit, columns, t);
    }
    const int most = exact_columns(target.bits);
    for (int j = 0; j < columns; j += most) {
      kernels_.gemm(terms_.data() + j, kScoreStride, block.rows, target.factor.panels(tile_id) + j * kPanel,
                    kKeyTile * kPanel, width_ / kPanel, std::min(most, columns - j), acc_.data(), width_, false);
      kernels_.add_integers(acc_.data(), static_cast<int64_t>(block.rows) * width_, sums);
    }
  }

  // Into the digits. Blocks that share rows with another split add atomically.
  void flush(const RowBlock& block, const std::vector<Target>& targets, bool alone) {
    const int depth = pack_.q.depth;
    for (size_t t = 0; t < targets.size(); ++t) {
      const Target& target = targets[t];
      const int64_t row = (block.set - pack_.set_lo) * target.set_stride + block.first;
      for (int64_t i = 0; i < static_cast<int64_t>(block.rows) * depth; ++i) {
        int64_t& sum = sums(t)[i / depth * width_ + i % depth];
        int64_t part[kGradientDigits] = {0, 0, 0};
        gradient_digits_add(part, sum);
        sum = 0;
        int64_t* digits = target.digits + (row * depth + i) * kGradientDigits;
        for (int k = 0; k < 2; ++k) {  // the top digit gets its share by carries
          if (alone) {
            digits[k] += part[k];
          } else {
            __atomic_fetch_add(digits + k, part[k], __ATOMIC_RELAXED);
          }
        }
      }
    }
  }

  const BackwardPack& pack_;
  const TileKernels& kernels_;
  PairWorker pairs_;
  const int width_;
  Buffer<double> terms_;  // [kRowTile][kScoreStride]
  Buffer<double> acc_;    // [kRowTile][width]
  Buffer<int64_t> sums_;  // [target][kRowTile][width]
};

void sum_round(const Problem& problem, const BackwardPack& pack, bool query_is_row,
               const std::vector<Target>& targets) {
  if (targets.empty()) return;
  const auto make = [&] { return SumWorker(problem, pack, query_is_row); };
  run_blocks(pack, query_is_row, make, [&](SumWorker& worker, const RowBlock& block, int64_t begin, int64_t end,
                                           bool alone) { worker.run(block, begin, end, targets, alone); });
}

// Pointers start at the round's first query row, and at its first key row inside the mask. Null sums are not computed.
void sums_round(const Problem& problem, const BackwardPack& pack, const int32_t* a, const int32_t* b, const int32_t* c,
                int64_t* dq, int64_t* dk, int64_t* dv) {
  const QueryState& query = pack.query;
  std::vector<Target> of_query, of_key;
  if (dq) of_query.push_back({pack.k, pack.key.score_unit, a, 0, false, kQueryGradientBits, pack.queries.rows(), dq});
  if (dk) {
    of_key.push_back({pack.q, query.key_term_unit, b, kQueryExponentBias, false, kKeyGradientBits, problem.kv_len, dk});
  }
  if (dv) {
    of_key.push_back({pack.grad, query.value_term_unit, c, 0, true, kValueGradientBits, problem.kv_len, dv});
  }
  sum_round(problem, pack, true, of_query);
  sum_round(problem, pack, false, of_key);
}

int wanted_sums(bool dq, bool dk, bool dv) { return (dq ? kQueryGradient : 0) | (dk || dv ? kKeyGradient : 0); }

void round_rows(const int64_t* sums, const int32_t* reference, int64_t rows, int gradient_bits, double scale,
                const RowSet& where, int64_t set_lo, int64_t head_dim, Precision precision, const MutableView& out) {
  const View places{out.data, out.stride_batch, out.stride_head, out.stride_row, out.dtype};
  run_ranges(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = where.offset(places, set_lo + row / where.rows(), row % where.rows());
      for (int64_t d = 0; d < head_dim; ++d) {
        const double sum = gradient_digits_round(sums + (row * head_dim + d) * kGradientDigits);
        store_element(out.data, offset + d, out.dtype,
                      gradient_of(sum, reference[row], scale, gradient_bits, precision.operand_bits));
      }
    }
  });
}

}  // namespace

// ---- The stages ------------------------------------------------------------------------------------------------

void grad_reference(const Gradient& call, int32_t* a, int32_t* b, int32_t* c) {
  const Problem& p = call.problem;
  std::fill(a, a + p.batch * p.q_heads * p.q_len, kReferenceEmpty);
  for (int32_t* x : {b, c}) std::fill(x, x + p.batch * p.kv_heads * p.kv_len, kReferenceEmpty);
  for_each_round(call, kReferences, [&](const BackwardPack& pack) {
    const int64_t key = pack.set_lo * p.kv_len + p.mask.kv_lo;
    reference_round(p, pack, a + pack.set_lo * pack.queries.rows(), b + key, c + key);
  });
}

void grad_accumulate(const Gradient& call, const int32_t* a, const int32_t* b, const int32_t* c, int64_t* dq,
                     int64_t* dk, int64_t* dv) {
  const Problem& p = call.problem;
  const int64_t row = p.head_dim * kGradientDigits;
  const int64_t query_numbers = p.batch * p.q_heads * p.q_len * row;
  const int64_t key_numbers = p.batch * p.kv_heads * p.kv_len * row;
  if (dq) std::fill(dq, dq + query_numbers, 0);
  if (dk) std::fill(dk, dk + key_numbers, 0);
  if (dv) std::fill(dv, dv + key_numbers, 0);
  for_each_round(call, wanted_sums(dq, dk, dv), [&](const BackwardPack& pack) {
    const int64_t query = pack.set_lo * pack.queries.rows(), key = pack.set_lo * p.kv_len + p.mask.kv_lo;
    sums_round(p, pack, a ? a + query : nullptr, b ? b + key : nullptr, c ? c + key : nullptr,
               dq ? dq + query * row : nullptr, dk ? dk + key * row : nullptr, dv ? dv + key * row : nullptr);
  });
  const auto normalise = [](int64_t* digits, int64_t numbers) {
    run_ranges(numbers / kGradientDigits, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) gradient_digits_normalise(digits + i * kGradientDigits);
    });
  };
  if (dq) normalise(dq, query_numbers);
  if (dk) normalise(dk, key_numbers);
  if (dv) normalise(dv, key_numbers);
}

void grad_finalize(const int64_t* sums, const int32_t* reference, int64_t count, int64_t head_dim, int gradient_bits,
                   double scale, Precision precision, void* out, DType out_dtype) {
  const RowSet rows{1, count, 0, 1};
  round_rows(sums, reference, count, gradient_bits, scale, rows, 0, head_dim, precision,
             {out, 0, 0, head_dim, out_dtype});
}

void backward(const Gradient& call, const MutableView& dq, const MutableView& dk, const MutableView& dv) {
  const Problem& p = call.problem;
  const int wanted = kReferences | wanted_sums(dq.data, dk.data, dv.data);
  const int64_t row = p.head_dim * kGradientDigits;
  Buffer<int32_t> a, b, c;
  Buffer<int64_t> query_sums, key_sums, value_sums;
  for_each_round(call, wanted, [&](const BackwardPack& pack) {
    const int64_t sets = pack.set_hi - pack.set_lo;
    const int64_t queries = sets * pack.queries.rows(), keys = sets * p.kv_len;
    const auto cleared = [](auto& buffer, int64_t count, auto value) {
      buffer.resize(count);
      std::fill(buffer.data(), buffer.data() + count, value);
      return buffer.data();
    };
    cleared(a, queries, kReferenceEmpty), cleared(b, keys, kReferenceEmpty), cleared(c, keys, kReferenceEmpty);
    int64_t* dq_sums = dq.data ? cleared(query_sums, queries * row, int64_t(0)) : nullptr;
    int64_t* dk_sums = dk.data ? cleared(key_sums, keys * row, int64_t(0)) : nullptr;
    int64_t* dv_sums = dv.data ? cleared(value_sums, keys * row, int64_t(0)) : nullptr;
    const int64_t lo = p.mask.kv_lo;
    reference_round(p, pack, a.data(), b.data() + lo, c.data() + lo);
    sums_round(p, pack, a.data(), b.data() + lo, c.data() + lo, dq_sums, dk_sums ? dk_sums + lo * row : nullptr,
               dv_sums ? dv_sums + lo * row : nullptr);
    const RowSet all_keys{1, p.kv_len, 0, p.kv_heads};
    const auto round = [&](const int64_t* sums, const Buffer<int32_t>& reference, int64_t rows, int gradient_bits,
                           double scale, const RowSet& where, const MutableView& out) {
      if (sums == nullptr) return;
      round_rows(sums, reference.data(), rows, gradient_bits, scale, where, pack.set_lo, p.head_dim, p.precision, out);
    };
    round(dq_sums, a, queries, kQueryGradientBits, p.scale, pack.queries, dq);
    round(dk_sums, b, keys, kKeyGradientBits, 1.0, all_keys, dk);
    round(dv_sums, c, keys, kValueGradientBits, 1.0, all_keys, dv);
  });
}

}  // namespace cpu
}  // namespace det_attn
