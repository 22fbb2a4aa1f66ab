// Score modifiers and dropout on rows of pairs (docs/contract.md sections 10 and 11), see modifiers.h.
#include "modifiers.h"

#include <algorithm>
#include <limits>

namespace det_attn {
namespace cpu {

RowModifiers::RowModifiers(const Problem& problem)
    : problem_(problem),
      modifiers_(problem.modifiers),
      kernels_(tile_kernels()),
      of_scores_(problem.modifiers.of_scores()) {
  if (modifiers_.bias.data != nullptr) bias_.resize(kKeyTile), ordered_.resize(kKeyTile);
  if (modifiers_.dropout.on) counters_.resize(4 * kKeyTile), words_.resize(4 * kKeyTile);
}

// ---- Scores ----------------------------------------------------------------------------------------------------

void RowModifiers::cap(double* s, int n) const {
  if (modifiers_.softcap != 0.0) kernels_.softcap(s, n, modifiers_.softcap);
}

void RowModifiers::shift(double* s, int n, const Pair& at, const int32_t* places) {
  if (modifiers_.slopes != nullptr) {
    const double slope = modifiers_.slopes[at.batch * modifiers_.slopes_batch + at.head * modifiers_.slopes_head];
    if (is_finite(slope)) {
      kernels_.add_alibi(s, n, slope, problem_.mask.place(at.batch, at.query) - at.key, places);
    } else {
      std::fill(s, s + n, std::numeric_limits<double>::quiet_NaN());
    }
  }
  if (modifiers_.bias.data != nullptr) {
    load_bias(n, at, places);
    kernels_.add_bias(s, n, places == nullptr ? bias_.data() : ordered_.data());
  }
}

// Into bias_ in the order of memory, and from there into ordered_ if the keys have another order.
void RowModifiers::load_bias(int n, const Pair& at, const int32_t* places) {
  const Bias& bias = modifiers_.bias;
  const int64_t first = bias.offset(at);
  if (bias.stride_key == 1 && !bias.boolean) {
    kernels_.load_row(bias.data, first, bias.dtype, n, bias_.data());
  } else {
    for (int j = 0; j < n; ++j) bias_[j] = bias.at(first + j * bias.stride_key);
  }
  for (int j = 0; places != nullptr && j < n; ++j) ordered_[j] = bias_[places[j]];
}

Pair RowModifiers::pair_of(const Pair& at, int64_t row) const {
  return {at.batch, at.head + row / problem_.q_len, row % problem_.q_len, at.key};
}

void RowModifiers::shift_column(double* s, int n, const Pair& at, int64_t first) const {
  if (modifiers_.slopes == nullptr && modifiers_.bias.data == nullptr) return;
  for (int j = 0; j < n; ++j) {
    const int64_t shifted = shifted_score(problem_, static_cast<int64_t>(s[j]), pair_of(at, first + j));
    s[j] = shifted == kScoreMasked
               ? -std::numeric_limits<double>::infinity()
               : (shifted == kScorePoisoned ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(shifted));
  }
}

// ---- Dropout ---------------------------------------------------------------------------------------------------

void RowModifiers::factors(float* factor, int n, const Pair& at, const int32_t* places) {
  const Dropout& dropout = modifiers_.dropout;
  const uint64_t row = static_cast<uint64_t>(dropout.row_id(at.batch, at.query, problem_.q_len));
  uint32_t* counter = counters_.data();
  // Four keys share a counter where ids follow one another; otherwise each key has its own.
  const uint64_t first_id = static_cast<uint64_t>(dropout.key_id(at.key));
  const bool listed = dropout.keys != nullptr;
  const int count = listed ? n : static_cast<int>((first_id & 3) + static_cast<uint64_t>(n) + 3) / 4;
  for (int i = 0; i < count; ++i) {
    counter[i] = static_cast<uint32_t>(listed ? static_cast<uint64_t>(dropout.keys[at.key + i]) >> 2
                                              : (first_id >> 2) + static_cast<uint64_t>(i));
    counter[kKeyTile + i] = static_cast<uint32_t>(row);
    counter[2 * kKeyTile + i] = static_cast<uint32_t>(at.head + dropout.first_head);
    counter[3 * kKeyTile + i] = static_cast<uint32_t>(row >> 32);
  }
  kernels_.philox(counter, count, dropout.seed, words_.data());
  for (int j = 0; j < n; ++j) {
    const int place = places == nullptr ? j : places[j];
    const int from = static_cast<int>(listed ? dropout.keys[at.key + place] & 3 : (first_id & 3) + place);
    const uint32_t word = listed ? words_[from * kKeyTile + place] : words_[from % 4 * kKeyTile + from / 4];
    factor[j] = word >= dropout.threshold ? dropout.rescale : 0.0f;
  }
}

// Neighbouring keys mostly share their words, so the last ones are kept.
void RowModifiers::factor_column(float* factor, int n, const Pair& at, int64_t first) {
  const Dropout& dropout = modifiers_.dropout;
  const int64_t id = dropout.key_id(at.key);
  const Pair wanted{at.batch, at.head, n, static_cast<int64_t>(static_cast<uint64_t>(id) >> 2)};
  const bool kept = words_first_ == first && words_at_.batch == wanted.batch && words_at_.head == wanted.head &&
                    words_at_.query == wanted.query && words_at_.key == wanted.key;
  if (!kept) {
    uint32_t* counter = counters_.data();
    for (int j = 0; j < n; ++j) {
      const Pair pair = pair_of(at, first + j);
      const uint64_t row = static_cast<uint64_t>(dropout.row_id(pair.batch, pair.query, problem_.q_len));
      counter[j] = static_cast<uint32_t>(wanted.key);
      counter[kKeyTile + j] = static_cast<uint32_t>(row);
      counter[2 * kKeyTile + j] = static_cast<uint32_t>(pair.head + dropout.first_head);
      counter[3 * kKeyTile + j] = static_cast<uint32_t>(row >> 32);
    }
    kernels_.philox(counter, n, dropout.seed, words_.data());
    words_at_ = wanted;
    words_first_ = first;
  }
  const uint32_t* word = words_.data() + (id & 3) * kKeyTile;
  for (int j = 0; j < n; ++j) factor[j] = word[j] >= dropout.threshold ? dropout.rescale : 0.0f;
}

}  // namespace cpu
}  // namespace det_attn
