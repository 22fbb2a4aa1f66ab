// The CUDA backend: picks the path of each call. In: a Context and a Problem. Out: the chosen path's bytes, which are
// the contract's whichever it is.
#include <stdexcept>

#include "paths.h"

namespace det_attn {

namespace {

// The path that runs: the fastest one built, unless the caller names one.
Path choose_path(const Context& ctx) {
  switch (ctx.path) {
    case Path::kAuto:
    case Path::kReference:
      return Path::kReference;
    case Path::kMma:
      throw std::runtime_error("det_attn: path 'mma' is not in this build; use 'auto' or 'reference'");
    case Path::kWgmma:
      throw std::runtime_error("det_attn: path 'wgmma' is not in this build; use 'auto' or 'reference'");
  }
  throw std::runtime_error("det_attn: unknown path; use 'auto' or 'reference'");
}

void rowmax(const Context& ctx, const Problem& problem, double* rowmax) {
  choose_path(ctx);
  cuda::reference::rowmax(ctx, problem, rowmax);
}

void accumulate(const Context& ctx, const Problem& problem, const double* rowmax, int64_t* num, int64_t* den) {
  choose_path(ctx);
  cuda::reference::accumulate(ctx, problem, rowmax, num, den);
}

void forward(const Context& ctx, const Problem& problem, const MutableView& out, double* rowmax, int64_t* den) {
  choose_path(ctx);
  cuda::reference::forward(ctx, problem, out, rowmax, den);
}

}  // namespace

const Backend& cuda_backend() {
  static const Backend backend{cuda::rows, rowmax, accumulate, cuda::finalize, forward};
  return backend;
}

}  // namespace det_attn
