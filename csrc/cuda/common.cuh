// What the CUDA files share: launch checks and sizes, workspace, hints to the compiler, and the quantised rows of the
// reference kernels. No contract rule lives here.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../backend.h"
#include "tiles.h"

namespace det_attn::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline cudaStream_t stream_of(const Context& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("det_attn: CUDA: ") + what + ": " + cudaGetErrorString(status));
  }
}
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

template <typename T>
T* workspace(const Context& ctx, int64_t count) {
  return static_cast<T*>(ctx.workspace(count * static_cast<int64_t>(sizeof(T))));
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}
inline int processors(int device) { return device_attribute(cudaDevAttrMultiProcessorCount, device); }
inline int shared_limit(int device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

// Blocks of a kernel whose blocks loop over `items`: as many as are resident at once, and never none.
template <typename Kernel>
int resident_blocks(Kernel kernel, int threads, size_t shared_bytes, int device, int64_t items) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const int64_t resident = static_cast<int64_t>(processors(device)) * (blocks > 0 ? blocks : 1);
  return static_cast<int>(items < resident ? items : resident);
}

// Blocks of an elementwise kernel with a grid-stride loop.
inline int stride_blocks(int64_t items, int items_per_block) {
  const int64_t blocks = ceil_div(items, items_per_block);
  const int64_t most = 1 << 16;  // far more than are resident anywhere
  return static_cast<int>(blocks < most ? blocks : most);
}

// A one-dimensional grid; its limit is 2^31 - 1 blocks.
inline unsigned grid_of(int64_t blocks) {
  if (blocks > INT32_MAX) throw std::runtime_error("det_attn: CUDA: the tensors are too large for one launch");
  return static_cast<unsigned>(blocks);
}

// Lets a kernel use more than 48 KB of dynamic shared memory.
template <typename Kernel>
void allow_shared(Kernel kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

// x, which the compiler does not know to be what it was before: what is found from it is found anew wherever it is
// needed, instead of being kept in registers, which are scarce.
__device__ __forceinline__ uint32_t anew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
// x, which all lanes have, so that the compiler knows it and finds what follows from it once a warp.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kFullWarp, x, 0); }

constexpr int32_t kZeroRow = INT32_MAX;  // the exponent of a value row that adds nothing to NUM

// Section 1's rows of one tensor, [batch * heads * length] of them. A row is padded with zeros to `pitch` integers.
struct PreparedRows {
  int32_t* integers;
  int32_t* exponents;       // values: kZeroRow for a row without a nonzero finite integer, which adds nothing to NUM
  int32_t pitch;            // a multiple of kDimPad, so rows are 128-byte aligned and chunks of dims are whole
  uint8_t* special_rows;    // values only: 1 where a row has a non-finite element
  int32_t* special_heads;   // values only: nonzero where a (batch, head) has such a row
};

}  // namespace det_attn::cuda
