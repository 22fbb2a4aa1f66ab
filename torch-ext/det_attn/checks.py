"""Argument checks of every public function: before anything runs, and cheap enough for every call.

In: arguments as the user gave them. Out: the same, with defaults resolved; or a TypeError (wrong Python type or dtype)
or ValueError (anything else) that names the argument, what came and what is allowed; or a NotImplementedError where a
gradient is asked for that does not exist. Shapes: contract sections 1-3, 5, 8, 10, 11.
Checks compare sizes without converting them, so they also hold for the symbolic sizes of torch.compile.
"""

import math
from numbers import Real
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias

from ._ops import add_op_namespace_prefix

MAX_HEAD_DIM = 256
MAX_KEYS = 2**31
DIGITS = 12
GRADIENT_DIGITS = 3
_MAX_OFFSET = 2**62  # so that q_offset - kv_offset fits the op's int64
_FARTHEST = 2**60  # Mask::kFarthest in csrc/problem.h
_MAX_SOFTCAP = torch.finfo(torch.float64).max
_OURS = ("Q", "K", "V")  # what messages call them, unless the caller has other names
TORCHS = ("query", "key", "value")
_ID_SHAPES = {"dropout_rows": "[B, Sq] of Q", "dropout_keys": "[Skv] of K"}

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (int, torch.SymInt)
_STRIDED = torch.strided
_in_transform = torch._C._are_functorch_transforms_active
_PLAIN = (Tensor, torch.nn.Parameter)
_HAS_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix("forward"), "CUDA")

# Contract section 1: 1 / sqrt(head_dim) in float64. Looked up, so that a traced head_dim is a constant and the scale
# keeps its bits whatever a compiler would make of the formula.
_DEFAULT_SCALE = (math.nan,) + tuple(1.0 / math.sqrt(head_dim) for head_dim in range(1, MAX_HEAD_DIM + 1))


def _got_type(x):
    kind = type(x)
    return "numpy.bool" if kind.__name__ == "bool" and kind is not bool else kind.__name__


def are_tensors(**given):
    """Whatever is looked at before the whole check."""
    for name, x in given.items():
        _strided(x, name)


def _strided(x, name):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {_got_type(x)}, must be a torch.Tensor")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"{name}: got a {'nested' if x.is_nested else x.layout} tensor, must be dense and strided")


def _tensor(x, name):
    _strided(x, name)
    if not (x.is_cpu or (_HAS_CUDA and x.is_cuda)):
        raise ValueError(f"{name}: got device {x.device}, this build has kernels for cpu{' and cuda' * _HAS_CUDA} only")
    # torch would drop the tangent without a word. The level is looked at first: it costs nothing where there is none.
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{name}: got a tensor with a forward-mode tangent, det-attn has no forward-mode AD")
    if _in_transform() and not torch.compiler.is_compiling():
        _no_func_gradient(x, name)


def _no_func_gradient(x, name):
    """The autograd of a library's op knows no torch.func: grad and its like would fail deep inside."""
    functorch = torch._C._functorch
    while torch.is_grad_enabled() and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            raise NotImplementedError(f"{name}: got a tensor of torch.func's grad, vjp or jacrev: use torch.autograd")
        x = functorch.get_unwrapped(x)


def _same_device(x, device, name, other):
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, must be on {other}'s, {device}")


def input_dtype(x, name):
    """That of Q, K and V."""
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, allowed are float32, bfloat16 and float16")


def matrix(x, name):
    """One of Q, K, V: dtype, [batch, heads, length, head_dim], dense last dimension. Returns its shape."""
    _tensor(x, name)
    input_dtype(x, name)
    shape = x.shape
    if len(shape) != 4:
        raise ValueError(f"{name}: got shape {tuple(shape)}, must be 4-D [batch, heads, length, head_dim]")
    head_dim = shape[3]
    if head_dim < 1 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{name}: got head_dim {head_dim}, allowed is 1 to {MAX_HEAD_DIM}")
    if head_dim != 1 and not is_dense(x) and x.numel() > 0:  # contiguous() leaves the strides of nothing as they are
        raise ValueError(
            f"{name}: got stride {x.stride(3)} in the last dimension, it must be dense (stride 1): call .contiguous()"
        )
    return shape


def is_dense(x):
    """Whether the last dimension, of a 4-D tensor, is. All strides at once take half the time of one of them."""
    return x.stride()[3] == 1


def inputs(Q, K, V, names=_OURS):
    """All that queries_keys() and values() check. Returns the shapes of Q and of K."""
    shapes = plain(Q, K, V)
    if shapes is None:
        shapes = queries_keys(Q, K, names)
        values(V, K, names)
    return shapes


def plain(Q, K, V):
    """What inputs() returns where it is sure, as with most calls; None where the checks one by one have the say.

    To look at a tensor takes longer than to compare what was seen, so nothing is looked at twice, and neither the
    layout nor is_nested at all: tensors that are not dense and strided raise here, or have no last stride of 1.
    """
    dtype = Q.dtype if type(Q) in _PLAIN and type(K) in _PLAIN and type(V) in _PLAIN else None
    if not (
        dtype in INPUT_DTYPES
        and dtype is K.dtype is V.dtype
        and ((Q.is_cpu and K.is_cpu and V.is_cpu) or (_HAS_CUDA and Q.is_cuda and Q.device == K.device == V.device))
        and forward_ad._current_level < 0
        and not _in_transform()
    ):
        return None
    try:
        q_shape, k_shape = Q.shape, K.shape
        if len(q_shape) != 4 or len(k_shape) != 4 or V.shape != k_shape:
            return None
        if not Q.stride()[3] == K.stride()[3] == V.stride()[3] == 1:
            return None
    except RuntimeError:
        return None
    (batch, q_heads, _, head_dim), (k_batch, kv_heads, kv_len, k_dim) = q_shape, k_shape
    if (
        batch == k_batch
        and head_dim == k_dim
        and 1 <= head_dim <= MAX_HEAD_DIM
        and (q_heads == kv_heads or (kv_heads > 0 and q_heads % kv_heads == 0))
        and kv_len <= MAX_KEYS
    ):
        return q_shape, k_shape
    return None


def queries_keys(Q, K, names=_OURS):
    """Q [B, Hq, Sq, D] against K [B, Hkv, Skv, D]. Returns both shapes."""
    q, k, _ = names
    q_shape = matrix(Q, q)
    k_shape = matrix(K, k)
    if K.dtype is not Q.dtype:
        raise TypeError(f"{k}: got dtype {K.dtype}, must be {q}'s, {Q.dtype}")
    _same_device(K, Q.device, k, q)
    if k_shape[0] != q_shape[0] or k_shape[3] != q_shape[3]:
        raise ValueError(
            f"{k}: got shape {tuple(k_shape)}, its batch and head_dim must be {q}'s, whose shape is {tuple(q_shape)}"
        )
    q_heads, kv_heads = q_shape[1], k_shape[1]
    if q_heads != kv_heads and (kv_heads == 0 or q_heads % kv_heads != 0):
        raise ValueError(f"{q}: got {q_heads} heads, must be a multiple of {k}'s {kv_heads}")
    if k_shape[2] > MAX_KEYS:
        raise ValueError(f"{k}: got {k_shape[2]} keys, at most {MAX_KEYS} are allowed")
    return q_shape, k_shape


def values(V, K, names=_OURS):
    """V has K's shape, dtype and device."""
    q, k, v = names
    v_shape = matrix(V, v)
    if V.dtype is not K.dtype:
        raise TypeError(f"{v}: got dtype {V.dtype}, must be {q}'s and {k}'s, {K.dtype}")
    _same_device(V, K.device, v, k)
    if v_shape != K.shape:
        raise ValueError(f"{v}: got shape {tuple(v_shape)}, must be {k}'s, {tuple(K.shape)}")


def widths(query, key, value):
    """(E, Ev) of inputs with at least two dimensions, whose widths may differ: they are padded later."""
    width, value_width = query.shape[-1], value.shape[-1]
    if key.shape[-1] != width:
        raise ValueError(f"key: got head_dim {key.shape[-1]}, must be query's, {width}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: got {value.shape[-2]} rows, must be key's, {key.shape[-2]}")
    for name, x in (("query", width), ("value", value_width)):
        if x < 1 or x > MAX_HEAD_DIM:
            raise ValueError(f"{name}: got head_dim {x}, allowed is 1 to {MAX_HEAD_DIM}")
    return width, value_width


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
        input_dtype(x, name)
        _same_device(x, Q.device, name, "Q")
        if x.shape != q_shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, must be Q's, {tuple(q_shape)}")
    if out.dtype is not torch.float32:
        raise TypeError(f"out: got dtype {out.dtype}, must be float32: the output before any further rounding")
    _row_integers(DEN, "DEN", torch.int64, Q.device, q_shape[:3], "[B, Hq, Sq] of Q", "the forward pass")


def _row_integers(x, name, dtype, device, shape, which, source):
    _tensor(x, name)
    if x.dtype is not dtype:
        returned = f", as {source} returns it" if source else ""
        raise TypeError(f"{name}: got dtype {x.dtype}, must be {dtype}{returned}")
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


def _integer(x, name):
    if not isinstance(x, _INTS) or isinstance(x, bool):
        raise TypeError(f"{name}: got {_got_type(x)}, must be an int")


def _offset(x, name):
    _integer(x, name)
    if x < -_MAX_OFFSET or x > _MAX_OFFSET:
        raise ValueError(f"{name}: got {x}, allowed is -2**62 to 2**62")


def softmax_scale(scale, head_dim, name="scale"):
    """The factor on the scores; None is 1 / sqrt(head_dim) in float64."""
    if scale is None:
        return _DEFAULT_SCALE[head_dim]
    if not isinstance(scale, (float, int, Real)) or isinstance(scale, bool):
        raise TypeError(f"{name}: got {_got_type(scale)}, must be a float, an int or None")
    try:
        scale = float(scale)
    except OverflowError:
        raise ValueError(f"{name}: got an int of {scale.bit_length()} bits, must be within float64") from None
    if not -math.inf < scale < math.inf:  # NaN fails too; unlike isfinite this holds for a traced float
        raise ValueError(f"{name}: got {scale}, must be finite")
    return scale


class Modifiers(NamedTuple):
    """The ops' arguments of sections 10 and 11, in their order: the first six shape scores, the others drop weights."""

    bias: Optional[Tensor] = None
    alibi_slopes: Optional[Tensor] = None
    key_ranges: Optional[Tensor] = None
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_query: int = 0
    dropout_key: int = 0
    dropout_head: int = 0
    dropout_rows: Optional[Tensor] = None
    dropout_keys: Optional[Tensor] = None

    @property
    def of_scores(self):
        return self[:6]


NO_MODIFIERS = Modifiers()
NO_OTHERS = NO_MODIFIERS[1:]  # beside a bias
EVERYWHERE = (-1, -1)


def modifiers(
    Q, k_shape, causal, q_offset, kv_offset, attn_bias, window, softcap, alibi_slopes, key_ranges, dropout_p=0.0,
    dropout_seed=0, dropout_head=0, dropout_rows=None, dropout_keys=None,
):  # fmt: skip
    """(diagonal, Modifiers) of a call: query i's own place among the local keys is i + diagonal (section 10)."""
    kv_len = k_shape[2]
    if causal is not True and causal is not False:
        raise TypeError(f"causal: got {_got_type(causal)}, must be a bool")
    _offset(kv_offset, "kv_offset")
    if q_offset is not None:
        _offset(q_offset, "q_offset")
    bare = attn_bias is None and alibi_slopes is None and key_ranges is None
    bare = bare and type(window) is tuple and window == EVERYWHERE  # an array would compare by elements
    if bare and kv_offset == 0 and type(softcap) is float and softcap == 0.0 and dropout_rows is dropout_keys is None:
        if type(dropout_p) is float and dropout_p == 0.0 and type(dropout_seed) is type(dropout_head) is int:
            if dropout_seed == 0 and dropout_head == 0:  # most calls, whose checks should cost little
                return (kv_len - Q.shape[2] if q_offset is None else q_offset) if causal else 0, NO_MODIFIERS
    q_shape = Q.shape
    left, right = _window(window)
    softcap = _softcap(softcap)
    dropout_p = dropout_probability(dropout_p)
    _integer(dropout_seed, "dropout_seed")
    if dropout_seed < -(2**63) or dropout_seed >= 2**64:
        raise ValueError(f"dropout_seed: got {dropout_seed}, allowed is -2**63 to 2**64 - 1")
    _integer(dropout_head, "dropout_head")
    if dropout_head < 0 or dropout_head >= 2**32:
        raise ValueError(f"dropout_head: got {dropout_head}, allowed is 0 to 2**32 - 1")
    reach = left >= 0 or right >= 0 or alibi_slopes is not None
    counted = dropout_p > 0 and (dropout_rows is None or dropout_keys is None)

    if q_offset is None:
        if kv_offset != 0 and (causal or reach or counted):
            raise ValueError(
                f"q_offset: got None with kv_offset={kv_offset} and causal, window, alibi_slopes or dropout_p, must be "
                "the global index of the first query (the default, Skv - Sq, would need the length of all keys)"
            )
        q_offset = kv_len - q_shape[2]
    diagonal = q_offset - kv_offset if causal or reach else 0
    if reach and (diagonal < -_FARTHEST or diagonal > _FARTHEST):
        raise ValueError(
            f"q_offset: got {q_offset} with kv_offset={kv_offset}, with window or alibi_slopes they may differ by "
            "at most 2**60"
        )
    if attn_bias is not None:
        attn_bias = bias(attn_bias, Q, (*q_shape[:3], kv_len))
    if alibi_slopes is not None:
        _slopes(alibi_slopes, Q)
    if key_ranges is not None:
        _ranges(key_ranges, Q)
    for x, name, shape in ((dropout_rows, "dropout_rows", q_shape[::2][:2]), (dropout_keys, "dropout_keys", (kv_len,))):
        if x is not None:
            _ids(x, name, Q, shape)
    if dropout_seed >= 2**63:
        dropout_seed = dropout_seed - 2**64  # the same 64 bits
    return diagonal, Modifiers(
        attn_bias, alibi_slopes, key_ranges, softcap, left, right, dropout_p, dropout_seed,
        q_offset if counted else 0, kv_offset if counted else 0, dropout_head, dropout_rows, dropout_keys,
    )  # fmt: skip


def _window(window):
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: got {_got_type(window)}, must be a tuple or list of two ints")
    if len(window) != 2:
        raise ValueError(f"window: got {len(window)} numbers, must be (left, right)")
    for size in window:
        if not isinstance(size, _INTS) or isinstance(size, bool):
            raise TypeError(f"window: got {_got_type(size)} in it, must be two ints")
        if size < -1 or size > _MAX_OFFSET:
            raise ValueError(f"window: got {tuple(window)}, allowed is -1 for no limit, or 0 to 2**62")
    return window


def _number(x, name):
    if not isinstance(x, (float, int, Real)) or isinstance(x, bool):
        raise TypeError(f"{name}: got {_got_type(x)}, must be a float or an int")
    return x


def _softcap(softcap):
    if not 0 <= _number(softcap, "softcap") <= _MAX_SOFTCAP:  # NaN fails too
        raise ValueError(f"softcap: got {softcap}, must be finite and positive, or 0 for none")
    return float(softcap)


def dropout_probability(dropout_p, name="dropout_p"):
    """0 to 1, as a float."""
    if not 0 <= _number(dropout_p, name) <= 1:
        raise ValueError(f"{name}: got {dropout_p}, allowed is 0 to 1")
    return float(dropout_p)


def _no_modifier_gradient(x, name):
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: got a tensor that requires grad, but it has no gradient here: pass {name}.detach()"
        )


def bias(x, Q, shape, name="attn_bias", of="Q"):
    """bool or a float dtype, broadcastable to `shape` [B, Hq, Sq, Skv]; returns it expanded."""
    # As plain(): sure of most masks, without the checks one by one.
    if not (
        type(x) is Tensor
        and x.layout is _STRIDED
        and not x.is_nested
        and (x.dtype is torch.bool or x.dtype in INPUT_DTYPES)
        and ((x.is_cpu and Q.is_cpu) or (_HAS_CUDA and x.is_cuda and x.device == Q.device))
        and not x.requires_grad
        and forward_ad._current_level < 0
        and not _in_transform()
    ):
        if isinstance(x, CausalBias):  # holds no values
            raise TypeError(f"{name}: got torch's CausalBias, must be a torch.Tensor with values, or causal=True")
        _tensor(x, name)
        if x.dtype is not torch.bool and x.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name}: got dtype {x.dtype}, allowed are bool, float32, bfloat16 and float16")
        _same_device(x, Q.device, name, of)
        _no_modifier_gradient(x, name)
    if x.shape == shape:
        return x
    given = x.shape
    if len(given) <= 4:
        for size, full in zip(given, shape[4 - len(given) :]):
            if size != 1 and size != full:
                break
        else:
            return x.expand(*shape)
    raise ValueError(f"{name}: got shape {tuple(given)}, must be broadcastable to [B, Hq, Sq, Skv], {tuple(shape)}")


def _slopes(slopes, Q):
    _tensor(slopes, "alibi_slopes")
    if slopes.dtype is not torch.float32:
        raise TypeError(f"alibi_slopes: got dtype {slopes.dtype}, must be float32")
    _same_device(slopes, Q.device, "alibi_slopes", "Q")
    if slopes.shape != Q.shape[1:2] and slopes.shape != Q.shape[:2]:
        raise ValueError(
            f"alibi_slopes: got shape {tuple(slopes.shape)}, must be [Hq] or [B, Hq] of Q, {tuple(Q.shape[:2])}"
        )
    _no_modifier_gradient(slopes, "alibi_slopes")


def _ranges(ranges, Q):
    _tensor(ranges, "key_ranges")
    if ranges.dtype is not torch.int32:
        raise TypeError(f"key_ranges: got dtype {ranges.dtype}, must be int32")
    _same_device(ranges, Q.device, "key_ranges", "Q")
    shape, (batch, _, length, _) = ranges.shape, Q.shape
    if len(shape) != 3 or (shape[0] != 1 and shape[0] != batch) or shape[1] != length or shape[2] not in (2, 3):
        raise ValueError(
            f"key_ranges: got shape {tuple(shape)}, must be [B or 1, Sq, 2 or 3] with B = {batch}, Sq = {length}"
        )
    if not ranges.is_contiguous():
        raise ValueError("key_ranges: got a tensor that is not contiguous: call .contiguous()")


def integers(x, name, query, also=()):
    """A tensor of integers on query's device."""
    _strided(x, name)
    allowed = (*also, torch.int8, torch.int16, torch.int32, torch.int64)
    if x.dtype not in allowed:
        names = ", ".join(str(dtype)[6:] for dtype in allowed)
        raise TypeError(f"{name}: got dtype {x.dtype}, must be integers: allowed are {names}")
    _same_device(x, query.device, name, "query")


def length(x, name):
    """An int that is not negative."""
    _integer(x, name)
    if x < 0:
        raise ValueError(f"{name}: got {x}, must not be negative")


def vector(x, name, Q, size, of="q", dtypes=(torch.int32,)):
    """int32 [size] on Q's device; size None is any from 2."""
    _tensor(x, name)
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, must be {' or '.join(str(d)[6:] for d in dtypes)}")
    _same_device(x, Q.device, name, of)
    if x.dim() != 1 or (x.shape[0] < 2 if size is None else x.shape[0] != size):
        allowed = "[N + 1] of at least one sequence" if size is None else f"[{size}]"
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, must be {allowed}")
    return x.shape[0]


def host_values(*tensors):
    """The tensors, or None, as lists, where reading them waits for nothing. None on a GPU, and for tensors that hold no
    numbers: those of a compiler, of vmap and of a fake mode."""
    if torch.compiler.is_compiling() or any(x is not None and not x.is_cpu for x in tensors):
        return None
    try:
        return [None if x is None else x.tolist() for x in tensors]
    except RuntimeError:
        return None


def starts(values, name, rows, of):
    """A list of sequences' starts within so many rows; None: within any."""
    if values[0] != 0:
        raise ValueError(f"{name}: got {values[0]} first, must be 0")
    for start, end in zip(values, values[1:]):
        if end < start:
            raise ValueError(f"{name}: got {end} after {start}, must never fall")
    if rows is not None and values[-1] > rows:
        raise ValueError(f"{name}: got {values[-1]} last, must be at most {of}'s {rows} rows")


def used_keys(lengths, name, room):
    """How many keys of each sequence are used, and how many there are."""
    for n, (length, most) in enumerate(zip(lengths, room)):
        if length < 0 or length > most:
            raise ValueError(f"{name}: got {length} keys of sequence {n}, allowed is 0 to {most}")


def used_pages(table, lengths, page_size, pages):
    """block_table as lists: what is in use must be pages."""
    for n, (row, length) in enumerate(zip(table, lengths)):
        for page in row[: -(-length // max(page_size, 1))]:
            if page < 0 or page >= pages:
                raise ValueError(f"block_table: got page {page} of sequence {n}, allowed is 0 to {pages - 1}")


def table(x, Q, sequences):
    """block_table int32 [sequences, max_blocks] on q's device."""
    _tensor(x, "block_table")
    if x.dtype is not torch.int32:
        raise TypeError(f"block_table: got dtype {x.dtype}, must be int32")
    _same_device(x, Q.device, "block_table", "q")
    if x.dim() != 2 or x.shape[0] != sequences:
        raise ValueError(f"block_table: got shape {tuple(x.shape)}, must be [{sequences}, max_blocks]")


def pages(k, v, q, block_table):
    """k, v [num_blocks, page_size, Hkv, D] of one shape: one table serves both."""
    for x, name in ((k, "k"), (v, "v")):
        matrix(x, name)
        _same_device(x, q.device, name, "q")
    if k.shape[0] == 0 and block_table.shape[1] > 0:
        raise ValueError(f"k: got no pages, but block_table has shape {tuple(block_table.shape)}")


def _ids(x, name, Q, shape):
    _row_integers(x, name, torch.int64, Q.device, torch.Size(shape), _ID_SHAPES[name], None)
    if not x.is_contiguous():
        raise ValueError(f"{name}: got a tensor that is not contiguous: call .contiguous()")


def key_range(kv_lo, kv_hi, kv_len):
    """0 <= kv_lo <= kv_hi <= Skv; kv_hi None is Skv."""
    _integer(kv_lo, "kv_lo")
    if kv_hi is None:
        kv_hi = kv_len
    else:
        _integer(kv_hi, "kv_hi")
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


def _choice(x, name, allowed):
    if not isinstance(x, str):
        raise TypeError(f"{name}: got {_got_type(x)}, must be one of {', '.join(map(repr, allowed))}")
    if x not in allowed:
        raise ValueError(f"{name}: got {x!r}, allowed are {', '.join(map(repr, allowed))}")


def precision_name(precision):
    _choice(precision, "precision", ("highest", "high"))


def row_kind(kind):
    _choice(kind, "kind", ("query", "key", "value"))


def path_name(path, x):
    _choice(path, "path", ("auto", "reference", "mma", "wgmma"))
    if path in ("mma", "wgmma") and x.is_cpu:
        raise ValueError(f"path: got {path!r} with CPU tensors, allowed there are 'auto' and 'reference'")
    if path == "wgmma" and torch.cuda.get_device_capability(x.device) != (9, 0):
        raise ValueError("path: got 'wgmma' on a GPU without it, it needs compute capability 9.0")


def output_dtype(out_dtype):
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: got {_got_type(out_dtype)}, must be a torch.dtype")
    if out_dtype not in INPUT_DTYPES:
        raise ValueError(f"out_dtype: got {out_dtype}, allowed are torch.float32, torch.bfloat16 and torch.float16")


def distribution(method, replicated_q, head_groups, q_offset, chunk_bytes):
    """What det_attn_context_parallel takes beside the arguments of a call."""
    _choice(method, "method", ("ring", "gather", "reduce"))
    flag(replicated_q, "replicated_q")
    if replicated_q and method != "reduce":
        raise ValueError(f"replicated_q: got True with method={method!r}, needs method='reduce'")
    if replicated_q and head_groups:
        raise ValueError("replicated_q: got True with a heads_group, only one of them is allowed")
    if q_offset is not None:
        _offset(q_offset, "q_offset")
    _integer(chunk_bytes, "chunk_bytes")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: got {chunk_bytes}, must be positive")


def layout(x, q_len, kv_len, device):
    """None for a layout with a name, otherwise the positions of own queries and of own keys."""
    if isinstance(x, str):
        _choice(x, "layout", ("contiguous", "zigzag"))
        return None
    pair = x if isinstance(x, tuple) else (x, x)
    if len(pair) != 2:
        raise ValueError(f"layout: got a tuple of {len(pair)}, must be (positions of queries, positions of keys)")
    for positions, length, rows in ((pair[0], q_len, "q"), (pair[1], kv_len, "k")):
        if not isinstance(positions, torch.Tensor):
            raise TypeError(f"layout: got {_got_type(positions)}, must be 'contiguous', 'zigzag' or int64 tensors")
        if positions.dtype is not torch.int64:
            raise TypeError(f"layout: got positions of dtype {positions.dtype}, must be int64")
        if positions.shape != (length,):
            raise ValueError(
                f"layout: got positions of shape {tuple(positions.shape)}, must be one a row of {rows}, ({length},)"
            )
        _same_device(positions, device, "layout", "q")
    return pair


def position_ends(ends):
    """The least and largest of explicit positions: sums of them with q_offset and a window must fit int64."""
    for x in ends:
        if x < -_FARTHEST or x > _FARTHEST:
            raise ValueError(f"layout: got position {x}, allowed is -2**60 to 2**60")


def window_size(x, name):
    """transformers' sliding_window: a count of keys."""
    _integer(x, name)
    if x < 1 or x > _MAX_OFFSET:
        raise ValueError(f"{name}: got {x}, allowed is 1 to 2**62, or None")


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
