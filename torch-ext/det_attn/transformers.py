"""The attention function of Hugging Face transformers, with det-attn's bytes; transformers itself is not imported.

In: what `transformers.AttentionInterface` hands to an attention: query [B, Hq, Sq, D] and the masks, windows and
packing of the model. Out: [B, Sq, Hq, D] in the dtype of the input. A mask is data here, never read on the host.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import checks
from .attention import fused
from .sdpa import cast_for_autocast, draw_seed, same_width
from .varlen import packed_ranges, packed_reach


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
    max_length_k: Optional[int] = None,
    s_aux: Optional[Tensor] = None,
    indices: Optional[Tensor] = None,
    block_indices: Optional[Tensor] = None,
    cache: Optional[Any] = None,
    block_table: Optional[Tensor] = None,
    output_attentions: bool = False,
    precision: str = "highest",
    **ignored: Any,
) -> Tuple[Tensor, None]:
    """For `attn_implementation="phanerozoic/det-attn:attention"` and for `AttentionInterface.register`.

    Register the mask too, or transformers drops padding without a word:
    `AttentionMaskInterface.register("det_attn", AttentionMaskInterface()["sdpa"])`. With "flash_attention_2" in place
    of "sdpa" it hands over which keys are padding, but nothing of packed position_ids, of chunked attention and of what
    a static cache has room for.

    Args:
        module: the attention layer; `module.is_causal` counts where is_causal is None.
        query: [B, Hq, Sq, D]; key: [B, Hkv, Skv, D]; value: [B, Hkv, Skv, Dv]; D and Dv from 1 to 256, Hq a multiple of
            Hkv; float32, bfloat16 or float16.
        attention_mask: [B, 1 or Hq, Sq, >= Skv], bool (True is attended) or float (added to the scores): it alone says
            what is attended. Or [B, <= Skv], bool or integers, True or 1 where a key is no padding: keys beyond it are
            left out, and causality and windows count from the last key; it runs as key_ranges, on copies of key and
            value, where there is neither dropout nor position_bias. Or None.
        dropout: probability of dropping a weight, from torch's default CPU generator, as in
            `scaled_dot_product_attention`.
        scaling: factor on the scores; None is 1 / sqrt(D).
        is_causal: each query attends the keys up to its own. Without a mask a single query attends all keys.
        sliding_window: a query attends this many keys, itself among them, before it (and, if not causal, after it).
        softcap: c of c * tanh(score / c).
        position_bias: float, broadcastable to [B, Hq, Sq, Skv], added to the scores; without a gradient.
        position_ids: integers [B or 1, Sq] or [Sq]; where a causal call without a mask has more keys than queries (a
            cache), they say which key is a query's own; of more dimensions they are not looked at. Packed rows come
            with a mask, which transformers makes of them.
        cu_seq_lens_q, cu_seq_lens_k: or with these, int32 or int64 [sequences + 1], the starts of the sequences, in a
            batch of 1, as in `det_attn_varlen`: their values are checked on the CPU alone.
        max_length_k: int, at least the keys of the longest of them, as max_seqlen_k in `det_attn_varlen`; a tensor is
            not read.
        s_aux, indices, block_indices, cache, block_table, output_attentions: attention sinks, keys chosen by an
            indexer, paged caches and weights are not supported.
        precision: "highest" or "high", as in `det_attn`: register functools.partial(attention, precision="high").
        ignored: what other models pass along.

    Returns:
        ([B, Sq, Hq, Dv] in query's dtype, None): attention weights exist nowhere.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it. Nothing is computed.
        NotImplementedError: sinks, chosen keys, paged caches, weights, or the gradient of position_bias or of a float
            mask were asked for; else as `scaled_dot_product_attention`.
    """
    _refuse(
        s_aux=s_aux, indices=indices, block_indices=block_indices, cache=cache, block_table=block_table,
        output_attentions=output_attentions or None,
    )  # fmt: skip
    checks.are_tensors(query=query, key=key, value=value)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key, value: got shapes {shapes}, must be 4-D [batch, heads, length, head_dim]")
    if sliding_window is not None:
        checks.window_size(sliding_window, "sliding_window")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    elif not isinstance(is_causal, (bool, torch.SymBool)):
        raise TypeError(f"is_causal: got {type(is_causal).__name__}, must be a bool or None")
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("cu_seq_lens_q, cu_seq_lens_k: got one of them, must be both or none")
    query, key, value = cast_for_autocast(query, key, value)
    width, value_width = checks.widths(query, key, value)
    scale = checks.softmax_scale(scaling, width, "scaling")  # of the width as given
    dropout = checks.dropout_probability(dropout, "dropout")
    checks.precision_name(precision)
    q_len = query.shape[2]
    bias, ranges, q_offset, reach = None, None, None, -1
    window = checks.EVERYWHERE

    if attention_mask is not None:
        bias, key, value = _masked(attention_mask, query, key, value)
    query, key, value = same_width(query, key, value)
    _, k_shape = checks.inputs(query, key, value, checks.TORCHS)
    kv_len = k_shape[2]
    of_keys = attention_mask is not None and attention_mask.dim() == 2
    if attention_mask is not None and not of_keys:
        is_causal = False
    else:
        is_causal = True if is_causal and q_len > 1 else False  # a bool for a traced length too
        if sliding_window is not None:
            window = (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    if of_keys and dropout == 0.0 and position_bias is None:  # which go by the places of keys
        window = (window[0], 0 if is_causal else window[1])
        key, value, ranges = _kept_first(bias[:, 0, 0], key, value, q_len, window)
        if min(window) >= 0:
            reach = min(sum(window), checks.MAX_KEYS)
        bias, is_causal, window = None, False, checks.EVERYWHERE
    elif attention_mask is None and cu_seq_lens_q is not None:
        starts_q, starts_k = _starts(cu_seq_lens_q, cu_seq_lens_k, query, key)
        ranges = packed_ranges(starts_q, starts_k[:-1], starts_k[1:], q_len)[0][None]
        if isinstance(max_length_k, int):
            reach = packed_reach(cu_seq_lens_q, cu_seq_lens_k, max_length_k, is_causal, *window)
    elif attention_mask is None and is_causal and kv_len > q_len:
        if position_ids is not None and _are_positions(position_ids, query):
            ranges = _cached_ranges(position_ids, kv_len, window)
            is_causal, window = False, checks.EVERYWHERE
        else:
            q_offset = 0  # as in transformers' own sdpa: what lies behind is the rest of a static cache

    if position_bias is not None:
        bias = _with_bias(position_bias, bias, query, kv_len)
    diagonal, modifiers = checks.modifiers(
        query, k_shape, is_causal, q_offset, 0, bias, window, softcap or 0.0, None, ranges, dropout
    )
    if dropout > 0.0:  # a call that is refused draws nothing
        modifiers = modifiers._replace(dropout_seed=draw_seed())
    call = (is_causal, scale, precision, diagonal, 0, kv_len)
    out = fused(query, key, value, call, modifiers, query.dtype, "auto", reach)[0]
    return out[..., :value_width].transpose(1, 2), None


def _refuse(**given):
    """What changes the result and is not there."""
    for name, x in given.items():
        if x is not None:
            raise NotImplementedError(
                f"{name}: got {type(x).__name__}, must be None: attention sinks, keys chosen by an indexer, paged "
                "caches and attention weights are not supported here"
            )


def _masked(mask, query, key, value):
    """A mask of pairs or of keys as a bias, and the keys and values that it reaches."""
    checks.are_tensors(attention_mask=mask)
    shape, batch, kv_len = mask.shape, query.shape[0], key.shape[2]
    if len(shape) == 2 and shape[0] in (1, batch) and shape[1] <= kv_len:
        checks.integers(mask, "attention_mask", query, (torch.bool, torch.uint8))  # of a bias 0.0 means the opposite
        key, value = key[:, :, : shape[1]], value[:, :, : shape[1]]
        bias = mask[:, None, None].to(torch.bool)
    elif len(shape) == 4:
        bias = mask[..., :kv_len]
    else:
        raise ValueError(
            f"attention_mask: got shape {tuple(shape)}, must be 2-D or 4-D, [{batch}, at most {kv_len}] where it is 2-D"
        )
    checks.bias(bias, query, (*query.shape[:3], key.shape[2]), "attention_mask", "query")
    return bias, key, value


class _Permuted(torch.autograd.Function):
    """Rows in another order, and their gradients in the old one, bit by bit: gather's own would add them to zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, order, inverse):
        return _in_order(x, order)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad):
        return _in_order(grad, ctx.saved_tensors[0]), None, None


def _in_order(x, order):
    return x.gather(2, order[:, None, :, None].expand(x.shape))


def _kept_first(kept, key, value, q_len, window):
    """Keys and values with those that are no padding in front, in their order, and the key_ranges of each query.

    Sums have no order, so this changes no byte; and what a query then attends is one interval, whatever holes the mask
    has, which may not be looked for on the host. The kernels of intervals cost less than those of a bias, and skip
    what nobody attends.
    """
    kv_len = key.shape[2]
    order = torch.argsort(kept.logical_not().to(torch.uint8), dim=1, stable=True)
    before = functional.pad(kept.cumsum(1, dtype=torch.int32), (1, 0))  # how many are kept before each key
    own = torch.arange(kv_len - q_len, kv_len, device=kept.device)
    begin = own - window[0] if window[0] >= 0 else torch.zeros_like(own)
    end = own + (window[1] + 1) if window[1] >= 0 else torch.full_like(own, kv_len)
    ranges = torch.stack([before[:, x.clamp(0, kv_len)] for x in (begin, end)], dim=-1)
    if not torch.is_grad_enabled():
        return _in_order(key, order), _in_order(value, order), ranges
    inverse = order.argsort(1)
    return _Permuted.apply(key, order, inverse), _Permuted.apply(value, order, inverse), ranges


def _are_positions(position_ids, query):
    """Whether they are those of the rows, and not of more than one kind."""
    batch, q_len = query.shape[0], query.shape[2]
    checks.integers(position_ids, "position_ids", query)
    shape = position_ids.shape
    if len(shape) > 2:
        return False
    if len(shape) == 0 or shape[-1] != q_len or shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"position_ids: got shape {tuple(shape)}, must be [B or 1, Sq] with B = {batch}, Sq = {q_len}")
    return True


def _cached_ranges(position_ids, kv_len, window):
    """Causal with more keys than queries: key_ranges [B or 1, Sq, 2], which the kernels clamp to the keys there are. A
    query's own key is at its position, or, where the cache has dropped older keys, counted from the last key: at the
    smaller of both."""
    position_ids = position_ids if position_ids.dim() == 2 else position_ids[None]
    q_len = position_ids.shape[1]
    from_last = torch.arange(kv_len - q_len, kv_len, device=position_ids.device)
    own = torch.minimum(position_ids, from_last)
    begin = own - window[0] if window[0] >= 0 else torch.zeros_like(own)
    return torch.stack((begin, own + 1), dim=-1).clamp(-(2**31), 2**31 - 1).to(torch.int32)


def _starts(cu_seq_lens_q, cu_seq_lens_k, query, key):
    """Both as int32."""
    if query.shape[0] != 1:
        raise ValueError(f"query: got a batch of {query.shape[0]} with cu_seq_lens_q, must be a batch of 1")
    size = None
    for x, name in ((cu_seq_lens_q, "cu_seq_lens_q"), (cu_seq_lens_k, "cu_seq_lens_k")):
        size = checks.vector(x, name, query, size, "query", (torch.int32, torch.int64))
    values = checks.host_values(cu_seq_lens_q, cu_seq_lens_k)
    if values is not None:
        checks.starts(values[0], "cu_seq_lens_q", query.shape[2], "query")
        checks.starts(values[1], "cu_seq_lens_k", key.shape[2], "key")
    return cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)


def _with_bias(position_bias, mask, query, kv_len):
    checks.are_tensors(position_bias=position_bias)
    if position_bias.dtype is torch.bool:
        raise TypeError("position_bias: got dtype torch.bool, allowed are float32, bfloat16 and float16")
    if position_bias.dim() > 0:
        position_bias = position_bias[..., :kv_len]
    checks.bias(position_bias, query, (*query.shape[:3], kv_len), "position_bias", "query")
    if mask is None:
        return position_bias
    if mask.dtype is torch.bool:
        return position_bias.masked_fill(~mask, float("-inf"))
    return position_bias + mask
