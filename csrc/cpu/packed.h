// Keys and values of some key heads, rounded once (docs/contract.md section 1) and laid out for TileKernels::gemm.
// In: the views of K and V. Out: tiles of kKeyTile keys, shared by every query head and query tile.
#pragma once

#include <vector>

#include "../backend.h"
#include "isa.h"
#include "threads.h"

namespace det_attn {
namespace cpu {

// Keys whose value exponents lie within kBucketWidth of each other share one float64 sum: v^ is stored as
// v^ * 2^(ev - base). Sums are exact while (keys) * 2^spread stays under kSumBudget, see below.
constexpr int kBucketWidth = 5;
constexpr int kBuckets = 128 / kBucketWidth + 126 / kBucketWidth + 3;
constexpr int kBudgetBits = 15;
// |half of W| <= 2^15, |v^| <= 2^23, shifted by the spread: 2^(kBudgetBits - spread) of them stay inside 2^53.
static_assert((kHalfBits - 1) + (kHighest.operand_bits - 1) + kBudgetBits <= 53, "halves of W must sum exactly");
static_assert(kHigh.weight_bits + (kHigh.operand_bits - 1) + kBudgetBits <= 53, "whole W must sum exactly");
static_assert(kBudgetBits - (kBucketWidth - 1) >= 7 && kKeyTile <= 128, "one tile must fit the budget");

// Where a row starts, in elements. X is a View or a MutableView.
template <class X>
inline int64_t row_offset(const X& x, int64_t batch, int64_t head, int64_t row) {
  return batch * x.stride_batch + head * x.stride_head + row * x.stride_row;
}

// The integer that stands for a value element that is not finite (section 7).
inline int32_t special_integer(double x) { return x != x ? kValueNan : (x > 0 ? kValuePosInf : kValueNegInf); }

struct Bucket {
  int base = 0;          // ev of the unit: the smallest of this head in this bucket
  int64_t key_budget = 0;  // keys whose terms sum exactly in float64
};

class PackedKeys {
 public:
  // Packs keys [mask.kv_lo, mask.kv_hi) of heads [head_lo, head_hi), counted over batch * kv_heads.
  // Without values (rowmax) the keys keep their order; with them each tile is ordered by bucket.
  void pack(const Problem& problem, int64_t head_lo, int64_t head_hi, bool with_values);

  static int64_t bytes_per_head(const Problem& problem, bool with_values);

  int64_t tiles = 0;       // per head
  int64_t head_lo = 0;
  bool values = false;
  int depth = 0;           // head_dim
  int width = 0;           // head_dim rounded up to panels

  int64_t tile_id(int64_t head, int64_t tile) const { return (head - head_lo) * tiles + tile; }
  int64_t tile_keys(int64_t tile) const { return tile + 1 < tiles ? kKeyTile : keys_ - tile * kKeyTile; }

  // k^ * 2^(ek - (b-1) + kScoreFractionBits) as [kKeyTile / kPanel][depth][kPanel]
  const double* keys(int64_t id) const { return keys_data_.data() + id * kKeyTile * depth; }
  // v^ * 2^(ev - base) as [width / kPanel][kKeyTile][kPanel]; non-finite elements are 0 here
  const double* value_panels(int64_t id) const { return values_data_.data() + id * kKeyTile * width; }
  // Per key of a tile: its place in the tile in memory order (INT32_MAX where there is no key), ek, ev's bucket.
  const int32_t* index(int64_t id) const { return index_.data() + id * kKeyTile; }
  const int32_t* key_exponents(int64_t id) const { return key_exponent_.data() + id * kKeyTile; }
  bool is_ordered(int64_t id) const { return !(flags_[id] & kHasOrder); }  // index is 0, 1, 2, ..
  const uint8_t* buckets(int64_t id) const { return bucket_.data() + id * kKeyTile; }
  // Per tile: the largest ek; whether a key is poisoned; whether a value element is not finite.
  int max_key_exponent(int64_t id) const { return max_key_exponent_[id]; }
  bool has_poisoned(int64_t id) const { return flags_[id] & kHasPoisoned; }
  bool has_special(int64_t id) const { return flags_[id] & kHasSpecial; }
  const Bucket& bucket(int64_t head, int number) const { return bucket_table_[(head - head_lo) * kBuckets + number]; }

 private:
  enum Flags : uint8_t { kHasPoisoned = 1, kHasSpecial = 2, kHasOrder = 4 };

  void measure_values(const Problem& problem, int64_t heads);
  void choose_buckets(int64_t head);
  void order_keys(int64_t id, int keys);
  void pack_tile(const Problem& problem, int64_t id, double* scratch);
  void pack_tile_keys(const Problem& problem, int64_t id, double* scratch);
  void pack_tile_values(const Problem& problem, int64_t id, double* row);

  int64_t keys_ = 0;
  Buffer<double> keys_data_, values_data_;
  Buffer<int32_t> index_, key_exponent_, max_key_exponent_;
  Buffer<int32_t> value_exponent_;  // per key in memory order; kNoValue for rows whose finite elements are all zero
  Buffer<uint8_t> bucket_, flags_;
  std::vector<Bucket> bucket_table_;
  std::vector<int> bucket_offset_;   // per head
  std::vector<int> common_bucket_;   // per head: where rows of zeros go
};

// One row of Q for the tile kernels: f64(q * scale) rounded to q^, stored as q^ * 2^(unit - (b-1)).
struct QueryRow {
  int exponent;  // kPoisonedExponent: NaN or infinity
  int unit;      // exponent, capped so that extreme scales do not overflow float64
  bool any_order_exact;  // every sum of q^_d k^_d, in any order, stays inside 2^53
};
QueryRow pack_query(const Problem& problem, int64_t batch, int64_t head, int64_t row, double* out);

void rows(const View& x, int64_t batch, int64_t heads, int64_t length, int64_t head_dim, RowKind kind, double scale,
          Precision precision, int32_t* integers, int32_t* exponents);

}  // namespace cpu
}  // namespace det_attn
