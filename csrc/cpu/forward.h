// The CPU's forward stages over whole problems, see forward.cpp. Signatures as in backend.h, without the context.
#pragma once

#include "../backend.h"

namespace det_attn {
namespace cpu {

void rowmax(const Problem& problem, double* rowmax);
void accumulate(const Problem& problem, const double* rowmax, int64_t* num, int64_t* den);
void forward(const Problem& problem, const MutableView& out, double* rowmax, int64_t* den);

}  // namespace cpu
}  // namespace det_attn
