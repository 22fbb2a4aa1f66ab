"""Packed sequences of different lengths in one call, and keys in pages (contract sections 1-7, 10, 11).

In: q [total_q, Hq, D], k and v [total_k, Hkv, D], one sequence behind the other, as FlashAttention packs them; or k and
v in pages. Out: [total_q, Hq, D], the bytes of each sequence alone. The sequences are one batch of one whose key_ranges
say which keys and which place each query has; they are made on the device, without waiting for it.
"""

from typing import Optional, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import checks
from .attention import fused


def det_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: Optional[float] = None,
    *,
    window: Sequence[int] = checks.EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    precision: str = "highest",
    out_dtype: torch.dtype = torch.float32,
    block_table: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    path: str = "auto",
) -> Tensor:
    """`det_attn` of N packed sequences: byte for byte what each gives alone.

    Args:
        q: [total_q, Hq, D]; k, v: [total_k, Hkv, D]; dtypes and heads as for `det_attn`, last dimension dense.
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1] on q's device, 0 first, never falling, at most the rows that there
            are: sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1]. Sequences may be empty. Rows of q behind the
            last sequence give 0.
        max_seqlen_q: int, as FlashAttention takes it; nothing depends on it.
        max_seqlen_k: int, at least the keys of the longest sequence. Where cu_seqlens_q and cu_seqlens_k are the same
            memory it bounds the workspace on a GPU, and rows of sequences longer than it may become NaN there.
        causal: in each sequence the last query sees the last key, as `det_attn` has it by default.
        window, softcap, scale, precision, out_dtype, path: those of `det_attn`, in each sequence.
        alibi_slopes: float32 [Hq], one slope a head for all sequences; distances are those within a sequence.
        dropout_p, dropout_seed: those of `det_attn`, where sequence n is batch n.
        block_table: int32 [N, max_blocks]: k and v are pages [num_blocks, page_size, Hkv, D], and those of sequence n
            are block_table[n], in order. The pages are copied together first. Forward only. Entries of pages that lie
            behind the sequence's length may be anything; cu_seqlens_k gives the lengths alone.
        seqused_k: int32 [N]: how many keys of each sequence count, the first ones, instead of all that cu_seqlens_k
            gives it. Beside a block_table cu_seqlens_k is not used then.

    Returns:
        out_dtype [total_q, Hq, D].

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it. Nothing is computed.
        NotImplementedError: an input requires grad beside a block_table and grad mode is on; else as `det_attn`.

    The values of cu_seqlens, block_table and seqused_k are checked on the CPU, in eager calls. On CUDA that would mean
    waiting for the device: wrong ones give numbers without meaning there. But memory is safe, a sequence sees no keys
    but its own rows or pages, and one that uses a page which is not there is NaN.

    Gradients of q, k and v are those of `det_attn` for each sequence, byte for byte.
    """
    checks.are_tensors(q=q, k=k, v=v)
    sequences = checks.vector(cu_seqlens_q, "cu_seqlens_q", q, None) - 1
    checks.vector(cu_seqlens_k, "cu_seqlens_k", q, sequences + 1)
    if seqused_k is not None:
        checks.vector(seqused_k, "seqused_k", q, sequences)
    checks.length(max_seqlen_q, "max_seqlen_q")
    checks.length(max_seqlen_k, "max_seqlen_k")
    if block_table is None:
        _check_shapes(q, k, v, "[total_k, heads, head_dim]")
    else:
        checks.no_gradient("det_attn_varlen with a block_table", q=q, k=k, v=v)
        checks.table(block_table, q, sequences)
        _check_shapes(q, k, v, "[num_blocks, page_size, heads, head_dim]")
        checks.pages(k, v, q, block_table)
    _check_values(q, k, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k)

    # Whatever the numbers on a GPU, which are not read here: no sequence reaches the keys of another.
    starts, ends = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    if block_table is not None:
        capacity = block_table.shape[1] * k.shape[1]
        k, v = _gathered(k, block_table), _gathered(v, block_table)
        starts = torch.arange(sequences, dtype=torch.int32, device=q.device) * capacity
        ends = starts + (cu_seqlens_k.diff() if seqused_k is None else seqused_k).clamp(max=capacity)
    elif seqused_k is not None:
        ends = torch.minimum(starts + seqused_k, ends)
    Q, K, V = (x.transpose(0, 1)[None] for x in (q, k, v))
    q_shape, k_shape = checks.inputs(Q, K, V, ("q", "k", "v"))
    if alibi_slopes is not None and isinstance(alibi_slopes, Tensor) and alibi_slopes.shape != q_shape[1:2]:
        raise ValueError(f"alibi_slopes: got shape {tuple(alibi_slopes.shape)}, must be [Hq], ({q_shape[1]},)")

    key_ranges, of_query = packed_ranges(cu_seqlens_q, starts, ends, q_shape[2])
    query_ids, key_ids = None, None
    if checks.dropout_probability(dropout_p) > 0:
        place = (key_ranges[:, 2] - key_ranges[:, 0]).to(torch.int64)  # among the keys of the sequence
        query_ids = ((of_query.to(torch.int64) << 32) + (place & 0xFFFFFFFF))[None]
        key_ids = _key_positions(starts, k_shape[2])
    diagonal, modifiers = checks.modifiers(
        Q, k_shape, causal, 0, 0, None, window, softcap, alibi_slopes, key_ranges[None], dropout_p, dropout_seed, 0,
        query_ids, key_ids,
    )  # fmt: skip
    scale = checks.softmax_scale(scale, q_shape[3])
    checks.precision_name(precision)
    checks.path_name(path, Q)
    checks.output_dtype(out_dtype)
    call = (causal, scale, precision, diagonal, 0, k_shape[2])
    reach = -1
    if block_table is None and seqused_k is None:
        reach = packed_reach(
            cu_seqlens_q, cu_seqlens_k, max_seqlen_k, causal, modifiers.window_left, modifiers.window_right
        )
    return fused(Q, K, V, call, modifiers, out_dtype, path, reach)[0][0].transpose(0, 1)


def _check_shapes(q, k, v, layout):
    """What det_attn's checks would report of other shapes than the caller's."""
    for x, name, of in ((q, "q", "[total_q, heads, head_dim]"), (k, "k", layout), (v, "v", layout)):
        dims = of.count(",") + 1
        if x.dim() != dims:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, must be {dims}-D {of}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: got head_dim {k.shape[-1]}, must be q's, {q.shape[-1]}")
    if v.shape != k.shape:
        raise ValueError(f"v: got shape {tuple(v.shape)}, must be k's, {tuple(k.shape)}")


def _check_values(q, k, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k):
    """On the CPU; on a GPU this would wait for the device."""
    values = checks.host_values(cu_seqlens_q, cu_seqlens_k, block_table, seqused_k)
    if values is None:
        return
    of_q, of_k, table, used = values
    checks.starts(of_q, "cu_seqlens_q", q.shape[0], "q")
    if table is None or used is None:
        checks.starts(of_k, "cu_seqlens_k", k.shape[0] if table is None else None, "k")
    lengths = [end - start for start, end in zip(of_k, of_k[1:])]
    room = lengths if table is None else [block_table.shape[1] * k.shape[1]] * len(lengths)
    lengths, name = (lengths, "cu_seqlens_k") if used is None else (used, "seqused_k")
    checks.used_keys(lengths, name, room)
    if table is not None:
        checks.used_pages(table, lengths, k.shape[1], k.shape[0])


def packed_ranges(cu_seqlens_q, starts, ends, total):
    """(key_ranges int32 [total, 3], the sequence of each query): sequence n has the keys from starts[n] to ends[n], and
    its last query sees the last of them. Queries behind the last sequence have no keys."""
    table = pad(torch.stack([starts, ends, ends - cu_seqlens_q[1:]], 1), (0, 0, 0, 1))
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens_q.device)
    of_query = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True, out_int32=True)
    key_ranges = table.index_select(0, of_query)
    key_ranges[:, 2] += rows
    return key_ranges, of_query


def _are_one(a, b):
    """Whether both are the same memory, which the host sees without their values. A compiler sees names alone."""
    if a is b or torch.compiler.is_compiling():
        return a is b
    try:
        return a.is_set_to(b)
    except RuntimeError:  # a tensor of vmap
        return False


def packed_reach(cu_seqlens_q, cu_seqlens_k, longest, causal, left, right):
    """Where queries and keys are packed alike: to how many keys before and behind its own row a query's keys extend.
    Otherwise -1."""
    if not _are_one(cu_seqlens_q, cu_seqlens_k):
        return -1
    longest = min(longest, checks.MAX_KEYS)
    before = longest - 1 if left < 0 else min(left, longest - 1)
    if causal:
        return before
    return before + (longest - 1 if right < 0 else min(right, longest - 1))


def _key_positions(starts, total):
    """The place of each of `total` keys in its sequence, int64."""
    rows = torch.arange(total, device=starts.device)
    of = (torch.searchsorted(starts.to(torch.int64), rows, right=True) - 1).clamp(min=0)
    return rows - starts[of]


def _gathered(pages, block_table):
    """[num_blocks, page_size, Hkv, D] -> [N * max_blocks * page_size, Hkv, D], the pages of each sequence in order.
    Where there is no such page the rows hold a NaN: as keys they make every query NaN that attends them."""
    asked = block_table.flatten()
    blocks = asked.clamp(0, max(pages.shape[0] - 1, 0))
    rows = pages.index_select(0, blocks)
    rows[..., 0].masked_fill_((blocks != asked)[:, None, None], float("nan"))
    return rows.flatten(0, 1)
