"""Attention over shards of the keys on one device: the stages, forward and backward, combined by max and +.

In: as the fused call, and how the keys are cut. Out: the fused call's bytes, and those of its gradients, for every cut
(contract sections 3, 5, 6, 8, 10, 11).
"""

from typing import Optional, Sequence

import torch
from torch import Tensor

from . import checks
from ._ops import ops
from .gradients import Narrow, Once, joined, split


def det_attn_sharded(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    kv_splits: Sequence[int],
    causal: bool = False,
    scale: Optional[float] = None,
    *,
    precision: str = "highest",
    q_offset: Optional[int] = None,
    attn_bias: Optional[Tensor] = None,
    window: Sequence[int] = checks.EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    key_ranges: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    out_dtype: torch.dtype = torch.float32,
    path: str = "auto",
) -> Tensor:
    """`det_attn` over consecutive shards of the keys; `torch.equal` to it for every kv_splits.

    Args:
        kv_splits: list or tuple of shard sizes, ints >= 0, that add up to Skv.
        The others are those of `det_attn`.

    Returns:
        out_dtype [B, Hq, Sq, D], contiguous.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it. Nothing is computed.
        NotImplementedError: as `det_attn`.

    Gradients are those of `det_attn`, byte for byte, over the same shards.
    """
    q_shape, k_shape = checks.inputs(Q, K, V)
    shards = checks.key_splits(kv_splits, k_shape[2])
    checks.output_dtype(out_dtype)
    diagonal, modifiers = checks.modifiers(
        Q, k_shape, causal, q_offset, 0, attn_bias, window, softcap, alibi_slopes, key_ranges, dropout_p, dropout_seed
    )
    scale = checks.softmax_scale(scale, q_shape[3])
    checks.precision_name(precision)
    checks.path_name(path, Q)
    call = (causal, scale, precision, diagonal)
    if torch.is_grad_enabled() and (Q.requires_grad or K.requires_grad or V.requires_grad):
        out = _Sharded.apply(Q, K, V, call, shards, modifiers, path)
        return out if out_dtype is torch.float32 else Narrow.apply(out, out_dtype)
    return _forward(Q, K, V, call, shards, modifiers, out_dtype, path)[0]


def _forward(Q, K, V, call, shards, modifiers, out_dtype, path):
    """out, and what the backward pass needs beside it: rowmax and DEN over all keys."""
    maximum = None
    for kv_lo, kv_hi in shards:
        shard = ops.rowmax.default(Q, K, *call, kv_lo, kv_hi, *modifiers.of_scores, path)
        maximum = shard if maximum is None else torch.maximum(maximum, shard)

    num, den = None, None
    for kv_lo, kv_hi in shards:
        shard_num, shard_den = ops.accumulate.default(Q, K, V, maximum, *call, kv_lo, kv_hi, *modifiers, path)
        num = shard_num if num is None else num.add_(shard_num)  # in place: NUM is the largest tensor here
        den = shard_den if den is None else den.add_(shard_den)

    return ops.finalize.default(num, den, call[2], out_dtype, modifiers.dropout_p), maximum, den


def _backward(dO, Q, K, V, out, rowmax, den, call, shards, need, modifiers, path):
    """dQ, dK, dV; None where not needed."""
    given = (dO, Q, K, V, out, rowmax, den)
    references = None
    for kv_lo, kv_hi in shards:
        shard = ops.grad_reference.default(*given, *call, kv_lo, kv_hi, *modifiers, path)
        references = shard if references is None else tuple(map(torch.maximum, references, shard))

    sums = None
    for kv_lo, kv_hi in shards:
        shard = ops.grad_accumulate.default(*given, *references, *call, kv_lo, kv_hi, *need, *modifiers, path)
        sums = shard if sums is None else tuple(a.add_(b) for a, b in zip(sums, shard))

    _, scale, precision, _ = call
    return tuple(
        ops.grad_finalize.default(total, reference, kind, factor, precision, Q.dtype) if needed else None
        for total, reference, kind, factor, needed in zip(
            sums, references, ("query", "key", "value"), (scale, 1.0, 1.0), need
        )
    )


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, call, shards, modifiers, path):
        out, rowmax, den = _forward(Q, K, V, call, shards, modifiers, torch.float32, path)
        tensors, ctx.modifiers = split(modifiers)
        ctx.save_for_backward(Q, K, V, out, rowmax, den, *tensors)
        ctx.call, ctx.shards, ctx.path = call, shards, path
        return out

    @staticmethod
    def backward(ctx, dO):
        Q, K, V, out, rowmax, den, *tensors = ctx.saved_tensors
        modifiers = joined(tensors, ctx.modifiers)
        need = ctx.needs_input_grad[:3]
        with torch.no_grad():
            found = _backward(dO, Q, K, V, out, rowmax, den, ctx.call, ctx.shards, need, modifiers, ctx.path)
        if torch.is_grad_enabled():  # create_graph=True
            found = tuple(x if x is None else Once.apply(x, dO, Q, K, V) for x in found)
        return (*found, None, None, None, None)
