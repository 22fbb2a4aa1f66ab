"""The stages of exact attention as separate calls, so that shards of the keys can meet between them.

rowmax (combine shards by torch.maximum) -> accumulate (combine by +) -> finalize; rows shows what every stage rounds.
In: Q [B, Hq, Sq, D], K and V [B, Hkv, Skv, D]. Out: contract sections 1 (rows), 3 (rowmax), 5 (NUM, DEN), 6 (output).
"""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import checks
from ._ops import ops


def rows(x: Tensor, kind: str, scale: Optional[float] = None, *, precision: str = "highest") -> Tuple[Tensor, Tensor]:
    """Round each row to the short integers that all later arithmetic uses (contract section 1).

    Args:
        x: [B, H, S, D], float32, bfloat16 or float16, D from 1 to 256, last dimension dense.
        kind: "query" (multiplied by scale first), "key" or "value".
        scale: for queries only; None is 1 / sqrt(D). Must be None for keys and values.
        precision: "highest" (24-bit integers) or "high" (16-bit).

    Returns:
        (integers int32 [B, H, S, D], exponents int32 [B, H, S]). A row's values are integers * 2^(exponent - (b - 1))
        with b = 24 or 16. A query or key row holding a NaN or an infinity has exponent 2^31 - 1 and integers 0; in a
        value row NaN is -2^31, infinities are +-(2^31 - 1), and the exponent is that of the finite elements.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        NotImplementedError: x requires grad and grad mode is on.
    """
    shape = checks.matrix(x, "x")
    checks.row_kind(kind)
    checks.precision_name(precision)
    if kind != "query" and scale is not None:
        raise ValueError(f"scale: got {scale} for kind={kind!r}, must be None: only queries are scaled")
    scale = checks.softmax_scale(scale, shape[3])
    checks.no_gradient("rows", x=x)
    return ops.rows.default(x, kind, scale, precision)


def rowmax(
    Q: Tensor,
    K: Tensor,
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
    path: str = "auto",
) -> Tensor:
    """Maximum of each query's scores over the keys K[:, :, kv_lo:kv_hi] (contract sections 2, 3, 10).

    Args:
        Q: [B, Hq, Sq, D]; K: [B, Hkv, Skv, D], Hq a multiple of Hkv; float32, bfloat16 or float16, one dtype, one
            device, D from 1 to 256, last dimension dense. B, Hq, Sq and Skv may be 0.
        causal: query i attends key j when j + kv_offset <= i + q_offset.
        scale: factor on the scores, finite; None is 1 / sqrt(D).
        kv_lo, kv_hi: rows of the K passed, 0 <= kv_lo <= kv_hi <= Skv; kv_hi None is Skv.
        precision: "highest" or "high".
        q_offset: global index of query 0; None is Skv - Sq of the K passed. torch's is_causal is q_offset=0.
        kv_offset: global index of row 0 of the K passed, where a shard has its own K. With causal, window, alibi_slopes
            or dropout_p it needs a q_offset.
        attn_bias, window, softcap, alibi_slopes, key_ranges: those of `det_attn`; a bias and ranges are of the K
            passed, [.., Skv] and local.
        path: "auto" or "reference", on CUDA also "mma" or "wgmma": which kernels run. The bytes are the same.

    Returns:
        float64 [B, Hq, Sq], exact multiples of 2^-24; -inf where no key is attended; NaN where the query or an
        attended key holds a NaN or an infinity. Combine shards by torch.maximum.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        NotImplementedError: an input requires grad and grad mode is on.
    """
    q_shape, k_shape = checks.queries_keys(Q, K)
    diagonal, modifiers = checks.modifiers(
        Q, k_shape, causal, q_offset, kv_offset, attn_bias, window, softcap, alibi_slopes, key_ranges
    )
    scale = checks.softmax_scale(scale, q_shape[3])
    kv_lo, kv_hi = checks.key_range(kv_lo, kv_hi, k_shape[2])
    checks.precision_name(precision)
    checks.path_name(path, Q)
    checks.no_gradient("rowmax", Q=Q, K=K)
    return ops.rowmax.default(Q, K, causal, scale, precision, diagonal, kv_lo, kv_hi, *modifiers.of_scores, path)


def accumulate(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    rowmax: Tensor,
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
) -> Tuple[Tensor, Tensor]:
    """Exact sums of weights, and of weights times values, over the keys [kv_lo, kv_hi) (contract sections 4, 5, 7, 11).

    Args:
        V: [B, Hkv, Skv, D], K's shape, dtype and device.
        rowmax: float64 [B, Hq, Sq], the maximum over *all* keys of the softmax, not of this shard alone.
        dropout_p, dropout_seed: those of `det_attn`. Query i is i + q_offset to it, key j is j + kv_offset, head h is
            h + dropout_head, batch b is b; where these do not follow one another,
        dropout_rows: int64 [B, Sq], contiguous, holds batch * 2^32 + index of each query, and
        dropout_keys: int64 [Skv], contiguous, the index of each key.
        The others are those of `rowmax`, and must have the same values.

    Returns:
        (NUM int64 [B, Hq, Sq, D, 12], DEN int64 [B, Hq, Sq]). NUM's digits are normalised: 0..9 in [0, 2^32), the sign
        in digit 10, counts of special values in digit 11. DEN is in units of 2^-31 ("highest") or 2^-23 ("high").
        Combine shards by +, in any order; digits of 2^31 shards add up without a carry.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        NotImplementedError: an input requires grad and grad mode is on.
    """
    q_shape, k_shape = checks.inputs(Q, K, V)
    checks.row_maxima(rowmax, Q, q_shape)
    diagonal, modifiers = checks.modifiers(
        Q, k_shape, causal, q_offset, kv_offset, attn_bias, window, softcap, alibi_slopes, key_ranges, dropout_p,
        dropout_seed, dropout_head, dropout_rows, dropout_keys,
    )  # fmt: skip
    scale = checks.softmax_scale(scale, q_shape[3])
    kv_lo, kv_hi = checks.key_range(kv_lo, kv_hi, k_shape[2])
    checks.precision_name(precision)
    checks.path_name(path, Q)
    checks.no_gradient("accumulate", Q=Q, K=K, V=V, rowmax=rowmax)
    call = (causal, scale, precision, diagonal, kv_lo, kv_hi)
    return ops.accumulate.default(Q, K, V, rowmax, *call, *modifiers, path)


def finalize(
    NUM: Tensor,
    DEN: Tensor,
    shape: Optional[Sequence[int]] = None,
    *,
    precision: str = "highest",
    dropout_p: float = 0.0,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The output from the sums over all keys: one division, rounded once (contract section 6).

    Args:
        NUM: int64 [..., D, 12], the sum of the shards' NUM; the digits need not be normalised.
        DEN: int64 [...], the sum of the shards' DEN.
        shape: the output shape you expect, checked against NUM.shape[:-1]; None skips the check.
        precision, dropout_p: those given to accumulate.
        out_dtype: torch.float32, or torch.bfloat16 or torch.float16 by one further rounding.

    Returns:
        out_dtype [..., D], contiguous; 0 where nothing was attended.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    checks.sums(NUM, DEN, shape)
    checks.precision_name(precision)
    checks.output_dtype(out_dtype)
    dropout_p = checks.dropout_probability(dropout_p)
    return ops.finalize.default(NUM, DEN, precision, out_dtype, dropout_p)
