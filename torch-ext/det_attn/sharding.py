"""Attention over shards of the keys on one device: rowmax, accumulate and finalize, combined by max and +.

In: as the fused call, and how the keys are cut. Out: the fused call's bytes, for every cut (contract sections 3, 5, 6).
"""

from typing import Optional, Sequence

import torch
from torch import Tensor

from . import checks
from .stages import accumulate, finalize, rowmax


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
        NotImplementedError: an input requires grad and grad mode is on.
    """
    q_shape, k_shape = checks.queries_keys(Q, K)
    checks.values(V, K)
    shards = checks.key_splits(kv_splits, k_shape[2])
    checks.output_dtype(out_dtype)
    checks.no_gradient("det_attn_sharded", Q=Q, K=K, V=V)
    same = dict(precision=precision, q_offset=q_offset, path=path)

    maximum = None
    for kv_lo, kv_hi in shards:
        shard = rowmax(Q, K, causal, scale, kv_lo, kv_hi, **same)
        maximum = shard if maximum is None else torch.maximum(maximum, shard)

    num, den = None, None
    for kv_lo, kv_hi in shards:
        shard_num, shard_den = accumulate(Q, K, V, maximum, causal, scale, kv_lo, kv_hi, **same)
        num = shard_num if num is None else num.add_(shard_num)  # in place: NUM is the largest tensor here
        den = shard_den if den is None else den.add_(shard_den)

    return finalize(num, den, q_shape, precision=precision, out_dtype=out_dtype)
