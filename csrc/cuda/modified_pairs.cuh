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

// Section 11: which of the keys `key`, + 1, + 8, + 9 a query row leaves out of the sums. Two keys side by side mostly
// share their random words. row_id is Dropout::row_id(). Out of line, for kernels whose registers are all taken.
template <class Args>
static __device__ __noinline__ unsigned dropped_keys(const Args& args, int64_t row_id, int head, int key) {
  const Problem& p = args.problem;
  const Dropout& d = p.modifiers.dropout;
  unsigned out = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int64_t have = -1;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (key + half * 8 + i >= args.shape.keys) break;
      const int64_t id = d.key_id(p.mask.kv_lo + key + half * 8 + i);
      if (id >> 2 != have) dropout_words(d, row_id, head, id, words);
      have = id >> 2;
      const uint32_t low = id & 1 ? words[1] : words[0], high = id & 1 ? words[3] : words[2];
      if (!((id & 2 ? high : low) >= d.threshold)) out |= 1u << (half * 2 + i);
    }
  }
  return out;
}

}  // namespace det_attn::cuda
