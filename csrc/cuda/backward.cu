// Backward on CUDA: references, exact sums and the fused call over strips of query rows (docs/contract.md section 8),
// in terms of the kernels in gradients.cuh. The pairs kernel leaves p and ds of a strip in a bounded workspace, the
// gradient sums kernel turns them into sums, the next strip reuses the space. References are needed before the first
// sum: where all pairs of a head fit, the kernel that keeps them raises the references too; longer heads are computed
// twice, first for the references alone. The stages around are the forward's.
#include <algorithm>

#include "paths.h"
#include "tensor_core.cuh"

namespace det_attn::cuda {

namespace {

constexpr int64_t kPairBytes = int64_t(576) << 20;  // p and ds kept at a time: a head of 8192 x 8192
constexpr int64_t kLeastInnerRows = 512;            // shorter parts of a sum are not worth adding

int64_t strip_bytes(const Shape& s, int64_t rows) { return rows * s.keys_pad * int64_t(2 * sizeof(float)); }

Strip all_rows(const Shape& s) { return Strip{0, s.heads, 0, s.rows_pad}; }

// How rows are cut: `heads` at a time, `rows` of each.
struct Strips {
  int64_t heads, rows;
  bool whole;  // all rows of a head at once
};
Strips strips_of(const Shape& s) {
  const int64_t head = std::max<int64_t>(1, strip_bytes(s, s.rows_pad));
  if (head <= kPairBytes) return {std::max<int64_t>(1, std::min(s.heads, kPairBytes / head)), s.rows_pad, true};
  return {1, std::max<int64_t>(1, kPairBytes / strip_bytes(s, kRowPad)) * kRowPad, false};
}

Pairs pairs_workspace(const BackwardCall& b, const Strips& strips) {
  const int64_t count = strip_bytes(b.shape, strips.heads * std::min(strips.rows, b.shape.rows_pad)) / 2;
  return Pairs{workspace<float4>(b.ctx, count / sizeof(float4)), workspace<float4>(b.ctx, count / sizeof(float4)),
               b.shape.keys_pad / kPairBlock};
}

void run_pairs(const BackwardCall& b, const Strip& strip, const Pairs& pairs, const References& references) {
  if (strip.heads * strip.rows == 0 || b.shape.keys == 0) return;
  b.engine.pairs(b.ctx, PairsArgs{b.call.problem, b.shape, b.query, b.grad, b.key, b.value, b.state, strip, pairs,
                                  references});
}

// Inner rows of one CTA: enough parts to fill the device a few times, each worth its additions.
int64_t part_of(int64_t inner, int64_t wanted) {
  const int64_t most = std::min(kMostInnerRows, std::max(kLeastInnerRows, wanted));
  const int64_t parts = std::max<int64_t>(1, ceil_div(inner, most));
  return std::max<int64_t>(kPairStep, round_up(ceil_div(inner, parts), kPairStep));
}

void run_sums(const BackwardCall& b, const Strip& strip, const Pairs& pairs, const SumJob (&jobs)[3]) {
  const Shape& s = b.shape;
  if (strip.heads * strip.rows == 0 || s.keys == 0) return;
  GradientSumsArgs args{};
  args.shape = s, args.state = b.state, args.strip = strip, args.pairs = pairs;
  for (const SumJob& job : jobs)
    if (job.digits != nullptr) args.jobs[args.job_count++] = job;
  if (args.job_count == 0) return;
  // Inner rows of all CTAs, if one has 64 sum rows and 128 dims; then three CTAs a processor.
  const int64_t ctas = args.job_count * strip.heads * (strip.rows / kPairStep) * ceil_div(s.value_dims_pad, 128);
  const int64_t wanted = ctas * s.keys / (3 * processors(b.ctx.device));
  args.split_keys = part_of(s.keys, wanted);
  args.split_rows = part_of(strip.rows, wanted);
  b.engine.sums(b.ctx, args);
}

// What dQ, dK and dV are sums of; where they go is still open.
void make_jobs(const BackwardCall& b, const int32_t* a, const int32_t* of_k, const int32_t* of_v, SumJob (&jobs)[3]) {
  const Problem& p = b.call.problem;
  for (SumJob& job : jobs) job = SumJob{};
  jobs[0].of_query = true;
  jobs[0].bits = kQueryGradientBits, jobs[1].bits = kKeyGradientBits, jobs[2].bits = kValueGradientBits;
  jobs[2].of_p = true;
  jobs[0].factor = b.key_factor, jobs[1].factor = b.query_factor, jobs[2].factor = b.grad_factor;
  jobs[0].exponent = b.state.key_exponent, jobs[1].exponent = b.state.query_exponent;
  jobs[2].exponent = b.state.grad_exponent;
  jobs[0].reference = a, jobs[1].reference = of_k + p.mask.kv_lo, jobs[2].reference = of_v + p.mask.kv_lo;
  jobs[0].reference_stride = b.shape.rows, jobs[1].reference_stride = jobs[2].reference_stride = p.kv_len;
}

void clear(const Context& ctx, int64_t* x, int64_t count) {
  if (count != 0) check(cudaMemsetAsync(x, 0, count * sizeof(int64_t), stream_of(ctx)), "cudaMemsetAsync");
}

// Calls body(strip) over the rows of `heads` heads.
template <class Body>
void for_each_strip(const Shape& s, const Strips& strips, int64_t head, int64_t heads, const Body& body) {
  for (int64_t row = 0; row < s.rows_pad; row += strips.rows)
    body(Strip{head, heads, row, std::min(strips.rows, s.rows_pad - row)});
}

}  // namespace

void run_grad_reference(const BackwardCall& b, int32_t* a, int32_t* of_k, int32_t* of_v) {
  const Problem& p = b.call.problem;
  const References references{a, of_k + p.mask.kv_lo, of_v + p.mask.kv_lo, p.kv_len};
  reset_references(b.ctx, p, b.shape, b.state, references);
  run_pairs(b, all_rows(b.shape), Pairs{nullptr, nullptr, b.shape.keys_pad / kPairBlock}, references);
}

void run_grad_accumulate(const BackwardCall& b, const int32_t* a, const int32_t* of_k, const int32_t* of_v,
                         int64_t* dq, int64_t* dk, int64_t* dv) {
  const Problem& p = b.call.problem;
  const Shape& s = b.shape;
  const int64_t row = int64_t(s.dims) * kGradientDigits;
  int64_t* const sums[3] = {dq, dk, dv};
  const int64_t rows[3] = {s.heads * s.rows, s.heads * p.kv_len, s.heads * p.kv_len};
  SumJob jobs[3];
  make_jobs(b, a, of_k, of_v, jobs);
  for (int i = 0; i < 3; ++i) {
    if (sums[i] == nullptr) continue;
    clear(b.ctx, sums[i], rows[i] * row);
    jobs[i].digits = i == 0 ? sums[i] : sums[i] + p.mask.kv_lo * row;
    jobs[i].row_stride = i == 0 ? s.rows : p.kv_len;
    jobs[i].element_stride = kGradientDigits, jobs[i].digit_stride = 1;
  }
  const Strips strips = strips_of(s);
  const Pairs pairs = pairs_workspace(b, strips);
  for (int64_t head = 0; head < s.heads; head += strips.heads) {
    for_each_strip(s, strips, head, std::min(strips.heads, s.heads - head), [&](const Strip& strip) {
      run_pairs(b, strip, pairs, References{});
      run_sums(b, strip, pairs, jobs);
    });
  }
  for (int i = 0; i < 3; ++i)
    if (sums[i] != nullptr) normalise_sums(b.ctx, sums[i], rows[i] * s.dims);
}

void run_backward(const BackwardCall& b, const MutableView& dq, const MutableView& dk, const MutableView& dv) {
  const Problem& p = b.call.problem;
  const Shape& s = b.shape;
  int32_t* const a = workspace<int32_t>(b.ctx, s.heads * s.rows);
  int32_t* const of_k = workspace<int32_t>(b.ctx, s.heads * p.kv_len);
  int32_t* const of_v = workspace<int32_t>(b.ctx, s.heads * p.kv_len);
  const int32_t* const found[3] = {a, of_k, of_v};
  const References references{a, of_k + p.mask.kv_lo, of_v + p.mask.kv_lo, p.kv_len};
  reset_references(b.ctx, p, s, b.state, references);
  const Strips strips = strips_of(s);
  if (!strips.whole) run_pairs(b, all_rows(s), Pairs{nullptr, nullptr, s.keys_pad / kPairBlock}, references);
  const Pairs pairs = pairs_workspace(b, strips);

  // Sums of one round of heads, as one int64 where that holds them.
  const MutableView* const out[3] = {&dq, &dk, &dv};
  SumJob jobs[3];
  make_jobs(b, a, of_k, of_v, jobs);
  int64_t words[3];
  for (int i = 0; i < 3; ++i) {
    SumJob& job = jobs[i];
    job.row_stride = job.of_query ? s.rows : s.keys;
    job.element_stride = 1;
    words[i] = strips.heads * job.row_stride * s.dims;
    if ((job.of_query ? s.keys : s.rows) > kMostInOneWord) job.digit_stride = words[i], words[i] *= 2;
    if (out[i]->data != nullptr) job.digits = workspace<int64_t>(b.ctx, words[i]);
  }
  for (int64_t head = 0; head < s.heads; head += strips.heads) {
    const int64_t heads = std::min(strips.heads, s.heads - head);
    for (int i = 0; i < 3; ++i) {
      jobs[i].first_head = head;
      if (jobs[i].digits != nullptr) clear(b.ctx, jobs[i].digits, words[i]);
    }
    for_each_strip(s, strips, head, heads, [&](const Strip& strip) {
      run_pairs(b, strip, pairs, strips.whole ? references : References{});
      run_sums(b, strip, pairs, jobs);
    });
    for (int i = 0; i < 3; ++i) {
      const double scale = i == 0 ? p.scale : 1.0;
      if (jobs[i].digits != nullptr) round_gradient(b.ctx, p, s, jobs[i], found[i], heads, scale, *out[i]);
    }
  }
}

// ---- the tensor cores' side ------------------------------------------------------------------------------------

namespace {

class TensorCores : public GradientEngine {
 public:
  explicit TensorCores(Engine engine) : engine_(engine) {}
  void pairs(const Context& ctx, const PairsArgs& args) const override {
    const bool highest = args.shape.planes == 3;
    if (args.problem.modifiers.any()) {
      (highest ? launch_pairs_modified_highest : launch_pairs_modified_high)(ctx, args);
    } else if (engine_ == Engine::kWgmma && args.shape.dims_pad >= 64 && args.shape.dims_pad <= 128) {
      (highest ? launch_pairs_wgmma_highest : launch_pairs_wgmma_high)(ctx, args);
    } else {
      (highest ? launch_pairs_highest : launch_pairs_high)(ctx, args);
    }
  }
  void sums(const Context& ctx, GradientSumsArgs args) const override {
    const bool highest = args.shape.planes == 3;
    if (engine_ == Engine::kWgmma) {
      (highest ? launch_gradient_sums_hopper_highest : launch_gradient_sums_hopper_high)(ctx, args);
    } else {
      (highest ? launch_gradient_sums_highest : launch_gradient_sums_high)(ctx, args);
    }
  }

 private:
  Engine engine_;
};

// `sums`: the transposed planes of whatever is wanted.
BackwardCall prepare(const Context& ctx, const Gradient& call, const GradientEngine& engine, bool for_dq, bool for_dk,
                     bool for_dv) {
  const Problem& p = call.problem;
  const Shape s = shape_of(p, Engine::kMma);
  const int64_t row_bytes = s.heads * s.planes * s.rows_pad * s.dims_pad;
  const int64_t key_bytes = s.heads * s.planes * s.keys_pad * s.dims_pad;
  // The forward's rows, once for Q and K and once for dO and V. With a scale of 1 a query's rule is that of the others.
  Prepared prepared[2];
  Problem problems[2] = {p, p};
  problems[1].q = call.grad, problems[1].k = p.v, problems[1].scale = 1.0;
  for (int i = 0; i < 2; ++i) {
    Prepared& x = prepared[i] = Prepared{};
    x.query = workspace<uint8_t>(ctx, row_bytes), x.key = workspace<uint8_t>(ctx, key_bytes);
    x.query_exponent = workspace<int32_t>(ctx, s.heads * s.rows_pad);
    x.key_exponent = workspace<int32_t>(ctx, s.heads * s.keys_pad);
    x.rowmax = workspace<int64_t>(ctx, s.heads * s.rows_pad);
    x.row_keys = workspace<int2>(ctx, s.heads * s.rows_pad);
    if (s.rows_pad != 0) prepare_queries(ctx, problems[i], s, x);
    prepare_keys(ctx, problems[i], s, x);
  }
  const RowExponents exponents{prepared[0].query_exponent, prepared[1].query_exponent, prepared[0].key_exponent,
                               prepared[1].key_exponent,   s.rows_pad,                 s.keys_pad};
  BackwardCall b{ctx, call, engine, s, make_gradient_state(ctx, call, s, exponents)};
  b.query = prepared[0].query, b.grad = prepared[1].query, b.key = prepared[0].key, b.value = prepared[1].key;
  if (for_dq) b.key_factor = transpose_planes(ctx, s, b.key, s.keys_pad);
  if (for_dk) b.query_factor = transpose_planes(ctx, s, b.query, s.rows_pad);
  if (for_dv) b.grad_factor = transpose_planes(ctx, s, b.grad, s.rows_pad);
  return b;
}

}  // namespace

namespace tensor_core {

void grad_reference(const Context& ctx, Engine engine, const Gradient& call, int32_t* a, int32_t* b, int32_t* c) {
  const TensorCores cores(engine);
  run_grad_reference(prepare(ctx, call, cores, false, false, false), a, b, c);
}

void grad_accumulate(const Context& ctx, Engine engine, const Gradient& call, const int32_t* a, const int32_t* b,
                     const int32_t* c, int64_t* dq, int64_t* dk, int64_t* dv) {
  const TensorCores cores(engine);
  run_grad_accumulate(prepare(ctx, call, cores, dq, dk, dv), a, b, c, dq, dk, dv);
}

void backward(const Context& ctx, Engine engine, const Gradient& call, const MutableView& dq, const MutableView& dk,
              const MutableView& dv) {
  const TensorCores cores(engine);
  run_backward(prepare(ctx, call, cores, dq.data, dk.data, dv.data), dq, dk, dv);
}

}  // namespace tensor_core
}  // namespace det_attn::cuda
