// Score modifiers and dropout on rows of pairs (docs/contract.md sections 10 and 11). In: scores of a query against
// keys of a tile, or of a key against queries of a tile. Out: their final scores, -inf where the bias masks a pair and
// NaN where it is poisoned; and what each pair's weight is multiplied by.
#pragma once

#include "../backend.h"
#include "isa.h"
#include "threads.h"

namespace det_attn {
namespace cpu {

// One thread's; it keeps scratch and the last random words.
class RowModifiers {
 public:
  explicit RowModifiers(const Problem& problem);

  bool of_scores() const { return of_scores_; }
  bool dropout() const { return modifiers_.dropout.on; }

  // One query against keys at.key + places[j], j < n. places is a permutation of 0 .. n - 1, null for the identity.
  void cap(double* s, int n) const;
  void shift(double* s, int n, const Pair& at, const int32_t* places);
  // r where the pair is kept, 0 where it is dropped.
  void factors(float* factor, int n, const Pair& at, const int32_t* places);

  // One key against n queries: the rows `first` and on of a packed set of query heads, at.head being the set's first.
  void shift_column(double* s, int n, const Pair& at, int64_t first) const;
  void factor_column(float* factor, int n, const Pair& at, int64_t first);

 private:
  void load_bias(int n, const Pair& at, const int32_t* places);
  Pair pair_of(const Pair& at, int64_t row) const;

  const Problem& problem_;
  const Modifiers& modifiers_;
  const TileKernels& kernels_;
  const bool of_scores_;
  Buffer<double> bias_, ordered_;            // [kKeyTile]
  Buffer<uint32_t> counters_;                // [4][kKeyTile]: a Philox counter a column
  Buffer<uint32_t> words_;                   // [4][kKeyTile]: its four random words
  Pair words_at_{-1, -1, -1, -1};            // factor_column(): what words_ holds, key being the key's id / 4
  int64_t words_first_ = -1;
};

}  // namespace cpu
}  // namespace det_attn
