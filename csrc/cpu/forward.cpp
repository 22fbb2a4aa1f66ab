// The CPU's forward stages over whole problems: rowmax, accumulate and the fused call (docs/contract.md sections 1-7).
// Work is cut into query tiles; when these are too few for the threads, keys are cut too, and the partial maxima and
// sums are combined as shards would be. The cuts change no bit.
#include "forward.h"

#include <algorithm>

#include "tile_worker.h"

namespace det_attn {
namespace cpu {

namespace {

constexpr int64_t kPackedBytes = int64_t(1) << 26;  // packed keys and values held at a time, unless one head has more
constexpr int64_t kUnitsPerThread = 4;              // enough to balance causal tiles
constexpr int64_t kTilesPerSplit = 4;               // shorter key ranges are not worth a partial result

// Some key heads, packed, and how their work is cut.
struct Round {
  int64_t head_lo, head_hi;
  int64_t head_rows;  // rows per key head: group * q_len
  int64_t row_tiles;  // per key head
  int max_rows;
  int64_t splits;     // of the keys
  PackedKeys keys;

  int64_t units() const { return (head_hi - head_lo) * row_tiles; }
  int64_t rows() const { return (head_hi - head_lo) * head_rows; }
  int64_t first_row() const { return head_lo * head_rows; }  // over the whole problem

  // The last query tiles come first: under a causal mask they are the longest.
  Unit unit(int64_t number) const {
    const int64_t tile = row_tiles - 1 - number / (head_hi - head_lo);
    const int64_t first = tile * kRowTile;
    return {head_lo + number % (head_hi - head_lo), first,
            static_cast<int>(std::min<int64_t>(kRowTile, head_rows - first))};
  }
  int64_t row_of(const Unit& unit) const { return (unit.head - head_lo) * head_rows + unit.first; }
  int64_t split_begin(int64_t split) const { return keys.tiles * split / splits; }
};

template <class Body>
void for_each_round(const Problem& problem, bool with_values, const Body& body) {
  const int64_t heads = problem.batch * problem.kv_heads;
  if (heads == 0 || problem.q_heads == 0 || problem.q_len == 0) return;
  const int64_t head_bytes = std::max<int64_t>(1, PackedKeys::bytes_per_head(problem, with_values));
  const int64_t step = std::max<int64_t>(1, std::min(heads, kPackedBytes / head_bytes));
  const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
  Round round;  // its memory serves every round
  for (int64_t lo = 0; lo < heads; lo += step) {
    round.head_lo = lo;
    round.head_hi = std::min(heads, lo + step);
    round.head_rows = problem.q_heads / problem.kv_heads * problem.q_len;
    round.row_tiles = (round.head_rows + kRowTile - 1) / kRowTile;
    round.max_rows = static_cast<int>(std::min<int64_t>(kRowTile, round.head_rows));
    round.keys.pack(problem, lo, round.head_hi, with_values);
    const int64_t wanted = round.units() >= threads ? 1 : (kUnitsPerThread * threads) / round.units();
    round.splits = std::max<int64_t>(1, std::min(wanted, round.keys.tiles / kTilesPerSplit));
    body(round);
  }
}

// rowmax of the round's rows.
void rowmax_round(const Problem& problem, const Round& round, double* rowmax) {
  Buffer<double> parts(round.splits > 1 ? round.splits * round.rows() : 0);
  double* out = round.splits > 1 ? parts.data() : rowmax;
  run_units(round.units() * round.splits, [&](const auto& next) {
    TileWorker worker(problem, round.keys, round.max_rows, false);
    for (int64_t i = next(); i >= 0; i = next()) {
      const Unit unit = round.unit(i / round.splits);
      const int64_t split = i % round.splits;
      worker.begin(unit);
      worker.maxima(round.split_begin(split), round.split_begin(split + 1));
      worker.store_maxima(out + split * round.rows() + round.row_of(unit));
    }
  });
  if (round.splits == 1) return;
  for (int64_t row = 0; row < round.rows(); ++row) {
    double largest = parts[row];
    for (int64_t split = 1; split < round.splits; ++split) {
      const double part = parts[split * round.rows() + row];
      if (part != part || part > largest) largest = part;  // once NaN, nothing compares larger
    }
    rowmax[row] = largest;
  }
}

// NUM and DEN of the same rows from parts of the keys: [splits][rows].
struct SumParts {
  SumParts(int64_t splits, int64_t rows, int64_t row_digits)
      : num(splits * rows * row_digits), den(splits * rows), poisoned(splits * rows) {}
  Buffer<int64_t> num, den;
  Buffer<uint8_t> poisoned;
};

// Adds the parts up. A part that found its row poisoned decides for all of them, and counts once (section 7).
void add_parts(const SumParts& parts, const Round& round, int64_t head_dim, int64_t* num, int64_t* den) {
  const int64_t row_digits = head_dim * kDigits;
  run_ranges(round.rows(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t* sum = num + row * row_digits;
      std::fill(sum, sum + row_digits, 0);
      den[row] = 0;
      bool poisoned = false;
      for (int64_t at = row; at < round.splits * round.rows(); at += round.rows()) {
        poisoned |= parts.poisoned[at] != 0;
        for (int64_t i = 0; i < row_digits; ++i) sum[i] += parts.num[at * row_digits + i];
        den[row] += parts.den[at];
      }
      if (poisoned) {
        std::fill(sum, sum + row_digits, 0);
        den[row] = 0;
      }
      for (int64_t d = 0; d < head_dim; ++d) {
        digits_normalise(sum + d * kDigits, 1);
        if (poisoned) sum[d * kDigits + kSpecialDigit] = kCountNan;
      }
    }
  });
}

// NUM and DEN of the round's rows.
void accumulate_round(const Problem& problem, const Round& round, const double* rowmax, int64_t* num, int64_t* den) {
  const int64_t row_digits = problem.head_dim * kDigits;
  const bool split_keys = round.splits > 1;
  const SumParts parts(split_keys ? round.splits : 0, round.rows(), row_digits);
  int64_t* num_out = split_keys ? parts.num.data() : num;
  int64_t* den_out = split_keys ? parts.den.data() : den;
  run_units(round.units() * round.splits, [&](const auto& next) {
    TileWorker worker(problem, round.keys, round.max_rows, false);
    for (int64_t i = next(); i >= 0; i = next()) {
      const Unit unit = round.unit(i / round.splits);
      const int64_t split = i % round.splits;
      const int64_t row = round.row_of(unit);
      const int64_t at = split * round.rows() + row;
      worker.begin(unit);
      worker.set_maxima(rowmax + row);
      worker.sums(round.split_begin(split), round.split_begin(split + 1));
      worker.store_num(num_out + at * row_digits);
      worker.store_den(den_out + at);
      if (split_keys) worker.store_poisoned(parts.poisoned.data() + at);
    }
  });
  if (split_keys) add_parts(parts, round, problem.head_dim, num, den);
}

void forward_fused(const Problem& problem, const Round& round, const MutableView& out, double* rowmax, int64_t* den) {
  run_units(round.units(), [&](const auto& next) {
    TileWorker worker(problem, round.keys, round.max_rows, true);
    for (int64_t i = next(); i >= 0; i = next()) {
      const Unit unit = round.unit(i);
      worker.begin(unit);
      worker.maxima(0, round.keys.tiles);
      worker.sums(0, round.keys.tiles);
      worker.store_maxima(rowmax + round.row_of(unit));
      worker.store_den(den + round.row_of(unit));
      worker.store_out(out);
    }
  });
}

// Few queries, many keys: the stages one after another, NUM only for this round's few rows.
void forward_staged(const Problem& problem, const Round& round, const MutableView& out, double* rowmax, int64_t* den) {
  const Buffer<int64_t> num(round.rows() * problem.head_dim * kDigits);
  rowmax_round(problem, round, rowmax);
  accumulate_round(problem, round, rowmax, num.data(), den);
  for (int64_t i = 0; i < round.rows(); ++i) {
    const int64_t row = round.first_row() + i;
    const int64_t head = row / problem.q_len;
    const int64_t offset = row_offset(out, head / problem.q_heads, head % problem.q_heads, row % problem.q_len);
    for (int64_t d = 0; d < problem.head_dim; ++d) {
      const int64_t* digits = num.data() + (i * problem.head_dim + d) * kDigits;
      const double sum = digits_round(digits, 1);
      const float value = output_of(sum, den[i], digits[kSpecialDigit], problem.precision.weight_bits,
                                    problem.modifiers.rescale());
      store_element(out.data, offset + d, out.dtype, value);
    }
  }
}

}  // namespace

void rowmax(const Problem& problem, double* rowmax) {
  for_each_round(problem, false, [&](const Round& round) { rowmax_round(problem, round, rowmax + round.first_row()); });
}

void accumulate(const Problem& problem, const double* rowmax, int64_t* num, int64_t* den) {
  for_each_round(problem, true, [&](const Round& round) {
    const int64_t row = round.first_row();
    accumulate_round(problem, round, rowmax + row, num + row * problem.head_dim * kDigits, den + row);
  });
}

void forward(const Problem& problem, const MutableView& out, double* rowmax, int64_t* den) {
  for_each_round(problem, true, [&](const Round& round) {
    const int64_t row = round.first_row();
    (round.splits == 1 ? forward_fused : forward_staged)(problem, round, out, rowmax + row, den + row);
  });
}

}  // namespace cpu
}  // namespace det_attn
