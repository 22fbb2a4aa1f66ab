// One thread's work on one query tile: scores, row maxima, weights and exact sums over tiles of keys
// (docs/contract.md sections 2-7). In: packed keys, a range of key tiles. Out: rows of rowmax, NUM and DEN, or outputs.
// Memory is a few tiles, whatever the number of keys.
#pragma once

#include "modifiers.h"
#include "packed.h"

namespace det_attn {
namespace cpu {

// Scores of this many key tiles are kept from the maximum pass to the sum pass; later tiles are computed twice.
constexpr int kCachedTiles = 32;  // 1.6 MB a thread: what an L2 of a server core holds

struct Range {
  int64_t first, last;
};

// Rows of a unit are counted over the query heads of one key head: row = (q_head in group) * q_len + query.
struct Unit {
  int64_t head;   // over batch * kv_heads
  int64_t first;  // first row
  int rows;       // at most kRowTile
};

class TileWorker {
 public:
  TileWorker(const Problem& problem, const PackedKeys& keys, int max_rows, bool cache_scores);

  void begin(const Unit& unit);

  // Row maxima over key tiles [first, last), public form: NaN poisoned, -inf nothing attended.
  void maxima(int64_t first, int64_t last);
  void store_maxima(double* rowmax) const;
  void set_maxima(const double* rowmax);

  // Exact sums over key tiles [first, last) under the maxima.
  void sums(int64_t first, int64_t last);
  void store_den(int64_t* den) const;
  void store_poisoned(uint8_t* poisoned) const;
  void store_num(int64_t* num);            // [rows, head_dim, 12] normalised
  void store_out(const MutableView& out);  // section 6

 private:
  struct Row {
    QueryRow query;
    Pair at;             // its place in the problem; key is kv_lo
    int64_t begin, end;  // packed keys [begin, end) are attended
    int fast_exponent;  // key exponents up to this one take the float64 rounding
    bool poisoned;
    double maximum;    // in units of 2^-24; -inf nothing attended
    int64_t den;

    Pair first_of(int64_t tile) const { return {at.batch, at.head, at.query, at.key + tile * kKeyTile}; }
  };

  struct Keys {
    int32_t first, last;  // places in the tile, in memory order
    bool empty() const { return last <= first; }
  };
  Keys attended(const Row& row, int64_t tile) const;
  Range attended_tiles(int64_t first, int64_t last) const;
  double* score_tile(int64_t tile, int64_t first, bool* cached) const;
  void scores(int64_t tile, double* s);
  const int32_t* places(int64_t id) const;
  void modify(const Row& row, int64_t tile, double* s);
  void drop(const Row& row, int64_t tile, double* high, double* low);
  void exact_scores(const Row& row, const double* q, int64_t id, int keys, double* s) const;
  void note_poisoned(int64_t tile, const double* s);
  int64_t weigh(int64_t tile, const double* s);
  void add_values(int64_t tile);
  void count_specials(int64_t tile, const double* s);
  void flush();
  void clear_sums();
  int64_t* digit(int k) { return digits_.data() + static_cast<int64_t>(k) * max_rows_ * width_; }

  const Problem& problem_;
  const PackedKeys& keys_;
  const TileKernels& kernels_;
  RowModifiers modifiers_;
  const bool split_weights_;  // `highest`: W in two halves
  const int depth_, width_, max_rows_;
  int64_t group_;
  Unit unit_{0, 0, 0};
  Row row_[kRowTile];
  int64_t cached_first_ = 0, cached_last_ = 0;

  Buffer<double> q_;        // [rows][depth]
  Buffer<double> scores_;   // [cached tiles, at least 1][rows][kScoreStride]
  Buffer<double> weights_;  // [2 * rows][kScoreStride]: high halves, then low halves
  Buffer<double> acc_;      // [2 * rows][width]: sums of high halves, then of low halves
  Buffer<int64_t> digits_;  // [kSumDigits][rows][width], those in [digit_lo_, digit_hi_) are valid
  Buffer<int64_t> counts_;  // [rows][depth] digit 11, valid if counted_
  int bucket_ = 0;
  int64_t acc_keys_ = 0;    // keys summed in acc_ since it was last empty
  int digit_lo_ = 0, digit_hi_ = 0;
  bool counted_ = false;
  int cached_tiles_;
};

// f64 of digits [lo, hi) of one number (section 6); same result as digits_round() with the others 0.
double round_digits(const int64_t* digits, int64_t stride, int lo, int hi);

void finalize(const int64_t* num, const int64_t* den, int64_t count, int64_t head_dim, Precision precision,
              double rescale, void* out, DType out_dtype);

}  // namespace cpu
}  // namespace det_attn
