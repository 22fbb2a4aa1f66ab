"""Shapes, dtypes and strides of the ops for tracing (torch.compile, torch.export), and what autograd may do with them.

In: fake tensors, sizes possibly symbolic. Out: empty tensors laid out exactly as csrc/api.cpp lays out the real ones.
"""

import torch

from ._ops import add_op_namespace_prefix
from .checks import DIGITS


@torch.library.register_fake(add_op_namespace_prefix("rows"))
def _rows(x, kind, scale, precision):
    return x.new_empty(x.shape, dtype=torch.int32), x.new_empty(x.shape[:3], dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("rowmax"))
def _rowmax(q, k, causal, scale, precision, diagonal, kv_lo, kv_hi, path):
    return q.new_empty(q.shape[:3], dtype=torch.float64)


@torch.library.register_fake(add_op_namespace_prefix("accumulate"))
def _accumulate(q, k, v, rowmax, causal, scale, precision, diagonal, kv_lo, kv_hi, path):
    num = q.new_empty((*q.shape, DIGITS), dtype=torch.int64)
    return num, q.new_empty(q.shape[:3], dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("finalize"))
def _finalize(num, den, precision, out_dtype):
    return num.new_empty(num.shape[:-1], dtype=out_dtype)


@torch.library.register_fake(add_op_namespace_prefix("forward"))
def _forward(q, k, v, causal, scale, precision, diagonal, kv_lo, kv_hi, out_dtype, path):
    batch, heads, length, head_dim = q.shape
    if heads > 1 and length > 1 and q.stride(1) < q.stride(2):  # q's heads lie inside its rows: so do out's
        out = q.new_empty((batch, length, heads, head_dim), dtype=out_dtype).transpose(1, 2)
    else:
        out = q.new_empty((batch, heads, length, head_dim), dtype=out_dtype)
    rows_shape = (batch, heads, length)
    return out, q.new_empty(rows_shape, dtype=torch.float64), q.new_empty(rows_shape, dtype=torch.int64)


def _no_backward(ctx, *grads):
    raise NotImplementedError("det-attn: backward is not implemented yet")


# Without a formula autograd would drop the gradient; so the output requires grad, and backward() says what is missing.
torch.library.register_autograd(add_op_namespace_prefix("forward"), _no_backward)
