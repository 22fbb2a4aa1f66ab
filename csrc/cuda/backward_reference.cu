// The reference path of the backward pass: prepared rows and the launches of its kernels; backward.cu has the stages.
#include "backward_reference.cuh"
#include "tensor_core.cuh"

namespace det_attn::cuda::reference {

namespace {

struct ReferenceEngine : GradientEngine {
  BackwardRows rows;
  Precision precision;

  void pairs(const Context& ctx, const PairsArgs& args) const override {
    const dim3 grid(grid_of(args.strip.heads * (args.strip.rows / kQueries)),
                    static_cast<unsigned>(ceil_div(args.shape.keys_pad, kPairSlab)));
    const int bytes = static_cast<int>(sizeof(PairsShared));
    const auto kernel = args.problem.modifiers.any() ? pairs_kernel<true> : pairs_kernel<false>;
    allow_shared(kernel, bytes);
    kernel<<<grid, kThreads, bytes, stream_of(ctx)>>>(args, rows, precision);
    check_launch("reference pairs_kernel");
  }
  void sums(const Context& ctx, GradientSumsArgs args) const override {
    args.dim_blocks = static_cast<int>(ceil_div(args.shape.dims, kSumDims));
    const int64_t blocks =
        args.strip.heads * std::max(args.strip.rows, args.shape.keys_pad) / kSumRows * args.dim_blocks;
    const int64_t parts =
        std::max(ceil_div(args.shape.keys, args.split_keys), ceil_div(args.strip.rows, args.split_rows));
    const dim3 grid(grid_of(blocks), static_cast<unsigned>(parts), args.job_count);
    gradient_sums_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(args, rows);
    check_launch("reference gradient_sums_kernel");
  }
};

PreparedRows prepare(const Context& ctx, const Problem& p, const View& x, bool of_query, double scale) {
  return prepare_rows(ctx, x, p.batch, of_query ? p.q_heads : p.kv_heads, of_query ? p.q_len : p.kv_len, p.head_dim,
                      of_query ? RowKind::kQuery : RowKind::kKey, scale, p.precision);
}

BackwardCall prepare(const Context& ctx, const Gradient& call, ReferenceEngine& engine) {
  const Problem& p = call.problem;
  const Shape s = shape_of(p, Engine::kMma);
  // Values take the rule of keys here: a bad element makes the row bad. So does dO, whose scale is 1.
  engine.rows = {prepare(ctx, p, p.q, true, p.scale), prepare(ctx, p, call.grad, true, 1.0),
                 prepare(ctx, p, p.k, false, 1.0), prepare(ctx, p, p.v, false, 1.0), p.kv_len, p.mask.kv_lo};
  engine.precision = p.precision;
  const BackwardRows& x = engine.rows;
  const RowExponents exponents{x.q.exponents, x.grad.exponents, x.k.exponents + p.mask.kv_lo,
                               x.v.exponents + p.mask.kv_lo, s.rows, p.kv_len};
  return BackwardCall{ctx, call, engine, s, make_gradient_state(ctx, call, s, exponents)};
}

}  // namespace

void grad_reference(const Context& ctx, const Gradient& call, int32_t* a, int32_t* b, int32_t* c) {
  ReferenceEngine engine;
  run_grad_reference(prepare(ctx, call, engine), a, b, c);
}

void grad_accumulate(const Context& ctx, const Gradient& call, const int32_t* a, const int32_t* b, const int32_t* c,
                     int64_t* dq, int64_t* dk, int64_t* dv) {
  ReferenceEngine engine;
  run_grad_accumulate(prepare(ctx, call, engine), a, b, c, dq, dk, dv);
}

void backward(const Context& ctx, const Gradient& call, const MutableView& dq, const MutableView& dk,
              const MutableView& dv) {
  ReferenceEngine engine;
  run_backward(prepare(ctx, call, engine), dq, dk, dv);
}

}  // namespace det_attn::cuda::reference
