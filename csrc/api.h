// The torch ops of the extension. In: stable-ABI tensors with every default already resolved by Python.
// Out: freshly allocated tensors; the work is done by the Backend of the tensors' device (backend.h).
// Shapes and dtypes as in docs/contract.md sections 1, 3, 5 and 6; schemas in torch-ext/torch_binding.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace det_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// x [B, H, S, D] -> integers int32 [B, H, S, D], exponents int32 [B, H, S]. kind: query | key | value.
std::tuple<Tensor, Tensor> rows(const Tensor& x, const std::string& kind, double scale, const std::string& precision);

// -> float64 [B, Hq, Sq] over the local keys [kv_lo, kv_hi). Causal: local key j is attended when j <= i + diagonal.
Tensor rowmax(const Tensor& q, const Tensor& k, bool causal, double scale, const std::string& precision,
              int64_t diagonal, int64_t kv_lo, int64_t kv_hi, const std::string& path);

// -> NUM int64 [B, Hq, Sq, D, 12] normalised, DEN int64 [B, Hq, Sq], of the same keys.
std::tuple<Tensor, Tensor> accumulate(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rowmax,
                                      bool causal, double scale, const std::string& precision, int64_t diagonal,
                                      int64_t kv_lo, int64_t kv_hi, const std::string& path);

// num [..., D, 12], den [...] -> out [..., D].
Tensor finalize(const Tensor& num, const Tensor& den, const std::string& precision, ScalarType out_dtype);

// The fused call -> out [B, Hq, Sq, D] laid out as q, rowmax float64 [B, Hq, Sq], DEN int64 [B, Hq, Sq].
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                           double scale, const std::string& precision, int64_t diagonal,
                                           int64_t kv_lo, int64_t kv_hi, ScalarType out_dtype,
                                           const std::string& path);

// ---- Gradients (docs/contract.md section 8) --------------------------------------------------------------------
// grad [B, Hq, Sq, D] is dO; out is the float32 output over all keys, rowmax and den likewise over all keys.

// -> A int32 [B, Hq, Sq], B and C int32 [B, Hkv, Skv], of the pairs with keys in [kv_lo, kv_hi).
std::tuple<Tensor, Tensor, Tensor> grad_reference(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& rowmax, const Tensor& den,
                                                  bool causal, double scale, const std::string& precision,
                                                  int64_t diagonal, int64_t kv_lo, int64_t kv_hi,
                                                  const std::string& path);

// -> sums for dQ, dK, dV, int64 [q's, k's, v's shape, 3] normalised; of shape [0] where not needed.
std::tuple<Tensor, Tensor, Tensor> grad_accumulate(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out, const Tensor& rowmax,
                                                   const Tensor& den, const Tensor& a, const Tensor& b, const Tensor& c,
                                                   bool causal, double scale, const std::string& precision,
                                                   int64_t diagonal, int64_t kv_lo, int64_t kv_hi, bool need_q,
                                                   bool need_k, bool need_v, const std::string& path);

// sums [..., D, 3], reference [...] -> out [..., D].
Tensor grad_finalize(const Tensor& sums, const Tensor& reference, double scale, const std::string& precision,
                     ScalarType out_dtype);

// The fused call -> dQ, dK, dV in the dtype and layout of q, k, v; of shape [0] where not needed.
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& rowmax, const Tensor& den, bool causal,
                                            double scale, const std::string& precision, int64_t diagonal, int64_t kv_lo,
                                            int64_t kv_hi, bool need_q, bool need_k, bool need_v,
                                            const std::string& path);

}  // namespace det_attn
