// Quantised rows for the reference kernels; see PreparedRows. Implemented in rows.cu.
#pragma once

#include "common.cuh"

namespace det_attn::cuda {

// Quantises every row of x into workspace. Values also get the notes on special and zero rows.
PreparedRows prepare_rows(const Context&, const View& x, int64_t batch, int64_t heads, int64_t length,
                          int64_t head_dim, RowKind kind, double scale, Precision precision);

}  // namespace det_attn::cuda
