// Schemas and registration of the ops; nothing is computed here. Shapes and dtypes are in csrc/api.h.
// The CPU implementation is part of every build, so that CPU tensors work, and compare, in a CUDA build too.
#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "torch_binding.h"

// What every stage takes of the score modifiers; DET_MODIFIER_PARAMETERS in csrc/api.h.
#define SCORE_MODIFIERS \
  "Tensor? bias, Tensor? alibi_slopes, Tensor? key_ranges, float softcap, SymInt window_left, SymInt window_right, "
#define MODIFIERS                                                                                                   \
  SCORE_MODIFIERS                                                                                                   \
  "float dropout_p, SymInt dropout_seed, SymInt dropout_query, SymInt dropout_key, SymInt dropout_head, "           \
  "Tensor? dropout_rows, Tensor? dropout_keys, "

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rows(Tensor x, str kind, float scale, str precision) -> (Tensor integers, Tensor exponents)");
  ops.def(
      "rowmax(Tensor q, Tensor k, bool causal, float scale, str precision, SymInt diagonal, SymInt kv_lo, "
      "SymInt kv_hi, " SCORE_MODIFIERS "str path) -> Tensor");
  ops.def(
      "accumulate(Tensor q, Tensor k, Tensor v, Tensor rowmax, bool causal, float scale, str precision, "
      "SymInt diagonal, SymInt kv_lo, SymInt kv_hi, " MODIFIERS "str path) -> (Tensor num, Tensor den)");
  ops.def(
      "accumulate_last(Tensor q, Tensor k, Tensor v, Tensor rowmax, bool causal, float scale, str precision, "
      "SymInt diagonal, SymInt kv_lo, SymInt kv_hi, " MODIFIERS "str path) -> (Tensor num, Tensor den, Tensor rowmax)");
  ops.def("finalize(Tensor num, Tensor den, str precision, ScalarType out_dtype, float dropout_p) -> Tensor");
  ops.def(
      "forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, str precision, SymInt diagonal, SymInt kv_lo, "
      "SymInt kv_hi, ScalarType out_dtype, " MODIFIERS "str path, SymInt range_reach) -> "
      "(Tensor out, Tensor rowmax, Tensor den)");
  ops.def(
      "grad_reference(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor rowmax, Tensor den, bool causal, "
      "float scale, str precision, SymInt diagonal, SymInt kv_lo, SymInt kv_hi, " MODIFIERS "str path) -> "
      "(Tensor a, Tensor b, Tensor c)");
  ops.def(
      "grad_accumulate(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor rowmax, Tensor den, Tensor a, "
      "Tensor b, Tensor c, bool causal, float scale, str precision, SymInt diagonal, SymInt kv_lo, SymInt kv_hi, "
      "bool need_q, bool need_k, bool need_v, " MODIFIERS "str path) -> (Tensor dq, Tensor dk, Tensor dv)");
  ops.def(
      "grad_finalize(Tensor sums, Tensor reference, str kind, float scale, str precision, ScalarType out_dtype) "
      "-> Tensor");
  ops.def(
      "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor rowmax, Tensor den, bool causal, "
      "float scale, str precision, SymInt diagonal, SymInt kv_lo, SymInt kv_hi, bool need_q, bool need_k, bool need_v, "
      MODIFIERS "str path) -> (Tensor dq, Tensor dk, Tensor dv)");
}

// The same functions serve both devices: each asks its tensors where it runs.
template <class Library>
static void implement(Library& ops) {
  ops.impl("rows", TORCH_BOX(&det_attn::rows));
  ops.impl("rowmax", TORCH_BOX(&det_attn::rowmax));
  ops.impl("accumulate", TORCH_BOX(&det_attn::accumulate));
  ops.impl("accumulate_last", TORCH_BOX(&det_attn::accumulate_last));
  ops.impl("finalize", TORCH_BOX(&det_attn::finalize));
  ops.impl("forward", TORCH_BOX(&det_attn::forward));
  ops.impl("grad_reference", TORCH_BOX(&det_attn::grad_reference));
  ops.impl("grad_accumulate", TORCH_BOX(&det_attn::grad_accumulate));
  ops.impl("grad_finalize", TORCH_BOX(&det_attn::grad_finalize));
  ops.impl("backward", TORCH_BOX(&det_attn::backward));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { implement(ops); }

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { implement(ops); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
