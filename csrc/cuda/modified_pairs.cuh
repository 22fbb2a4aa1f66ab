// Single pairs under modifiers (docs/contract.md sections 10 and 11) as the tensor-core kernels and every kernel of the
// backward pass see them: rows of a head are stacked as Shape says, keys count from kv_lo on.
#pragma once

#include "planes.cuh"

namespace det_attn::cuda {

// The final S of an attended pair, kScoreMasked or kScorePoisoned; and what its ds is multiplied by, which the capped
// score alone decides.
struct ModifiedPair {
  int64_t score;
  float slope;
};
__device__ inline ModifiedPair modified_pair(const Problem& p, int64_t head, int64_t row, int64_t key, int64_t s) {
  const double c = p.modifiers.softcap;
  const int64_t capped = capped_score(p, s);
  return {p.modifiers.of_scores() ? shifted_score(p, capped, pair_in_call(p, head, row, key)) : s,
          c == 0.0 ? 1.0f : softcap_slope(static_cast<double>(capped), c)};
}

// M - S of such a score as weight_of() takes it: a pair that is masked or poisoned weighs nothing.
__device__ inline int64_t modified_distance(int64_t maximum, int64_t score) {
  return score == kScoreMasked || score == kScorePoisoned ? kZeroWeightDistance : maximum - score;
}

// Only under dropout: which keys of a C fragment a row drops, bit i for key + 8 * (i / 2) + i % 2, i < COUNT.
// Neighbours mostly share their random words.
template <int COUNT>
__device__ inline unsigned dropped_keys(const Problem& p, const Shape& s, int64_t head, int64_t row, int key) {
  if (row >= s.rows) return 0;
  unsigned out = 0;
  uint32_t have = 0, words[4];
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i) {
    const int own = key + 8 * (i / 2) + i % 2;
    if (own >= s.keys) break;
    const Pair at = pair_in_call(p, head, row, own);
    const int64_t id = p.modifiers.dropout.key_id(at.key);
    const uint32_t four = static_cast<uint32_t>(static_cast<uint64_t>(id) >> 2);  // as much of it as words depend on
    if (i == 0 || four != have) dropout_words(p, at, id, words);
    have = four;
    if (!(words[id & 3] >= p.modifiers.dropout.threshold)) out |= 1u << i;
  }
  return out;
}

}  // namespace det_attn::cuda
