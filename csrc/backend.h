// What a device must provide. api.cpp checks and allocates, then calls one of these tables; the CPU's is always
// there, CUDA's where it was built. Every function gives the contract's bytes, so callers may mix them freely.
#pragma once

#include <functional>

#include "digits.h"
#include "problem.h"

namespace det_attn {

// Which kernels run. The bytes are the same; kAuto picks the fastest that this device and shape allow.
enum class Path : int32_t { kAuto = 0, kReference = 1, kMma = 2, kWgmma = 3 };

struct Context {
  void* stream = nullptr;                       // cudaStream_t; unused on the CPU
  int device = 0;                               // CUDA device index; unused on the CPU
  std::function<void*(int64_t bytes)> workspace;  // uninitialised device memory, 256-byte aligned, alive for the call
  Path path = Path::kAuto;
};

enum class RowKind : int32_t { kQuery = 0, kKey = 1, kValue = 2 };

struct Backend {
  // Section 1. x [batch, heads, length, head_dim] -> integers int32 of the same shape, exponents int32 without the
  // last dimension, both contiguous. Queries are scaled. Query and key rows with a non-finite element get exponent
  // kPoisonedExponent and integers 0; non-finite value elements get kValueNan, kValuePosInf, kValueNegInf.
  void (*rows)(const Context&, const View& x, int64_t batch, int64_t heads, int64_t length, int64_t head_dim,
               RowKind kind, double scale, Precision precision, int32_t* integers, int32_t* exponents);

  // Sections 2, 3. rowmax float64 [batch, q_heads, q_len] contiguous, the public form.
  void (*rowmax)(const Context&, const Problem&, double* rowmax);

  // Sections 4, 5, 7. num int64 [batch, q_heads, q_len, head_dim, 12] normalised, den int64 [batch, q_heads, q_len].
  void (*accumulate)(const Context&, const Problem&, const double* rowmax, int64_t* num, int64_t* den);

  // Section 6. num [count, head_dim, 12] (normal or not), den [count] -> out [count, head_dim] contiguous. rescale is
  // section 11's r, 1 without dropout.
  void (*finalize)(const Context&, const int64_t* num, const int64_t* den, int64_t count, int64_t head_dim,
                   Precision precision, double rescale, void* out, DType out_dtype);

  // The fused call: rowmax, accumulate and finalize without NUM ever in memory. rowmax and den as above.
  void (*forward)(const Context&, const Problem&, const MutableView& out, double* rowmax, int64_t* den);

  // The backward stages (section 8).

  // References of the keys of the mask: a int32 [batch, q_heads, q_len]; b, c int32 [batch, kv_heads, kv_len], all
  // contiguous. kReferenceEmpty where no term is nonzero and outside [kv_lo, kv_hi), kReferencePoisoned for NaN rows.
  void (*grad_reference)(const Context&, const Gradient&, int32_t* a, int32_t* b, int32_t* c);

  // Exact sums under references combined over all shards: int64 [the shapes of q, k, v; then kGradientDigits],
  // contiguous, normalised; 0 in rows whose reference is kReferenceEmpty or kReferencePoisoned and outside
  // [kv_lo, kv_hi). A null dq (with a), or null dk and dv (with b and c), is not computed.
  void (*grad_accumulate)(const Context&, const Gradient&, const int32_t* a, const int32_t* b, const int32_t* c,
                          int64_t* dq, int64_t* dk, int64_t* dv);

  // sums [count, head_dim, kGradientDigits] (normal or not), reference [count] -> out [count, head_dim] contiguous.
  // gradient_bits is G of this gradient; scale is the call's for dQ, 1 for dK and dV.
  void (*grad_finalize)(const Context&, const int64_t* sums, const int32_t* reference, int64_t count, int64_t head_dim,
                        int gradient_bits, double scale, Precision precision, void* out, DType out_dtype);

  // The three of them fused, without the sums in memory as a whole. A view without data is not computed.
  void (*backward)(const Context&, const Gradient&, const MutableView& dq, const MutableView& dk,
                   const MutableView& dv);

  // rowmax and accumulate of the last shard in one: `others` is the row maximum over all other shards, `rowmax` becomes
  // that over all of them. The scores are computed once where a path keeps them.
  void (*accumulate_last)(const Context&, const Problem&, const double* others, double* rowmax, int64_t* num,
                          int64_t* den);
};

const Backend& cpu_backend();
const Backend& cuda_backend();  // defined only in CUDA builds

}  // namespace det_attn
