// Checks, allocation and dispatch of the torch ops. In: tensors and resolved arguments. Out: the Backend's results.
// The checks here are those that memory safety needs, whoever calls the op; det_attn/checks.py has the friendly ones.
#include "api.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "backend.h"
#include "float_env.h"

#if defined(CUDA_KERNEL)
// The shim declares it only where USE_CUDA is defined.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace det_attn {
namespace {

using torch::stable::Device;

// ---- Arguments -------------------------------------------------------------------------------------------------

Precision parse_precision(const std::string& name) {
  if (name == "highest") return kHighest;
  STD_TORCH_CHECK(name == "high", "precision: got '", name, "', allowed are 'highest' and 'high'");
  return kHigh;
}

Path parse_path(const std::string& name) {
  if (name == "auto") return Path::kAuto;
  if (name == "reference") return Path::kReference;
  if (name == "mma") return Path::kMma;
  STD_TORCH_CHECK(name == "wgmma", "path: got '", name, "', allowed are 'auto', 'reference', 'mma' and 'wgmma'");
  return Path::kWgmma;
}

RowKind parse_kind(const std::string& name) {
  if (name == "query") return RowKind::kQuery;
  if (name == "key") return RowKind::kKey;
  STD_TORCH_CHECK(name == "value", "kind: got '", name, "', allowed are 'query', 'key' and 'value'");
  return RowKind::kValue;
}

// G of the gradient with respect to rows of a kind.
int parse_gradient_bits(const std::string& kind) {
  switch (parse_kind(kind)) {
    case RowKind::kQuery: return kQueryGradientBits;
    case RowKind::kKey: return kKeyGradientBits;
    default: return kValueGradientBits;
  }
}

DType parse_dtype(ScalarType dtype, const char* name) {
  if (dtype == ScalarType::Float) return DType::kFloat32;
  if (dtype == ScalarType::BFloat16) return DType::kBFloat16;
  STD_TORCH_CHECK(dtype == ScalarType::Half, name, ": got dtype ", torch::headeronly::toString(dtype),
                  ", allowed are float32, bfloat16 and float16");
  return DType::kFloat16;
}

void check_scale(double scale) { STD_TORCH_CHECK(is_finite(scale), "scale: got ", scale, ", it must be finite"); }

void check_device(const Tensor& x, const Device& device, const char* name) {
  STD_TORCH_CHECK(x.device() == device, name, ": every tensor of the call must be on one device");
}

// A [batch, heads, length, head_dim] tensor that View can describe.
View view_of(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 4, name, ": got ", x.dim(), " dimensions, must be 4-D [batch, heads, length, head_dim]");
  STD_TORCH_CHECK(x.size(3) >= 1 && x.size(3) <= kMaxHeadDim, name, ": got head_dim ", x.size(3), ", allowed is 1 to ",
                  kMaxHeadDim);
  STD_TORCH_CHECK(x.stride(3) == 1 || x.size(3) == 1 || x.numel() == 0, name, ": got stride ", x.stride(3),
                  " in the last dimension, must be 1; call .contiguous()");
  return View{x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2), parse_dtype(x.scalar_type(), name)};
}

void check_shape(const Tensor& x, const char* name, ScalarType dtype, const std::vector<int64_t>& shape) {
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, ": got dtype ", torch::headeronly::toString(x.scalar_type()),
                  ", must be ", torch::headeronly::toString(dtype));
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  for (size_t d = 0; same && d < shape.size(); ++d) same = x.size(static_cast<int64_t>(d)) == shape[d];
  STD_TORCH_CHECK(same, name, ": its shape does not match the other arguments");
}

// Section 10: what stands between a score and its row maximum, and the ends of each query's keys.
void set_scores(Problem& p, const Device& device, int64_t diagonal, bool causal, DET_SCORE_PARAMETERS) {
  STD_TORCH_CHECK(window_left >= -1 && window_right >= -1, "window: got ", window_left, ", ", window_right,
                  ", allowed is -1 for no limit, or 0 and up");
  const bool places = window_left >= 0 || window_right >= 0 || alibi_slopes.has_value();
  STD_TORCH_CHECK(!places || (-Mask::kFarthest <= diagonal && diagonal <= Mask::kFarthest), "diagonal: got ", diagonal,
                  ", allowed with a window or ALiBi is -2^60 to 2^60");
  const auto reach = [](int64_t size) { return size < 0 || size > Mask::kUnlimited ? Mask::kUnlimited : size; };
  Mask& mask = p.mask;
  mask.diagonal = std::max(-Mask::kFarthest, std::min(Mask::kFarthest, diagonal));  // beyond them causal is the same
  mask.left = reach(window_left);
  mask.right = causal ? 0 : reach(window_right);
  mask.range_reach = Mask::kUnlimited;
  if (key_ranges) {
    STD_TORCH_CHECK(key_ranges->dim() == 3 && (key_ranges->size(2) == 2 || key_ranges->size(2) == 3),
                    "key_ranges: must be [B or 1, Sq, 2 or 3]");
    STD_TORCH_CHECK(key_ranges->size(0) == p.batch || key_ranges->size(0) == 1,
                    "key_ranges: its batch must be q's or 1");
    check_shape(*key_ranges, "key_ranges", ScalarType::Int, {key_ranges->size(0), p.q_len, key_ranges->size(2)});
    check_device(*key_ranges, device, "key_ranges");
    STD_TORCH_CHECK(key_ranges->is_contiguous(), "key_ranges: must be contiguous");
    mask.range_columns = static_cast<int>(key_ranges->size(2));
    mask.ranges = static_cast<const int32_t*>(key_ranges->const_data_ptr());
    mask.ranges_batch = key_ranges->size(0) == 1 ? 0 : p.q_len * mask.range_columns;
  }

  Modifiers& m = p.modifiers;
  STD_TORCH_CHECK(is_finite(softcap) && softcap >= 0.0, "softcap: got ", softcap, ", must be finite and not negative");
  m.softcap = softcap;
  if (alibi_slopes) {
    const bool batched = alibi_slopes->dim() == 2;
    check_shape(*alibi_slopes, "alibi_slopes", ScalarType::Float,
                batched ? std::vector<int64_t>{p.batch, p.q_heads} : std::vector<int64_t>{p.q_heads});
    check_device(*alibi_slopes, device, "alibi_slopes");
    m.slopes = static_cast<const float*>(alibi_slopes->const_data_ptr());
    m.slopes_batch = batched ? alibi_slopes->stride(0) : 0;
    m.slopes_head = alibi_slopes->stride(batched ? 1 : 0);
  }
  if (bias) {
    check_shape(*bias, "bias", bias->scalar_type(), {p.batch, p.q_heads, p.q_len, p.kv_len});
    check_device(*bias, device, "bias");
    const bool boolean = bias->scalar_type() == ScalarType::Bool;
    m.bias = Bias{bias->const_data_ptr(), bias->stride(0), bias->stride(1), bias->stride(2), bias->stride(3),
                  boolean ? DType::kFloat32 : parse_dtype(bias->scalar_type(), "bias"), boolean};
  }
}

// Section 11.
void set_dropout(Problem& p, const Device& device, DET_DROPOUT_PARAMETERS) {
  STD_TORCH_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p: got ", dropout_p, ", allowed is 0 to 1");
  const auto ids = [&](const std::optional<Tensor>& x, const char* name, const std::vector<int64_t>& shape) {
    if (!x) return static_cast<const int64_t*>(nullptr);
    check_shape(*x, name, ScalarType::Long, shape);
    check_device(*x, device, name);
    STD_TORCH_CHECK(x->is_contiguous(), name, ": must be contiguous");
    return static_cast<const int64_t*>(x->const_data_ptr());
  };
  Dropout& d = p.modifiers.dropout;
  d.rows = ids(dropout_rows, "dropout_rows", {p.batch, p.q_len});
  d.keys = ids(dropout_keys, "dropout_keys", {p.kv_len});
  d.on = dropout_p > 0.0;
  d.seed[0] = static_cast<uint32_t>(static_cast<uint64_t>(dropout_seed));
  d.seed[1] = static_cast<uint32_t>(static_cast<uint64_t>(dropout_seed) >> 32);
  d.threshold = dropout_threshold(dropout_p);
  d.rescale = dropout_rescale(dropout_p);
  d.first_query = dropout_query, d.first_key = dropout_key, d.first_head = dropout_head;
}

// Everything rowmax, accumulate and forward share but dropout. v is null for rowmax.
Problem problem_of(const Tensor& q, const Tensor& k, const Tensor* v, bool causal, double scale,
                   const std::string& precision, int64_t diagonal, int64_t kv_lo, int64_t kv_hi, DET_SCORE_PARAMETERS) {
  Problem p{};
  p.q = view_of(q, "q");
  p.k = view_of(k, "k");
  check_device(k, q.device(), "k");
  STD_TORCH_CHECK(p.k.dtype == p.q.dtype, "k: its dtype must be q's");
  p.batch = q.size(0), p.q_heads = q.size(1), p.q_len = q.size(2), p.head_dim = q.size(3);
  p.kv_heads = k.size(1), p.kv_len = k.size(2);
  STD_TORCH_CHECK(k.size(0) == p.batch && k.size(3) == p.head_dim, "k: batch and head_dim must be q's");
  STD_TORCH_CHECK(p.kv_heads > 0 ? p.q_heads % p.kv_heads == 0 : p.q_heads == 0, "q: its ", p.q_heads,
                  " heads must be a multiple of k's ", p.kv_heads);
  STD_TORCH_CHECK(p.kv_len <= int64_t(1) << 31, "k: got ", p.kv_len, " keys, at most 2^31 are allowed");
  if (v != nullptr) {
    p.v = view_of(*v, "v");
    check_device(*v, q.device(), "v");
    check_shape(*v, "v", q.scalar_type(), {p.batch, p.kv_heads, p.kv_len, p.head_dim});
  }
  STD_TORCH_CHECK(0 <= kv_lo && kv_lo <= kv_hi && kv_hi <= p.kv_len, "kv_lo, kv_hi: got ", kv_lo, ", ", kv_hi,
                  ", must be 0 <= kv_lo <= kv_hi <= ", p.kv_len);
  check_scale(scale);
  p.mask.kv_lo = kv_lo, p.mask.kv_hi = kv_hi;
  set_scores(p, q.device(), diagonal, causal, DET_SCORE_ARGUMENTS);
  p.scale = scale;
  p.precision = parse_precision(precision);
  return p;
}

// ---- Allocation and dispatch -----------------------------------------------------------------------------------

Tensor allocate(const std::vector<int64_t>& shape, ScalarType dtype, const Device& device) {
  return torch::stable::empty(shape, dtype, std::nullopt, device);
}

// The device of one call: its Backend, its Context, and the workspace, which lives until the call returns. On CUDA
// the caching allocator hands workspace memory on in stream order, so kernels still running keep it to themselves.
class Call {
 public:
  explicit Call(const Device& device, Path path = Path::kAuto) : device_(device) {
    context.path = path;
    context.workspace = [this](int64_t bytes) { return workspace(bytes); };
    if (device.is_cpu()) {
      environment_.emplace();
      return;
    }
#if defined(CUDA_KERNEL)
    STD_TORCH_CHECK(device.is_cuda(), "det-attn runs on CPU and CUDA tensors only");
    guard_.emplace(device.index());
    context.device = device.index();
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &context.stream));
    backend_ = &cuda_backend();
#else
    STD_TORCH_CHECK(false, "this build of det-attn runs on CPU tensors only");
#endif
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const Backend* operator->() const { return backend_; }

  Context context;

 private:
  void* workspace(int64_t bytes) {
    constexpr int64_t alignment = 256;  // promised by Context
    workspaces_.push_back(allocate({bytes + alignment - 1}, ScalarType::Byte, device_));
    const uintptr_t address = reinterpret_cast<uintptr_t>(workspaces_.back().mutable_data_ptr());
    return reinterpret_cast<void*>((address + alignment - 1) & ~static_cast<uintptr_t>(alignment - 1));
  }

  Device device_;
  const Backend* backend_ = &cpu_backend();
  std::vector<Tensor> workspaces_;
  std::optional<ContractFloatEnv> environment_;
#if defined(CUDA_KERNEL)
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#endif
};

// out [B, Hq, Sq, D] in q's layout: [B, Sq, Hq, D] in memory where q's heads lie inside its rows. meta.py repeats it.
Tensor allocate_out(const Tensor& q, ScalarType dtype) {
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), head_dim = q.size(3);
  const bool heads_inside = heads > 1 && length > 1 && q.stride(1) < q.stride(2);
  if (!heads_inside) return allocate({batch, heads, length, head_dim}, dtype, q.device());
  return torch::stable::transpose(allocate({batch, length, heads, head_dim}, dtype, q.device()), 1, 2);
}

}  // namespace

// ---- Ops -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> rows(const Tensor& x, const std::string& kind, double scale, const std::string& precision) {
  const View view = view_of(x, "x");
  const RowKind row_kind = parse_kind(kind);
  const Precision bits = parse_precision(precision);
  check_scale(scale);
  const int64_t batch = x.size(0), heads = x.size(1), length = x.size(2), head_dim = x.size(3);
  Tensor integers = allocate({batch, heads, length, head_dim}, ScalarType::Int, x.device());
  Tensor exponents = allocate({batch, heads, length}, ScalarType::Int, x.device());
  if (exponents.numel() > 0) {
    Call call(x.device());
    call->rows(call.context, view, batch, heads, length, head_dim, row_kind, scale, bits,
               static_cast<int32_t*>(integers.mutable_data_ptr()), static_cast<int32_t*>(exponents.mutable_data_ptr()));
  }
  return {integers, exponents};
}

Tensor rowmax(const Tensor& q, const Tensor& k, bool causal, double scale, const std::string& precision,
              int64_t diagonal, int64_t kv_lo, int64_t kv_hi, DET_SCORE_PARAMETERS, const std::string& path) {
  const Problem problem =
      problem_of(q, k, nullptr, causal, scale, precision, diagonal, kv_lo, kv_hi, DET_SCORE_ARGUMENTS);
  const Path kernels = parse_path(path);
  Tensor out = allocate({problem.batch, problem.q_heads, problem.q_len}, ScalarType::Double, q.device());
  if (out.numel() > 0) {
    Call call(q.device(), kernels);
    call->rowmax(call.context, problem, static_cast<double*>(out.mutable_data_ptr()));
  }
  return out;
}

namespace {

// accumulate, or with `raised` accumulate_last, which writes the row maximum over all shards there.
std::tuple<Tensor, Tensor> accumulate(const Tensor& q, const Tensor& rowmax, const Problem& problem,
                                      const std::string& path, Tensor* raised) {
  const Path kernels = parse_path(path);
  const std::vector<int64_t> rows_shape{problem.batch, problem.q_heads, problem.q_len};
  check_shape(rowmax, "rowmax", ScalarType::Double, rows_shape);
  check_device(rowmax, q.device(), "rowmax");
  Tensor num = allocate({problem.batch, problem.q_heads, problem.q_len, problem.head_dim, kDigits}, ScalarType::Long,
                        q.device());
  Tensor den = allocate(rows_shape, ScalarType::Long, q.device());
  if (raised != nullptr) *raised = allocate(rows_shape, ScalarType::Double, q.device());
  if (den.numel() > 0) {
    Call call(q.device(), kernels);
    const Tensor maxima = torch::stable::contiguous(rowmax);
    const double* given = static_cast<const double*>(maxima.const_data_ptr());
    int64_t* digits = static_cast<int64_t*>(num.mutable_data_ptr());
    int64_t* weights = static_cast<int64_t*>(den.mutable_data_ptr());
    if (raised == nullptr) {
      call->accumulate(call.context, problem, given, digits, weights);
    } else {
      call->accumulate_last(call.context, problem, given, static_cast<double*>(raised->mutable_data_ptr()), digits,
                            weights);
    }
  }
  return {num, den};
}

}  // namespace

std::tuple<Tensor, Tensor> accumulate(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rowmax,
                                      bool causal, double scale, const std::string& precision, int64_t diagonal,
                                      int64_t kv_lo, int64_t kv_hi, DET_MODIFIER_PARAMETERS, const std::string& path) {
  Problem problem = problem_of(q, k, &v, causal, scale, precision, diagonal, kv_lo, kv_hi, DET_SCORE_ARGUMENTS);
  set_dropout(problem, q.device(), DET_DROPOUT_ARGUMENTS);
  return accumulate(q, rowmax, problem, path, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> accumulate_last(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& rowmax, bool causal, double scale,
                                                   const std::string& precision, int64_t diagonal, int64_t kv_lo,
                                                   int64_t kv_hi, DET_MODIFIER_PARAMETERS, const std::string& path) {
  Problem problem = problem_of(q, k, &v, causal, scale, precision, diagonal, kv_lo, kv_hi, DET_SCORE_ARGUMENTS);
  set_dropout(problem, q.device(), DET_DROPOUT_ARGUMENTS);
  Tensor raised;
  const auto [num, den] = accumulate(q, rowmax, problem, path, &raised);
  return {num, den, raised};
}

Tensor finalize(const Tensor& num, const Tensor& den, const std::string& precision, ScalarType out_dtype,
                double dropout_p) {
  STD_TORCH_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p: got ", dropout_p, ", allowed is 0 to 1");
  const double rescale = dropout_rescale(dropout_p);
  const DType dtype = parse_dtype(out_dtype, "out_dtype");
  const Precision bits = parse_precision(precision);
  STD_TORCH_CHECK(num.dim() >= 2 && num.size(num.dim() - 1) == kDigits, "num: must be [..., head_dim, ", kDigits, "]");
  std::vector<int64_t> shape(num.sizes().begin(), num.sizes().end());
  check_shape(num, "num", ScalarType::Long, shape);
  shape.pop_back();
  const int64_t head_dim = shape.back();
  STD_TORCH_CHECK(head_dim >= 1 && head_dim <= kMaxHeadDim, "num: got head_dim ", head_dim, ", allowed is 1 to ",
                  kMaxHeadDim);
  check_shape(den, "den", ScalarType::Long, {shape.begin(), shape.end() - 1});
  check_device(den, num.device(), "den");
  Tensor out = allocate(shape, out_dtype, num.device());
  if (den.numel() > 0) {
    Call call(num.device());
    const Tensor digits = torch::stable::contiguous(num);
    const Tensor weights = torch::stable::contiguous(den);
    call->finalize(call.context, static_cast<const int64_t*>(digits.const_data_ptr()),
                   static_cast<const int64_t*>(weights.const_data_ptr()), den.numel(), head_dim, bits, rescale,
                   out.mutable_data_ptr(), dtype);
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                           double scale, const std::string& precision, int64_t diagonal,
                                           int64_t kv_lo, int64_t kv_hi, ScalarType out_dtype, DET_MODIFIER_PARAMETERS,
                                           const std::string& path, int64_t range_reach) {
  Problem problem = problem_of(q, k, &v, causal, scale, precision, diagonal, kv_lo, kv_hi, DET_SCORE_ARGUMENTS);
  set_dropout(problem, q.device(), DET_DROPOUT_ARGUMENTS);
  if (range_reach >= 0) problem.mask.range_reach = std::min(range_reach, Mask::kUnlimited);
  const Path kernels = parse_path(path);
  const DType dtype = parse_dtype(out_dtype, "out_dtype");
  const std::vector<int64_t> rows_shape{problem.batch, problem.q_heads, problem.q_len};
  Tensor out = allocate_out(q, out_dtype);
  Tensor maxima = allocate(rows_shape, ScalarType::Double, q.device());
  Tensor den = allocate(rows_shape, ScalarType::Long, q.device());
  if (den.numel() > 0) {
    Call call(q.device(), kernels);
    const MutableView view{out.mutable_data_ptr(), out.stride(0), out.stride(1), out.stride(2), dtype};
    call->forward(call.context, problem, view, static_cast<double*>(maxima.mutable_data_ptr()),
                  static_cast<int64_t*>(den.mutable_data_ptr()));
  }
  return {out, maxima, den};
}

// ---- Gradients -------------------------------------------------------------------------------------------------

namespace {

// The tensors of a gradient call as the stages see them. Holds the dense copies it had to make.
class GradientCall {
 public:
  GradientCall(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& rowmax, const Tensor& den, bool causal, double scale, const std::string& precision,
               int64_t diagonal, int64_t kv_lo, int64_t kv_hi, DET_MODIFIER_PARAMETERS)
      : grad_(dense(grad)), out_(dense(out)), rowmax_(torch::stable::contiguous(rowmax)),
        den_(torch::stable::contiguous(den)) {
    Problem problem = problem_of(q, k, &v, causal, scale, precision, diagonal, kv_lo, kv_hi, DET_SCORE_ARGUMENTS);
    set_dropout(problem, q.device(), DET_DROPOUT_ARGUMENTS);
    const std::vector<int64_t> shape{problem.batch, problem.q_heads, problem.q_len, problem.head_dim};
    const std::vector<int64_t> rows_shape(shape.begin(), shape.end() - 1);
    check_shape(grad, "grad", grad.scalar_type(), shape);
    check_shape(out, "out", ScalarType::Float, shape);
    check_shape(rowmax, "rowmax", ScalarType::Double, rows_shape);
    check_shape(den, "den", ScalarType::Long, rows_shape);
    check_device(grad, q.device(), "grad");
    check_device(out, q.device(), "out");
    check_device(rowmax, q.device(), "rowmax");
    check_device(den, q.device(), "den");
    call = Gradient{problem, view_of(grad_, "grad"), view_of(out_, "out"),
                    static_cast<const double*>(rowmax_.const_data_ptr()),
                    static_cast<const int64_t*>(den_.const_data_ptr())};
  }
  GradientCall(const GradientCall&) = delete;
  GradientCall& operator=(const GradientCall&) = delete;

  Gradient call;

 private:
  // Gradients come expanded, from sum() for one: a copy only where a row is not dense.
  static Tensor dense(const Tensor& x) {
    const bool is_dense = x.dim() != 4 || x.size(3) == 1 || x.stride(3) == 1;
    return is_dense ? x : torch::stable::contiguous(x);
  }

  Tensor grad_, out_, rowmax_, den_;
};

template <class T>
T* data_of(const Tensor& x, bool needed) {
  return needed ? static_cast<T*>(x.mutable_data_ptr()) : nullptr;
}

std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

Tensor allocate_sums(const Tensor& like, bool needed) {
  std::vector<int64_t> shape = shape_of(like);
  shape.push_back(kGradientDigits);
  return allocate(needed ? shape : std::vector<int64_t>{0}, ScalarType::Long, like.device());
}

Tensor allocate_gradient(const Tensor& like, bool needed) {
  return needed ? allocate_out(like, like.scalar_type()) : allocate({0}, like.scalar_type(), like.device());
}

MutableView gradient_view(const Tensor& x, bool needed, DType dtype) {
  if (!needed) return MutableView{nullptr, 0, 0, 0, dtype};
  return MutableView{x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2), dtype};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> grad_reference(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& rowmax, const Tensor& den,
                                                  bool causal, double scale, const std::string& precision,
                                                  int64_t diagonal, int64_t kv_lo, int64_t kv_hi,
                                                  DET_MODIFIER_PARAMETERS, const std::string& path) {
  const GradientCall gradient(grad, q, k, v, out, rowmax, den, causal, scale, precision, diagonal, kv_lo, kv_hi,
                              DET_MODIFIER_ARGUMENTS);
  const Problem& problem = gradient.call.problem;
  const Path kernels = parse_path(path);
  const std::vector<int64_t> keys_shape{problem.batch, problem.kv_heads, problem.kv_len};
  Tensor a = allocate({problem.batch, problem.q_heads, problem.q_len}, ScalarType::Int, q.device());
  Tensor b = allocate(keys_shape, ScalarType::Int, q.device());
  Tensor c = allocate(keys_shape, ScalarType::Int, q.device());
  if (a.numel() + b.numel() > 0) {
    Call call(q.device(), kernels);
    call->grad_reference(call.context, gradient.call, data_of<int32_t>(a, true), data_of<int32_t>(b, true),
                         data_of<int32_t>(c, true));
  }
  return {a, b, c};
}

std::tuple<Tensor, Tensor, Tensor> grad_accumulate(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out, const Tensor& rowmax,
                                                   const Tensor& den, const Tensor& a, const Tensor& b, const Tensor& c,
                                                   bool causal, double scale, const std::string& precision,
                                                   int64_t diagonal, int64_t kv_lo, int64_t kv_hi, bool need_q,
                                                   bool need_k, bool need_v, DET_MODIFIER_PARAMETERS,
                                                   const std::string& path) {
  const GradientCall gradient(grad, q, k, v, out, rowmax, den, causal, scale, precision, diagonal, kv_lo, kv_hi,
                              DET_MODIFIER_ARGUMENTS);
  const Problem& problem = gradient.call.problem;
  const Path kernels = parse_path(path);
  const std::vector<int64_t> keys_shape{problem.batch, problem.kv_heads, problem.kv_len};
  check_shape(a, "a", ScalarType::Int, {problem.batch, problem.q_heads, problem.q_len});
  check_shape(b, "b", ScalarType::Int, keys_shape);
  check_shape(c, "c", ScalarType::Int, keys_shape);
  check_device(a, q.device(), "a");
  check_device(b, q.device(), "b");
  check_device(c, q.device(), "c");
  Tensor dq = allocate_sums(q, need_q), dk = allocate_sums(k, need_k), dv = allocate_sums(v, need_v);
  if (dq.numel() + dk.numel() + dv.numel() > 0) {
    Call call(q.device(), kernels);
    const Tensor of_q = torch::stable::contiguous(a), of_k = torch::stable::contiguous(b),
                 of_v = torch::stable::contiguous(c);
    call->grad_accumulate(call.context, gradient.call, static_cast<const int32_t*>(of_q.const_data_ptr()),
                          static_cast<const int32_t*>(of_k.const_data_ptr()),
                          static_cast<const int32_t*>(of_v.const_data_ptr()), data_of<int64_t>(dq, need_q),
                          data_of<int64_t>(dk, need_k), data_of<int64_t>(dv, need_v));
  }
  return {dq, dk, dv};
}

Tensor grad_finalize(const Tensor& sums, const Tensor& reference, const std::string& kind, double scale,
                     const std::string& precision, ScalarType out_dtype) {
  const int gradient_bits = parse_gradient_bits(kind);
  const DType dtype = parse_dtype(out_dtype, "out_dtype");
  const Precision bits = parse_precision(precision);
  check_scale(scale);
  STD_TORCH_CHECK(sums.dim() >= 2 && sums.size(sums.dim() - 1) == kGradientDigits, "sums: must be [..., head_dim, ",
                  kGradientDigits, "]");
  std::vector<int64_t> shape = shape_of(sums);
  check_shape(sums, "sums", ScalarType::Long, shape);
  shape.pop_back();
  const int64_t head_dim = shape.back();
  STD_TORCH_CHECK(head_dim >= 1 && head_dim <= kMaxHeadDim, "sums: got head_dim ", head_dim, ", allowed is 1 to ",
                  kMaxHeadDim);
  check_shape(reference, "reference", ScalarType::Int, {shape.begin(), shape.end() - 1});
  check_device(reference, sums.device(), "reference");
  Tensor out = allocate(shape, out_dtype, sums.device());
  if (reference.numel() > 0) {
    Call call(sums.device());
    const Tensor digits = torch::stable::contiguous(sums), references = torch::stable::contiguous(reference);
    call->grad_finalize(call.context, static_cast<const int64_t*>(digits.const_data_ptr()),
                        static_cast<const int32_t*>(references.const_data_ptr()), reference.numel(), head_dim,
                        gradient_bits, scale, bits, out.mutable_data_ptr(), dtype);
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& rowmax, const Tensor& den, bool causal,
                                            double scale, const std::string& precision, int64_t diagonal, int64_t kv_lo,
                                            int64_t kv_hi, bool need_q, bool need_k, bool need_v,
                                            DET_MODIFIER_PARAMETERS, const std::string& path) {
  const GradientCall gradient(grad, q, k, v, out, rowmax, den, causal, scale, precision, diagonal, kv_lo, kv_hi,
                              DET_MODIFIER_ARGUMENTS);
  const Path kernels = parse_path(path);
  const DType dtype = gradient.call.problem.q.dtype;
  Tensor dq = allocate_gradient(q, need_q), dk = allocate_gradient(k, need_k), dv = allocate_gradient(v, need_v);
  if (dq.numel() + dk.numel() + dv.numel() > 0) {
    Call call(q.device(), kernels);
    call->backward(call.context, gradient.call, gradient_view(dq, need_q, dtype), gradient_view(dk, need_k, dtype),
                   gradient_view(dv, need_v, dtype));
  }
  return {dq, dk, dv};
}

}  // namespace det_attn
