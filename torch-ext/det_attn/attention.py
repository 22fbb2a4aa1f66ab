"""The fused call: Q, K, V -> output, in one op (contract sections 1-7, 10, 11).

In: Q [B, Hq, Sq, D], K and V [B, Hkv, Skv, D], any strides with a dense last dimension. Out: [B, Hq, Sq, D].
"""

from typing import NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import checks
from ._ops import ops
from .gradients import Narrow


class State(NamedTuple):
    """What the fused call knows of each softmax, beside its output; all [B, Hq, Sq].

    rowmax: float64, M_i * 2^-24 exactly (contract section 3); -inf where nothing is attended, NaN in poisoned rows.
    den: int64, DEN_i in units of 2^-31 ("highest") or 2^-23 ("high") (contract section 5).
    lse: float32 log-sum-exp of the scaled scores, for information: its bytes are not part of the contract (section 9).
    """

    rowmax: Tensor
    den: Tensor
    lse: Tensor


def det_attn(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
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
    return_state: bool = False,
    path: str = "auto",
) -> Union[Tensor, Tuple[Tensor, State]]:
    """softmax(Q K^T * scale) V with the same bytes whatever the sharding, batching, key order, device or thread count.

    Args:
        Q: [B, Hq, Sq, D]; K, V: [B, Hkv, Skv, D]; query head h reads key head h // (Hq // Hkv), Hq a multiple of Hkv.
            float32, bfloat16 or float16, all of one dtype and on one device; D from 1 to 256; B, Hq, Sq and Skv may
            be 0. Any strides with a dense last dimension are read in place, without a copy.
        causal: query i attends key j when j <= i + q_offset.
        scale: factor on the scores, finite; None is 1 / sqrt(D).
        precision: "highest" (float32-class accuracy) or "high" (faster, for bfloat16 and float16 work).
        q_offset: index, among the keys, of query 0; None is Skv - Sq, so that the last query sees the last key.
            torch's is_causal is q_offset=0.
        attn_bias: bool, float32, bfloat16 or float16, broadcastable to [B, Hq, Sq, Skv], any strides: added to the
            scaled scores; -inf or False masks a pair, NaN and +inf make row i NaN (contract section 10). No gradient.
        window: (left, right): query i attends keys i + q_offset - left to i + q_offset + right; -1 is no limit.
        softcap: c > 0 replaces the scaled scores s by c * tanh(s / c), before bias and ALiBi; 0 is none.
        alibi_slopes: float32 [Hq] or [B, Hq]: adds -slope * |i + q_offset - j| to the scores. No gradient.
        key_ranges: int32 [B or 1, Sq, 2], contiguous, on Q's device: query i attends keys in [begin, end) only, beside
            what causal and window say; ends beyond K are cut there. A third number a query, if there is one, stands
            for i + q_offset in causal, window and ALiBi, not in dropout: its place among the keys.
        dropout_p: weights are dropped with this probability, 0 to 1, and the others scaled by 1 / (1 - dropout_p).
        dropout_seed: 64-bit integer. Which weights are dropped depends on it and on batch, head, i + q_offset and j
            alone (contract section 11).
        out_dtype: torch.float32, or torch.bfloat16 or torch.float16 by one further rounding.
        return_state: also return a State.
        path: "auto" or "reference", on CUDA also "mma" or "wgmma": which kernels run, forward and backward. The bytes
            are the same.

    Returns:
        out_dtype [B, Hq, Sq, D], or (that, State). Where Q is a transposed view of [B, Sq, Hq, D] so is the output;
        otherwise it is contiguous. Rows that attend nothing are 0. NaN and infinities: contract section 7.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it. Nothing is computed.
        NotImplementedError: attn_bias or alibi_slopes requires grad and grad mode is on, or an input has a forward-mode
            tangent or is differentiated by torch.func; from the backward() of a gradient: the second derivative does
            not exist.

    Gradients of Q, K and V, those that require one, are exact sums too (contract section 8): the same bytes for every
    run, batching, grouping and sharding, in Q's dtype. The State has no gradient.
    """
    q_shape, k_shape = checks.inputs(Q, K, V)
    kv_len = k_shape[2]
    diagonal, modifiers = checks.modifiers(
        Q, k_shape, causal, q_offset, 0, attn_bias, window, softcap, alibi_slopes, key_ranges, dropout_p, dropout_seed
    )
    scale = checks.softmax_scale(scale, q_shape[3])
    checks.precision_name(precision)
    checks.path_name(path, Q)
    checks.output_dtype(out_dtype)
    checks.flag(return_state, "return_state")
    call = (causal, scale, precision, diagonal, 0, kv_len)
    out, rowmax, den = fused(Q, K, V, call, modifiers, out_dtype, path)
    if not return_state:
        return out
    weight_unit = 2.0**-31 if precision == "highest" else 2.0**-23
    lse = (rowmax + torch.log(den.to(torch.float64) * weight_unit)).to(torch.float32)
    return out, State(rowmax, den, lse)


def fused(Q, K, V, call, modifiers, out_dtype, path, range_reach=-1):
    """(out, rowmax, DEN) of checked arguments, with the gradient of the float32 output behind a narrow one."""
    dtype = out_dtype
    if out_dtype is not torch.float32 and torch.is_grad_enabled():
        if Q.requires_grad or K.requires_grad or V.requires_grad:
            dtype = torch.float32  # which the gradient is a function of
    out, rowmax, den = ops.forward.default(Q, K, V, *call, dtype, *modifiers, path, range_reach)
    return (out if dtype is out_dtype else Narrow.apply(out, out_dtype)), rowmax, den
