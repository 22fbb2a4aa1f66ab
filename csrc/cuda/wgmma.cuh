// The tensor-core and copy instructions of sm_90a: int8 wgmma from shared memory, bulk copies, mbarriers. Thin
// wrappers.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace det_attn::cuda {

constexpr int kWarpgroup = 128;

// ---- mbarriers and bulk copies ----
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 1000000;\n"  // sleeps up to a millisecond at a time
      "@done bra finished%=;\n"
      "bra again%=;\n"
      "finished%=:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// `bytes` contiguous bytes, a multiple of 16, both ends 16-byte aligned; completes on the barrier.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same for barriers that are named, not addressed.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) { barrier_arrive(shared_address(barrier)); }
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  barrier_expect(shared_address(barrier), bytes);
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  barrier_wait(shared_address(barrier), parity);
}
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint64_t* barrier) {
  copy_bulk(shared, global, bytes, shared_address(barrier));
}

// Where one side is in a ring of stages, each with such barriers.
template <int STAGES>
struct Place {
  static_assert((STAGES & (STAGES - 1)) == 0, "so that the count may wrap");
  unsigned count = 0;
  __device__ __forceinline__ unsigned stage() const { return count % STAGES; }
  __device__ __forceinline__ int parity() const { return static_cast<int>(count / STAGES & 1); }
  __device__ __forceinline__ void advance() { ++count; }
};

// ---- wgmma ----
// An operand in core matrices (plane_offset()): K-major, no swizzle. Neighbouring 16-byte columns are 128 bytes apart,
// neighbouring groups of 8 rows `eight_rows` bytes.
DET_HD constexpr uint64_t operand(uint32_t shared, int eight_rows) {
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | static_cast<uint64_t>(128 >> 4) << 16 |
         static_cast<uint64_t>(eight_rows >> 4) << 32;
}
// The operand one k-step (32 bytes, two core matrices) further.
constexpr uint64_t kOperandStep = 256 >> 4;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Moves registers between warpgroups that work differently: each calls it once, and on average they may have no more
// than LAUNCHED, the registers of a thread at the launch.
template <int REGISTERS, int LAUNCHED>
__device__ __forceinline__ void set_registers() {
  if constexpr (REGISTERS > LAUNCHED) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  }
}

// Named barriers of `threads` threads, of which some wait and the others only arrive. 0 is __syncthreads().
__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes ordinary shared-memory writes of this thread visible to wgmma.
__device__ __forceinline__ void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// D (64 x N, int32; a warp's 16 rows as C fragments of N / 8 8-column blocks) += A (64 x 32) * B (32 x N), N = 64
// or 32. If FIRST, D = A * B: no registers need to be cleared, before which the compiler would wait for products.
#define DET_ROW(n) "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])
#define DET_NEW_ROW(n) "=r"(d[n][0]), "=r"(d[n][1]), "=r"(d[n][2]), "=r"(d[n][3])
#define DET_BY_SIGN(INSTRUCTION)        \
  if constexpr (A_SIGNED && B_SIGNED) { \
    INSTRUCTION("s8.s8");               \
  } else if constexpr (A_SIGNED) {      \
    INSTRUCTION("s8.u8");               \
  } else if constexpr (B_SIGNED) {      \
    INSTRUCTION("u8.s8");               \
  } else {                              \
    INSTRUCTION("u8.u8");               \
  }
template <bool A_SIGNED, bool B_SIGNED, bool FIRST = false>
__device__ __forceinline__ void wgmma_bytes(int32_t (&d)[8][4], uint64_t a, uint64_t b) {
#define DET_WGMMA_64(TYPES, ROW, ADD)                                                                            \
  asm volatile(                                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n64k32.s32." TYPES                                                        \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
      "%28,%29,%30,%31}, %32, %33, " ADD ";"                                                                     \
      : ROW(0), ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7)                                           \
      : "l"(a), "l"(b))
#define DET_WGMMA(TYPES) DET_WGMMA_64(TYPES, DET_ROW, "1")
#define DET_WGMMA_NEW(TYPES) DET_WGMMA_64(TYPES, DET_NEW_ROW, "0")
  if constexpr (FIRST) {
    DET_BY_SIGN(DET_WGMMA_NEW)
  } else {
    DET_BY_SIGN(DET_WGMMA)
  }
#undef DET_WGMMA_NEW
#undef DET_WGMMA
#undef DET_WGMMA_64
}
template <bool A_SIGNED, bool B_SIGNED>
__device__ __forceinline__ void wgmma_bytes(int32_t (&d)[4][4], uint64_t a, uint64_t b) {
#define DET_WGMMA(TYPES)                                                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.s32." TYPES                      \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1;" \
               : DET_ROW(0), DET_ROW(1), DET_ROW(2), DET_ROW(3)                         \
               : "l"(a), "l"(b))
  DET_BY_SIGN(DET_WGMMA)
#undef DET_WGMMA
}
#undef DET_BY_SIGN
#undef DET_NEW_ROW
#undef DET_ROW

}  // namespace det_attn::cuda
