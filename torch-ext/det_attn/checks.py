"""Argument checks of every public function: before anything runs, and cheap enough for every call.

In: arguments as the user gave them. Out: the same, with defaults resolved; or a TypeError (wrong Python type or dtype)
or ValueError (anything else) that names the argument, what came and what is allowed. Shapes: contract sections 1-3, 5.
Checks compare sizes without converting them, so they also hold for the symbolic sizes of torch.compile.
"""

import math

import torch
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix

MAX_HEAD_DIM = 256
MAX_KEYS = 2**31
DIGITS = 12
GRADIENT_DIGITS = 3
_MAX_OFFSET = 2**62  # so that q_offset - kv_offset fits the op's int64

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (int, torch.SymInt)
_HAS_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix("forward"), "CUDA")

# Contract section 1: 1 / sqrt(head_dim) in float64. Looked up, so that a traced head_dim is a constant and the scale
# keeps its bits whatever a compiler would make of the formula.
_DEFAULT_SCALE = (math.nan,) + tuple(1.0 / math.sqrt(head_dim) for head_dim in range(1, MAX_HEAD_DIM + 1))


def _got_type(x):
    return type(x).__name__


def _tensor(x, name):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {_got_type(x)}, must be a torch.Tensor")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"{name}: got a {'nested' if x.is_nested else x.layout} tensor, must be dense and strided")
    if not (x.is_cpu or (_HAS_CUDA and x.is_cuda)):
        raise ValueError(f"{name}: got device {x.device}, this build has kernels for cpu{' and cuda' * _HAS_CUDA} only")
    # torch would drop the tangent without a word. The level is looked at first: it costs nothing where there is none.
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{name}: got a tensor with a forward-mode tangent, det-attn has no forward-mode AD")


def _same_device(x, device, name, other):
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, must be on {other}'s, {device}")


def matrix(x, name):
    """One of Q, K, V: dtype, [batch, heads, length, head_dim], dense last dimension. Returns its shape."""
    _tensor(x, name)
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, allowed are float32, bfloat16 and float16")
    shape = x.shape
    if len(shape) != 4:
        raise ValueError(f"{name}: got shape {tuple(shape)}, must be 4-D [batch, heads, length, head_dim]")
    head_dim = shape[3]
    if head_dim < 1 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{name}: got head_dim {head_dim} in shape {tuple(shape)}, allowed is 1 to {MAX_HEAD_DIM}")
    if head_dim != 1 and x.stride(3) != 1:
        raise ValueError(
            f"{name}: got stride {x.stride(3)} in the last dimension, it must be dense (stride 1): call .contiguous()"
        )
    return shape


def queries_keys(Q, K):
    """Q [B, Hq, Sq, D] against K [B, Hkv, Skv, D]. Returns both shapes."""
    q_shape = matrix(Q, "Q")
    k_shape = matrix(K, "K")
    if K.dtype is not Q.dtype:
        raise TypeError(f"K: got dtype {K.dtype}, must be Q's, {Q.dtype}")
    _same_device(K, Q.device, "K", "Q")
    if k_shape[0] != q_shape[0] or k_shape[3] != q_shape[3]:
        raise ValueError(
            f"K: got shape {tuple(k_shape)}, its batch and head_dim must be Q's, whose shape is {tuple(q_shape)}"
        )
    q_heads, kv_heads = q_shape[1], k_shape[1]
    if q_heads != kv_heads and (kv_heads == 0 or q_heads % kv_heads != 0):
        raise ValueError(f"Q: got {q_heads} heads, must be a multiple of K's {kv_heads}")
    if k_shape[2] > MAX_KEYS:
        raise ValueError(f"K: got {k_shape[2]} keys, at most {MAX_KEYS} are allowed")
    return q_shape, k_shape


def values(V, K):
    """V has K's shape, dtype and device."""
    v_shape = matrix(V, "V")
    if V.dtype is not K.dtype:
        raise TypeError(f"V: got dtype {V.dtype}, must be Q's and K's, {K.dtype}")
    _same_device(V, K.device, "V", "K")
    if v_shape != K.shape:
        raise ValueError(f"V: got shape {tuple(v_shape)}, must be K's, {tuple(K.shape)}")


def row_maxima(rowmax, Q, q_shape):
    """rowmax float64 [B, Hq, Sq] of these queries."""
    _tensor(rowmax, "rowmax")
    if rowmax.dtype is not torch.float64:
        raise TypeError(f"rowmax: got dtype {rowmax.dtype}, must be float64, as rowmax() returns it")
    _same_device(rowmax, Q.device, "rowmax", "Q")
    if rowmax.shape != q_shape[:3]:
        raise ValueError(f"rowmax: got shape {tuple(rowmax.shape)}, must be [B, Hq, Sq] of Q, {tuple(q_shape[:3])}")


def sums(NUM, DEN, shape):
    """NUM int64 [..., D, 12] and DEN int64 [...]; the output is shaped NUM.shape[:-1], and `shape` if given."""
    for x, name in ((NUM, "NUM"), (DEN, "DEN")):
        _tensor(x, name)
        if x.dtype is not torch.int64:
            raise TypeError(f"{name}: got dtype {x.dtype}, must be int64, as accumulate() returns it")
    _same_device(DEN, NUM.device, "DEN", "NUM")
    if NUM.dim() < 2 or NUM.shape[-1] != DIGITS:
        raise ValueError(f"NUM: got shape {tuple(NUM.shape)}, must be [..., head_dim, {DIGITS}]")
    head_dim = NUM.shape[-2]
    if head_dim < 1 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"NUM: got head_dim {head_dim} in shape {tuple(NUM.shape)}, allowed is 1 to {MAX_HEAD_DIM}")
    if DEN.shape != NUM.shape[:-2]:
        raise ValueError(f"DEN: got shape {tuple(DEN.shape)}, must be NUM's without [D, 12], {tuple(NUM.shape[:-2])}")
    if shape is not None:
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"shape: got {_got_type(shape)}, must be a tuple or list of ints, or None")
        if tuple(shape) != tuple(NUM.shape[:-1]):
            raise ValueError(f"shape: got {tuple(shape)}, but NUM and DEN are of an output {tuple(NUM.shape[:-1])}")


def output_gradient(dO, out, DEN, Q, q_shape):
    """dO of any input dtype and out float32, both [B, Hq, Sq, D]; DEN int64 [B, Hq, Sq]."""
    for x, name in ((dO, "dO"), (out, "out")):
        _tensor(x, name)
        if x.dtype not in _INPUT_DTYPES:
            raise TypeError(f"{name}: got dtype {x.dtype}, allowed are float32, bfloat16 and float16")
        _same_device(x, Q.device, name, "Q")
        if x.shape != q_shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, must be Q's, {tuple(q_shape)}")
    if out.dtype is not torch.float32:
        raise TypeError(f"out: got dtype {out.dtype}, must be float32: the output before any further rounding")
    _row_integers(DEN, "DEN", torch.int64, Q.device, q_shape[:3], "[B, Hq, Sq] of Q", "the forward pass")


def _row_integers(x, name, dtype, device, shape, which, source):
    _tensor(x, name)
    if x.dtype is not dtype:
        raise TypeError(f"{name}: got dtype {x.dtype}, must be {dtype}, as {source} returns it")
    _same_device(x, device, name, "Q")
    if x.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, must be {which}, {tuple(shape)}")


def references(A, B, C, Q, q_shape, k_shape):
    """A int32 [B, Hq, Sq]; B and C int32 [B, Hkv, Skv]."""
    for x, name, shape, which in (
        (A, "A", q_shape[:3], "[B, Hq, Sq] of Q"),
        (B, "B", k_shape[:3], "[B, Hkv, Skv] of K"),
        (C, "C", k_shape[:3], "[B, Hkv, Skv] of K"),
    ):
        _row_integers(x, name, torch.int32, Q.device, shape, which, "grad_reference()")


def gradient_sums(SUM, reference):
    """SUM int64 [..., D, 3] and its reference int32 [...]."""
    _tensor(SUM, "SUM")
    if SUM.dtype is not torch.int64:
        raise TypeError(f"SUM: got dtype {SUM.dtype}, must be int64, as grad_accumulate() returns it")
    if SUM.dim() < 2 or SUM.shape[-1] != GRADIENT_DIGITS:
        raise ValueError(f"SUM: got shape {tuple(SUM.shape)}, must be [..., head_dim, {GRADIENT_DIGITS}]")
    head_dim = SUM.shape[-2]
    if head_dim < 1 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"SUM: got head_dim {head_dim} in shape {tuple(SUM.shape)}, allowed is 1 to {MAX_HEAD_DIM}")
    _tensor(reference, "reference")
    if reference.dtype is not torch.int32:
        raise TypeError(f"reference: got dtype {reference.dtype}, must be int32, as grad_reference() returns it")
    _same_device(reference, SUM.device, "reference", "SUM")
    if reference.shape != SUM.shape[:-2]:
        raise ValueError(
            f"reference: got shape {tuple(reference.shape)}, must be SUM's without [D, 3], {tuple(SUM.shape[:-2])}"
        )


def integer(x, name):
    if not isinstance(x, _INTS) or isinstance(x, bool):
        raise TypeError(f"{name}: got {_got_type(x)}, must be an int")


def offset(x, name):
    integer(x, name)
    if x < -_MAX_OFFSET or x > _MAX_OFFSET:
        raise ValueError(f"{name}: got {x}, allowed is -2**62 to 2**62")


def softmax_scale(scale, head_dim):
    """The factor on the scores; None is 1 / sqrt(head_dim) in float64."""
    if scale is None:
        return _DEFAULT_SCALE[head_dim]
    if not isinstance(scale, (float, int)) or isinstance(scale, bool):
        raise TypeError(f"scale: got {_got_type(scale)}, must be a float, an int or None")
    try:
        scale = float(scale)
    except OverflowError:
        raise ValueError(f"scale: got an int of {scale.bit_length()} bits, must be within float64") from None
    if not -math.inf < scale < math.inf:  # NaN fails too; unlike isfinite this holds for a traced float
        raise ValueError(f"scale: got {scale}, must be finite")
    return scale


def diagonal(causal, q_offset, kv_offset, q_len, kv_len):
    """Contract section 2: local key j is attended by query i when j <= i + diagonal. 0 where nothing is causal."""
    if causal is not True and causal is not False:
        raise TypeError(f"causal: got {_got_type(causal)}, must be a bool")
    offset(kv_offset, "kv_offset")
    if q_offset is not None:
        offset(q_offset, "q_offset")
    if not causal:
        return 0
    if q_offset is None:
        if kv_offset != 0:
            raise ValueError(
                f"q_offset: got None with causal=True and kv_offset={kv_offset}, must be the global index of the first "
                "query (the default, Skv - Sq, would need the length of all keys)"
            )
        return kv_len - q_len
    return q_offset - kv_offset


def key_range(kv_lo, kv_hi, kv_len):
    """0 <= kv_lo <= kv_hi <= Skv; kv_hi None is Skv."""
    integer(kv_lo, "kv_lo")
    if kv_hi is None:
        kv_hi = kv_len
    else:
        integer(kv_hi, "kv_hi")
    if kv_hi < 0 or kv_hi > kv_len:
        raise ValueError(f"kv_hi: got {kv_hi}, allowed is 0 to {kv_len}, the keys in K")
    if kv_lo < 0 or kv_lo > kv_hi:
        raise ValueError(f"kv_lo: got {kv_lo}, allowed is 0 to kv_hi, {kv_hi}")
    return kv_lo, kv_hi


def key_splits(kv_splits, kv_len):
    """Sizes of consecutive shards that add up to Skv. Returns the (kv_lo, kv_hi) of each."""
    if not isinstance(kv_splits, (tuple, list)):
        raise TypeError(f"kv_splits: got {_got_type(kv_splits)}, must be a list or tuple of ints")
    shards = []
    end = 0
    for i, size in enumerate(kv_splits):
        if not isinstance(size, _INTS) or isinstance(size, bool):
            raise TypeError(f"kv_splits: got {_got_type(size)} at index {i}, must be ints")
        if size < 0:
            raise ValueError(f"kv_splits: got {size} at index {i}, must not be negative")
        shards.append((end, end + size))
        end = end + size
    if end != kv_len:
        raise ValueError(f"kv_splits: got sizes that add up to {end}, must add up to K's {kv_len} keys")
    return shards or [(0, 0)]


def choice(x, name, allowed):
    if not isinstance(x, str):
        raise TypeError(f"{name}: got {_got_type(x)}, must be one of {', '.join(map(repr, allowed))}")
    if x not in allowed:
        raise ValueError(f"{name}: got {x!r}, allowed are {', '.join(map(repr, allowed))}")


def precision_name(precision):
    choice(precision, "precision", ("highest", "high"))


def row_kind(kind):
    choice(kind, "kind", ("query", "key", "value"))


def path_name(path, x):
    choice(path, "path", ("auto", "reference", "mma", "wgmma"))
    if path in ("mma", "wgmma") and x.is_cpu:
        raise ValueError(f"path: got {path!r} with CPU tensors, allowed there are 'auto' and 'reference'")


def output_dtype(out_dtype):
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: got {_got_type(out_dtype)}, must be a torch.dtype")
    if out_dtype not in _INPUT_DTYPES:
        raise ValueError(f"out_dtype: got {out_dtype}, allowed are torch.float32, torch.bfloat16 and torch.float16")


def flag(x, name):
    if x is not True and x is not False:
        raise TypeError(f"{name}: got {_got_type(x)}, must be a bool")


def no_gradient(function, **tensors):
    """Integers have no gradient, and a dropped gradient would go unnoticed: refuse under grad mode."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires grad, but {function} has no backward; call it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )
