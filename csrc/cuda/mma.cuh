// The tensor-core and copy instructions of sm_80: int8 mma.sync, ldmatrix, cp.async. Thin wrappers, no policy.
#pragma once

#include <cstdint>

namespace det_attn::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void copy_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
// 16 bytes of zeros where there is nothing to read.
__device__ __forceinline__ void copy_async16_or_zero(uint32_t shared, const void* global, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(real ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

// C (16 x 8, int32) += A (16 x 32) * B (32 x 8), exact modulo 2^32. Signedness of each side's bytes is a template flag.
template <bool A_SIGNED, bool B_SIGNED>
__device__ __forceinline__ void mma_bytes(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define DET_MMA(TYPES)                                          \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." TYPES   \
               ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "   \
               "{%0,%1,%2,%3};"                                 \
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (A_SIGNED && B_SIGNED) {
    DET_MMA("s8.s8");
  } else if constexpr (A_SIGNED) {
    DET_MMA("s8.u8");
  } else if constexpr (B_SIGNED) {
    DET_MMA("u8.s8");
  } else {
    DET_MMA("u8.u8");
  }
#undef DET_MMA
}

}  // namespace det_attn::cuda
