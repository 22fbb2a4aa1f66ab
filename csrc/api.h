// The torch ops of the extension. In: stable-ABI tensors with every default already resolved by Python.
// Out: freshly allocated tensors; the work is done by the Backend of the tensors' device (backend.h).
// Shapes and dtypes as in docs/contract.md sections 1, 3, 5, 6 and 8; schemas in torch-ext/torch_binding.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace det_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The arguments of the score modifiers (docs/contract.md sections 10, 11), which every stage takes alike; as macros,
// because the stable ABI boxes functions by their parameters. bias is expanded to [B, Hq, Sq, Skv]; alibi_slopes is
// float32 [Hq] or [B, Hq], key_ranges int32 [B or 1, Sq, 2 or 3]. None: softcap and dropout_p 0, windows -1.
#define DET_SCORE_PARAMETERS                                                                                      \
  const std::optional<Tensor>&bias, const std::optional<Tensor>&alibi_slopes,                                     \
      const std::optional<Tensor>&key_ranges, double softcap, int64_t window_left, int64_t window_right
#define DET_SCORE_ARGUMENTS bias, alibi_slopes, key_ranges, softcap, window_left, window_right
// dropout_query and dropout_key are the ids of query 0 and local key 0, dropout_head that of head 0; dropout_rows int64
// [B, Sq] and dropout_keys int64 [Skv] list them instead where they do not follow one another.
#define DET_DROPOUT_PARAMETERS                                                                                    \
  double dropout_p, int64_t dropout_seed, int64_t dropout_query, int64_t dropout_key, int64_t dropout_head,       \
      const std::optional<Tensor>&dropout_rows, const std::optional<Tensor>&dropout_keys
#define DET_DROPOUT_ARGUMENTS \
  dropout_p, dropout_seed, dropout_query, dropout_key, dropout_head, dropout_rows, dropout_keys
#define DET_MODIFIER_PARAMETERS DET_SCORE_PARAMETERS, DET_DROPOUT_PARAMETERS
#define DET_MODIFIER_ARGUMENTS DET_SCORE_ARGUMENTS, DET_DROPOUT_ARGUMENTS

// x [B, H, S, D] -> integers int32 [B, H, S, D], exponents int32 [B, H, S]. kind: query | key | value.
std::tuple<Tensor, Tensor> rows(const Tensor& x, const std::string& kind, double scale, const std::string& precision);

// -> float64 [B, Hq, Sq] over the local keys [kv_lo, kv_hi). Query i's own place among the local keys is i + diagonal;
// causal: local key j is attended when it is not behind that place.
Tensor rowmax(const Tensor& q, const Tensor& k, bool causal, double scale, const std::string& precision,
              int64_t diagonal, int64_t kv_lo, int64_t kv_hi, DET_SCORE_PARAMETERS, const std::string& path);

// -> NUM int64 [B, Hq, Sq, D, 12] normalised, DEN int64 [B, Hq, Sq], of the same keys.
std::tuple<Tensor, Tensor> accumulate(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rowmax,
                                      bool causal, double scale, const std::string& precision, int64_t diagonal,
                                      int64_t kv_lo, int64_t kv_hi, DET_MODIFIER_PARAMETERS, const std::string& path);

// The same for the last shard: rowmax is that of all other shards -> (NUM, DEN, rowmax over all of them).
std::tuple<Tensor, Tensor, Tensor> accumulate_last(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& rowmax, bool causal, double scale,
                                                   const std::string& precision, int64_t diagonal, int64_t kv_lo,
                                                   int64_t kv_hi, DET_MODIFIER_PARAMETERS, const std::string& path);

// num [..., D, 12], den [...] -> out [..., D].
Tensor finalize(const Tensor& num, const Tensor& den, const std::string& precision, ScalarType out_dtype,
                double dropout_p);

// The fused call -> out [B, Hq, Sq, D] laid out as q, rowmax float64 [B, Hq, Sq], DEN int64 [B, Hq, Sq]. range_reach:
// Mask::range_reach, negative where nothing is known. It saves workspace; on CUDA rows that break it may become NaN.
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                           double scale, const std::string& precision, int64_t diagonal,
                                           int64_t kv_lo, int64_t kv_hi, ScalarType out_dtype, DET_MODIFIER_PARAMETERS,
                                           const std::string& path, int64_t range_reach);

// ---- Gradients (docs/contract.md section 8) --------------------------------------------------------------------
// grad [B, Hq, Sq, D] is dO; out is the float32 output over all keys, rowmax and den likewise over all keys.

// -> A int32 [B, Hq, Sq], B and C int32 [B, Hkv, Skv], of the pairs with keys in [kv_lo, kv_hi).
std::tuple<Tensor, Tensor, Tensor> grad_reference(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& rowmax, const Tensor& den,
                                                  bool causal, double scale, const std::string& precision,
                                                  int64_t diagonal, int64_t kv_lo, int64_t kv_hi,
                                                  DET_MODIFIER_PARAMETERS, const std::string& path);

// -> sums for dQ, dK, dV, int64 [q's, k's, v's shape, 3] normalised; of shape [0] where not needed.
std::tuple<Tensor, Tensor, Tensor> grad_accumulate(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out, const Tensor& rowmax,
                                                   const Tensor& den, const Tensor& a, const Tensor& b, const Tensor& c,
                                                   bool causal, double scale, const std::string& precision,
                                                   int64_t diagonal, int64_t kv_lo, int64_t kv_hi, bool need_q,
                                                   bool need_k, bool need_v, DET_MODIFIER_PARAMETERS,
                                                   const std::string& path);

// sums [..., D, 3], reference [...] -> out [..., D]. kind: "query" for dQ, "key" for dK, "value" for dV.
Tensor grad_finalize(const Tensor& sums, const Tensor& reference, const std::string& kind, double scale,
                     const std::string& precision, ScalarType out_dtype);

// The fused call -> dQ, dK, dV in the dtype and layout of q, k, v; of shape [0] where not needed.
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& rowmax, const Tensor& den, bool causal,
                                            double scale, const std::string& precision, int64_t diagonal, int64_t kv_lo,
                                            int64_t kv_hi, bool need_q, bool need_k, bool need_v,
                                            DET_MODIFIER_PARAMETERS, const std::string& path);

}  // namespace det_attn
