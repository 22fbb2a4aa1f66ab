// Stages scores and weights of the backward pass on the CPU (docs/contract.md sections 2, 4 and 8), see pair_worker.h.
#include "pair_worker.h"

#include <algorithm>

namespace det_attn {
namespace cpu {

static_assert(kRowTile % kPanel == 0 && kKeyTile % kPanel == 0, "panels of keys must not straddle blocks or tiles");

namespace {

int32_t place_in(int64_t x, int64_t size) { return static_cast<int32_t>(std::max<int64_t>(0, std::min(size, x))); }

}  // namespace

PairWorker::PairWorker(const Problem& problem, const BackwardPack& pack, bool query_is_row)
    : problem_(problem),
      pack_(pack),
      kernels_(tile_kernels()),
      modifiers_(problem),
      query_is_row_(query_is_row),
      row_x_(query_is_row ? pack.q : pack.k),
      row_y_(query_is_row ? pack.grad : pack.v),
      column_x_(query_is_row ? pack.k : pack.q),
      column_y_(query_is_row ? pack.v : pack.grad),
      row_unit_(query_is_row ? pack.query.score_unit : pack.key.score_unit),
      column_unit_(query_is_row ? pack.key.score_unit : pack.query.score_unit) {
  s_.resize(kRowTile * kScoreStride);
  dot_.resize(kRowTile * kScoreStride);
  own_p_.resize(kRowTile * kKeyTile);
  own_ds_.resize(kRowTile * kKeyTile);
  p_ = own_p_.data();
  ds_ = own_ds_.data();
}

PairWorker::Keys PairWorker::attended(const RowBlock& block, int row, int64_t tile) const {
  const int64_t id = (block.set - pack_.set_lo) * row_x_.padded + block.first + row;
  return {place_in(pack_.query.begin[id] - tile * kKeyTile, kKeyTile),
          place_in(pack_.query.end[id] - tile * kKeyTile, kKeyTile)};
}

// Sets the columns' places and whether any pair needs the mask. False where no pair is attended.
bool PairWorker::mask_columns(const RowBlock& block, int64_t tile) {
  if (query_is_row_) {
    bool any = false;
    masked_ = false;
    for (int r = 0; r < block.rows; ++r) {
      const Keys keys = attended(block, r, tile);
      any |= !keys.empty();
      masked_ |= keys.first > 0 || keys.last < columns_;
    }
    for (int j = 0; masked_ && j < columns_; ++j) place_[j] = j;
    return any;
  }
  const int64_t id = (block.set - pack_.set_lo) * column_x_.tiles + tile;
  const int64_t end = block.first + block.rows;
  if (pack_.any_end[id] <= block.first || pack_.any_begin[id] >= end) return false;
  masked_ = pack_.all_end[id] < end || pack_.all_begin[id] > block.first;
  for (int j = 0; masked_ && j < columns_; ++j) {
    place_[j] = place_in(pack_.query.begin[id * kKeyTile + j] - block.first, block.rows);
    last_[j] = place_in(pack_.query.end[id * kKeyTile + j] - block.first, block.rows);
  }
  return true;
}

// Sets the columns and, for query rows of kept pairs, where p and ds lie.
bool PairWorker::begin(const RowBlock& block, int64_t tile) {
  const int64_t real = (query_is_row_ ? pack_.keys : pack_.queries).rows() - tile * kKeyTile;
  columns_ = round_up(static_cast<int>(std::min<int64_t>(kKeyTile, real)), kPanel);
  if (pack_.pairs.kept && query_is_row_) {
    const int64_t at = pack_.pair_offset(block.set, tile, block.first);
    p_ = pack_.pairs.p.data() + at;
    ds_ = pack_.pairs.ds.data() + at;
  }
  return mask_columns(block, tile);
}

bool PairWorker::get(const RowBlock& block, int64_t tile) {
  if (!pack_.pairs.kept) return compute(block, tile);
  if (!begin(block, tile)) return false;
  if (query_is_row_) return true;
  for (int r = 0; r < block.rows; r += kPanel) {  // a panel of keys lies within one tile of keys
    const int64_t key = block.first + r;
    const int64_t at = pack_.pair_offset(block.set, key / kKeyTile, tile * kKeyTile) + key % kKeyTile;
    kernels_.turn_pairs(pack_.pairs.p.data() + at, columns_, p_ + r * kKeyTile);
    kernels_.turn_pairs(pack_.pairs.ds.data() + at, columns_, ds_ + r * kKeyTile);
  }
  return true;
}

bool PairWorker::compute(const RowBlock& block, int64_t tile) {
  const int64_t set = block.set - pack_.set_lo;
  const int64_t first = set * row_x_.padded + block.first;
  const int64_t column_tile = set * column_x_.tiles + tile;
  const int64_t column = column_tile * kKeyTile;
  if (!begin(block, tile)) {
    if (pack_.pairs.kept && query_is_row_) {
      std::fill(p_, p_ + block.rows * kKeyTile, 0.0f);
      std::fill(ds_, ds_ + block.rows * kKeyTile, 0.0f);
    }
    return false;
  }

  const int depth = row_x_.depth;
  const int64_t panel = static_cast<int64_t>(depth) * kPanel;
  const int panels = columns_ / kPanel;
  kernels_.gemm(row_x_.row(first), depth, block.rows, column_x_.transposed(column_tile), panel, panels, depth,
                s_.data(), kScoreStride, false);
  kernels_.gemm(row_y_.row(first), depth, block.rows, column_y_.transposed(column_tile), panel, panels, depth,
                dot_.data(), kScoreStride, false);
  const int fast_sum = fast_exponent_sum(depth) - column_x_.max_exponent(column_tile);
  for (int r = 0; r < block.rows; ++r) {
    const int64_t row = first + r;
    double* s = s_.data() + r * kScoreStride;
    double* dot = dot_.data() + r * kScoreStride;
    if (row_x_.any_order_exact(row) && row_x_.exponent(row) <= fast_sum) {
      kernels_.scale_row(s, column_unit_.data() + column, row_unit_[row], columns_);
      kernels_.round_scores(s, columns_);
    } else {
      exact_scores(row, column, s);
    }
    if (!row_y_.any_order_exact(row)) exact_products(row, column, dot);
    if (modifiers_.of_scores()) modify(block, r, tile, s);
    if (masked_ && query_is_row_) {
      const Keys keys = attended(block, r, tile);
      kernels_.mask_scores(s, place_, keys.first, keys.last, columns_);
    } else if (masked_) {
      kernels_.mask_columns(s, place_, last_, r, columns_);
    }

    const int64_t query = query_is_row_ ? row : column, key = query_is_row_ ? column : row;
    const QueryState& q = pack_.query;
    const PairQuery of_query{q.maximum.data() + query, q.inverse.data() + query, q.delta.data() + query,
                             q.grad_unit.data() + query};
    const PairKey of_key{pack_.key.value_unit.data() + key};
    kernels_.pair_terms(query_is_row_, s, dot, columns_, of_query, of_key, change(block, r, tile),
                        problem_.precision.weight_bits, p_ + r * kKeyTile, ds_ + r * kKeyTile);
  }
  return true;
}

// ---- Sections 10 and 11: modifiers -----------------------------------------------------------------------------

// A pair of the block's set; row counts the queries of the set.
Pair PairWorker::pair_of(const RowBlock& block, int64_t row, int64_t key) const {
  const int64_t group = pack_.queries.heads_per_set, length = pack_.queries.length;
  const int64_t batch = block.set / pack_.queries.sets_per_batch;
  const int64_t head = block.set % pack_.queries.sets_per_batch * group;
  return {batch, head + row / length, row % length, problem_.mask.kv_lo + key};
}

// Also sets slope_, which the capped scores alone decide.
void PairWorker::modify(const RowBlock& block, int r, int64_t tile, double* s) {
  const int64_t columns = (query_is_row_ ? pack_.keys : pack_.queries).rows() - tile * kKeyTile;
  const int real = static_cast<int>(std::min<int64_t>(columns, columns_));
  modifiers_.cap(s, real);
  if (problem_.modifiers.softcap != 0.0) kernels_.softcap_slopes(s, columns_, problem_.modifiers.softcap, slope_);
  if (query_is_row_) {
    modifiers_.shift(s, real, pair_of(block, block.first + r, tile * kKeyTile), nullptr);
  } else {
    modifiers_.shift_column(s, real, pair_of(block, 0, block.first + r), tile * kKeyTile);
  }
}

const PairChange* PairWorker::change(const RowBlock& block, int r, int64_t tile) {
  const bool softcap = problem_.modifiers.softcap != 0.0;
  if (!softcap && !modifiers_.dropout()) return nullptr;
  if (!softcap) std::fill(slope_, slope_ + columns_, 1.0f);
  std::fill(factor_, factor_ + columns_, 1.0f);
  if (modifiers_.dropout()) {
    const int64_t columns = (query_is_row_ ? pack_.keys : pack_.queries).rows() - tile * kKeyTile;
    const int real = static_cast<int>(std::min<int64_t>(columns, columns_));
    if (query_is_row_) {
      modifiers_.factors(factor_, real, pair_of(block, block.first + r, tile * kKeyTile), nullptr);
    } else {
      modifiers_.factor_column(factor_, real, pair_of(block, 0, block.first + r), tile * kKeyTile);
    }
  }
  return &change_;
}

// ---- Rows beyond float64: the scalar rules ---------------------------------------------------------------------

namespace {

int64_t exact_dot(const PackedRows& rows, int64_t row, const PackedRows& columns, int64_t column) {
  const double* x = rows.row(row);
  const double* y = columns.transposed(column / kKeyTile) +
                    column % kKeyTile / kPanel * static_cast<int64_t>(columns.depth) * kPanel + column % kPanel;
  int64_t dot = 0;
  for (int d = 0; d < rows.depth; ++d) dot += static_cast<int64_t>(x[d]) * static_cast<int64_t>(y[d * kPanel]);
  return dot;
}

}  // namespace

void PairWorker::exact_scores(int64_t row, int64_t column, double* s) const {
  for (int j = 0; j < columns_; ++j) {
    const int r = score_shift(row_x_.exponent(row), column_x_.exponent(column + j), problem_.precision.operand_bits);
    s[j] = static_cast<double>(score_of(exact_dot(row_x_, row, column_x_, column + j), r));
  }
}

// Rounded to float32 from the whole integer; a second rounding to float32 changes nothing.
void PairWorker::exact_products(int64_t row, int64_t column, double* dot) const {
  for (int j = 0; j < columns_; ++j) dot[j] = static_cast<float>(exact_dot(row_y_, row, column_y_, column + j));
}

}  // namespace cpu
}  // namespace det_attn
