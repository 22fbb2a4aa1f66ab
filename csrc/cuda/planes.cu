// Rows stage for the tensor cores: strided inputs -> byte planes and exponents, one pass over each input
// (docs/contract.md section 1). Values are stored transposed, [dim][key], because 8-bit products are K-major only.
#include "common.cuh"
#include "planes.cuh"

namespace det_attn::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kLaneDims = kMaxHeadDim / kWarpSize;  // a warp holds one row: 8 elements a lane at most

// Element d = 128 * (c / 4) + 4 * lane + c % 4 sits in slot c: four neighbours a lane, so loads can be vectors.
__device__ __forceinline__ int dim_of_slot(int lane, int c) { return 128 * (c >> 2) + 4 * lane + (c & 3); }

// One row into registers as float32 (exact for every input dtype). `vector` says four neighbours are aligned.
__device__ __forceinline__ void load_row(const View& x, int64_t offset, int dims, bool vector, int lane, float (&row)[kLaneDims]) {
#pragma unroll
  for (int part = 0; part < kLaneDims / 4; ++part) {
    const int d = 128 * part + 4 * lane;
    float* r = row + 4 * part;
    r[0] = r[1] = r[2] = r[3] = 0.0f;
    if (d >= dims) continue;
    if (vector && d + 4 <= dims) {
      if (x.dtype == DType::kFloat32) {
        const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + offset + d);
        r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
      } else {
        const ushort4 v = *reinterpret_cast<const ushort4*>(static_cast<const uint16_t*>(x.data) + offset + d);
        const bool bf16 = x.dtype == DType::kBFloat16;
        r[0] = bf16 ? bfloat16_to_float(v.x) : float16_to_float(v.x);
        r[1] = bf16 ? bfloat16_to_float(v.y) : float16_to_float(v.y);
        r[2] = bf16 ? bfloat16_to_float(v.z) : float16_to_float(v.z);
        r[3] = bf16 ? bfloat16_to_float(v.w) : float16_to_float(v.w);
      }
    } else {
      for (int c = 0; c < 4 && d + c < dims; ++c) r[c] = load_element(x.data, offset + d + c, x.dtype);
    }
  }
}

__device__ __forceinline__ bool is_vector_view(const View& x) {
  const int64_t align = 4 * element_size(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % align == 0 && x.stride_batch % 4 == 0 && x.stride_head % 4 == 0 &&
         x.stride_row % 4 == 0;
}

// Quantises a warp's row of float64 (already scaled for queries). Returns the exponent, kPoisonedExponent if an element
// is not finite; integers are then 0.
__device__ __forceinline__ int quantise_row(const double (&x)[kLaneDims], int operand_bits, int32_t (&q)[kLaneDims]) {
  double max_abs = 0.0;
  bool finite = true;
#pragma unroll
  for (int c = 0; c < kLaneDims; ++c) {
    finite = finite && is_finite(x[c]);
    max_abs = fmax(max_abs, fabs(x[c]));
  }
  if (!__all_sync(kFullWarp, finite)) {
#pragma unroll
    for (int c = 0; c < kLaneDims; ++c) q[c] = 0;
    return kPoisonedExponent;
  }
  // Non-negative doubles order as their bits; the exponent needs the high word alone.
  const int high = __reduce_max_sync(kFullWarp, static_cast<int>(bits_of(max_abs) >> 32));
  const int e = row_exponent(double_of(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32));
#pragma unroll
  for (int c = 0; c < kLaneDims; ++c) q[c] = quantise(x[c], e, operand_bits);
  return e;
}

// Byte p of four integers, in order.
__device__ __forceinline__ uint32_t byte_plane(const int32_t* q, int p) {
  const uint32_t selector = p | (p + 4) << 4;
  const uint32_t low = __byte_perm(q[0], q[1], selector), high = __byte_perm(q[2], q[3], selector);
  return __byte_perm(low, high, 0x5410);
}

__device__ __forceinline__ void store_planes(uint8_t* planes, int64_t plane_stride, int64_t row, const Shape& s, int lane,
                                             const int32_t (&q)[kLaneDims]) {
#pragma unroll
  for (int part = 0; part < kLaneDims / 4; ++part) {
    const int d = 128 * part + 4 * lane;
    if (d >= s.dims_pad) continue;
    for (int p = 0; p < s.planes; ++p) {
      *reinterpret_cast<uint32_t*>(planes + p * plane_stride + plane_offset(row, d, s.dims_pad)) = byte_plane(q + 4 * part, p);
    }
  }
}

// QUERY: scaled rows, and M's starting value. Otherwise key rows. One warp a padded row.
template <bool QUERY>
__global__ void __launch_bounds__(kWarps* kWarpSize) row_planes_kernel(Problem problem, Shape s, Prepared out) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t length_pad = QUERY ? s.rows_pad : s.keys_pad;
  const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (index >= s.heads * length_pad) return;
  const int64_t head = index / length_pad, row = index % length_pad;
  const int64_t batch = head / problem.kv_heads, kv_head = head % problem.kv_heads;
  const bool real = row < (QUERY ? s.rows : s.keys);

  int32_t q[kLaneDims] = {};
  int e = kMinExponent;
  if (real) {
    const View& x = QUERY ? problem.q : problem.k;
    const int64_t group = problem.q_heads / problem.kv_heads;
    const int64_t x_head = QUERY ? kv_head * group + row / problem.q_len : kv_head;
    const int64_t x_row = QUERY ? row % problem.q_len : problem.mask.kv_lo + row;
    float raw[kLaneDims];
    load_row(x, batch * x.stride_batch + x_head * x.stride_head + x_row * x.stride_row, s.dims, is_vector_view(x), lane, raw);
    double scaled[kLaneDims];
#pragma unroll
    for (int c = 0; c < kLaneDims; ++c) {
      scaled[c] = QUERY ? mul_f64(static_cast<double>(raw[c]), problem.scale) : static_cast<double>(raw[c]);
      if (dim_of_slot(lane, c) >= s.dims) scaled[c] = 0.0;  // 0 * scale is 0 already; kept for a NaN-safe tail
    }
    e = quantise_row(scaled, problem.precision.operand_bits, q);
  }
  uint8_t* planes = QUERY ? out.query : out.key;
  store_planes(planes + head * s.planes * length_pad * s.dims_pad, length_pad * s.dims_pad, row, s, lane, q);
  if (lane == 0) {
    (QUERY ? out.query_exponent : out.key_exponent)[index] = e == kPoisonedExponent ? kPoisonedInTile : e;
    if (QUERY) out.rowmax[index] = e == kPoisonedExponent ? kRowmaxPoisoned : kRowmaxEmpty;
  }
}

constexpr int32_t kZeroRow = INT32_MAX;  // a value row that adds nothing to NUM

// A CTA transposes kSumKeys keys through shared memory; a warp quantises one key row at a time. Leaves exponents in
// value_shift: the head's least is known only afterwards.
__global__ void __launch_bounds__(kWarps* kWarpSize) value_planes_kernel(Problem problem, Shape s, Prepared out) {
  constexpr int kPitch = kSumKeys + 4;  // 17 words: neighbouring dims fall into different banks
  extern __shared__ uint8_t tile[];       // [planes][value_dims_pad][kPitch]
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t tiles = s.keys_pad / kSumKeys;
  const int64_t head = blockIdx.x / tiles, key_base = (blockIdx.x % tiles) * kSumKeys;
  const int64_t batch = head / problem.kv_heads, kv_head = head % problem.kv_heads;
  const View& x = problem.v;
  const bool vector = is_vector_view(x);

  int least = INT32_MAX, greatest = INT32_MIN;
  bool any_special = false;
  for (int k = warp; k < kSumKeys; k += kWarps) {
    const int64_t key = key_base + k;
    int32_t q[kLaneDims] = {};
    int e = kZeroRow;
    bool special = false;
    if (key < s.keys) {
      float raw[kLaneDims];
      load_row(x, batch * x.stride_batch + kv_head * x.stride_head + (problem.mask.kv_lo + key) * x.stride_row, s.dims, vector,
               lane, raw);
      double row[kLaneDims];
      bool nonzero = false;
#pragma unroll
      for (int c = 0; c < kLaneDims; ++c) {
        const bool finite = is_finite(raw[c]);
        special = special || !finite;
        row[c] = finite ? static_cast<double>(raw[c]) : 0.0;  // section 7: the exponent is taken over the finite elements
        nonzero = nonzero || row[c] != 0.0;
      }
      const int exponent = quantise_row(row, problem.precision.operand_bits, q);
      if (__any_sync(kFullWarp, nonzero)) {
        e = exponent;
        least = min(least, e);
        greatest = max(greatest, e);
      }
    }
    special = __any_sync(kFullWarp, special);
    any_special = any_special || special;
    if (lane == 0) {
      out.value_shift[head * s.keys_pad + key] = e;
      out.special_key[head * s.keys_pad + key] = special;
    }
    const int slot = (k & ~15) + value_slot(k & 15);
#pragma unroll
    for (int c = 0; c < kLaneDims; ++c) {
      const int d = dim_of_slot(lane, c);
      if (d >= s.value_dims_pad) continue;
      for (int p = 0; p < s.planes; ++p) {
        tile[(p * s.value_dims_pad + d) * kPitch + slot] = static_cast<uint8_t>(q[c] >> (8 * p));
      }
    }
  }
  if (lane == 0 && least != INT32_MAX) {
    atomicMin(&out.value_range[2 * head], least);
    atomicMax(&out.value_range[2 * head + 1], greatest);
  }
  if (any_special && lane == 0) out.value_special[head] = 1;
  __syncthreads();

  // Out in the order of memory: word w of a plane's tile is 4 keys of one dim.
  const int words = s.value_dims_pad * kSumKeys / 4;
  for (int p = 0; p < s.planes; ++p) {
    auto* to = reinterpret_cast<uint32_t*>(out.value + ((head * s.planes + p) * tiles + key_base / kSumKeys) * s.value_dims_pad * kSumKeys);
    for (int w = threadIdx.x; w < words; w += blockDim.x) {
      const int word = w & 3, dim_in_8 = (w >> 2) & 7, chunk = (w >> 5) % (kSumKeys / 16), dim = (w >> 5) / (kSumKeys / 16) * 8 + dim_in_8;
      to[w] = *reinterpret_cast<const uint32_t*>(tile + (p * s.value_dims_pad + dim) * kPitch + chunk * 16 + word * 4);
    }
  }
}

__global__ void value_shift_kernel(Prepared out, int64_t keys_pad, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int32_t e = out.value_shift[i];
  out.value_shift[i] = e == kZeroRow ? 0 : e - out.value_range[2 * (i / keys_pad)];
}

__global__ void reset_values_kernel(Prepared out, int64_t heads) {
  const int64_t head = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (head >= heads) return;
  out.value_range[2 * head] = INT32_MAX;
  out.value_range[2 * head + 1] = INT32_MIN;
  out.value_special[head] = 0;
}

}  // namespace

void prepare_queries(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  const int64_t blocks = (s.heads * s.rows_pad + kWarps - 1) / kWarps;
  row_planes_kernel<true><<<grid_of(blocks), kWarps * kWarpSize, 0, stream_of(ctx)>>>(problem, s, out);
  check_launch("row_planes_kernel<query>");
}

void prepare_keys(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  const int64_t blocks = (s.heads * s.keys_pad + kWarps - 1) / kWarps;
  if (blocks == 0) return;
  row_planes_kernel<false><<<grid_of(blocks), kWarps * kWarpSize, 0, stream_of(ctx)>>>(problem, s, out);
  check_launch("row_planes_kernel<key>");
}

void prepare_values(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  reset_values_kernel<<<grid_of((s.heads + 255) / 256), 256, 0, stream_of(ctx)>>>(out, s.heads);
  check_launch("reset_values_kernel");
  if (s.keys_pad == 0) return;
  const int bytes = s.planes * s.value_dims_pad * (kSumKeys + 4);
  allow_shared(value_planes_kernel, bytes);
  value_planes_kernel<<<grid_of(s.heads * (s.keys_pad / kSumKeys)), kWarps * kWarpSize, bytes, stream_of(ctx)>>>(problem, s, out);
  check_launch("value_planes_kernel");
  const int64_t count = s.heads * s.keys_pad;
  value_shift_kernel<<<grid_of(ceil_div(count, 256)), 256, 0, stream_of(ctx)>>>(out, s.keys_pad, count);
  check_launch("value_shift_kernel");
}

}  // namespace det_attn::cuda
