"""det-attn: attention whose bytes do not depend on how it was computed.

Shard the keys, reorder them, batch differently, change the device or the number of threads: the output is the same,
bit for bit. Every operand is rounded once by a rule that looks at its row alone; from there on all arithmetic is exact
integer arithmetic, and the result is rounded once. docs/contract.md states the rules.

    det_attn(Q, K, V, causal)                    the fused call
    det_attn_sharded(Q, K, V, kv_splits, causal) the same bytes over shards of the keys
    det_attn_context_parallel(q, k, v, group)    the same bytes over the ranks of torch.distributed
    det_attn_varlen(q, k, v, cu_seqlens_q, ...)  the same bytes for packed sequences
    rowmax, accumulate, finalize                 the stages, for shards that live apart: combine by max, by +
    grad_reference, grad_accumulate, grad_finalize   the same for gradients: combine by max, by +
    rows                                         the integers that the stages see
    scaled_dot_product_attention, replace_sdpa   torch's function with det-attn's bytes, and det-attn in its place
    attention                                    the same for transformers' models
    layers                                       what kernels.kernelize puts in a model
"""

from . import layers
from . import meta as _meta  # noqa: F401  registers the fake implementations
from ._ops import ops
from .attention import State, det_attn
from .distributed import det_attn_context_parallel
from .gradients import grad_accumulate, grad_finalize, grad_reference
from .sdpa import replace_sdpa, scaled_dot_product_attention
from .sharding import det_attn_sharded
from .stages import accumulate, finalize, rowmax, rows
from .transformers import attention
from .varlen import det_attn_varlen

# Under these two names transformers looks for an attention that takes its masks of every pair.
flash_attn_forward, supports_flash_attn = attention, True

__all__ = [
    "State",
    "accumulate",
    "attention",
    "det_attn",
    "det_attn_context_parallel",
    "det_attn_sharded",
    "det_attn_varlen",
    "finalize",
    "grad_accumulate",
    "grad_finalize",
    "grad_reference",
    "layers",
    "ops",
    "replace_sdpa",
    "rowmax",
    "rows",
    "scaled_dot_product_attention",
]
