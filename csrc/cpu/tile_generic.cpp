// tile.h in portable C++, for the compiler's baseline instruction set. Products and sums are exact integers in
// float64, so a product and a sum instead of a fused multiply-add change nothing.
#include "isa.h"

#define DET_ISA generic
#define DET_ISA_NAME "generic"

namespace det_attn {
namespace cpu {
namespace DET_ISA {
namespace {
constexpr int kLanes = 2;
constexpr int kVectors = 2;
constexpr int kBlockRows = 4;  // 8 accumulators, two columns and a broadcast: 11 of SSE2's 16 registers
typedef double Vec __attribute__((vector_size(2 * sizeof(double))));
inline Vec broadcast(double x) { return Vec{x, x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
}  // namespace
}  // namespace DET_ISA
}  // namespace cpu
}  // namespace det_attn

#include "tile.h"

namespace det_attn {
namespace cpu {
const TileKernels& tile_kernels_generic() { return DET_ISA::kKernels; }
}  // namespace cpu
}  // namespace det_attn
