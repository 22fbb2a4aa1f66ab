// Stages scores, rowmax, weights and exact sums on the CPU (docs/contract.md sections 2-5 and 7), see tile_worker.h.
#include "tile_worker.h"

#include <algorithm>
#include <limits>

namespace det_attn {
namespace cpu {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

TileWorker::TileWorker(const Problem& problem, const PackedKeys& keys, int max_rows, bool cache_scores)
    : problem_(problem),
      keys_(keys),
      kernels_(tile_kernels()),
      modifiers_(problem),
      split_weights_(problem.precision.weight_bits + problem.precision.operand_bits - 1 + kBudgetBits > 53),
      depth_(keys.depth),
      width_(keys.width),
      max_rows_(max_rows),
      group_(problem.q_heads / problem.kv_heads),
      cached_tiles_(cache_scores ? static_cast<int>(std::min<int64_t>(kCachedTiles, keys.tiles)) : 0) {
  q_.resize(static_cast<int64_t>(max_rows) * depth_);
  scores_.resize(static_cast<int64_t>(cached_tiles_ + 1) * max_rows * kScoreStride);
  if (!keys.values) return;
  weights_.resize(2 * max_rows * kScoreStride);
  acc_.resize(2 * static_cast<int64_t>(max_rows) * width_);
  digits_.resize(static_cast<int64_t>(kSumDigits) * max_rows * width_);
  counts_.resize(static_cast<int64_t>(max_rows) * depth_);
}

void TileWorker::begin(const Unit& unit) {
  unit_ = unit;
  cached_first_ = cached_last_ = 0;
  const int fast_sum = fast_exponent_sum(depth_);
  for (int r = 0; r < unit.rows; ++r) {
    const int64_t index = unit.first + r;
    const int64_t query = index % problem_.q_len;
    const int64_t q_head = unit.head % problem_.kv_heads * group_ + index / problem_.q_len;
    Row& row = row_[r];
    row.at = {unit.head / problem_.kv_heads, q_head, query, problem_.mask.kv_lo};
    row.query = pack_query(problem_, row.at.batch, q_head, query, q_.data() + r * depth_);
    row.poisoned = row.query.exponent == kPoisonedExponent;
    row.fast_exponent = INT32_MIN;
    if (row.poisoned) {
      row.fast_exponent = INT32_MAX;  // its scores are zeros nobody reads
    } else if (row.query.any_order_exact) {
      row.fast_exponent = fast_sum - row.query.exponent;
    }
    row.begin = problem_.mask.begin(row.at.batch, query) - problem_.mask.kv_lo;
    row.end = problem_.mask.end(row.at.batch, query) - problem_.mask.kv_lo;
    row.maximum = -kInfinity;
    row.den = 0;
  }
  clear_sums();
}

// ---- Section 2: scores -----------------------------------------------------------------------------------------

// The row's interval within a tile.
TileWorker::Keys TileWorker::attended(const Row& row, int64_t tile) const {
  const auto place = [tile](int64_t key) {
    return static_cast<int32_t>(std::max<int64_t>(0, std::min<int64_t>(kKeyTile, key - tile * kKeyTile)));
  };
  return {place(row.begin), place(row.end)};
}

// The tiles of a range outside of which no row attends a key.
Range TileWorker::attended_tiles(int64_t first, int64_t last) const {
  int64_t begin = INT64_MAX, end = 0;
  for (int r = 0; r < unit_.rows; ++r) {
    if (row_[r].end <= row_[r].begin) continue;
    begin = std::min(begin, row_[r].begin);
    end = std::max(end, row_[r].end);
  }
  return {std::max(first, begin / kKeyTile), std::min(last, (end + kKeyTile - 1) / kKeyTile)};
}

// Where the scores of a tile go: a kept place for the first ones of a range, the spare place for the others.
double* TileWorker::score_tile(int64_t tile, int64_t first, bool* cached) const {
  *cached = tile - first < cached_tiles_;
  return scores_.data() + (*cached ? tile - first : cached_tiles_) * max_rows_ * kScoreStride;
}

// S as float64 integers; -inf where a key is not attended or not there. I * 2^(eq + ek + 24 - 2(b-1)) comes out of the
// product itself: all terms of a pair share that power of two, so exactness is that of the integers.
void TileWorker::scores(int64_t tile, double* s) {
  const int64_t id = keys_.tile_id(unit_.head, tile);
  const int keys = static_cast<int>(keys_.tile_keys(tile));
  const int padded = round_up(keys, kPanel);
  kernels_.gemm(q_.data(), depth_, unit_.rows, keys_.keys(id), static_cast<int64_t>(depth_) * kPanel, padded / kPanel,
                depth_, s, kScoreStride, false);
  for (int r = 0; r < unit_.rows; ++r) {
    double* row_scores = s + r * kScoreStride;
    if (keys_.max_key_exponent(id) <= row_[r].fast_exponent) {
      kernels_.round_scores(row_scores, padded);
    } else {
      exact_scores(row_[r], q_.data() + r * depth_, id, keys, row_scores);
    }
    if (modifiers_.of_scores()) modify(row_[r], tile, row_scores);
    const Keys in = attended(row_[r], tile);
    if (in.first > 0 || in.last < keys || keys < padded) {
      kernels_.mask_scores(row_scores, keys_.index(id), in.first, in.last, padded);
    }
  }
  for (int r = 0; modifiers_.of_scores() && r < unit_.rows; ++r) {
    row_[r].poisoned |= kernels_.any_nan(s + r * kScoreStride, padded);
  }
  if (keys_.has_poisoned(id)) note_poisoned(tile, s);
}

// The places of a tile's keys, null where they keep the order of memory.
const int32_t* TileWorker::places(int64_t id) const { return keys_.is_ordered(id) ? nullptr : keys_.index(id); }

void TileWorker::modify(const Row& row, int64_t tile, double* s) {
  const int keys = static_cast<int>(keys_.tile_keys(tile));
  modifiers_.cap(s, keys);
  modifiers_.shift(s, keys, row.first_of(tile), places(keys_.tile_id(unit_.head, tile)));
}

// The scalar rule, for scores beyond the float64 rounding and for rows whose integer sums may leave 2^53.
void TileWorker::exact_scores(const Row& row, const double* q, int64_t id, int keys, double* s) const {
  const int bits = problem_.precision.operand_bits;
  const int32_t* exponents = keys_.key_exponents(id);
  for (int j = 0; j < keys; ++j) {
    const int ek = exponents[j];
    if (ek == kPoisonedExponent) {
      s[j] = 0.0;
      continue;
    }
    const double q_scale = pow2(bits - 1 - row.query.unit);
    const double k_scale = pow2(bits - 1 - kScoreFractionBits - ek);
    int64_t dot = 0;
    if (row.query.any_order_exact) {
      dot = static_cast<int64_t>(s[j] * q_scale * k_scale);
    } else {
      const double* k = keys_.keys(id) + static_cast<int64_t>(j / kPanel) * depth_ * kPanel + j % kPanel;
      for (int d = 0; d < depth_; ++d) {
        dot += static_cast<int64_t>(q[d] * q_scale) * static_cast<int64_t>(k[d * kPanel] * k_scale);
      }
    }
    s[j] = static_cast<double>(score_of(dot, score_shift(row.query.exponent, ek, bits)));
  }
}

// Section 7: keys with a NaN or an infinity poison the rows that attend them.
void TileWorker::note_poisoned(int64_t tile, const double* s) {
  const int64_t id = keys_.tile_id(unit_.head, tile);
  for (int j = 0; j < keys_.tile_keys(tile); ++j) {
    if (keys_.key_exponents(id)[j] != kPoisonedExponent) continue;
    for (int r = 0; r < unit_.rows; ++r) row_[r].poisoned |= s[r * kScoreStride + j] != -kInfinity;
  }
}

// ---- Section 3: row maximum ------------------------------------------------------------------------------------

void TileWorker::maxima(int64_t first, int64_t last) {
  const Range tiles = attended_tiles(first, last);
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    bool cached = false;
    double* s = score_tile(tile, tiles.first, &cached);
    scores(tile, s);
    if (cached) {
      cached_first_ = tiles.first;
      cached_last_ = tile + 1;
    }
    const int padded = round_up(static_cast<int>(keys_.tile_keys(tile)), kPanel);
    for (int r = 0; r < unit_.rows; ++r) {
      row_[r].maximum = std::max(row_[r].maximum, kernels_.row_max(s + r * kScoreStride, padded));
    }
  }
}

void TileWorker::store_maxima(double* rowmax) const {
  for (int r = 0; r < unit_.rows; ++r) {
    rowmax[r] = row_[r].poisoned ? rowmax_to_public(kRowmaxPoisoned) : row_[r].maximum * pow2(-kScoreFractionBits);
  }
}

void TileWorker::set_maxima(const double* rowmax) {
  for (int r = 0; r < unit_.rows; ++r) {
    Row& row = row_[r];
    const int64_t m = rowmax_from_public(rowmax[r]);
    row.poisoned |= m == kRowmaxPoisoned;
    row.maximum = m == kRowmaxPoisoned || m == kRowmaxEmpty ? -kInfinity : static_cast<double>(m);
    if (m == kRowmaxEmpty) row.end = row.begin;  // the caller says so: special values of the keys do not count either
  }
}

// ---- Sections 4, 5, 7: weights and sums ------------------------------------------------------------------------

void TileWorker::sums(int64_t first, int64_t last) {
  const Range tiles = attended_tiles(first, last);
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    bool cached = false;
    double* s = score_tile(tile, tiles.first, &cached);
    if (!(tiles.first == cached_first_ && tile < cached_last_)) scores(tile, s);
    if (weigh(tile, s) != 0) add_values(tile);
    if (keys_.has_special(keys_.tile_id(unit_.head, tile))) count_specials(tile, s);
  }
}

// Weights of a tile; returns their sum, so that a tile without any is skipped.
int64_t TileWorker::weigh(int64_t tile, const double* s) {
  const int padded = round_up(static_cast<int>(keys_.tile_keys(tile)), kPanel);
  int64_t total = 0;
  for (int r = 0; r < unit_.rows; ++r) {
    double* high = weights_.data() + r * kScoreStride;
    double* low = split_weights_ ? high + unit_.rows * kScoreStride : nullptr;
    Row& row = row_[r];
    if (row.poisoned || row.maximum == -kInfinity || attended(row, tile).empty()) {
      std::fill(high, high + padded, 0.0);
      if (low) std::fill(low, low + padded, 0.0);
      continue;
    }
    const int64_t sum =
        kernels_.weights(s + r * kScoreStride, padded, row.maximum, problem_.precision.weight_bits, high, low);
    row.den += sum;
    total |= sum;
    if (sum != 0 && modifiers_.dropout()) drop(row, tile, high, low);
  }
  return total;
}

// Section 11: the weights that the sums of values go without.
void TileWorker::drop(const Row& row, int64_t tile, double* high, double* low) {
  const int keys = static_cast<int>(keys_.tile_keys(tile));
  float factor[kKeyTile];
  modifiers_.factors(factor, keys, row.first_of(tile), places(keys_.tile_id(unit_.head, tile)));
  for (int j = 0; j < keys; ++j) high[j] = factor[j] != 0.0f ? high[j] : 0.0;
  for (int j = 0; low != nullptr && j < keys; ++j) low[j] = factor[j] != 0.0f ? low[j] : 0.0;
}

// acc += weights * values, one product for each bucket of value exponents in the tile.
void TileWorker::add_values(int64_t tile) {
  const int64_t id = keys_.tile_id(unit_.head, tile);
  const int keys = static_cast<int>(keys_.tile_keys(tile));
  const uint8_t* buckets = keys_.buckets(id);
  for (int begin = 0, end = 0; begin < keys; begin = end) {
    while (end < keys && buckets[end] == buckets[begin]) ++end;
    if (buckets[begin] != bucket_ || acc_keys_ + (end - begin) > keys_.bucket(unit_.head, bucket_).key_budget) flush();
    bucket_ = buckets[begin];
    kernels_.gemm(weights_.data() + begin, kScoreStride, unit_.rows * (split_weights_ ? 2 : 1),
                  keys_.value_panels(id) + begin * kPanel, kKeyTile * kPanel, width_ / kPanel, end - begin, acc_.data(),
                  width_, acc_keys_ > 0);
    acc_keys_ += end - begin;
  }
}

// Section 7: non-finite value elements of attended keys count whatever the weight. Rare, so read from V itself.
void TileWorker::count_specials(int64_t tile, const double* s) {
  if (!counted_) std::fill(counts_.data(), counts_.data() + unit_.rows * depth_, 0);
  counted_ = true;
  const View& v = problem_.v;
  const int32_t* index = keys_.index(keys_.tile_id(unit_.head, tile));
  const int64_t batch = unit_.head / problem_.kv_heads;
  const int64_t head = unit_.head % problem_.kv_heads;
  double values[kMaxHeadDim];
  for (int64_t j = 0; j < keys_.tile_keys(tile); ++j) {
    const int64_t key = problem_.mask.kv_lo + tile * kKeyTile + index[j];
    kernels_.load_row(v.data, row_offset(v, batch, head, key), v.dtype, depth_, values);
    for (int d = 0; d < depth_; ++d) {
      if (is_finite(values[d])) continue;
      for (int r = 0; r < unit_.rows; ++r) {
        if (s[r * kScoreStride + j] == -kInfinity) continue;
        counts_[r * depth_ + d] += special_count(special_integer(values[d]));
      }
    }
  }
}

// Moves acc into the digits: the low halves at their bucket's position, the high halves kHalfBits above.
void TileWorker::flush() {
  if (acc_keys_ == 0) return;
  acc_keys_ = 0;
  const int position = digit_position(keys_.bucket(unit_.head, bucket_).base, problem_.precision);
  const int64_t count = static_cast<int64_t>(unit_.rows) * width_;
  const int parts = split_weights_ ? 2 : 1;
  for (int part = 0; part < parts; ++part) {
    const int at = position + (part == 0 && split_weights_ ? kHalfBits : 0);
    const int k = at / kDigitBits;
    if (digit_lo_ == digit_hi_) digit_lo_ = digit_hi_ = k;
    while (digit_lo_ > k) std::fill_n(digit(--digit_lo_), count, 0);
    while (digit_hi_ < k + 3) std::fill_n(digit(digit_hi_++), count, 0);
    kernels_.flush(acc_.data() + part * count, count, at % kDigitBits, digit(k), digit(k + 1), digit(k + 2));
  }
}

void TileWorker::clear_sums() {
  acc_keys_ = 0;
  digit_lo_ = digit_hi_ = 0;
  counted_ = false;
}

void TileWorker::store_den(int64_t* den) const {
  for (int r = 0; r < unit_.rows; ++r) den[r] = row_[r].poisoned ? 0 : row_[r].den;
}

void TileWorker::store_poisoned(uint8_t* poisoned) const {
  for (int r = 0; r < unit_.rows; ++r) poisoned[r] = row_[r].poisoned;
}

void TileWorker::store_num(int64_t* num) {
  flush();
  for (int r = 0; r < unit_.rows; ++r) {
    for (int d = 0; d < depth_; ++d) {
      int64_t* out = num + (static_cast<int64_t>(r) * depth_ + d) * kDigits;
      std::fill(out, out + kDigits, 0);
      if (row_[r].poisoned) {
        out[kSpecialDigit] = kCountNan;
        continue;
      }
      for (int k = digit_lo_; k < digit_hi_; ++k) out[k] = digit(k)[r * width_ + d];
      digits_normalise(out, 1);
      if (counted_) out[kSpecialDigit] = counts_[r * depth_ + d];
    }
  }
}

// ---- Section 6: output -----------------------------------------------------------------------------------------

void TileWorker::store_out(const MutableView& out) {
  // Sums that never left the two float64 accumulators are rounded from there; others from the digits.
  const bool short_sum = digit_lo_ == digit_hi_ && acc_keys_ > 0;
  if (!short_sum) flush();
  const int base = keys_.bucket(unit_.head, bucket_).base;
  const double unit = short_sum ? pow2(digit_position(base, problem_.precision) - kUnitExponent) : 1.0;
  const double rescale = problem_.modifiers.rescale();
  double numerators[kMaxHeadDim];
  float values[kMaxHeadDim];
  for (int r = 0; r < unit_.rows; ++r) {
    const Row& row = row_[r];
    const double den = static_cast<double>(row.den) * pow2(-problem_.precision.weight_bits);
    if (row.poisoned) {
      std::fill(values, values + depth_, float_of(kQuietNan));
    } else if (row.den == 0) {
      std::fill(values, values + depth_, 0.0f);
    } else if (short_sum) {
      const double* high = acc_.data() + r * width_;
      const double* low = split_weights_ ? high + unit_.rows * width_ : nullptr;
      kernels_.finish_row(high, low, depth_, unit, den, rescale, values);
    } else {
      for (int d = 0; d < depth_; ++d) {
        numerators[d] = round_digits(digits_.data() + r * width_ + d, static_cast<int64_t>(max_rows_) * width_,
                                     digit_lo_, digit_hi_);
      }
      kernels_.finish_row(numerators, nullptr, depth_, 1.0, den, rescale, values);
    }
    for (int d = 0; counted_ && !row.poisoned && d < depth_; ++d) {
      const int64_t special = counts_[r * depth_ + d];
      if (special != 0) values[d] = output_of(0.0, row.den, special, problem_.precision.weight_bits);
    }
    const int64_t index = unit_.first + r;
    const int64_t q_head = unit_.head % problem_.kv_heads * group_ + index / problem_.q_len;
    const int64_t offset = row_offset(out, unit_.head / problem_.kv_heads, q_head, index % problem_.q_len);
    for (int d = 0; d < depth_; ++d) store_element(out.data, offset + d, out.dtype, values[d]);
  }
}

}  // namespace cpu
}  // namespace det_attn
