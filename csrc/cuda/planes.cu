// Rows stage for the tensor cores: strided inputs -> byte planes and exponents, one pass over each input
// (docs/contract.md section 1). Values are stored transposed, [dim][key], because 8-bit products are K-major only.
#include "common.cuh"
#include "planes.cuh"

namespace det_attn::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

// ---- one row in a warp: SLOTS elements a lane, SLOTS * 32 at most ----

// A lane's `SLOTS` elements as float32, exact for every input dtype; elements beyond head_dim are 0. Query and key
// rows: slot c holds element 128 * (c / 4) + 4 * lane + c % 4, so that four neighbours are one load where they are
// aligned.
template <int SLOTS>
__device__ __forceinline__ void load_row(const View& x, int64_t offset, int dims, bool vector, int lane,
                                         float (&row)[SLOTS]) {
#pragma unroll
  for (int part = 0; part < SLOTS / 4; ++part) {
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

// Whether every row begins at a multiple of `count` elements, 2 or 4.
__device__ __forceinline__ bool is_aligned_view(const View& x, int count) {
  const int64_t align = count * element_size(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % align == 0 && x.stride_batch % count == 0 &&
         x.stride_head % count == 0 && x.stride_row % count == 0;
}

// Section 1 for an unscaled row: the exponent is in the bits of the largest magnitude. Returns it, or kPoisonedExponent
// with integers 0 if an element is not finite.
template <int SLOTS>
__device__ __forceinline__ int quantise_row(const float (&x)[SLOTS], int operand_bits, int32_t (&q)[SLOTS]) {
  int largest = 0;
#pragma unroll
  for (int c = 0; c < SLOTS; ++c) largest = max(largest, __float_as_int(x[c]) & 0x7fffffff);
  largest = __reduce_max_sync(kFullWarp, largest);
  const bool finite = largest < 0x7f800000;
  const int e = (largest >> 23) - 126;
  const RowScale scale(e, operand_bits);
  const int limit = (1 << (operand_bits - 1)) - 1;
#pragma unroll
  for (int c = 0; c < SLOTS; ++c) q[c] = finite ? min(scale.round(x[c]), limit) : 0;
  return finite ? e : kPoisonedExponent;
}

// Section 1 for a query row, which is scaled in float64.
template <int SLOTS>
__device__ __forceinline__ int quantise_scaled_row(const float (&x)[SLOTS], double scale, int operand_bits,
                                                   int32_t (&q)[SLOTS]) {
  double scaled[SLOTS];
  bool finite = true;
  int largest = 0;  // high words of non-negative doubles order as they do, and the exponent needs no more
#pragma unroll
  for (int c = 0; c < SLOTS; ++c) {
    scaled[c] = mul_f64(static_cast<double>(x[c]), scale);
    finite = finite && is_finite(scaled[c]);
    largest = max(largest, static_cast<int>(bits_of(scaled[c]) >> 32) & 0x7fffffff);
  }
  finite = __all_sync(kFullWarp, finite);
  largest = __reduce_max_sync(kFullWarp, largest);
  const int e = row_exponent(double_of(static_cast<uint64_t>(static_cast<uint32_t>(largest)) << 32));
#pragma unroll
  for (int c = 0; c < SLOTS; ++c) q[c] = finite ? quantise(scaled[c], e, operand_bits) : 0;
  return finite ? e : kPoisonedExponent;
}

// ---- query and key rows ----

template <int SLOTS>
__device__ __forceinline__ void store_planes(uint8_t* planes, int64_t plane_stride, int64_t row, const Shape& s,
                                             int lane, const int32_t (&q)[SLOTS]) {
#pragma unroll
  for (int part = 0; part < SLOTS / 4; ++part) {
    const int d = 128 * part + 4 * lane;
    if (d >= s.dims_pad) continue;
    const uint32_t four[4] = {static_cast<uint32_t>(q[4 * part]), static_cast<uint32_t>(q[4 * part + 1]),
                              static_cast<uint32_t>(q[4 * part + 2]), static_cast<uint32_t>(q[4 * part + 3])};
    uint32_t bytes[4];
    byte_planes(four, bytes);
    uint8_t* to = planes + plane_offset(row, d, s.dims_pad);
#pragma unroll
    for (int p = 0; p < 3; ++p)
      if (p < s.planes) *reinterpret_cast<uint32_t*>(to + p * plane_stride) = bytes[p];
  }
}

constexpr int kWarpRows = 4;  // neighbouring rows of a warp, all on their way from memory at once
static_assert(kRowPad % (kWarps * kWarpRows) == 0, "a CTA's rows are of one head");
static_assert(kKeyPad % (kWarps * kWarpRows) == 0, "and its keys");

// QUERY: scaled rows, and M's starting value. Otherwise key rows. kWarpRows padded rows a warp, blocks over rows and
// heads. A padding row is a row of zeros: integers 0, exponent kMinExponent.
template <bool QUERY, int SLOTS>
__global__ void __launch_bounds__(kThreads)
    row_planes_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Shape s,
                      const __grid_constant__ Prepared out) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t length_pad = QUERY ? s.rows_pad : s.keys_pad;
  const int64_t blocks = length_pad / (kWarps * kWarpRows);
  const int64_t head = blockIdx.x / blocks,
                first = (blockIdx.x % blocks * kWarps + threadIdx.x / kWarpSize) * kWarpRows;
  const int64_t batch = head / problem.kv_heads, kv_head = head % problem.kv_heads;
  const int64_t group = problem.q_heads / problem.kv_heads;
  const View& x = QUERY ? problem.q : problem.k;
  const auto head_of = [&](int64_t row) { return QUERY ? kv_head * group + row / problem.q_len : kv_head; };
  const auto row_of = [&](int64_t row) { return QUERY ? row % problem.q_len : problem.mask.kv_lo + row; };

  float raw[kWarpRows][SLOTS] = {};
  const bool vector = is_aligned_view(x, 4);
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const int64_t row = first + i;
    if (row >= (QUERY ? s.rows : s.keys)) break;
    const int64_t offset = batch * x.stride_batch + head_of(row) * x.stride_head + row_of(row) * x.stride_row;
    load_row(x, offset, s.dims, vector, lane, raw[i]);
  }
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const int64_t row = first + i;
    int32_t q[SLOTS];
    int e;
    if constexpr (QUERY) {
      e = quantise_scaled_row(raw[i], problem.scale, problem.precision.operand_bits, q);
    } else {
      e = quantise_row(raw[i], problem.precision.operand_bits, q);
    }
    uint8_t* planes = (QUERY ? out.query : out.key) + head * s.planes * length_pad * s.dims_pad;
    store_planes(planes, length_pad * s.dims_pad, row, s, lane, q);
    if (lane != 0) continue;
    const int64_t index = head * length_pad + row;
    (QUERY ? out.query_exponent : out.key_exponent)[index] = e == kPoisonedExponent ? kPoisonedInTile : e;
    if (QUERY) {
      out.rowmax[index] = e == kPoisonedExponent ? kRowmaxPoisoned : kRowmaxEmpty;
      const Mask& mask = problem.mask;
      int2 keys = make_int2(0, 0);
      if (row < s.rows) {
        keys.x = static_cast<int>(mask.begin(batch, row_of(row)) - mask.kv_lo);
        keys.y = static_cast<int>(mask.end(batch, row_of(row)) - mask.kv_lo);
      }
      out.row_keys[index] = keys.y > keys.x ? keys : make_int2(0, 0);
      if (out.row_bias != nullptr)
        out.row_bias[index] = problem.modifiers.bias.offset({batch, head_of(row), row_of(row), mask.kv_lo});
    }
  }
}

// One warp a tile of kRowPad rows; half a warp a block of kBlockRows. There are no distances beyond the tile's span, so
// no key beyond it is named; rows that have some, against the caller's word (Mask::range_reach), are poisoned.
__global__ void tiles_kernel(const __grid_constant__ Shape s, const __grid_constant__ Prepared out) {
  static_assert(kWarpSize == 2 * kBlockRows, "half a warp a block");
  const int64_t tile = blockIdx.x;
  const int half = threadIdx.x / kBlockRows;
  const unsigned lanes = 0xffffu << (half * kBlockRows);
  const int64_t first_row = tile * kRowPad + threadIdx.x;
  int2 keys[kRowPad / kWarpSize];
  int tile_first = INT32_MAX;
#pragma unroll
  for (int i = 0; i < kRowPad / kWarpSize; ++i) {
    keys[i] = out.row_keys[first_row + i * kWarpSize];
    if (keys[i].y > keys[i].x) tile_first = min(tile_first, keys[i].x);
  }
  tile_first = __reduce_min_sync(kFullWarp, tile_first);
  tile_first = tile_first == INT32_MAX ? 0 : tile_first / kKeyPad * kKeyPad;
  const int64_t tile_end = tile_first + s.span;
#pragma unroll
  for (int i = 0; i < kRowPad / kWarpSize; ++i) {
    const int64_t row = first_row + i * kWarpSize;
    const bool any = keys[i].y > keys[i].x;
    if (any && keys[i].y > tile_end) out.rowmax[row] = kRowmaxPoisoned;
    const int first = __reduce_min_sync(lanes, any ? keys[i].x : INT32_MAX),
              last = __reduce_max_sync(lanes, any ? keys[i].y : 0);
    if (threadIdx.x % kBlockRows == 0)
      out.block_keys[row / kBlockRows] = make_int2(first, static_cast<int>(min(static_cast<int64_t>(last), tile_end)));
  }
  if (threadIdx.x == 0) out.tile_first[tile] = tile_first;
}

// ---- value rows ----

// Two neighbouring value elements of 16 bits, from one load.
__device__ __forceinline__ float2 load_two(const View& x, int64_t offset) {
  const ushort2 v = *reinterpret_cast<const ushort2*>(static_cast<const uint16_t*>(x.data) + offset);
  if (x.dtype == DType::kBFloat16) return make_float2(bfloat16_to_float(v.x), bfloat16_to_float(v.y));
  return make_float2(float16_to_float(v.x), float16_to_float(v.y));
}

// One value row; slot c holds element 64 * (c / 2) + 2 * lane + c % 2. Non-finite elements become 0 (section 7: the
// exponent is taken over the finite ones) and set `special`. Returns kZeroRow for a row without a nonzero finite
// element.
template <int SLOTS>
__device__ __forceinline__ int quantise_value_row(float (&row)[SLOTS], int operand_bits, int32_t (&q)[SLOTS],
                                                  bool& special) {
  bool nonzero = false, bad = false;
#pragma unroll
  for (int c = 0; c < SLOTS; ++c) {
    const bool finite = (__float_as_uint(row[c]) & 0x7f800000u) != 0x7f800000u;
    bad = bad || !finite;
    row[c] = finite ? row[c] : 0.0f;
    nonzero = nonzero || row[c] != 0.0f;
  }
  special = __any_sync(kFullWarp, bad);
  const int e = quantise_row(row, operand_bits, q);
  return __any_sync(kFullWarp, nonzero) ? e : kZeroRow;
}

// A CTA transposes kSumKeys keys through shared memory; a warp takes four keys that lie side by side in value_slot()
// order. Leaves exponents, not shifts: the head's least is known only afterwards.
template <int SLOTS>
__global__ void __launch_bounds__(kThreads)
    value_planes_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Shape s,
                        const __grid_constant__ Prepared out) {
  constexpr int kPitch = kSumKeys + 4;  // 17 words: neighbouring dims fall into different banks
  extern __shared__ uint8_t tile[];     // [planes][value_dims_pad][kPitch]
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t tiles = s.keys_pad / kSumKeys;
  const int64_t head = blockIdx.x / tiles, key_base = (blockIdx.x % tiles) * kSumKeys;
  const View& x = problem.v;
  const int64_t base = head / problem.kv_heads * x.stride_batch + head % problem.kv_heads * x.stride_head;

  const bool pairs = element_size(x.dtype) == 2 && s.dims % 2 == 0 && is_aligned_view(x, 2);
  int least = INT32_MAX, greatest = INT32_MIN;
  bool any_special = false;
  for (int word = warp; word < kSumKeys / 4; word += kWarps) {
    float raw[4][SLOTS];
    int32_t q[4][SLOTS];
    const int64_t first = key_base + word / 4 * 16 + word % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // value_slot(key) is 4 * word + i
      const int64_t key = first + (i & 1) + (i >> 1) * 8, offset = base + (problem.mask.kv_lo + key) * x.stride_row;
#pragma unroll
      for (int c = 0; c < SLOTS; c += 2) {
        const int d = 32 * c + 2 * lane;
        float2 two = make_float2(0.0f, 0.0f);
        if (key < s.keys && d < s.dims) {
          if (pairs) {
            two = load_two(x, offset + d);
          } else {
            two.x = load_element(x.data, offset + d, x.dtype);
            if (d + 1 < s.dims) two.y = load_element(x.data, offset + d + 1, x.dtype);
          }
        }
        raw[i][c] = two.x, raw[i][c + 1] = two.y;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = first + (i & 1) + (i >> 1) * 8;
      bool special;
      const int e = quantise_value_row(raw[i], problem.precision.operand_bits, q[i], special);
      any_special = any_special || special;
      if (e != kZeroRow) least = min(least, e), greatest = max(greatest, e);
      if (lane == 0) {
        out.value_exponent[head * s.keys_pad + key] = e;
        out.special_key[head * s.keys_pad + key] = special;
      }
    }
#pragma unroll
    for (int c = 0; c < SLOTS; ++c) {
      const int d = 32 * (c & ~1) + 2 * lane + (c & 1);
      if (d >= s.value_dims_pad) continue;
      const uint32_t four[4] = {static_cast<uint32_t>(q[0][c]), static_cast<uint32_t>(q[1][c]),
                                static_cast<uint32_t>(q[2][c]), static_cast<uint32_t>(q[3][c])};
      uint32_t bytes[4];
      byte_planes(four, bytes);
#pragma unroll
      for (int p = 0; p < 3; ++p)
        if (p < s.planes)
          *reinterpret_cast<uint32_t*>(tile + (p * s.value_dims_pad + d) * kPitch + 4 * word) = bytes[p];
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
    auto* to = reinterpret_cast<uint32_t*>(out.value + ((head * s.planes + p) * tiles + key_base / kSumKeys) *
                                                           s.value_dims_pad * kSumKeys);
    for (int w = threadIdx.x; w < words; w += kThreads) {
      const int word = w & 3, dim_in_8 = (w >> 2) & 7, chunk = (w >> 5) % (kSumKeys / 16),
                dim = (w >> 5) / (kSumKeys / 16) * 8 + dim_in_8;
      to[w] = *reinterpret_cast<const uint32_t*>(tile + (p * s.value_dims_pad + dim) * kPitch + chunk * 16 + word * 4);
    }
  }
}

__global__ void value_shift_kernel(Prepared out, int64_t keys_pad, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int32_t e = out.value_exponent[i];
  // keys_pad is a multiple of 16, so the slot is that of the key in its head. At most 128 + 126: a byte.
  out.value_shift[(i & ~int64_t(15)) + value_slot(i & 15)] =
      static_cast<uint8_t>(e == kZeroRow ? 0 : e - out.value_range[2 * (i / keys_pad)]);
}

__global__ void reset_values_kernel(Prepared out, int64_t heads) {
  const int64_t head = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (head >= heads) return;
  out.value_range[2 * head] = INT32_MAX;
  out.value_range[2 * head + 1] = INT32_MIN;
  out.value_special[head] = 0;
}

template <bool QUERY>
void launch_row_planes(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  const unsigned grid = grid_of(s.heads * (QUERY ? s.rows_pad : s.keys_pad) / (kWarps * kWarpRows));
  if (s.dims_pad <= 128) {
    row_planes_kernel<QUERY, 4><<<grid, kThreads, 0, stream_of(ctx)>>>(problem, s, out);
  } else {
    row_planes_kernel<QUERY, 8><<<grid, kThreads, 0, stream_of(ctx)>>>(problem, s, out);
  }
  check_launch("row_planes_kernel");
}

template <int SLOTS>
void launch_value_planes(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  const int bytes = s.planes * s.value_dims_pad * (kSumKeys + 4);
  allow_shared(value_planes_kernel<SLOTS>, bytes);
  value_planes_kernel<SLOTS>
      <<<grid_of(s.heads * (s.keys_pad / kSumKeys)), kThreads, bytes, stream_of(ctx)>>>(problem, s, out);
  check_launch("value_planes_kernel");
}
}  // namespace

void prepare_queries(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  launch_row_planes<true>(ctx, problem, s, out);
}

void prepare_tiles(const Context& ctx, const Shape& s, const Prepared& out) {
  tiles_kernel<<<grid_of(s.heads * (s.rows_pad / kRowPad)), kWarpSize, 0, stream_of(ctx)>>>(s, out);
  check_launch("tiles_kernel");
}

void prepare_keys(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  if (s.keys_pad != 0) launch_row_planes<false>(ctx, problem, s, out);
}

void reset_values(const Context& ctx, const Shape& s, const Prepared& out) {
  reset_values_kernel<<<grid_of(ceil_div(s.heads, 256)), 256, 0, stream_of(ctx)>>>(out, s.heads);
  check_launch("reset_values_kernel");
}

void prepare_values(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  if (s.keys_pad == 0) return;
  if (s.value_dims_pad <= 128)
    launch_value_planes<4>(ctx, problem, s, out);
  else
    launch_value_planes<8>(ctx, problem, s, out);
  const int64_t count = s.heads * s.keys_pad;
  value_shift_kernel<<<grid_of(ceil_div(count, 256)), 256, 0, stream_of(ctx)>>>(out, s.keys_pad, count);
  check_launch("value_shift_kernel");
}

}  // namespace det_attn::cuda
