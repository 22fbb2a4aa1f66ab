// Packing for the backward products on the CPU (docs/contract.md sections 1 and 8), see backward_rows.h.
#include "backward_rows.h"

#include <algorithm>
#include <limits>

namespace det_attn {
namespace cpu {

namespace {

// Units only serve pairs inside the fast range; others are computed from exponents.
double unit(int exponent) { return pow2(std::max(-1000, std::min(1000, exponent))); }

// delta_i: a product of two float32 is exact in float64, so adding it is the fma.
float delta_of(const double* grad, const double* out, int depth) {
  double sum = 0.0;
  for (int d = 0; d < depth; ++d) sum += grad[d] * out[d];
  return static_cast<float>(sum);
}

bool all_finite(const double* x, int depth) {
  for (int d = 0; d < depth; ++d) {
    if (!is_finite(x[d])) return false;
  }
  return true;
}

}  // namespace

int64_t PackedRows::bytes_per_row(int64_t head_dim, int layouts) {
  int64_t numbers = 0;
  for (int layout : {kRowMajor, kTransposed, kPanels}) numbers += layouts & layout ? head_dim : 0;
  return numbers * static_cast<int64_t>(sizeof(double));
}

void PackedRows::pack(const View& x, const RowSet& where, int64_t set_lo, int64_t set_hi, int head_dim,
                      const double* scale, int operand_bits, int layouts) {
  const TileKernels& kernels = tile_kernels();
  tiles = (where.rows() + kKeyTile - 1) / kKeyTile;
  padded = tiles * kKeyTile;
  depth = head_dim;
  width = round_up(depth, kPanel);
  const int64_t count = (set_hi - set_lo) * padded;
  if (layouts & kRowMajor) row_major_.resize(count * depth);
  if (layouts & kTransposed) transposed_.resize(count * depth);
  if (layouts & kPanels) panels_.resize(count * width);
  exponent_.resize(count);
  flags_.resize(count);
  max_exponent_.resize((set_hi - set_lo) * tiles);
  tile_bad_.resize((set_hi - set_lo) * tiles);

  const auto pack_row = [&](int64_t tile, int j, double* row) {
    const int64_t at = tile % tiles * kKeyTile + j;
    const int64_t id = tile * kKeyTile + j;
    const bool padding = at >= where.rows();
    bool special = padding;
    exponent_[id] = kMinExponent;
    flags_[id] = kExact;
    if (!padding) {
      kernels.load_row(x.data, where.offset(x, set_lo + tile / tiles, at), x.dtype, depth, row);
      for (int d = 0; scale != nullptr && d < depth; ++d) row[d] = mul_f64(row[d], *scale);
      const int e = row_exponent(kernels.max_abs(row, depth, &special));
      if (special) {
        flags_[id] |= kBad;
        tile_bad_[tile] = 1;
      } else {
        exponent_[id] = e;
        max_exponent_[tile] = std::max(max_exponent_[tile], e);
        const double sum = kernels.quantise_row(row, depth, e, operand_bits, 1.0);
        if (sum * pow2(operand_bits - 1) > pow2(53)) flags_[id] &= ~kExact;
      }
    }
    if (special) std::fill(row, row + depth, 0.0);
  };

  run_units((set_hi - set_lo) * tiles, [&](const auto& next) {
    const Buffer<double> scratch(kPanel * width);
    std::fill(scratch.data(), scratch.data() + kPanel * width, 0.0);
    for (int64_t tile = next(); tile >= 0; tile = next()) {
      max_exponent_[tile] = kMinExponent;
      tile_bad_[tile] = 0;
      for (int j = 0; j < kKeyTile; ++j) {
        double* row = scratch.data() + j % kPanel * width;
        pack_row(tile, j, row);
        if (layouts & kRowMajor) std::copy(row, row + depth, row_major_.data() + (tile * kKeyTile + j) * depth);
        for (int p = 0; layouts & kPanels && p < width / kPanel; ++p) {
          double* out = panels_.data() + (tile * width + p * kPanel) * kKeyTile + j * kPanel;
          std::copy(row + p * kPanel, row + (p + 1) * kPanel, out);
        }
        if (layouts & kTransposed && j % kPanel == kPanel - 1) {
          kernels.transpose(scratch.data(), width, depth,
                            transposed_.data() + (tile * kKeyTile + j - (kPanel - 1)) * depth);
        }
      }
    }
  });
}

void QueryState::fill(const Gradient& call, const RowSet& where, int64_t set_lo, int64_t set_hi, const PackedRows& q,
                      const PackedRows& grad) {
  const int64_t count = (set_hi - set_lo) * q.padded;
  for (Buffer<double>* x : {&maximum, &inverse, &score_unit, &grad_unit, &key_term_unit, &value_term_unit}) {
    x->resize(count);
  }
  delta.resize(count), begin.resize(count), end.resize(count), dead.resize(count), bad.resize(count);
  const Problem& problem = call.problem;
  const TileKernels& kernels = tile_kernels();
  const int bits = problem.precision.operand_bits;
  run_ranges(count, 64, [&](int64_t first, int64_t last) {
    double grads[kMaxHeadDim], outs[kMaxHeadDim];
    for (int64_t id = first; id < last; ++id) {
      const int64_t set = set_lo + id / q.padded, row = id % q.padded;
      maximum[id] = std::numeric_limits<double>::infinity();
      inverse[id] = 0.0, delta[id] = 0.0f, begin[id] = end[id] = 0, dead[id] = 0, bad[id] = 0;
      score_unit[id] = unit(q.exponent(id) + kScoreFractionBits - 2 * (bits - 1));
      grad_unit[id] = unit(grad.exponent(id) - 2 * (bits - 1));
      key_term_unit[id] = pow2(q.exponent(id) - kQueryExponentBias);
      value_term_unit[id] = pow2(grad.exponent(id));
      if (row >= where.rows()) continue;
      // rowmax and den are contiguous, and the rows of a set follow one another in them.
      const int64_t number = set * where.rows() + row;
      kernels.load_row(call.grad.data, where.offset(call.grad, set, row), call.grad.dtype, q.depth, grads);
      kernels.load_row(call.out.data, where.offset(call.out, set, row), call.out.dtype, q.depth, outs);
      const int64_t m = rowmax_from_public(call.rowmax[number]);
      const Mask& mask = problem.mask;
      begin[id] = mask.begin(set / where.sets_per_batch, row % where.length) - mask.kv_lo;
      end[id] = mask.end(set / where.sets_per_batch, row % where.length) - mask.kv_lo;
      bad[id] = q.bad(id) || grad.bad(id);
      dead[id] = bad[id] || m == kRowmaxPoisoned || !all_finite(outs, q.depth);
      if (dead[id] || m == kRowmaxEmpty || call.den[number] <= 0) continue;
      maximum[id] = static_cast<double>(m);
      inverse[id] = inverse_den(call.den[number], problem.precision.weight_bits);
      delta[id] = delta_of(grads, outs, q.depth);
    }
  });
}

void KeyState::fill(const PackedRows& k, const PackedRows& v, int64_t count) {
  score_unit.resize(count), value_unit.resize(count), bad.resize(count);
  for (int64_t id = 0; id < count; ++id) {
    score_unit[id] = pow2(k.exponent(id));
    value_unit[id] = pow2(v.exponent(id));
    bad[id] = k.bad(id) || v.bad(id);
  }
}

}  // namespace cpu
}  // namespace det_attn
