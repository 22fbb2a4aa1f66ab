"""The attention function of Hugging Face transformers, with det-attn's bytes; transformers itself is not imported.

In: what `transformers.AttentionInterface` hands to an attention: query [B, Hq, Sq, D] and the masks, windows and
packing of the model. Out: [B, Sq, Hq, D] in the dtype of the input. A mask is data here, never read on the host.
"""

import math
from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from . import checks
from .attention import det_attn
from .sdpa import cast_for_autocast, draw_seed, same_width
from .varlen import sequences_of


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor] = None,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    position_bias: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    s_aux: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    output_attentions: bool = False,
    precision: str = "highest",
    **ignored: Any,
) -> Tuple[Tensor, None]:
    """For `attn_implementation="phanerozoic/det-attn:attention"` and for `AttentionInterface.register`.

    Register the mask too, or transformers drops padding without a word:
    `AttentionMaskInterface.register("det_attn", AttentionMaskInterface()["sdpa"])`.

    Args:
        module: the attention layer; `module.is_causal` counts where is_causal is None.
        query: [B, Hq, Sq, D]; key: [B, Hkv, Skv, D]; value: [B, Hkv, Skv, Dv]; D and Dv from 1 to 256, Hq a multiple of
            Hkv; float32, bfloat16 or float16.
        attention_mask: [B, 1 or Hq, Sq, >= Skv], bool (True is attended) or float (added to the scores): it alone says
            what is attended. Or [B, <= Skv], True or 1 where a key is no padding: keys beyond it are left out, and
            causality and windows count from the last key. Or None.
        dropout: probability of dropping a weight, from torch's default CPU generator, as in
            `scaled_dot_product_attention`.
        scaling: factor on the scores; None is 1 / sqrt(D).
        is_causal: each query attends the keys up to its own. Without a mask a single query attends all keys.
        sliding_window: a query attends this many keys, itself among them, before it (and, if not causal, after it).
        softcap: c of c * tanh(score / c).
        position_bias: float, broadcastable to [B, Hq, Sq, Skv], added to the scores; without a gradient.
        position_ids: [B or 1, Sq]; where a causal call without a mask has more keys than queries (a cache), they say
            which key is a query's own. Packed rows come with a mask, which transformers makes of them.
        cu_seq_lens_q, cu_seq_lens_k: or with these, [sequences + 1], the starts of the sequences, in a batch of 1.
        s_aux, block_table, output_attentions: attention sinks, paged caches and weights are not supported.
        precision: "highest" or "high", as in `det_attn`: register functools.partial(attention, precision="high").
        ignored: what other models pass along.

    Returns:
        ([B, Sq, Hq, Dv] in query's dtype, None): attention weights exist nowhere.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it. Nothing is computed.
        NotImplementedError: sinks, paged caches, weights, or the gradient of position_bias or of a float mask were
            asked for.
    """
    if s_aux is not None or block_table is not None or output_attentions:
        name = "s_aux" if s_aux is not None else "block_table" if block_table is not None else "output_attentions"
        raise NotImplementedError(f"{name}: attention sinks, paged caches and attention weights are not supported here")
    checks.are_tensors(query=query, key=key, value=value)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key, value: got shapes {shapes}, must be 4-D [batch, heads, length, head_dim]")
    if attention_mask is not None:
        checks.are_tensors(attention_mask=attention_mask)
        if attention_mask.dim() not in (2, 4):
            raise ValueError(f"attention_mask: got shape {tuple(attention_mask.shape)}, must be 2-D or 4-D")
    if sliding_window is not None:
        checks.window_size(sliding_window, "sliding_window")
    query, key, value = cast_for_autocast(query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    q_len = query.shape[2]
    bias, ranges, q_offset = None, None, None
    window = (-1, -1)

    if attention_mask is not None and attention_mask.dim() == 4:
        bias = attention_mask[..., : key.shape[2]]
        is_causal = False
    else:
        if attention_mask is not None:
            kept = attention_mask.shape[1]
            key, value = key[:, :, :kept], value[:, :, :kept]
            bias = attention_mask[:, None, None].to(torch.bool)
        is_causal = True if is_causal and q_len > 1 else False  # a bool for a traced length too
        if sliding_window is not None:
            window = (sliding_window - 1, 0 if is_causal else sliding_window - 1)
        kv_len = key.shape[2]
        if attention_mask is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            _check_starts(cu_seq_lens_q, cu_seq_lens_k, query)
            ranges = _packed_ranges(cu_seq_lens_q, cu_seq_lens_k, q_len, is_causal, window)
            is_causal, window = False, (-1, -1)
        elif attention_mask is None and is_causal and kv_len > q_len:
            if position_ids is not None and position_ids.dim() == 2:
                ranges = _cached_ranges(position_ids, kv_len, window)
                is_causal, window = False, (-1, -1)
            else:
                q_offset = 0  # as in transformers' own sdpa: what lies behind is the rest of a static cache

    if position_bias is not None:
        bias = _with_bias(position_bias[..., : key.shape[2]], bias)
    if scaling is None:
        scaling = 1.0 / math.sqrt(query.shape[-1])  # of the width as given
    width = value.shape[-1]
    query, key, value = same_width(query, key, value)
    out = det_attn(
        query,
        key,
        value,
        is_causal,
        scaling,
        precision=precision,
        q_offset=q_offset,
        out_dtype=query.dtype,
        attn_bias=bias,
        window=window,
        softcap=softcap or 0.0,
        key_ranges=ranges,
        dropout_p=dropout,
        dropout_seed=draw_seed() if dropout else 0,
    )
    return out[..., :width].transpose(1, 2), None


def _ranges(begin, end):
    """key_ranges [B or 1, Sq, 2]; the kernels clamp them to the keys that are there."""
    return torch.stack((begin, end), dim=-1).clamp(-(2**31), 2**31 - 1).to(torch.int32)


def _cached_ranges(position_ids, kv_len, window):
    """Causal with more keys than queries. A query's own key is at its position, or, where the cache has dropped older
    keys, counted from the last key: at the smaller of both."""
    q_len = position_ids.shape[1]
    from_last = torch.arange(kv_len - q_len, kv_len, device=position_ids.device)
    own = torch.minimum(position_ids, from_last)
    return _ranges(own - window[0] if window[0] >= 0 else torch.zeros_like(own), own + 1)


def _check_starts(cu_seq_lens_q, cu_seq_lens_k, query):
    checks.are_tensors(cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k)
    if query.shape[0] != 1:
        raise ValueError(f"query: got a batch of {query.shape[0]} with cu_seq_lens_q, must be a batch of 1")
    if cu_seq_lens_q.dim() != 1 or len(cu_seq_lens_q) < 2 or cu_seq_lens_k.shape != cu_seq_lens_q.shape:
        raise ValueError(
            f"cu_seq_lens_q, cu_seq_lens_k: got shapes {tuple(cu_seq_lens_q.shape)} and {tuple(cu_seq_lens_k.shape)}, "
            "must both be [sequences + 1]"
        )


def _packed_ranges(cu_seq_lens_q, cu_seq_lens_k, q_len, is_causal, window):
    """Packed sequences by their starts: within each the last query sees the last key. Queries behind the last sequence
    attend nothing."""
    token, sequence = sequences_of(cu_seq_lens_q.to(torch.int64), q_len)
    sequence = sequence.clamp(max=len(cu_seq_lens_q) - 2)
    begin, end = cu_seq_lens_k[sequence].to(torch.int64), cu_seq_lens_k[sequence + 1].to(torch.int64)
    own = end - cu_seq_lens_q[sequence + 1] + token
    if window[0] >= 0:
        begin = torch.maximum(begin, own - window[0])
    if is_causal:
        end = torch.minimum(end, own + 1)
    elif window[1] >= 0:
        end = torch.minimum(end, own + window[1] + 1)
    return _ranges(begin, end.masked_fill(token >= cu_seq_lens_q[-1], 0))[None]


def _with_bias(position_bias, mask):
    if mask is None:
        return position_bias
    if mask.dtype is torch.bool:
        return position_bias.masked_fill(~mask, float("-inf"))
    return position_bias + mask
