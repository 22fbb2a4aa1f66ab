// The backward pass around its products (docs/contract.md sections 7 and 8): what is known of rows and keys, transposed
// byte planes, the references that special values set, and the rounding of the sums.
#include "gradients.cuh"
#include "modified_pairs.cuh"
#include "paths.h"

namespace det_attn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStateWarps = 4;

// A row of a public tensor.
template <class V>
__device__ __forceinline__ int64_t offset_of(const V& x, const Pair& at) {
  return at.batch * x.stride_batch + at.head * x.stride_head + at.query * x.stride_row;
}

// ---- rows and keys ----

// delta of a warp's 32 rows, one a lane, d ascending. A product of two float32 is exact in float64, so adding it is the
// fma. Products pass through shared memory: loads are along a row, sums along the lane's own. `finite`: of the out row.
__device__ __forceinline__ float delta_of_lane(const Gradient& call, const Shape& s, int64_t head, int64_t first_row,
                                               double (&products)[32][33], int lane, bool& finite) {
  double sum = 0.0;
  finite = true;
  for (int base = 0; base < s.dims; base += 32) {
    for (int r = 0; r < 32; ++r) {
      double product = 0.0;
      bool bad = false;
      if (first_row + r < s.rows && base + lane < s.dims) {
        const Pair at = pair_in_call(call.problem, head, first_row + r, 0);
        const float o = load_element(call.out.data, offset_of(call.out, at) + base + lane, call.out.dtype);
        const float g = load_element(call.grad.data, offset_of(call.grad, at) + base + lane, call.grad.dtype);
        product = mul_f64(static_cast<double>(g), static_cast<double>(o));
        bad = !is_finite(static_cast<double>(o));
      }
      products[r][lane] = product;
      if (__any_sync(kFullWarp, bad) && lane == r) finite = false;
    }
    __syncwarp();
    for (int d = 0; d < min(32, s.dims - base); ++d) sum = add_f64(sum, products[lane][d]);
    __syncwarp();
  }
  return static_cast<float>(sum);
}

__global__ void __launch_bounds__(kStateWarps* kWarpSize)
    row_state_kernel(const __grid_constant__ Gradient call, const __grid_constant__ Shape s,
                     const __grid_constant__ RowExponents exponents, const __grid_constant__ GradientState state,
                     int64_t warps) {
  __shared__ double products[kStateWarps][32][33];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t block = int64_t(blockIdx.x) * kStateWarps + warp;
  if (block >= warps) return;
  const int64_t head = block / (s.rows_pad / 32), first_row = block % (s.rows_pad / 32) * 32, row = first_row + lane;
  const Problem& p = call.problem;
  bool finite;
  const float delta = delta_of_lane(call, s, head, first_row, products[warp], lane, finite);

  RowState x{};
  x.maximum = kFarMaximum;
  x.query_exponent = x.grad_exponent = kMinExponent;
  if (row < s.rows) {
    const int eq = exponents.query[head * exponents.row_stride + row];
    const int eo = exponents.grad[head * exponents.row_stride + row];
    const bool bad = eq >= kPoisonedInTile || eo >= kPoisonedInTile;
    const int64_t m = rowmax_from_public(call.rowmax[head * s.rows + row]), den = call.den[head * s.rows + row];
    const bool dead = bad || !finite || m == kRowmaxPoisoned;
    if (eq < kPoisonedInTile) x.query_exponent = eq;
    if (eo < kPoisonedInTile) x.grad_exponent = eo;
    const Pair at = pair_in_call(p, head, row, 0);
    x.begin = static_cast<int>(p.mask.begin(at.batch, at.query) - p.mask.kv_lo);
    x.end = static_cast<int>(p.mask.end(at.batch, at.query) - p.mask.kv_lo);
    x.flags = (bad ? kBadRow : 0) | (dead ? kDeadRow : 0);
    if (!dead && m != kRowmaxEmpty && den > 0) {
      x.maximum = m;
      x.inverse = inverse_den(den, p.precision.weight_bits);
      x.delta = delta;
    }
  }
  state.rows[head * s.rows_pad + row] = x;
  state.query_exponent[head * s.rows_pad + row] = x.query_exponent;
  state.grad_exponent[head * s.rows_pad + row] = x.grad_exponent;
  const bool any = x.begin < x.end;
  const int begin = __reduce_min_sync(kFullWarp, any ? x.begin : INT32_MAX);
  const int end = __reduce_max_sync(kFullWarp, any ? x.end : 0);
  if (lane == 0) state.range[block] = make_int2(begin, end);
}

__global__ void key_state_kernel(Shape s, RowExponents exponents, GradientState state) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= s.heads * s.keys_pad) return;
  const int64_t head = i / s.keys_pad, key = i % s.keys_pad;
  const bool real = key < s.keys;
  const int ek = real ? exponents.key[head * exponents.key_stride + key] : kMinExponent;
  const int ev = real ? exponents.value[head * exponents.key_stride + key] : kMinExponent;
  const int key_exponent = ek >= kPoisonedInTile ? kMinExponent : ek;
  state.key_exponents[i] = make_int2(key_exponent, ev >= kPoisonedInTile ? kMinExponent : ev);
  state.key_exponent[i] = key_exponent;
  state.bad_key[i] = ek >= kPoisonedInTile || ev >= kPoisonedInTile;
}

// ---- references of special values ----

// A warp a row: a dead row that attends a key is NaN itself; a bad one makes every key it attends NaN.
__global__ void mark_rows_kernel(Shape s, GradientState state, References out) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarpSize;
  if (i >= s.heads * s.rows) return;
  const int64_t head = i / s.rows;
  const RowState& x = state.rows[head * s.rows_pad + i % s.rows];
  if ((x.flags & kDeadRow) == 0 || x.begin >= x.end) return;
  if (lane == 0) out.a[i] = kReferencePoisoned;
  if ((x.flags & kBadRow) == 0) return;
  for (int64_t key = x.begin + lane; key < x.end; key += kWarpSize)
    out.b[head * out.key_stride + key] = out.c[head * out.key_stride + key] = kReferencePoisoned;
}

// A warp a key: a bad key is NaN, and so is every row that attends it.
__global__ void mark_keys_kernel(Shape s, GradientState state, References out) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarpSize;
  if (i >= s.heads * s.keys) return;
  const int64_t head = i / s.keys, key = i % s.keys;
  if (state.bad_key[head * s.keys_pad + key] == 0) return;
  for (int64_t row = lane; row < s.rows; row += kWarpSize) {
    const RowState& x = state.rows[head * s.rows_pad + row];
    if (key < x.begin || key >= x.end) continue;
    out.a[head * s.rows + row] = kReferencePoisoned;
    out.b[head * out.key_stride + key] = out.c[head * out.key_stride + key] = kReferencePoisoned;
  }
}

// The same of rows and keys where modifiers mask single pairs, or poison them: every pair by itself. A CTA a row.
__global__ void __launch_bounds__(kThreads)
    mark_pairs_kernel(const __grid_constant__ Problem p, Shape s, GradientState state, References out) {
  const int64_t i = blockIdx.x, head = i / s.rows, row = i % s.rows;
  const RowState& x = state.rows[head * s.rows_pad + row];
  for (int64_t key = x.begin + static_cast<int>(threadIdx.x); key < x.end; key += kThreads) {
    const int64_t score = shifted_score(p, 0, pair_in_call(p, head, row, key));  // marks are the same for every S
    if (score == kScoreMasked) continue;
    if (x.flags & kDeadRow) out.a[i] = kReferencePoisoned;
    if (!(x.flags & kBadRow) && !state.bad_key[head * s.keys_pad + key] && score != kScorePoisoned) continue;
    out.a[i] = kReferencePoisoned;
    out.b[head * out.key_stride + key] = out.c[head * out.key_stride + key] = kReferencePoisoned;
  }
}

__global__ void fill_kernel(int32_t* x, int64_t count, int32_t value) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) x[i] = value;
}

void fill(const Context& ctx, int32_t* x, int64_t count, int32_t value) {
  if (count == 0) return;
  fill_kernel<<<grid_of(ceil_div(count, kThreads)), kThreads, 0, stream_of(ctx)>>>(x, count, value);
  check_launch("fill_kernel");
}

// ---- transposed planes ----

// A CTA: 32 rows of one plane of one head.
__global__ void __launch_bounds__(kThreads)
    transpose_planes_kernel(Shape s, const uint8_t* planes, int64_t rows_pad, uint8_t* out) {
  __shared__ __align__(16) uint8_t tile[32 * kMaxHeadDim];
  const int64_t blocks = rows_pad / 32, plane = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const uint8_t* from = planes + (plane * rows_pad + block * 32) * s.dims_pad;
  for (int i = threadIdx.x * 16; i < 32 * s.dims_pad; i += kThreads * 16)
    *reinterpret_cast<uint4*>(tile + i) = *reinterpret_cast<const uint4*>(from + i);
  __syncthreads();
  uint8_t* to = out + (plane * blocks + block) * 32 * s.value_dims_pad;
  for (int i = threadIdx.x; i < 8 * s.value_dims_pad; i += kThreads) {  // words in the order of memory
    const int dim = i / 64 * 8 + i / 4 % 8, word = i / 32 % 2 * 4 + i % 4;
    uint32_t bytes = 0;
    if (dim < s.dims_pad) {
#pragma unroll
      for (int b = 0; b < 4; ++b)
        bytes |= static_cast<uint32_t>(tile[plane_offset(word + 8 * b, dim, s.dims_pad)]) << (8 * b);
    }
    *reinterpret_cast<uint32_t*>(to + 4 * i) = bytes;
  }
}

// ---- rounding ----

// OF_QUERY: dQ. Otherwise dK or dV, whose keys outside [kv_lo, kv_hi) have empty references and no sums.
template <bool OF_QUERY>
__global__ void round_gradient_kernel(const __grid_constant__ Problem p, const __grid_constant__ Shape s,
                                      const __grid_constant__ SumJob job, const int32_t* reference, int64_t elements,
                                      double scale, const __grid_constant__ MutableView out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t length = OF_QUERY ? s.rows : p.kv_len;
  const int dim = static_cast<int>(i % s.dims);
  const int64_t row = i / s.dims % length, head = job.first_head + i / s.dims / length;
  const int32_t r = reference[head * length + row];
  const int64_t sum_row = OF_QUERY ? row : row - p.mask.kv_lo;
  double sum = 0.0;
  if (r != kReferenceEmpty && sum_row >= 0 && sum_row < (OF_QUERY ? s.rows : s.keys)) {
    const int64_t* at = job.at(head, sum_row, s.dims, dim);
    int64_t digits[kGradientDigits] = {0, 0, 0};
    gradient_digits_add(digits, at[0]);
    if (job.digit_stride != 0) digits[1] += at[job.digit_stride];
    sum = gradient_digits_round(digits);
  }
  const float value = gradient_of(sum, r, scale, job.bits, p.precision.operand_bits);
  const Pair place =
      OF_QUERY ? pair_in_call(p, head, row, 0) : Pair{head / p.kv_heads, head % p.kv_heads, row, 0};
  store_element(out.data, offset_of(out, place) + dim, out.dtype, value);
}

__global__ void normalise_sums_kernel(int64_t* digits, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) gradient_digits_normalise(digits + i * kGradientDigits);
}

__global__ void grad_finalize_kernel(const int64_t* sums, const int32_t* reference, int64_t elements, int64_t head_dim,
                                     int gradient_bits, double scale, int operand_bits, void* out, DType out_dtype) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= elements) return;
  const double sum = gradient_digits_round(sums + i * kGradientDigits);
  store_element(out, i, out_dtype, gradient_of(sum, reference[i / head_dim], scale, gradient_bits, operand_bits));
}

}  // namespace

GradientState make_gradient_state(const Context& ctx, const Gradient& call, const Shape& s,
                                  const RowExponents& exponents) {
  GradientState state{};
  const int64_t rows = s.heads * s.rows_pad, keys = s.heads * s.keys_pad;
  state.rows = workspace<RowState>(ctx, rows);
  state.query_exponent = workspace<int32_t>(ctx, rows);
  state.grad_exponent = workspace<int32_t>(ctx, rows);
  state.range = workspace<int2>(ctx, rows / 32);
  state.key_exponents = workspace<int2>(ctx, keys);
  state.key_exponent = workspace<int32_t>(ctx, keys);
  state.bad_key = workspace<uint8_t>(ctx, keys);
  if (rows > 0) {
    row_state_kernel<<<grid_of(ceil_div(rows / 32, kStateWarps)), kStateWarps * kWarpSize, 0, stream_of(ctx)>>>(
        call, s, exponents, state, rows / 32);
    check_launch("row_state_kernel");
  }
  if (keys > 0) {
    key_state_kernel<<<grid_of(ceil_div(keys, kThreads)), kThreads, 0, stream_of(ctx)>>>(s, exponents, state);
    check_launch("key_state_kernel");
  }
  return state;
}

void reset_references(const Context& ctx, const Problem& p, const Shape& s, const GradientState& state,
                      const References& r) {
  fill(ctx, r.a, s.heads * s.rows, kReferenceEmpty);
  for (int32_t* x : {r.b, r.c}) fill(ctx, x - p.mask.kv_lo, s.heads * p.kv_len, kReferenceEmpty);
  constexpr int kWarps = kThreads / kWarpSize;
  if (p.modifiers.bias.data != nullptr || p.modifiers.slopes != nullptr) {
    if (s.heads * s.rows == 0) return;
    mark_pairs_kernel<<<grid_of(s.heads * s.rows), kThreads, 0, stream_of(ctx)>>>(p, s, state, r);
    return check_launch("mark_pairs_kernel");
  }
  if (s.heads * s.rows > 0) {
    mark_rows_kernel<<<grid_of(ceil_div(s.heads * s.rows, kWarps)), kThreads, 0, stream_of(ctx)>>>(s, state, r);
    check_launch("mark_rows_kernel");
  }
  if (s.heads * s.keys > 0) {
    mark_keys_kernel<<<grid_of(ceil_div(s.heads * s.keys, kWarps)), kThreads, 0, stream_of(ctx)>>>(s, state, r);
    check_launch("mark_keys_kernel");
  }
}

uint8_t* transpose_planes(const Context& ctx, const Shape& s, const uint8_t* planes, int64_t rows_pad) {
  uint8_t* out = workspace<uint8_t>(ctx, s.heads * s.planes * rows_pad * s.value_dims_pad);
  const int64_t blocks = s.heads * s.planes * (rows_pad / 32);
  if (blocks == 0) return out;
  transpose_planes_kernel<<<grid_of(blocks), kThreads, 0, stream_of(ctx)>>>(s, planes, rows_pad, out);
  check_launch("transpose_planes_kernel");
  return out;
}

void round_gradient(const Context& ctx, const Problem& p, const Shape& s, const SumJob& job, const int32_t* reference,
                    int64_t heads, double scale, const MutableView& out) {
  const int64_t elements = heads * (job.of_query ? s.rows : p.kv_len) * s.dims;
  if (elements == 0) return;
  const auto kernel = job.of_query ? round_gradient_kernel<true> : round_gradient_kernel<false>;
  kernel<<<grid_of(ceil_div(elements, kThreads)), kThreads, 0, stream_of(ctx)>>>(p, s, job, reference, elements, scale,
                                                                                 out);
  check_launch("round_gradient_kernel");
}

void normalise_sums(const Context& ctx, int64_t* digits, int64_t count) {
  if (count == 0) return;
  normalise_sums_kernel<<<grid_of(ceil_div(count, kThreads)), kThreads, 0, stream_of(ctx)>>>(digits, count);
  check_launch("normalise_sums_kernel");
}

void grad_finalize(const Context& ctx, const int64_t* sums, const int32_t* reference, int64_t count, int64_t head_dim,
                   int gradient_bits, double scale, Precision precision, void* out, DType out_dtype) {
  const int64_t elements = count * head_dim;
  if (elements == 0) return;
  grad_finalize_kernel<<<grid_of(ceil_div(elements, kThreads)), kThreads, 0, stream_of(ctx)>>>(
      sums, reference, elements, head_dim, gradient_bits, scale, precision.operand_bits, out, out_dtype);
  check_launch("grad_finalize_kernel");
}

}  // namespace det_attn::cuda
