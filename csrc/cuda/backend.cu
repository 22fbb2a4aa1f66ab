// The CUDA backend: picks the path of each call. In: a Context and a Problem. Out: the chosen path's bytes, which are
// the contract's whichever it is.
#include <stdexcept>

#include "common.cuh"
#include "paths.h"

namespace det_attn {

namespace {

int compute_capability(int device) {
  return 10 * cuda::device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
         cuda::device_attribute(cudaDevAttrComputeCapabilityMinor, device);
}

// The path that runs: the fastest one this GPU has, unless the caller names one.
Path choose_path(const Context& ctx) {
  const bool hopper = compute_capability(ctx.device) == 90;
  if (ctx.path == Path::kAuto) return hopper ? Path::kWgmma : Path::kMma;
  if (ctx.path == Path::kWgmma && !hopper) {
    throw std::runtime_error("det_attn: path 'wgmma' is not available on this GPU: it needs compute capability 9.0");
  }
  return ctx.path;
}

cuda::Engine engine_of(Path path) { return path == Path::kWgmma ? cuda::Engine::kWgmma : cuda::Engine::kMma; }

void rowmax(const Context& ctx, const Problem& problem, double* rowmax) {
  const Path path = choose_path(ctx);
  if (path == Path::kReference) return cuda::reference::rowmax(ctx, problem, rowmax);
  cuda::tensor_core::rowmax(ctx, engine_of(path), problem, rowmax);
}

void accumulate(const Context& ctx, const Problem& problem, const double* rowmax, int64_t* num, int64_t* den) {
  const Path path = choose_path(ctx);
  if (path == Path::kReference) return cuda::reference::accumulate(ctx, problem, rowmax, num, den);
  cuda::tensor_core::accumulate(ctx, engine_of(path), problem, rowmax, num, den);
}

void forward(const Context& ctx, const Problem& problem, const MutableView& out, double* rowmax, int64_t* den) {
  const Path path = choose_path(ctx);
  if (path == Path::kReference) return cuda::reference::forward(ctx, problem, out, rowmax, den);
  cuda::tensor_core::forward(ctx, engine_of(path), problem, out, rowmax, den);
}

void accumulate_last(const Context& ctx, const Problem& problem, const double* others, double* rowmax, int64_t* num,
                     int64_t* den) {
  const Path path = choose_path(ctx);
  if (path == Path::kReference) return cuda::reference::accumulate_last(ctx, problem, others, rowmax, num, den);
  cuda::tensor_core::accumulate_last(ctx, engine_of(path), problem, others, rowmax, num, den);
}

void grad_reference(const Context& ctx, const Gradient& call, int32_t* a, int32_t* b, int32_t* c) {
  const Path path = choose_path(ctx);
  if (path == Path::kReference) return cuda::reference::grad_reference(ctx, call, a, b, c);
  cuda::tensor_core::grad_reference(ctx, engine_of(path), call, a, b, c);
}

void grad_accumulate(const Context& ctx, const Gradient& call, const int32_t* a, const int32_t* b, const int32_t* c,
                     int64_t* dq, int64_t* dk, int64_t* dv) {
  const Path path = choose_path(ctx);
  if (path == Path::kReference) return cuda::reference::grad_accumulate(ctx, call, a, b, c, dq, dk, dv);
  cuda::tensor_core::grad_accumulate(ctx, engine_of(path), call, a, b, c, dq, dk, dv);
}

void backward(const Context& ctx, const Gradient& call, const MutableView& dq, const MutableView& dk,
              const MutableView& dv) {
  const Path path = choose_path(ctx);
  if (path == Path::kReference) return cuda::reference::backward(ctx, call, dq, dk, dv);
  cuda::tensor_core::backward(ctx, engine_of(path), call, dq, dk, dv);
}

}  // namespace

const Backend& cuda_backend() {
  static const Backend backend{cuda::rows,     rowmax,          accumulate,          cuda::finalize, forward,
                               grad_reference, grad_accumulate, cuda::grad_finalize, backward,       accumulate_last};
  return backend;
}

}  // namespace det_attn
