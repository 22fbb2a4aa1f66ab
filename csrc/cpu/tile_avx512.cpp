// tile.h for AVX-512 (F, DQ, BW, VL). The target is set here, not by flags, after the system headers: their inline
// functions must stay baseline code.
#include "isa.h"

#if defined(DET_CPU_X86_KERNELS)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")

#define DET_ISA avx512
#define DET_ISA_NAME "avx512"

namespace det_attn {
namespace cpu {
namespace DET_ISA {
namespace {
constexpr int kLanes = 8;
constexpr int kVectors = 2;
constexpr int kBlockRows = 12;  // 24 accumulators, two columns and a broadcast: 27 of 32 registers
using Vec = __m512d;
inline Vec broadcast(double x) { return _mm512_set1_pd(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
}  // namespace
}  // namespace DET_ISA
}  // namespace cpu
}  // namespace det_attn

#include "tile.h"

namespace det_attn {
namespace cpu {
const TileKernels& tile_kernels_avx512() { return DET_ISA::kKernels; }
}  // namespace cpu
}  // namespace det_attn

#pragma GCC pop_options
#endif
