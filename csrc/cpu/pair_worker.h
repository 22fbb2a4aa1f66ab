// One thread's work on one tile of pairs in the backward pass: scores, weights, p and ds (docs/contract.md sections 2,
// 4 and 8). In: packed rows of both sides. Out: p and ds. The rows of a tile are queries, or keys: dQ sums over keys
// and dK, dV over queries, and either way the sum runs along the columns.
#pragma once

#include "backward_rows.h"
#include "modifiers.h"

namespace det_attn {
namespace cpu {

// p and ds of all pairs of a round, kept between the passes where they are few enough: they cost more to compute again.
struct KeptPairs {
  bool kept = false;
  Buffer<float> p, ds;  // [set][tile of keys][padded queries][kKeyTile]; 0 in padding and unattended pairs
};

// The packed rows of some key heads, and what their queries and keys know.
struct BackwardPack {
  int64_t set_lo = 0, set_hi = 0;  // key heads, counted over batch * kv_heads
  RowSet queries, keys;
  PackedRows q, grad, k, v;
  QueryState query;
  KeyState key;
  mutable KeptPairs pairs;
  // Per tile of queries: keys before all_begin or from all_end on are not attended by every one, those before any_begin
  // or from any_end on by none.
  Buffer<int64_t> all_begin, all_end, any_begin, any_end;

  int64_t pair_offset(int64_t set, int64_t key_tile, int64_t query) const {
    return (((set - set_lo) * k.tiles + key_tile) * q.padded + query) * kKeyTile;
  }
  int64_t pair_count() const { return (set_hi - set_lo) * k.padded * q.padded; }
};

// Some rows of one set, at most kRowTile.
struct RowBlock {
  int64_t set;
  int64_t first;
  int rows;
};

class PairWorker {
 public:
  PairWorker(const Problem& problem, const BackwardPack& pack, bool query_is_row);

  // p and ds of the block against a tile of the other side. Returns false where no pair is attended.
  // compute() works them out, and keeps them if pairs are kept and the rows are queries; get() takes kept ones.
  bool compute(const RowBlock& block, int64_t tile);
  bool get(const RowBlock& block, int64_t tile);

  int columns() const { return columns_; }  // a multiple of kPanel; p and ds are 0 in padding and unattended pairs
  const float* p(int row) const { return p_ + row * kKeyTile; }
  const float* ds(int row) const { return ds_ + row * kKeyTile; }
  // After compute(): -inf in pairs that are not attended, NaN in those that a modifier poisons.
  const double* scores(int row) const { return s_.data() + row * kScoreStride; }

  // Query rows: the keys of the tile that the row attends.
  struct Keys {
    int32_t first, last;
    bool empty() const { return last <= first; }
  };
  Keys attended(const RowBlock& block, int row, int64_t tile) const;

 private:
  bool begin(const RowBlock& block, int64_t tile);
  bool mask_columns(const RowBlock& block, int64_t tile);
  void modify(const RowBlock& block, int r, int64_t tile, double* s);
  const PairChange* change(const RowBlock& block, int r, int64_t tile);
  Pair pair_of(const RowBlock& block, int64_t row, int64_t key) const;
  void exact_scores(int64_t row, int64_t column, double* s) const;
  void exact_products(int64_t row, int64_t column, double* dot) const;

  const Problem& problem_;
  const BackwardPack& pack_;
  const TileKernels& kernels_;
  RowModifiers modifiers_;
  const bool query_is_row_;
  const PackedRows &row_x_, &row_y_, &column_x_, &column_y_;
  const Buffer<double> &row_unit_, &column_unit_;
  int columns_ = 0;
  bool masked_ = false;
  int32_t place_[kKeyTile];  // query rows: 0, 1, 2, ..; key rows: the first and last of the block's rows of each column
  int32_t last_[kKeyTile];

  Buffer<double> s_, dot_;   // [kRowTile][kScoreStride]
  Buffer<float> own_p_, own_ds_;  // [kRowTile][kKeyTile]
  float slope_[kKeyTile], factor_[kKeyTile];
  PairChange change_{slope_, factor_};
  float *p_, *ds_;                // these, or the kept ones
};

}  // namespace cpu
}  // namespace det_attn
