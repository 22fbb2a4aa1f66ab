// Rows stage for the tensor cores: strided inputs -> byte planes and exponents, one pass over each input
// (docs/contract.md section 1). Values are stored transposed, [dim][key], because 8-bit products are K-major only.
#include "common.cuh"
#include "planes.cuh"

namespace det_attn::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

// ---- runs of neighbouring elements ----

// Runs of 16-bit elements, two in a word.
template <int RUNS, int N, class Convert>
__device__ __forceinline__ void widen(const uint4 (&raw)[RUNS][N / 8], float (&out)[RUNS][N], Convert to_float) {
#pragma unroll
  for (int r = 0; r < RUNS; ++r) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint4& eight = raw[r][i / 8];
      const uint32_t two = i % 8 == 0 ? eight.x : i % 8 == 2 ? eight.y : i % 8 == 4 ? eight.z : eight.w;
      out[r][i] = to_float(static_cast<uint16_t>(two));
      out[r][i + 1] = to_float(static_cast<uint16_t>(two >> 16));
    }
  }
}

// The first count[r] elements of each run as float32, exact for every input dtype; the others are 0. All loads are on
// their way before the first is used. `vector`: the rows are in_pieces(); others are loaded element by element.
template <int RUNS, int N>
__device__ __forceinline__ void load_runs(const View& x, bool vector, const int64_t (&at)[RUNS],
                                          const int (&count)[RUNS], float (&out)[RUNS][N]) {
  if (vector && x.dtype == DType::kFloat32) {
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < count[r]) four = *reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + at[r] + i);
        out[r][i] = four.x, out[r][i + 1] = four.y, out[r][i + 2] = four.z, out[r][i + 3] = four.w;
      }
    }
  } else if (vector) {
    uint4 raw[RUNS][N / 8];
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
#pragma unroll
      for (int i = 0; i < N; i += 8) {
        raw[r][i / 8] = make_uint4(0, 0, 0, 0);
        if (i < count[r])
          raw[r][i / 8] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.data) + at[r] + i);
      }
    }
    if (x.dtype == DType::kBFloat16)
      widen(raw, out, bfloat16_to_float);
    else
      widen(raw, out, float16_to_float);
  } else {
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[r][i] = i < count[r] ? load_element(x.data, at[r] + i, x.dtype) : 0.0f;
    }
  }
}

constexpr int kInfinityBits = 0x7f800000;  // of a float32; those of finite magnitudes are less, of NaN more

// The bits of the largest magnitude of the runs of LANES neighbouring lanes; they order as magnitudes do.
template <int LANES, int N>
__device__ __forceinline__ int largest_bits(const float (&run)[N]) {
  int largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = max(largest, __float_as_int(run[i]) & 0x7fffffff);
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) largest = max(largest, __shfl_xor_sync(kFullWarp, largest, lane));
  return largest;
}

// Section 1 for an element of a row that is not scaled.
__device__ __forceinline__ int quantise_unscaled(float x, const RowScale& scale, int operand_bits) {
  return min(scale.round(x), (1 << (operand_bits - 1)) - 1);
}

// ---- query and key rows ----

constexpr int kWarpRows = 8;  // of one core matrix: four lanes a row, each with every fourth run of a matrix's width
constexpr int kRun = 16;
static_assert(kRowPad % (kWarps * kWarpRows) == 0, "a CTA's rows are of one head");
static_assert(kKeyPad % (kWarps * kWarpRows) == 0, "and its keys");

// QUERY: scaled rows, and M's starting value. Otherwise key rows. kWarpRows padded rows a warp, blocks over rows and
// heads. A padding row is a row of zeros: integers 0, exponent kMinExponent.
template <bool QUERY, int RUNS>
__global__ void __launch_bounds__(kThreads, RUNS == 4 ? 2 : 4)
    row_planes_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Shape s,
                      const __grid_constant__ Prepared out) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t length_pad = QUERY ? s.rows_pad : s.keys_pad;
  const int64_t blocks = length_pad / (kWarps * kWarpRows);
  const int64_t head = blockIdx.x / blocks,
                row = (blockIdx.x % blocks * kWarps + threadIdx.x / kWarpSize) * kWarpRows + lane / 4;
  const int64_t batch = head / problem.kv_heads, kv_head = head % problem.kv_heads;
  const bool real = row < (QUERY ? s.rows : s.keys);
  const int64_t group = problem.q_heads / problem.kv_heads;
  const int64_t own_head = QUERY ? kv_head * group + row / problem.q_len : kv_head;
  const int64_t own_row = QUERY ? row % problem.q_len : problem.mask.kv_lo + row;
  const View& x = QUERY ? problem.q : problem.k;

  int64_t at[RUNS];
  int count[RUNS];
  float runs[RUNS][kRun];
#pragma unroll
  for (int r = 0; r < RUNS; ++r) {
    const int d = (4 * r + lane % 4) * kRun;
    at[r] = batch * x.stride_batch + own_head * x.stride_head + own_row * x.stride_row + d;
    count[r] = real ? s.dims - d : 0;
  }
  load_runs(x, in_pieces(x, s.dims), at, count, runs);

  // ---- exponent ----
  int largest = 0;
#pragma unroll
  for (int r = 0; r < RUNS; ++r) largest = max(largest, largest_bits<4>(runs[r]));
  const int bits = problem.precision.operand_bits;
  // Rounding keeps the order, so the largest magnitude is the largest scaled one too, and not finite if any is not.
  const double scaled = mul_f64(static_cast<double>(__int_as_float(largest)), problem.scale);
  const bool finite = QUERY ? is_finite(scaled) : largest < kInfinityBits;
  const int e = QUERY ? row_exponent(scaled) : exponent_of_largest(largest);
  const RowScale unscaled(QUERY ? 0 : e, bits);

  // ---- planes ----
  uint8_t* planes = (QUERY ? out.query : out.key) + head * s.planes * length_pad * s.dims_pad;
#pragma unroll
  for (int r = 0; r < RUNS; ++r) {
    const int d = (4 * r + lane % 4) * kRun;
    if (d >= s.dims_pad) continue;
    uint32_t words[4][kRun / 4];
#pragma unroll
    for (int w = 0; w < kRun / 4; ++w) {
      uint32_t four[4], bytes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float element = finite ? runs[r][4 * w + i] : 0.0f;
        four[i] = QUERY ? quantise(mul_f64(static_cast<double>(element), problem.scale), e, bits)
                        : quantise_unscaled(element, unscaled, bits);
      }
      byte_planes(four, bytes);
#pragma unroll
      for (int p = 0; p < 4; ++p) words[p][w] = bytes[p];
    }
    uint8_t* to = planes + plane_offset(row, d, s.dims_pad);
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      if (p < s.planes)
        *reinterpret_cast<uint4*>(to + p * length_pad * s.dims_pad) =
            make_uint4(words[p][0], words[p][1], words[p][2], words[p][3]);
    }
  }

  // ---- what is known of the row ----
  if (lane % 4 != 0) return;
  const int64_t index = head * length_pad + row;
  (QUERY ? out.query_exponent : out.key_exponent)[index] = finite ? e : kPoisonedInTile;
  if constexpr (QUERY) {
    out.rowmax[index] = finite ? kRowmaxEmpty : kRowmaxPoisoned;
    const Mask& mask = problem.mask;
    int2 keys = make_int2(0, 0);
    if (real) {
      keys.x = static_cast<int>(mask.begin(batch, own_row) - mask.kv_lo);
      keys.y = static_cast<int>(mask.end(batch, own_row) - mask.kv_lo);
    }
    out.row_keys[index] = keys.y > keys.x ? keys : make_int2(0, 0);
    if (out.row_bias != nullptr)
      out.row_bias[index] = problem.modifiers.bias.offset({batch, own_head, own_row, mask.kv_lo});
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

// A CTA transposes kSumKeys keys through shared memory. A lane has eight dims of four keys that lie side by side in
// value_slot() order, so kLanes lanes share a key. DIMS is value_dims_pad.
template <int DIMS>
struct ValueTile {
  static constexpr int kLaneDims = 8;
  static constexpr int kLanes = DIMS / kLaneDims;
  static constexpr int kThreads = kSumKeys / 4 * kLanes;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kOctetBytes = kLaneDims * kSumKeys;  // of one plane: eight dims of all keys, as in memory
  static constexpr int kPitch = kOctetBytes + 16;           // neighbouring octets fall into different banks
  static int bytes(int planes) { return planes * kLanes * kPitch; }
};

// The bits of the largest magnitude of each key's row, of the elements that are finite: section 7 has the others, which
// become 0, count for nothing. Returns whether this warp has such elements, and in `special` whether the row has.
template <int LANES, int N>
__device__ __forceinline__ bool largest_finite_bits(float (&runs)[4][N], int (&largest)[4], bool (&special)[4]) {
  bool any_special = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest[i] = largest_bits<LANES>(runs[i]);
    special[i] = largest[i] >= kInfinityBits;
    any_special = any_special || special[i];
  }
  any_special = __any_sync(kFullWarp, any_special);
  if (any_special) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int d = 0; d < N; ++d) {
        if ((__float_as_int(runs[i][d]) & 0x7fffffff) >= kInfinityBits) runs[i][d] = 0.0f;
      }
      largest[i] = largest_bits<LANES>(runs[i]);
    }
  }
  return any_special;
}

// Leaves exponents, not shifts: the head's least is known only afterwards.
template <int DIMS>
__global__ void __launch_bounds__(ValueTile<DIMS>::kThreads)
    value_planes_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Shape s,
                        const __grid_constant__ Prepared out) {
  using Tile = ValueTile<DIMS>;
  extern __shared__ __align__(16) uint8_t tile[];  // [planes][kLanes][kPitch]
  __shared__ int2 ranges[Tile::kWarps];
  const int octet = threadIdx.x % Tile::kLanes, word = threadIdx.x / Tile::kLanes;
  const int64_t tiles = s.keys_pad / kSumKeys;
  const int64_t head = blockIdx.x / tiles, key_base = (blockIdx.x % tiles) * kSumKeys;
  const int64_t first_key = key_base + word / 4 * 16 + word % 4 * 2;  // value_key() of slot 4 * word
  const View& x = problem.v;

  int64_t at[4];
  int count[4];
  float runs[4][Tile::kLaneDims];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t key = first_key + value_key(i);
    at[i] = head / problem.kv_heads * x.stride_batch + head % problem.kv_heads * x.stride_head +
            (problem.mask.kv_lo + key) * x.stride_row + octet * Tile::kLaneDims;
    count[i] = key < s.keys ? s.dims - octet * Tile::kLaneDims : 0;
  }
  load_runs(x, in_pieces(x, s.dims), at, count, runs);

  // ---- exponents ----
  int largest[4];
  bool special[4];
  const bool any_special = largest_finite_bits<Tile::kLanes>(runs, largest, special);
  int least = INT32_MAX, greatest = INT32_MIN;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int e = exponent_of_largest(largest[i]);
    if (largest[i] != 0) least = min(least, e), greatest = max(greatest, e);
    if (octet == 0) {
      const int64_t index = head * s.keys_pad + first_key + value_key(i);
      out.value_exponent[index] = largest[i] != 0 ? e : kZeroRow;
      out.special_key[index] = special[i];
    }
  }
  least = __reduce_min_sync(kFullWarp, least), greatest = __reduce_max_sync(kFullWarp, greatest);
  if (threadIdx.x % kWarpSize == 0) {
    ranges[threadIdx.x / kWarpSize] = make_int2(least, greatest);
    if (any_special) out.value_special[head] = 1;
  }

  // ---- planes, transposed ----
  const int bits = problem.precision.operand_bits;
  const auto scale_of = [&](int i) { return RowScale(exponent_of_largest(largest[i]), bits); };
  const RowScale scales[4] = {scale_of(0), scale_of(1), scale_of(2), scale_of(3)};
  uint8_t* own = tile + octet * Tile::kPitch + word / 4 * 128 + word % 4 * 4;
#pragma unroll
  for (int d = 0; d < Tile::kLaneDims; ++d) {
    uint32_t four[4], bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = static_cast<uint32_t>(quantise_unscaled(runs[i][d], scales[i], bits));
    byte_planes(four, bytes);
#pragma unroll
    for (int p = 0; p < 3; ++p)
      if (p < s.planes) *reinterpret_cast<uint32_t*>(own + p * Tile::kLanes * Tile::kPitch + d * 16) = bytes[p];
  }
  __syncthreads();
  for (int p = 0; p < s.planes; ++p) {
    uint8_t* to = out.value + ((head * s.planes + p) * tiles + key_base / kSumKeys) * DIMS * kSumKeys;
    for (int byte = threadIdx.x * 16; byte < DIMS * kSumKeys; byte += blockDim.x * 16)
      *reinterpret_cast<uint4*>(to + byte) = *reinterpret_cast<const uint4*>(
          tile + (p * Tile::kLanes + byte / Tile::kOctetBytes) * Tile::kPitch + byte % Tile::kOctetBytes);
  }

  // All CTAs of a head add to one range, which few of them change: an atomic of each would have the others wait.
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < Tile::kWarps; ++warp)
      least = min(least, ranges[warp].x), greatest = max(greatest, ranges[warp].y);
    int32_t* range = out.value_range + 2 * head;
    if (least < __ldcg(range)) atomicMin(range, least);
    if (greatest > __ldcg(range + 1)) atomicMax(range + 1, greatest);
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
  const auto kernel = s.dims_pad <= 4 * kRun    ? row_planes_kernel<QUERY, 1>
                      : s.dims_pad <= 8 * kRun ? row_planes_kernel<QUERY, 2>
                                               : row_planes_kernel<QUERY, 4>;
  kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(problem, s, out);
  check_launch("row_planes_kernel");
}

template <int DIMS>
void launch_value_planes(const Context& ctx, const Problem& problem, const Shape& s, const Prepared& out) {
  using Tile = ValueTile<DIMS>;
  const int bytes = Tile::bytes(s.planes);
  allow_shared(value_planes_kernel<DIMS>, bytes);
  const unsigned grid = grid_of(s.heads * (s.keys_pad / kSumKeys));
  value_planes_kernel<DIMS><<<grid, Tile::kThreads, bytes, stream_of(ctx)>>>(problem, s, out);
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
  const auto launch = s.value_dims_pad == 64    ? launch_value_planes<64>
                      : s.value_dims_pad == 128 ? launch_value_planes<128>
                                                : launch_value_planes<256>;
  launch(ctx, problem, s, out);
  const int64_t count = s.heads * s.keys_pad;
  value_shift_kernel<<<grid_of(ceil_div(count, 256)), 256, 0, stream_of(ctx)>>>(out, s.keys_pad, count);
  check_launch("value_shift_kernel");
}

}  // namespace det_attn::cuda
