"""Shapes, dtypes and strides of the ops for tracing (torch.compile, torch.export).

In: fake tensors, sizes possibly symbolic. Out: empty tensors laid out exactly as csrc/api.cpp lays out the real ones.
"""

import torch

from ._ops import add_op_namespace_prefix
from .checks import DIGITS, GRADIENT_DIGITS


@torch.library.register_fake(add_op_namespace_prefix("rows"))
def _rows(x, kind, scale, precision):
    return x.new_empty(x.shape, dtype=torch.int32), x.new_empty(x.shape[:3], dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("rowmax"))
def _rowmax(q, k, *call):
    return q.new_empty(q.shape[:3], dtype=torch.float64)


@torch.library.register_fake(add_op_namespace_prefix("accumulate"))
def _accumulate(q, *call):
    num = q.new_empty((*q.shape, DIGITS), dtype=torch.int64)
    return num, q.new_empty(q.shape[:3], dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("accumulate_last"))
def _accumulate_last(q, *call):
    return *_accumulate(q), q.new_empty(q.shape[:3], dtype=torch.float64)


@torch.library.register_fake(add_op_namespace_prefix("finalize"))
def _finalize(num, den, precision, out_dtype, dropout_p):
    return num.new_empty(num.shape[:-1], dtype=out_dtype)


def _like(x, dtype):
    """An output in x's layout: where x's heads lie inside its rows, so do the output's."""
    batch, heads, length, head_dim = x.shape
    if heads > 1 and length > 1 and x.stride(1) < x.stride(2):
        return x.new_empty((batch, length, heads, head_dim), dtype=dtype).transpose(1, 2)
    return x.new_empty((batch, heads, length, head_dim), dtype=dtype)


@torch.library.register_fake(add_op_namespace_prefix("forward"))
def _forward(q, k, v, causal, scale, precision, diagonal, kv_lo, kv_hi, out_dtype, *modifiers_path_reach):
    rows_shape = q.shape[:3]
    return (
        _like(q, out_dtype),
        q.new_empty(rows_shape, dtype=torch.float64),
        q.new_empty(rows_shape, dtype=torch.int64),
    )


@torch.library.register_fake(add_op_namespace_prefix("grad_reference"))
def _grad_reference(grad, q, k, *call):
    a = q.new_empty(q.shape[:3], dtype=torch.int32)
    return a, k.new_empty(k.shape[:3], dtype=torch.int32), k.new_empty(k.shape[:3], dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("grad_accumulate"))
def _grad_accumulate(
    grad, q, k, v, out, rowmax, den, a, b, c, causal, scale, precision, diagonal, kv_lo, kv_hi, need_q, need_k, need_v,
    *modifiers_path,
):  # fmt: skip
    return tuple(
        x.new_empty((*x.shape, GRADIENT_DIGITS) if needed else (0,), dtype=torch.int64)
        for x, needed in ((q, need_q), (k, need_k), (v, need_v))
    )


@torch.library.register_fake(add_op_namespace_prefix("grad_finalize"))
def _grad_finalize(sums, reference, kind, scale, precision, out_dtype):
    return sums.new_empty(sums.shape[:-1], dtype=out_dtype)


@torch.library.register_fake(add_op_namespace_prefix("backward"))
def _backward(
    grad, q, k, v, out, rowmax, den, causal, scale, precision, diagonal, kv_lo, kv_hi, need_q, need_k, need_v,
    *modifiers_path,
):  # fmt: skip
    return tuple(
        _like(x, x.dtype) if needed else x.new_empty((0,)) for x, needed in ((q, need_q), (k, need_k), (v, need_v))
    )
