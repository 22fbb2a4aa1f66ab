// The CPU's table for api.cpp and the one place that looks at the processor.
#include "../backend.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../float_env.h"
#include "backward.h"
#include "forward.h"
#include "isa.h"
#include "packed.h"
#include "tile_worker.h"

namespace det_attn {
namespace cpu {

namespace {

bool supported(const char* isa) {
#if defined(DET_CPU_X86_KERNELS)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (std::strcmp(isa, "avx2") == 0) return avx2;
  if (std::strcmp(isa, "avx512") == 0) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return std::strcmp(isa, "generic") == 0;
}

const TileKernels* kernels_of(const char* isa) {
#if defined(DET_CPU_X86_KERNELS)
  if (std::strcmp(isa, "avx512") == 0) return &tile_kernels_avx512();
  if (std::strcmp(isa, "avx2") == 0) return &tile_kernels_avx2();
#endif
  (void)isa;
  return &tile_kernels_generic();
}

// The best there is, or the one that DET_ATTN_CPU_ISA names: so that tests can compare them on one machine.
const TileKernels* choose_kernels() {
  const char* wanted = std::getenv("DET_ATTN_CPU_ISA");
  std::string allowed;
  for (const char* isa : {"avx512", "avx2", "generic"}) {
    if (!supported(isa)) continue;
    if (wanted == nullptr || std::strcmp(wanted, isa) == 0) return kernels_of(isa);
    allowed += std::string(allowed.empty() ? "" : ", ") + isa;
  }
  STD_TORCH_CHECK(false, "DET_ATTN_CPU_ISA: got '", wanted, "', this CPU and this build allow ", allowed);
}

}  // namespace

const TileKernels& tile_kernels() {
  static const TileKernels* const chosen = choose_kernels();
  return *chosen;
}

}  // namespace cpu

const Backend& cpu_backend() {
  cpu::tile_kernels();  // an instruction set that is not there is refused here, not in a worker thread
  static const Backend backend = {
      [](const Context&, const View& x, int64_t batch, int64_t heads, int64_t length, int64_t head_dim, RowKind kind,
         double scale, Precision precision, int32_t* integers, int32_t* exponents) {
        cpu::rows(x, batch, heads, length, head_dim, kind, scale, precision, integers, exponents);
      },
      [](const Context&, const Problem& problem, double* rowmax) { cpu::rowmax(problem, rowmax); },
      [](const Context&, const Problem& problem, const double* rowmax, int64_t* num, int64_t* den) {
        cpu::accumulate(problem, rowmax, num, den);
      },
      [](const Context&, const int64_t* num, const int64_t* den, int64_t count, int64_t head_dim, Precision precision,
         double rescale, void* out, DType out_dtype) {
        cpu::finalize(num, den, count, head_dim, precision, rescale, out, out_dtype);
      },
      [](const Context&, const Problem& problem, const MutableView& out, double* rowmax, int64_t* den) {
        cpu::forward(problem, out, rowmax, den);
      },
      [](const Context&, const Gradient& call, int32_t* a, int32_t* b, int32_t* c) {
        cpu::grad_reference(call, a, b, c);
      },
      [](const Context&, const Gradient& call, const int32_t* a, const int32_t* b, const int32_t* c, int64_t* dq,
         int64_t* dk, int64_t* dv) { cpu::grad_accumulate(call, a, b, c, dq, dk, dv); },
      [](const Context&, const int64_t* sums, const int32_t* reference, int64_t count, int64_t head_dim,
         int gradient_bits, double scale, Precision precision, void* out, DType out_dtype) {
        cpu::grad_finalize(sums, reference, count, head_dim, gradient_bits, scale, precision, out, out_dtype);
      },
      [](const Context&, const Gradient& call, const MutableView& dq, const MutableView& dk, const MutableView& dv) {
        cpu::backward(call, dq, dk, dv);
      },
      [](const Context&, const Problem& problem, const double* others, double* rowmax, int64_t* num, int64_t* den) {
        cpu::rowmax(problem, rowmax);
        const int64_t rows = problem.batch * problem.q_heads * problem.q_len;
        for (int64_t i = 0; i < rows; ++i) rowmax[i] = larger_rowmax(rowmax[i], others[i]);
        cpu::accumulate(problem, rowmax, num, den);
      },
  };
  return backend;
}

}  // namespace det_attn
