// Rows of Q, K, V and dO for the backward products, rounded once (docs/contract.md sections 1 and 8).
// In: a view, and which of its rows one key head owns. Out: the integers in the layouts the products read, exponents,
// and for queries what the forward pass kept of them.
#pragma once

#include <vector>

#include "../backend.h"
#include "isa.h"
#include "threads.h"

namespace det_attn {
namespace cpu {

// Where the rows of one key head lie. Queries: those of every query head of the group, one head after another.
struct RowSet {
  int64_t heads_per_set;  // 1, or the query heads of a group
  int64_t length;         // rows per head
  int64_t first;          // index of the first row of a head in its view
  int64_t sets_per_batch;  // key heads

  int64_t rows() const { return heads_per_set * length; }
  int64_t offset(const View& x, int64_t set, int64_t row) const {
    const int64_t head = set % sets_per_batch * heads_per_set + row / length;
    return set / sets_per_batch * x.stride_batch + head * x.stride_head + (first + row % length) * x.stride_row;
  }
};

// Which layouts a pass needs; each holds float64 integers, rows padded with zeros to whole tiles of kKeyTile.
enum Layout : int {
  kRowMajor = 1,    // [row][depth]: the left factor of the products over the head dimension
  kTransposed = 2,  // [tile][kKeyTile / kPanel][depth][kPanel]: their right factor
  kPanels = 4,      // [tile][width / kPanel][kKeyTile][kPanel]: the right factor of the sums over rows
};

class PackedRows {
 public:
  // Sets [set_lo, set_hi) of x, scaled by `scale` if it is not null (queries).
  void pack(const View& x, const RowSet& where, int64_t set_lo, int64_t set_hi, int head_dim, const double* scale,
            int operand_bits, int layouts);

  static int64_t bytes_per_row(int64_t head_dim, int layouts);

  int64_t tiles = 0;   // per set
  int64_t padded = 0;  // rows per set
  int depth = 0;
  int width = 0;       // depth rounded up to panels

  // Rows and tiles are counted over the packed sets: row = (set - set_lo) * padded + row of the set.
  const double* row(int64_t row) const { return row_major_.data() + row * depth; }
  const double* transposed(int64_t tile) const { return transposed_.data() + tile * kKeyTile * depth; }
  const double* panels(int64_t tile) const { return panels_.data() + tile * kKeyTile * width; }
  // kMinExponent for bad and padding rows.
  int exponent(int64_t row) const { return exponent_[row]; }
  bool bad(int64_t row) const { return flags_[row] & kBad; }  // holds a NaN or an infinity; its integers are 0
  // Products with any other row, summed in any order, stay inside 2^53.
  bool any_order_exact(int64_t row) const { return flags_[row] & kExact; }
  int max_exponent(int64_t tile) const { return max_exponent_[tile]; }
  bool has_bad(int64_t tile) const { return tile_bad_[tile] != 0; }

 private:
  enum Flags : uint8_t { kBad = 1, kExact = 2 };

  Buffer<double> row_major_, transposed_, panels_;
  Buffer<int32_t> exponent_, max_exponent_;
  Buffer<uint8_t> flags_, tile_bad_;
};

// What a pair needs of its query beside q^ and o^, one entry a packed row; padding rows take no part.
struct QueryState {
  void fill(const Gradient& call, const RowSet& where, int64_t set_lo, int64_t set_hi, const PackedRows& q,
            const PackedRows& grad);

  Buffer<double> maximum;     // M in units of 2^-24; +infinity where the row takes no part
  Buffer<double> inverse;     // rinv * 2^-T
  Buffer<float> delta;
  Buffer<double> score_unit;  // 2^(eq + 24 - 2(b-1))
  Buffer<double> grad_unit;   // 2^(eo - 2(b-1))
  Buffer<double> key_term_unit;    // 2^(eq - kQueryExponentBias)
  Buffer<double> value_term_unit;  // 2^eo
  Buffer<int64_t> begin, end;  // keys [begin, end) of the call's are attended
  Buffer<uint8_t> dead;       // its own gradient is NaN if it attends a key, and it gives nothing to others
  Buffer<uint8_t> bad;        // q or dO hold a NaN or an infinity: every key it attends gets NaN
};

// eq reaches 1024 where scale is huge. Shifted by this, ds * 2^eq stays inside float64.
constexpr int kQueryExponentBias = 512;

// What a pair needs of its key beside k^ and v^.
struct KeyState {
  void fill(const PackedRows& k, const PackedRows& v, int64_t count);

  Buffer<double> score_unit;  // 2^ek, the unit of its terms too
  Buffer<double> value_unit;  // 2^ev
  Buffer<uint8_t> bad;
};

}  // namespace cpu
}  // namespace det_attn
