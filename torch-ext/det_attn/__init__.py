"""det-attn: attention whose bytes do not depend on how it was computed.

Shard the keys, reorder them, batch differently, change the device or the number of threads: the output is the same,
bit for bit. Every operand is rounded once by a rule that looks at its row alone; from there on all arithmetic is exact
integer arithmetic, and the result is rounded once. docs/contract.md states the rules.

    det_attn(Q, K, V, causal)                    the fused call
    det_attn_sharded(Q, K, V, kv_splits, causal) the same bytes over shards of the keys
    det_attn_varlen(q, k, v, cu_seqlens_q, ...)  the same bytes for packed sequences
    rowmax, accumulate, finalize                 the stages, for shards that live apart: combine by max, by +
    grad_reference, grad_accumulate, grad_finalize   the same for gradients: combine by max, by +
    rows                                         the integers that the stages see
"""

from . import meta as _meta  # noqa: F401  registers the fake implementations
from ._ops import ops
from .attention import State, det_attn
from .gradients import grad_accumulate, grad_finalize, grad_reference
from .sharding import det_attn_sharded
from .stages import accumulate, finalize, rowmax, rows
from .varlen import det_attn_varlen

__all__ = [
    "State",
    "accumulate",
    "det_attn",
    "det_attn_sharded",
    "det_attn_varlen",
    "finalize",
    "grad_accumulate",
    "grad_finalize",
    "grad_reference",
    "ops",
    "rowmax",
    "rows",
]
