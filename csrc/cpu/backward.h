// The CPU's backward stages over whole problems, see backward.cpp. Signatures as in backend.h, without the context.
#pragma once

#include "../backend.h"

namespace det_attn {
namespace cpu {

void grad_reference(const Gradient& call, int32_t* a, int32_t* b, int32_t* c);
void grad_accumulate(const Gradient& call, const int32_t* a, const int32_t* b, const int32_t* c, int64_t* dq,
                     int64_t* dk, int64_t* dv);
void grad_finalize(const int64_t* sums, const int32_t* reference, int64_t count, int64_t head_dim, int gradient_bits,
                   double scale, Precision precision, void* out, DType out_dtype);
void backward(const Gradient& call, const MutableView& dq, const MutableView& dk, const MutableView& dv);

}  // namespace cpu
}  // namespace det_attn
