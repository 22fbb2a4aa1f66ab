// tile.h for AVX2 with FMA. The target is set here, not by flags, after the system headers: their inline functions
// must stay baseline code.
#include "isa.h"

#if defined(DET_CPU_X86_KERNELS)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")

#define DET_ISA avx2
#define DET_ISA_NAME "avx2"

namespace det_attn {
namespace cpu {
namespace DET_ISA {
namespace {
constexpr int kLanes = 4;
constexpr int kVectors = 2;
constexpr int kBlockRows = 6;  // 12 accumulators, two columns and a broadcast: 15 of 16 registers
using Vec = __m256d;
inline Vec broadcast(double x) { return _mm256_set1_pd(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
}  // namespace
}  // namespace DET_ISA
}  // namespace cpu
}  // namespace det_attn

#include "tile.h"

namespace det_attn {
namespace cpu {
const TileKernels& tile_kernels_avx2() { return DET_ISA::kKernels; }
}  // namespace cpu
}  // namespace det_attn

#pragma GCC pop_options
#endif
