"""The gradients: autograd of the fused call, and the backward stages as separate calls (contract section 8).

grad_reference (combine shards by torch.maximum) -> grad_accumulate (combine by +) -> grad_finalize. A shard is some of
the keys, some of the queries, or both. In: the call's Q, K, V, the gradient dO of its output, and what the forward pass
knows over all keys: the float32 output, rowmax and DEN. Out: dQ, dK, dV.
"""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import checks
from ._ops import add_op_namespace_prefix, ops

# ---- Autograd of the fused call -------------------------------------------------------------------------------------


def _keep(ctx, inputs, output):
    q, k, v, *call = inputs[:9]
    out, rowmax, den = output
    ctx.mark_non_differentiable(rowmax, den)
    ctx.set_materialize_grads(False)
    ctx.call, ctx.out_dtype, ctx.path = call, inputs[9], inputs[-2]
    tensors, ctx.modifiers = split(inputs[10:-2])
    ctx.save_for_backward(q, k, v, out, rowmax, den, *tensors)


def split(modifiers):
    """The tensors among the modifiers, None where there is none, and all the others with None in their place."""
    tensors = [x if i in _TENSORS else None for i, x in enumerate(modifiers)]
    return [tensors[i] for i in _TENSORS], [None if i in _TENSORS else x for i, x in enumerate(modifiers)]


def joined(tensors, others):
    """What split() took apart."""
    modifiers = list(others)
    for i, x in zip(_TENSORS, tensors):
        modifiers[i] = x
    return modifiers


_TENSORS = (0, 1, 2, 11, 12)  # bias, alibi_slopes, key_ranges, dropout_rows, dropout_keys in checks.Modifiers
_FORWARD_ARGUMENTS = 10 + len(checks.Modifiers._fields) + 2


def _fused(ctx, grad, *_):
    if grad is None:
        return (None,) * _FORWARD_ARGUMENTS
    if ctx.out_dtype is not torch.float32:  # det_attn() asks the op for float32 and rounds by itself
        raise NotImplementedError(
            f"out_dtype: got {ctx.out_dtype}, but the gradient is a function of the float32 output: call det_attn()"
        )
    need = ctx.needs_input_grad[:3]
    if any(ctx.needs_input_grad[3:]):  # det_attn() refuses this earlier
        raise NotImplementedError("det-attn: bias and alibi_slopes have no gradient: detach them")
    q, k, v, out, rowmax, den, *tensors = ctx.saved_tensors
    modifiers = joined(tensors, ctx.modifiers)
    found = ops.backward.default(grad, q, k, v, out, rowmax, den, *ctx.call, *need, *modifiers, ctx.path)
    return (*(x if needed else None for x, needed in zip(found, need)), *(None,) * (_FORWARD_ARGUMENTS - 3))


def refuse_twice(ctx, *grads):
    """The backward pass of a gradient."""
    raise NotImplementedError("det-attn: the second derivative is not implemented: a gradient has no gradient")


torch.library.register_autograd(add_op_namespace_prefix("forward"), _fused, setup_context=_keep)
torch.library.register_autograd(add_op_namespace_prefix("backward"), refuse_twice)


class Narrow(torch.autograd.Function):
    """The float32 output rounded once more (section 6), where the float32 one must be kept for the gradient."""

    @staticmethod
    def forward(ctx, out, out_dtype):
        # torch converts NaN to other bits than the contract's on some machines. Not in place: torch 2.11's compiler
        # would lose the gradient without a word.
        return out.to(out_dtype).masked_fill(out.isnan(), float("nan"))

    @staticmethod
    def backward(ctx, grad):
        return grad.to(torch.float32), None


class Once(torch.autograd.Function):
    """A gradient that refuses, instead of forgetting, that it depends on dO, Q, K and V."""

    @staticmethod
    def forward(ctx, gradient, *inputs):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *grads):
        refuse_twice(ctx, *grads)


# ---- The stages -----------------------------------------------------------------------------------------------------


def grad_reference(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    dO: Tensor,
    out: Tensor,
    rowmax: Tensor,
    DEN: Tensor,
    causal: bool = False,
    scale: Optional[float] = None,
    kv_lo: int = 0,
    kv_hi: Optional[int] = None,
    *,
    precision: str = "highest",
    q_offset: Optional[int] = None,
    kv_offset: int = 0,
    attn_bias: Optional[Tensor] = None,
    window: Sequence[int] = checks.EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    key_ranges: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    dropout_head: int = 0,
    dropout_rows: Optional[Tensor] = None,
    dropout_keys: Optional[Tensor] = None,
    path: str = "auto",
) -> Tuple[Tensor, Tensor, Tensor]:
    """Exponents of the largest terms of dQ, dK and dV, over the queries Q and the keys K[:, :, kv_lo:kv_hi].

    Contract section 8.

    Args:
        Q, K, V, causal, scale, kv_lo, kv_hi, the options: those of `accumulate`.
        dO: [B, Hq, Sq, D], gradient of the output; float32, bfloat16 or float16, whatever Q's dtype.
        out: float32 [B, Hq, Sq, D], the output over *all* keys before any further rounding.
        rowmax: float64 [B, Hq, Sq]; DEN: int64 [B, Hq, Sq]; both over *all* keys.

    Returns:
        (A int32 [B, Hq, Sq], B int32 [B, Hkv, Skv], C int32 [B, Hkv, Skv]). -2^31 where no term is nonzero and for keys
        outside [kv_lo, kv_hi); 2^31 - 1 where the gradient row is NaN. Combine shards by torch.maximum: A over shards
        of the keys, B and C over shards of the queries.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        NotImplementedError: an input requires grad and grad mode is on.
    """
    given = (Q, K, V, dO, out, rowmax, DEN)
    call, modifiers = _call(
        "grad_reference", *given, causal, scale, kv_lo, kv_hi, precision, q_offset, kv_offset, path, attn_bias, window,
        softcap, alibi_slopes, key_ranges, dropout_p, dropout_seed, dropout_head, dropout_rows, dropout_keys,
    )  # fmt: skip
    return ops.grad_reference.default(dO, Q, K, V, out, rowmax, DEN, *call, *modifiers, path)


def grad_accumulate(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    dO: Tensor,
    out: Tensor,
    rowmax: Tensor,
    DEN: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    causal: bool = False,
    scale: Optional[float] = None,
    kv_lo: int = 0,
    kv_hi: Optional[int] = None,
    *,
    precision: str = "highest",
    q_offset: Optional[int] = None,
    kv_offset: int = 0,
    attn_bias: Optional[Tensor] = None,
    window: Sequence[int] = checks.EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    key_ranges: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    dropout_head: int = 0,
    dropout_rows: Optional[Tensor] = None,
    dropout_keys: Optional[Tensor] = None,
    path: str = "auto",
) -> Tuple[Tensor, Tensor, Tensor]:
    """Exact sums of dQ, dK and dV over the queries Q and the keys K[:, :, kv_lo:kv_hi] (contract section 8).

    Args:
        A, B, C: int32, of `grad_reference`, combined over all shards, not of this shard alone.
        The others are those of `grad_reference`, and must have the same values.

    Returns:
        (int64 [B, Hq, Sq, D, 3], int64 [B, Hkv, Skv, D, 3], int64 [B, Hkv, Skv, D, 3]): the sums of dQ, dK, dV, each an
        integer in three digits; digit k weighs 2^(32k), digits 0 and 1 are in [0, 2^32), the sign is in digit 2.
        Combine shards by +, in any order: dQ over shards of the keys, dK and dV over shards of the queries.

    Raises:
        TypeError, ValueError, NotImplementedError: as `grad_reference`.
    """
    given = (Q, K, V, dO, out, rowmax, DEN)
    call, modifiers = _call(
        "grad_accumulate", *given, causal, scale, kv_lo, kv_hi, precision, q_offset, kv_offset, path, attn_bias, window,
        softcap, alibi_slopes, key_ranges, dropout_p, dropout_seed, dropout_head, dropout_rows, dropout_keys,
    )  # fmt: skip
    checks.references(A, B, C, Q, Q.shape, K.shape)
    given = (dO, Q, K, V, out, rowmax, DEN, A, B, C)
    return ops.grad_accumulate.default(*given, *call, True, True, True, *modifiers, path)


def grad_finalize(
    SUM: Tensor,
    reference: Tensor,
    kind: str,
    scale: Optional[float] = None,
    *,
    precision: str = "highest",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One of dQ, dK, dV from its sums over all shards, rounded once (contract section 8).

    Args:
        SUM: int64 [..., D, 3], the sum of the shards'; the digits need not be normalised.
        reference: int32 [...], the combined A for dQ, B for dK, C for dV.
        kind: "query" for dQ, "key" for dK, "value" for dV.
        scale: the call's, for dQ only; None is 1 / sqrt(D). Must be None for dK and dV.
        precision: the one given to grad_accumulate.
        out_dtype: the dtype of Q, K, V.

    Returns:
        out_dtype [..., D], contiguous; NaN rows where the reference says so, 0 where nothing was added.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    checks.gradient_sums(SUM, reference)
    checks.row_kind(kind)
    if kind == "query":
        scale = checks.softmax_scale(scale, SUM.shape[-2])
    elif scale is not None:
        raise ValueError(f"scale: got {scale} for kind={kind!r}, must be None: only dQ is scaled here")
    else:
        scale = 1.0
    checks.precision_name(precision)
    checks.output_dtype(out_dtype)
    return ops.grad_finalize.default(SUM, reference, kind, scale, precision, out_dtype)


def _call(
    function, Q, K, V, dO, out, rowmax, DEN, causal, scale, kv_lo, kv_hi, precision, q_offset, kv_offset, path,
    *modifiers,
):  # fmt: skip
    """Checks what both stages take; returns the resolved arguments behind the tensors, and the modifiers."""
    q_shape, k_shape = checks.inputs(Q, K, V)
    checks.output_gradient(dO, out, DEN, Q, q_shape)
    checks.row_maxima(rowmax, Q, q_shape)
    diagonal, modifiers = checks.modifiers(Q, k_shape, causal, q_offset, kv_offset, *modifiers)
    scale = checks.softmax_scale(scale, q_shape[3])
    kv_lo, kv_hi = checks.key_range(kv_lo, kv_hi, k_shape[2])
    checks.precision_name(precision)
    checks.path_name(path, Q)
    checks.no_gradient(function, Q=Q, K=K, V=V, dO=dO, out=out, rowmax=rowmax)
    return (causal, scale, precision, diagonal, kv_lo, kv_hi), modifiers
