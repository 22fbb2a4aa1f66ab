"""torch's scaled_dot_product_attention with det-attn's bytes, and the switch that puts it in torch's place.

In: query [..., Hq, L, E], key [..., H, S, E], value [..., H, S, Ev], as torch takes them. Out: [..., Hq, L, Ev] in the
dtype of the input. The bytes are those of `det_attn` (contract sections 1-8, 10, 11), whatever the leading dimensions.
"""

import contextlib
import math
import threading
import warnings
from typing import Iterator, Optional

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from . import checks
from .attention import fused


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    *,
    precision: str = "highest",
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the bytes of `det_attn`.

    Args:
        query: [..., Hq, L, E]; key: [..., H, S, E]; value: [..., H, S, Ev], E and Ev from 1 to 256. float32, bfloat16
            or float16, all of one dtype and on one device; under autocast they are converted to its dtype first, as
            by torch. Leading dimensions broadcast; there may be none.
        attn_mask: broadcastable to [..., Hq, L, S]. bool: True is attended. float32, bfloat16 or float16: added to the
            scaled scores, -inf is not attended (contract section 10). No gradient. Or torch's CausalBias.
        dropout_p: probability of dropping a weight. The seed is drawn from torch's default CPU generator, on every
            device: torch.manual_seed governs it, compiled or not, and nothing waits for a GPU. It is a number of the
            host, so every replay of a CUDA graph drops the weights that were dropped at the capture.
        is_causal: query i attends the keys j <= i: aligned to the top left, unlike `det_attn(causal=True)`.
        scale: factor on the scores, a finite number of Python or numpy; None is 1 / sqrt(E). Not a tensor, unlike in
            torch: it would have to be read.
        enable_gqa: Hq may be a multiple of H; query head h reads key head h // (Hq // H). Key and value have the same
            number of heads, unlike in torch.
        precision: "highest" or "high", as in `det_attn`.

    Returns:
        [..., Hq, L, Ev] in query's dtype; rows that attend nothing are 0.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it. Nothing is computed.
        NotImplementedError: attn_mask requires grad and grad mode is on, an input has a forward-mode tangent or is
            differentiated by torch.func, or dropout under its vmap; from the backward() of a gradient.
    """
    shapes = checks.plain(query, key, value)
    if shapes is None:
        checks.are_tensors(query=query, key=key, value=value)
        narrow = attn_mask is None or (isinstance(attn_mask, Tensor) and attn_mask.dim() <= 3)
        if narrow and query.dim() == key.dim() == value.dim() == 3:
            four = (query[None], key[None], value[None], attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return scaled_dot_product_attention(*four, precision=precision)[0]
    if torch._C._is_any_autocast_enabled():
        device = "cuda" if query.is_cuda else "cpu"
        own = torch.is_autocast_enabled(device)  # and not another device's alone
        if own and (shapes is None or query.dtype is not torch.get_autocast_dtype(device)):
            query, key, value = cast_for_autocast(query, key, value)
            shapes = checks.plain(query, key, value)
    checks.flag(is_causal, "is_causal")
    checks.flag(enable_gqa, "enable_gqa")
    q_offset = 0  # from the top left: query i's own place is key i
    if attn_mask is not None:
        if is_causal:
            raise ValueError("attn_mask: got a mask together with is_causal=True, only one of them may be given")
        if type(attn_mask) is CausalBias:  # isinstance takes ten times as long
            q_offset = _diagonal(attn_mask, query, key)
            attn_mask, is_causal = None, True
    if shapes is not None and (enable_gqa or shapes[0][1] == shapes[1][1]):
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, precision, q_offset, shapes)
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, q_offset)


def _diagonal(bias, query, key):
    """Query 0's own key under torch's CausalBias, which has a shape but holds no values."""
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    if query.dim() > 1 and key.dim() > 1 and sizes != (query.shape[-2], key.shape[-2]):
        raise ValueError(f"attn_mask: got a CausalBias of {sizes}, must be of {(query.shape[-2], key.shape[-2])}")
    return _offset(bias)


def _offset(bias):
    return bias.seq_len_kv - bias.seq_len_q if bias.variant is CausalVariant.LOWER_RIGHT else 0


def _as_torch_has_it(bias, device):
    """(attn_mask, is_causal) with which torch's function computes a CausalBias."""
    if _offset(bias) == 0:
        return None, True
    return torch.ones(bias.seq_len_q, bias.seq_len_kv, dtype=torch.bool, device=device).tril(_offset(bias)), False


def cast_for_autocast(query, key, value):
    """Under autocast torch gives its attention inputs of the reduced dtype."""
    device = "cuda" if query.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype in checks.INPUT_DTYPES else x for x in (query, key, value))


def draw_seed():
    """From torch's default CPU generator, on every device: a GPU's would have to be waited for."""
    if torch.compiler.is_compiling():  # the same number; in randint's place Inductor would put another generator
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError("dropout: got one under torch.func and torch.compile, allowed is one of them")
        return torch.ops.aten.random.to(torch.empty((), dtype=torch.int64, device="cpu"), 2**63 - 1).item()
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    if torch._C._functorch.is_batchedtensor(seed):
        raise NotImplementedError("dropout: got one under torch.func.vmap with randomness='different': use 'same'")
    return seed.item()


def same_width(query, key, value):
    """Rows of one width. Zeros added to a row change neither its exponent nor its products: the bytes stay."""
    columns = max(query.shape[-1], value.shape[-1])
    if value.shape[-1] < columns:
        return query, key, functional.pad(value, (0, columns - value.shape[-1]))
    if query.shape[-1] < columns:
        extra = (0, columns - query.shape[-1])
        return functional.pad(query, extra), functional.pad(key, extra), value
    return query, key, value


def _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, precision, q_offset, shapes=None):
    """Inputs shaped as det_attn takes them; their shapes, if they are checked."""
    q_shape, k_shape = shapes or checks.inputs(query, key, value, checks.TORCHS)
    scale = checks.softmax_scale(scale, q_shape[3])
    checks.precision_name(precision)
    bias = attn_mask
    if bias is not None:
        batch, heads, length, _ = q_shape
        bias = checks.bias(bias, query, (batch, heads, length, k_shape[2]), "attn_mask", "query")
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = checks.dropout_probability(dropout_p)
    if dropout_p > 0.0:  # a call that is refused draws nothing
        modifiers = checks.Modifiers(bias, dropout_p=dropout_p, dropout_seed=draw_seed())
    else:
        modifiers = checks.NO_MODIFIERS if bias is None else (bias, *checks.NO_OTHERS)
    call = (is_causal, scale, precision, q_offset, 0, k_shape[2])
    return fused(query, key, value, call, modifiers, query.dtype, "auto")[0]


def _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, q_offset):
    """Any leading dimensions, grouped heads, and values of another width, brought to det_attn's shapes by views."""
    for x, name in ((query, "query"), (key, "key"), (value, "value")):
        if x.dim() < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, must be at least 2-D [..., length, head_dim]")
        checks.input_dtype(x, name)
    if attn_mask is not None:
        checks.are_tensors(attn_mask=attn_mask)
    width, value_width = checks.widths(query, key, value)
    scale = checks.softmax_scale(scale, width)  # of the width as given, not as padded below

    # Heads are the last of the leading dimensions. They broadcast like every other, unless they are grouped.
    kept = 3 if enable_gqa and min(query.dim(), key.dim(), value.dim()) > 2 and query.shape[-3] != key.shape[-3] else 2
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-kept] for x in (query, key, value)))
    except RuntimeError:
        came = ", ".join(str(tuple(x.shape[:-2])) for x in (query, key, value))
        raise ValueError(
            f"query, key, value: got leading dimensions {came}, which do not broadcast (enable_gqa={enable_gqa})"
        ) from None
    batch = math.prod(lead if kept == 3 else lead[:-1])

    def four(x):
        heads = x.shape[-3] if kept == 3 else lead[-1] if lead else 1
        x = x.expand(*lead, *x.shape[-kept:]).reshape(batch, heads, *x.shape[-2:])
        return x if x.stride(-1) == 1 else x.contiguous()

    out_shape = (*lead, *query.shape[-kept:-1], value_width)
    if attn_mask is not None and attn_mask.dim() > max(2, len(out_shape)):
        scores = (*out_shape[:-1], key.shape[-2])
        raise ValueError(f"attn_mask: got shape {tuple(attn_mask.shape)}, must be broadcastable to {scores}")
    if attn_mask is not None and len(out_shape) > 4:
        attn_mask = _four_mask(attn_mask, (*out_shape[:-1], key.shape[-2]), batch)
    query, key, value = (four(x) for x in same_width(query, key, value))
    out = _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, precision, q_offset)
    return out[..., :value_width].reshape(out_shape)


def _four_mask(mask, shape, batch):
    """A mask for scores of `shape`, more than 4-D, brought to 4-D."""
    given = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    if len(given) != len(shape) or any(size != 1 and size != full for size, full in zip(given, shape)):
        raise ValueError(f"attn_mask: got shape {tuple(mask.shape)}, must be broadcastable to {tuple(shape)}")
    return mask if mask.dim() <= 2 else mask.expand(shape).reshape(batch, *shape[-3:])


# ---- In torch's place -----------------------------------------------------------------------------------------------

_lock = threading.Lock()
_replacements = []  # of the blocks that are open; the last one counts
_replaced = functional.scaled_dot_product_attention  # what was there before the first
_fast_path = torch.backends.mha.get_fastpath_enabled()  # as it was then: of torch.nn's layers, past the function


@contextlib.contextmanager
def replace_sdpa(*, fallback: bool = False, precision: str = "highest") -> Iterator[None]:
    """Within the block, `torch.nn.functional.scaled_dot_product_attention` is det-attn's; also a decorator of
    functions, but of generators and coroutines only while they are made.

    It is replaced for the whole process, not for this thread alone, because the recomputation of a checkpoint runs in
    autograd's threads. The fast path of torch.nn's attention and transformer layers, which passes the function by in
    eval() without gradients, is off meanwhile (torch.backends.mha.set_fastpath_enabled). Not reached are code that took
    the function from its module before the block (`from torch.nn.functional import scaled_dot_product_attention`), and
    torch.nn.MultiheadAttention with need_weights=True, its default, which never calls the function. Enter the block
    outside of what torch.compile compiles: a compiler takes no locks.

    It adds 4 to 6 microseconds to the op's own time (Intel Xeon, Python 3.11; 6 to 9.5 on the host of an H200, Python
    3.12) for 4-D inputs of one shape or grouped heads, of one dtype, also under autocast to it, with or without a
    mask. 3-D inputs, dropout and float32 gradients take about 10, a bfloat16 or float16 output that has a gradient 35,
    and what else has to be broadcast, padded or flattened up to 60.

    Args:
        fallback: False: a call that det-attn does not support raises. True: it warns, once in this block, and runs
            torch's function; the bytes of such a call are torch's. What torch.compile traces does not warn.
        precision: "highest" or "high", as in `det_attn`.

    Raises:
        TypeError, ValueError: on entering, an argument is not as above; in the block, as scaled_dot_product_attention.
    """
    checks.flag(fallback, "fallback")
    checks.precision_name(precision)
    warned = []

    def strict(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision=precision
        )

    def lenient(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        try:
            return strict(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        except (TypeError, ValueError, NotImplementedError) as error:
            if not warned and not torch.compiler.is_compiling():  # a compiler's one graph has no place for a warning
                warned.append(error)
                warnings.warn(f"det-attn does not support this call, torch computes it: {error}", stacklevel=2)
            if isinstance(attn_mask, CausalBias) and not is_causal:  # it would look for torch's function in vain
                attn_mask, is_causal = _as_torch_has_it(attn_mask, getattr(query, "device", None))
            how = dict(scale=scale, enable_gqa=enable_gqa)
            return _replaced(query, key, value, attn_mask, dropout_p, is_causal, **how)

    global _replaced, _fast_path
    entry = lenient if fallback else strict if precision != "highest" else scaled_dot_product_attention
    block = [entry]  # told from another of the same entry
    with _lock:
        if not _replacements:
            _replaced = functional.scaled_dot_product_attention
            _fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _replacements.append(block)
        functional.scaled_dot_product_attention = entry
    try:
        yield
    finally:
        with _lock:
            _replacements[:] = [other for other in _replacements if other is not block]
            functional.scaled_dot_product_attention = _replacements[-1][0] if _replacements else _replaced
            if not _replacements:
                torch.backends.mha.set_fastpath_enabled(_fast_path)
