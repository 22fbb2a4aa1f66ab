// The functions of the CUDA backend by stage, and by path where paths differ. backend.cu picks; a faster path is one
// more namespace beside `reference`. Signatures are those of the Backend table.
#pragma once

#include "../backend.h"

namespace det_attn::cuda {

void rows(const Context&, const View& x, int64_t batch, int64_t heads, int64_t length, int64_t head_dim, RowKind kind,
          double scale, Precision precision, int32_t* integers, int32_t* exponents);

void finalize(const Context&, const int64_t* num, const int64_t* den, int64_t count, int64_t head_dim,
              Precision precision, double rescale, void* out, DType out_dtype);

void grad_finalize(const Context&, const int64_t* sums, const int32_t* reference, int64_t count, int64_t head_dim,
                   int gradient_bits, double scale, Precision precision, void* out, DType out_dtype);

// Float64 FMA with exact partial sums: simple, any sm_80+.
namespace reference {
void rowmax(const Context&, const Problem&, double* rowmax);
void accumulate(const Context&, const Problem&, const double* rowmax, int64_t* num, int64_t* den);
void accumulate_last(const Context&, const Problem&, const double* others, double* rowmax, int64_t* num, int64_t* den);
void forward(const Context&, const Problem&, const MutableView& out, double* rowmax, int64_t* den);
void grad_reference(const Context&, const Gradient&, int32_t* a, int32_t* b, int32_t* c);
void grad_accumulate(const Context&, const Gradient&, const int32_t* a, const int32_t* b, const int32_t* c, int64_t* dq,
                     int64_t* dk, int64_t* dv);
void backward(const Context&, const Gradient&, const MutableView& dq, const MutableView& dk, const MutableView& dv);
}  // namespace reference

// Int8 tensor cores. Whose products: the stages around them are the same. kMma is mma.sync, sm_80+; kWgmma takes wgmma
// where it pays, sm_90a; kDirect is mma.sync on keys and values in place, which forward.cu takes for few query rows.
enum class Engine { kMma, kWgmma, kDirect };
namespace tensor_core {
void rowmax(const Context&, Engine, const Problem&, double* rowmax);
void accumulate(const Context&, Engine, const Problem&, const double* rowmax, int64_t* num, int64_t* den);
void accumulate_last(const Context&, Engine, const Problem&, const double* others, double* rowmax, int64_t* num,
                     int64_t* den);
void forward(const Context&, Engine, const Problem&, const MutableView& out, double* rowmax, int64_t* den);
void grad_reference(const Context&, Engine, const Gradient&, int32_t* a, int32_t* b, int32_t* c);
void grad_accumulate(const Context&, Engine, const Gradient&, const int32_t* a, const int32_t* b, const int32_t* c,
                     int64_t* dq, int64_t* dk, int64_t* dv);
void backward(const Context&, Engine, const Gradient&, const MutableView& dq, const MutableView& dk,
              const MutableView& dv);
}  // namespace tensor_core

}  // namespace det_attn::cuda
