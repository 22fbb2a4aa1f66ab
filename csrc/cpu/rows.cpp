// Stage `rows` on the CPU (docs/contract.md section 1). In: views of Q, K, V. Out: packed panels for the tile kernels,
// and the public integers and exponents.
#include <cstdint>
#include <vector>

#include "packed.h"

namespace det_attn {
namespace cpu {

namespace {

constexpr int32_t kNoValue = INT32_MIN;
constexpr int kLargestUnit = 500;  // far from float64's 1023; scores that large saturate whatever the unit

int64_t element_offset(const View& x, int64_t kv_heads, int64_t head, int64_t row) {
  return row_offset(x, head / kv_heads, head % kv_heads, row);
}

}  // namespace

// ---- Packing ---------------------------------------------------------------------------------------------------

int64_t PackedKeys::bytes_per_head(const Problem& problem, bool with_values) {
  const int64_t keys = problem.mask.kv_hi - problem.mask.kv_lo;
  const int64_t tiles = (keys + kKeyTile - 1) / kKeyTile;
  const int64_t columns = problem.head_dim + (with_values ? round_up(static_cast<int>(problem.head_dim), kPanel) : 0);
  return tiles * kKeyTile * columns * static_cast<int64_t>(sizeof(double));
}

void PackedKeys::pack(const Problem& problem, int64_t first, int64_t last, bool with_values) {
  const int64_t heads = last - first;
  keys_ = problem.mask.kv_hi - problem.mask.kv_lo;
  tiles = (keys_ + kKeyTile - 1) / kKeyTile;
  head_lo = first;
  values = with_values;
  depth = static_cast<int>(problem.head_dim);
  width = round_up(depth, kPanel);
  const int64_t padded = heads * tiles * kKeyTile;
  keys_data_.resize(padded * depth);
  index_.resize(padded);
  key_exponent_.resize(padded);
  max_key_exponent_.resize(heads * tiles);
  flags_.resize(heads * tiles);
  if (values) {
    values_data_.resize(padded * width);
    value_exponent_.resize(padded);
    bucket_.resize(padded);
    bucket_table_.assign(heads * kBuckets, Bucket());
    bucket_offset_.assign(heads, 0);
    common_bucket_.assign(heads, 0);
    measure_values(problem, heads);
  }
  run_units(heads * tiles, [&](const auto& next) {
    const Buffer<double> scratch(kPanel * width);
    for (int64_t id = next(); id >= 0; id = next()) pack_tile(problem, id, scratch.data());
  });
}

// Value exponents first: the buckets of a head depend on all its keys, though no output bit depends on the buckets.
void PackedKeys::measure_values(const Problem& problem, int64_t heads) {
  const TileKernels& kernels = tile_kernels();
  run_units(heads * tiles, [&](const auto& next) {
    const Buffer<double> row(depth);
    for (int64_t id = next(); id >= 0; id = next()) {
      const int64_t tile = id % tiles;
      uint8_t flags = 0;
      for (int64_t j = 0; j < tile_keys(tile); ++j) {
        const int64_t key = problem.mask.kv_lo + tile * kKeyTile + j;
        const int64_t offset = element_offset(problem.v, problem.kv_heads, head_lo + id / tiles, key);
        kernels.load_row(problem.v.data, offset, problem.v.dtype, depth, row.data());
        bool special = false;
        const double largest = kernels.max_abs(row.data(), depth, &special);
        value_exponent_[id * kKeyTile + j] = largest == 0.0 ? kNoValue : row_exponent(largest);
        if (special) flags = kHasSpecial;
      }
      flags_[id] = flags;
    }
  });
  for (int64_t head = 0; head < heads; ++head) choose_buckets(head);
}

// Places the bucket borders so that the fullest bucket is as full as it can be: ordinary values then need only one.
void PackedKeys::choose_buckets(int64_t head) {
  constexpr int kExponents = 128 - kMinExponent + 1;
  int64_t count[kExponents + kBucketWidth] = {0};
  for (int64_t i = 0; i < keys_; ++i) {
    const int32_t e = value_exponent_[head * tiles * kKeyTile + i];
    if (e != kNoValue) ++count[e - kMinExponent];
  }
  int64_t fullest = -1;
  for (int offset = 0; offset < kBucketWidth; ++offset) {
    int64_t sums[kBuckets] = {0};
    for (int e = 0; e < kExponents; ++e) sums[(e + offset) / kBucketWidth] += count[e];
    for (int b = 0; b < kBuckets; ++b) {
      if (sums[b] <= fullest) continue;
      fullest = sums[b];
      bucket_offset_[head] = offset;
      common_bucket_[head] = b;
    }
  }
  Bucket* table = bucket_table_.data() + head * kBuckets;
  for (int b = 0; b < kBuckets; ++b) {
    int lowest = INT32_MAX;
    int highest = INT32_MIN;
    for (int i = 0; i < kBucketWidth; ++i) {
      const int e = b * kBucketWidth + i - bucket_offset_[head];
      if (e < 0 || e >= kExponents || count[e] == 0) continue;
      lowest = lowest < e ? lowest : e;
      highest = e;
    }
    if (highest == INT32_MIN) lowest = highest = 0;
    table[b].base = lowest + kMinExponent;
    table[b].key_budget = int64_t(1) << (kBudgetBits - (highest - lowest));
  }
}

// The order of a tile's keys: as in memory, or by bucket. Sums are integers, so any order gives the same bits.
void PackedKeys::order_keys(int64_t id, int keys) {
  int32_t* index = index_.data() + id * kKeyTile;
  for (int j = 0; j < kKeyTile; ++j) index[j] = j < keys ? j : INT32_MAX;
  if (!values) return;
  const int64_t head = id / tiles;
  const int32_t* exponent = value_exponent_.data() + id * kKeyTile;
  uint8_t bucket_of[kKeyTile];
  int start[kBuckets + 1] = {0};
  for (int j = 0; j < keys; ++j) {
    const int e = exponent[j];
    const int b = e == kNoValue ? common_bucket_[head] : (e - kMinExponent + bucket_offset_[head]) / kBucketWidth;
    bucket_of[j] = static_cast<uint8_t>(b);
    ++start[b + 1];
  }
  for (int b = 0; b < kBuckets; ++b) start[b + 1] += start[b];
  uint8_t* bucket = bucket_.data() + id * kKeyTile;
  for (int j = 0; j < keys; ++j) {
    const int place = start[bucket_of[j]]++;
    index[place] = j;
    if (place != j) flags_[id] |= kHasOrder;
    bucket[place] = bucket_of[j];
  }
}

void PackedKeys::pack_tile(const Problem& problem, int64_t id, double* scratch) {
  if (!values) flags_[id] = 0;  // else measure_values() has begun them
  order_keys(id, static_cast<int>(tile_keys(id % tiles)));
  pack_tile_keys(problem, id, scratch);
  if (values) pack_tile_values(problem, id, scratch);
}

// Transposed a panel at a time. Poisoned keys, and the places behind the last key, are rows of zeros.
void PackedKeys::pack_tile_keys(const Problem& problem, int64_t id, double* scratch) {
  const TileKernels& kernels = tile_kernels();
  const int64_t head = id / tiles;
  const int64_t tile = id % tiles;
  const int keys = static_cast<int>(tile_keys(tile));
  const int bits = problem.precision.operand_bits;
  const int32_t* index = index_.data() + id * kKeyTile;
  int max_exponent = kMinExponent;
  for (int j = 0; j < kKeyTile; ++j) {
    double* row = scratch + (j % kPanel) * width;
    int32_t& exponent = key_exponent_[id * kKeyTile + j];
    bool special = j >= keys;
    exponent = kMinExponent;
    if (!special) {
      const int64_t key = problem.mask.kv_lo + tile * kKeyTile + index[j];
      const int64_t offset = element_offset(problem.k, problem.kv_heads, head_lo + head, key);
      kernels.load_row(problem.k.data, offset, problem.k.dtype, depth, row);
      const int e = row_exponent(kernels.max_abs(row, depth, &special));
      exponent = special ? kPoisonedExponent : e;
      if (special) flags_[id] |= kHasPoisoned;
    }
    if (special) {
      for (int d = 0; d < depth; ++d) row[d] = 0.0;
    } else {
      max_exponent = exponent > max_exponent ? exponent : max_exponent;
      kernels.quantise_row(row, depth, exponent, bits, pow2(exponent - (bits - 1) + kScoreFractionBits));
    }
    if (j % kPanel == kPanel - 1) {
      double* panel = keys_data_.data() + (id * kKeyTile + j - (kPanel - 1)) * depth;
      kernels.transpose(scratch, width, depth, panel);
    }
  }
  max_key_exponent_[id] = max_exponent;
}

// Key j is row j of every panel; the sums read no further than the last key.
void PackedKeys::pack_tile_values(const Problem& problem, int64_t id, double* row) {
  const TileKernels& kernels = tile_kernels();
  const int64_t head = id / tiles;
  const int64_t tile = id % tiles;
  const int bits = problem.precision.operand_bits;
  const int32_t* index = index_.data() + id * kKeyTile;
  for (int d = depth; d < width; ++d) row[d] = 0.0;
  for (int j = 0; j < tile_keys(tile); ++j) {
    const int64_t key = problem.mask.kv_lo + tile * kKeyTile + index[j];
    const int64_t offset = element_offset(problem.v, problem.kv_heads, head_lo + head, key);
    kernels.load_row(problem.v.data, offset, problem.v.dtype, depth, row);
    if (has_special(id)) {
      for (int d = 0; d < depth; ++d) row[d] = is_finite(row[d]) ? row[d] : 0.0;
    }
    const int e = value_exponent_[id * kKeyTile + index[j]];
    const int base = bucket_table_[head * kBuckets + bucket_[id * kKeyTile + j]].base;
    if (e == kNoValue) {
      for (int d = 0; d < depth; ++d) row[d] = 0.0;
    } else {
      kernels.quantise_row(row, depth, e, bits, pow2(e - base));
    }
    double* out = values_data_.data() + id * kKeyTile * width + j * kPanel;
    for (int p = 0; p < width / kPanel; ++p) std::memcpy(out + p * kKeyTile * kPanel, row + p * kPanel, kPanel * 8);
  }
}

// ---- Queries ---------------------------------------------------------------------------------------------------

QueryRow pack_query(const Problem& problem, int64_t batch, int64_t head, int64_t row, double* out) {
  const TileKernels& kernels = tile_kernels();
  const int depth = static_cast<int>(problem.head_dim);
  const int bits = problem.precision.operand_bits;
  kernels.load_row(problem.q.data, row_offset(problem.q, batch, head, row), problem.q.dtype, depth, out);
  for (int d = 0; d < depth; ++d) out[d] = mul_f64(out[d], problem.scale);
  bool special = false;
  const int e = row_exponent(kernels.max_abs(out, depth, &special));
  if (special) {
    for (int d = 0; d < depth; ++d) out[d] = 0.0;
    return {kPoisonedExponent, 0, true};
  }
  const int unit = e < kLargestUnit ? e : kLargestUnit;
  const double sum = kernels.quantise_row(out, depth, e, bits, pow2(unit - (bits - 1)));
  return {e, unit, sum * pow2(bits - 1) <= pow2(53)};
}

// ---- The public rows -------------------------------------------------------------------------------------------

namespace {

void public_row(const View& x, int64_t offset, int64_t head_dim, RowKind kind, double scale, int operand_bits,
                int32_t* integers, int32_t* exponent) {
  double row[kMaxHeadDim];
  const int depth = static_cast<int>(head_dim);
  const TileKernels& kernels = tile_kernels();
  kernels.load_row(x.data, offset, x.dtype, depth, row);
  if (kind == RowKind::kQuery) {
    for (int d = 0; d < depth; ++d) row[d] = mul_f64(row[d], scale);
  }
  bool special = false;
  const int e = row_exponent(kernels.max_abs(row, depth, &special));
  const bool poisoned = special && kind != RowKind::kValue;
  *exponent = poisoned ? kPoisonedExponent : e;
  for (int d = 0; d < depth; ++d) {
    integers[d] = poisoned ? 0 : (is_finite(row[d]) ? quantise(row[d], e, operand_bits) : special_integer(row[d]));
  }
}

}  // namespace

void rows(const View& x, int64_t batch, int64_t heads, int64_t length, int64_t head_dim, RowKind kind, double scale,
          Precision precision, int32_t* integers, int32_t* exponents) {
  run_ranges(batch * heads * length, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t offset = row_offset(x, i / length / heads, i / length % heads, i % length);
      public_row(x, offset, head_dim, kind, scale, precision.operand_bits, integers + i * head_dim, exponents + i);
    }
  });
}

}  // namespace cpu
}  // namespace det_attn
