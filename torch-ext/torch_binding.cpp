// Schemas and registration of the ops; nothing is computed here. Shapes and dtypes are in csrc/api.h.
// The CPU implementation is part of every build, so that CPU tensors work, and compare, in a CUDA build too.
#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "torch_binding.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rows(Tensor x, str kind, float scale, str precision) -> (Tensor integers, Tensor exponents)");
  ops.def(
      "rowmax(Tensor q, Tensor k, bool causal, float scale, str precision, SymInt diagonal, SymInt kv_lo, "
      "SymInt kv_hi, str path) -> Tensor");
  ops.def(
      "accumulate(Tensor q, Tensor k, Tensor v, Tensor rowmax, bool causal, float scale, str precision, "
      "SymInt diagonal, SymInt kv_lo, SymInt kv_hi, str path) -> (Tensor num, Tensor den)");
  ops.def("finalize(Tensor num, Tensor den, str precision, ScalarType out_dtype) -> Tensor");
  ops.def(
      "forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, str precision, SymInt diagonal, SymInt kv_lo, "
      "SymInt kv_hi, ScalarType out_dtype, str path) -> (Tensor out, Tensor rowmax, Tensor den)");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("rows", TORCH_BOX(&det_attn::rows));
  ops.impl("rowmax", TORCH_BOX(&det_attn::rowmax));
  ops.impl("accumulate", TORCH_BOX(&det_attn::accumulate));
  ops.impl("finalize", TORCH_BOX(&det_attn::finalize));
  ops.impl("forward", TORCH_BOX(&det_attn::forward));
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("rows", TORCH_BOX(&det_attn::rows));
  ops.impl("rowmax", TORCH_BOX(&det_attn::rowmax));
  ops.impl("accumulate", TORCH_BOX(&det_attn::accumulate));
  ops.impl("finalize", TORCH_BOX(&det_attn::finalize));
  ops.impl("forward", TORCH_BOX(&det_attn::forward));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
