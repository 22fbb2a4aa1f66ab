"""Promise: a bad argument is refused before anything is computed, by an error that names it and says what is allowed.

In: one wrong argument at a time. Out: TypeError for a wrong Python type or dtype, ValueError for anything else.
"""

import math

import numpy as np
import pytest
import torch

from conftest import assert_same_bits
from helpers import NO_MODIFIERS, NO_SCORES

I64 = torch.int64


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def good(device="cpu", dtype=torch.float32):
    """Q [2, 4, 5, 8], K and V [2, 2, 7, 8]."""
    return {
        "Q": zeros(2, 4, 5, 8, dtype=dtype, device=device),
        "K": zeros(2, 2, 7, 8, dtype=dtype, device=device),
        "V": zeros(2, 2, 7, 8, dtype=dtype, device=device),
    }


def strided(*shape):
    """Right shape, but the last dimension is not dense."""
    return zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


ATTENTION = ("det_attn", "det_attn_sharded", "rowmax", "accumulate")


def call(kernel, function, device="cpu", **wrong):
    """Calls `function` with good arguments, except those in `wrong`."""
    arguments = good(device)
    if function == "rows":
        arguments = {"x": arguments["Q"], "kind": "query"}
    elif function == "finalize":
        arguments = {
            "NUM": zeros(2, 4, 5, 8, 12, dtype=torch.int64, device=device),
            "DEN": zeros(2, 4, 5, dtype=torch.int64, device=device),
        }
    elif function == "grad_finalize":
        arguments = {
            "SUM": zeros(2, 4, 5, 8, 3, dtype=torch.int64, device=device),
            "reference": zeros(2, 4, 5, dtype=torch.int32, device=device),
            "kind": "key",
        }
    elif function == "rowmax":
        arguments.pop("V")
    elif function == "accumulate":
        arguments["rowmax"] = zeros(2, 4, 5, dtype=torch.float64, device=device)
    elif function == "det_attn_sharded":
        arguments["kv_splits"] = [3, 0, 4]
    arguments.update(wrong)
    return getattr(kernel, function)(**arguments)


# What goes for Q, K and V of every function: (id, what is wrong, exception, the start of the message, a word in it).
TENSORS = [
    ("Q-list", {"Q": [[0.0]]}, TypeError, "Q: got list", "torch.Tensor"),
    ("K-none", {"K": None}, TypeError, "K: got NoneType", "torch.Tensor"),
    ("Q-numpy", {"Q": np.zeros((2, 4, 5, 8), np.float32)}, TypeError, "Q: got ndarray", "torch.Tensor"),
    ("Q-3d", {"Q": zeros(4, 5, 8)}, ValueError, "Q: got shape (4, 5, 8)", "4-D"),
    ("Q-5d", {"Q": zeros(1, 2, 4, 5, 8)}, ValueError, "Q: got shape (1, 2, 4, 5, 8)", "4-D"),
    ("Q-0d", {"Q": zeros()}, ValueError, "Q: got shape ()", "4-D"),
    ("K-3d", {"K": zeros(2, 7, 8)}, ValueError, "K: got shape (2, 7, 8)", "4-D"),
    ("Q-D257", {"Q": zeros(2, 4, 5, 257)}, ValueError, "Q: got head_dim 257", "1 to 256"),
    ("Q-D0", {"Q": zeros(2, 4, 5, 0)}, ValueError, "Q: got head_dim 0", "1 to 256"),
    ("K-D257", {"K": zeros(2, 2, 7, 257)}, ValueError, "K: got head_dim 257", "1 to 256"),
    ("Q-float64", {"Q": zeros(2, 4, 5, 8, dtype=torch.float64)}, TypeError, "Q: got dtype torch.float64", "float16"),
    ("Q-int32", {"Q": zeros(2, 4, 5, 8, dtype=torch.int32)}, TypeError, "Q: got dtype torch.int32", "float16"),
    ("Q-bool", {"Q": zeros(2, 4, 5, 8, dtype=torch.bool)}, TypeError, "Q: got dtype torch.bool", "float16"),
    ("Q-complex", {"Q": zeros(2, 4, 5, 8, dtype=torch.complex64)}, TypeError, "Q: got dtype torch.complex", "float16"),
    ("Q-fp8", {"Q": zeros(2, 4, 5, 8, dtype=torch.float8_e5m2)}, TypeError, "Q: got dtype torch.float8", "float16"),
    ("K-dtype", {"K": zeros(2, 2, 7, 8, dtype=torch.float16)}, TypeError, "K: got dtype torch.float16", "float32"),
    ("K-batch", {"K": zeros(3, 2, 7, 8)}, ValueError, "K: got shape (3, 2, 7, 8)", "(2, 4, 5, 8)"),
    ("K-batch-1", {"K": zeros(1, 2, 7, 8)}, ValueError, "K: got shape (1, 2, 7, 8)", "(2, 4, 5, 8)"),
    ("K-head-dim", {"K": zeros(2, 2, 7, 9)}, ValueError, "K: got shape (2, 2, 7, 9)", "(2, 4, 5, 8)"),
    ("heads-not-multiple", {"K": zeros(2, 3, 7, 8)}, ValueError, "Q: got 4 heads", "multiple of K's 3"),
    ("heads-more-kv", {"K": zeros(2, 8, 7, 8)}, ValueError, "Q: got 4 heads", "multiple of K's 8"),
    ("heads-no-kv", {"K": zeros(2, 0, 7, 8)}, ValueError, "Q: got 4 heads", "multiple of K's 0"),
    ("Q-strided", {"Q": strided(2, 4, 5, 8)}, ValueError, "Q: got stride 2", ".contiguous()"),
    ("K-strided", {"K": strided(2, 2, 7, 8)}, ValueError, "K: got stride 2", ".contiguous()"),
    ("Q-transposed", {"Q": zeros(2, 4, 8, 5).transpose(2, 3)}, ValueError, "Q: got stride 5", ".contiguous()"),
    ("Q-expanded", {"Q": zeros(2, 4, 5, 1).expand(2, 4, 5, 8)}, ValueError, "Q: got stride 0", ".contiguous()"),
    ("Q-meta", {"Q": zeros(2, 4, 5, 8, device="meta")}, ValueError, "Q: got device meta", "cpu"),
    ("K-meta", {"K": zeros(2, 2, 7, 8, device="meta")}, ValueError, "K: got device meta", "cpu"),
    ("Q-sparse", {"Q": zeros(2, 4, 5, 8).to_sparse()}, ValueError, "Q: got a torch.sparse_coo tensor", "strided"),
    (
        "K-too-long",
        {"K": zeros(1, 1, 1, 8).expand(2, 2, 2**31 + 1, 8)},
        ValueError,
        "K: got 2147483649 keys",
        "at most 2147483648",
    ),
]

# Options of all four attention functions.
OPTIONS = [
    ("causal-int", {"causal": 1}, TypeError, "causal: got int", "bool"),
    ("causal-none", {"causal": None}, TypeError, "causal: got NoneType", "bool"),
    ("causal-numpy", {"causal": np.bool_(True)}, TypeError, "causal: got numpy.bool", "bool"),
    ("causal-tensor", {"causal": torch.tensor(True)}, TypeError, "causal: got Tensor", "bool"),
    ("scale-nan", {"scale": math.nan}, ValueError, "scale: got nan", "finite"),
    ("scale-inf", {"scale": math.inf}, ValueError, "scale: got inf", "finite"),
    ("scale-minus-inf", {"scale": -math.inf}, ValueError, "scale: got -inf", "finite"),
    ("scale-huge-int", {"scale": 10**400}, ValueError, "scale: got an int of 1329 bits", "float64"),
    ("scale-str", {"scale": "1"}, TypeError, "scale: got str", "float"),
    ("scale-bool", {"scale": True}, TypeError, "scale: got bool", "float"),
    ("scale-complex", {"scale": 1j}, TypeError, "scale: got complex", "float"),
    ("scale-tensor", {"scale": torch.tensor(1.0)}, TypeError, "scale: got Tensor", "float"),
    ("precision-unknown", {"precision": "low"}, ValueError, "precision: got 'low'", "'highest', 'high'"),
    ("precision-case", {"precision": "Highest"}, ValueError, "precision: got 'Highest'", "'highest', 'high'"),
    ("precision-none", {"precision": None}, TypeError, "precision: got NoneType", "'highest', 'high'"),
    ("precision-tensor", {"precision": zeros(2)}, TypeError, "precision: got Tensor", "'highest', 'high'"),
    ("q_offset-float", {"q_offset": 1.0}, TypeError, "q_offset: got float", "int"),
    ("q_offset-bool", {"q_offset": True}, TypeError, "q_offset: got bool", "int"),
    ("q_offset-huge", {"q_offset": 2**63}, ValueError, "q_offset: got 9223372036854775808", "2**62"),
    ("q_offset-huge-negative", {"q_offset": -(2**62) - 1}, ValueError, "q_offset: got -4611686018427387905", "2**62"),
    ("path-unknown", {"path": "fast"}, ValueError, "path: got 'fast'", "'auto', 'reference', 'mma', 'wgmma'"),
    ("path-none", {"path": None}, TypeError, "path: got NoneType", "'auto'"),
    ("path-mma-on-cpu", {"path": "mma"}, ValueError, "path: got 'mma'", "'auto' and 'reference'"),
    ("path-wgmma-on-cpu", {"path": "wgmma"}, ValueError, "path: got 'wgmma'", "'auto' and 'reference'"),
]

# V, where there is one.
VALUES = [
    ("V-none", {"V": None}, TypeError, "V: got NoneType", "torch.Tensor"),
    ("V-shorter", {"V": zeros(2, 2, 6, 8)}, ValueError, "V: got shape (2, 2, 6, 8)", "(2, 2, 7, 8)"),
    ("V-heads", {"V": zeros(2, 4, 7, 8)}, ValueError, "V: got shape (2, 4, 7, 8)", "(2, 2, 7, 8)"),
    ("V-head-dim", {"V": zeros(2, 2, 7, 16)}, ValueError, "V: got shape (2, 2, 7, 16)", "(2, 2, 7, 8)"),
    ("V-3d", {"V": zeros(2, 7, 8)}, ValueError, "V: got shape (2, 7, 8)", "4-D"),
    ("V-dtype", {"V": zeros(2, 2, 7, 8, dtype=torch.bfloat16)}, TypeError, "V: got dtype torch.bfloat16", "float32"),
    ("V-float64", {"V": zeros(2, 2, 7, 8, dtype=torch.float64)}, TypeError, "V: got dtype torch.float64", "float16"),
    ("V-strided", {"V": strided(2, 2, 7, 8)}, ValueError, "V: got stride 2", ".contiguous()"),
    ("V-meta", {"V": zeros(2, 2, 7, 8, device="meta")}, ValueError, "V: got device meta", "cpu"),
]

# The keys of a shard.
RANGES = [
    ("kv_lo-negative", {"kv_lo": -1}, ValueError, "kv_lo: got -1", "0 to kv_hi, 7"),
    ("kv_hi-too-big", {"kv_hi": 8}, ValueError, "kv_hi: got 8", "0 to 7"),
    ("kv_hi-negative", {"kv_hi": -1}, ValueError, "kv_hi: got -1", "0 to 7"),
    ("kv_lo-above-kv_hi", {"kv_lo": 5, "kv_hi": 4}, ValueError, "kv_lo: got 5", "0 to kv_hi, 4"),
    ("kv_lo-too-big", {"kv_lo": 8}, ValueError, "kv_lo: got 8", "0 to kv_hi, 7"),
    ("kv_hi-2**64", {"kv_hi": 2**64}, ValueError, "kv_hi: got 18446744073709551616", "0 to 7"),
    ("kv_lo-float", {"kv_lo": 1.0}, TypeError, "kv_lo: got float", "int"),
    ("kv_lo-none", {"kv_lo": None}, TypeError, "kv_lo: got NoneType", "int"),
    ("kv_hi-bool", {"kv_hi": True}, TypeError, "kv_hi: got bool", "int"),
    ("kv_hi-tensor", {"kv_hi": torch.tensor(3)}, TypeError, "kv_hi: got Tensor", "int"),
    ("kv_offset-none", {"kv_offset": None}, TypeError, "kv_offset: got NoneType", "int"),
    ("kv_offset-float", {"kv_offset": 0.5}, TypeError, "kv_offset: got float", "int"),
    ("kv_offset-huge", {"kv_offset": 2**63}, ValueError, "kv_offset: got 9223372036854775808", "2**62"),
    ("causal-shard-no-q_offset", {"causal": True, "kv_offset": 7}, ValueError, "q_offset: got None", "kv_offset=7"),
]

ROWMAX = [
    ("rowmax-float32", {"rowmax": zeros(2, 4, 5)}, TypeError, "rowmax: got dtype torch.float32", "float64"),
    ("rowmax-int", {"rowmax": zeros(2, 4, 5, dtype=I64)}, TypeError, "rowmax: got dtype torch.int64", "float64"),
    (
        "rowmax-shape",
        {"rowmax": zeros(2, 4, 6, dtype=torch.float64)},
        ValueError,
        "rowmax: got shape (2, 4, 6)",
        "(2, 4, 5)",
    ),
    (
        "rowmax-keepdim",
        {"rowmax": zeros(2, 4, 5, 1, dtype=torch.float64)},
        ValueError,
        "rowmax: got shape (2, 4, 5, 1)",
        "(2, 4, 5)",
    ),
    (
        "rowmax-meta",
        {"rowmax": zeros(2, 4, 5, dtype=torch.float64, device="meta")},
        ValueError,
        "rowmax: got device meta",
        "cpu",
    ),
    ("rowmax-none", {"rowmax": None}, TypeError, "rowmax: got NoneType", "torch.Tensor"),
]

SPLITS = [
    ("splits-short", {"kv_splits": [3, 3]}, ValueError, "kv_splits: got sizes that add up to 6", "7"),
    ("splits-long", {"kv_splits": [3, 5]}, ValueError, "kv_splits: got sizes that add up to 8", "7"),
    ("splits-empty", {"kv_splits": []}, ValueError, "kv_splits: got sizes that add up to 0", "7"),
    ("splits-negative", {"kv_splits": [8, -1]}, ValueError, "kv_splits: got -1 at index 1", "negative"),
    ("splits-float", {"kv_splits": [3, 4.0]}, TypeError, "kv_splits: got float at index 1", "ints"),
    ("splits-bool", {"kv_splits": [6, True]}, TypeError, "kv_splits: got bool at index 1", "ints"),
    ("splits-int", {"kv_splits": 7}, TypeError, "kv_splits: got int", "list or tuple"),
    ("splits-none", {"kv_splits": None}, TypeError, "kv_splits: got NoneType", "list or tuple"),
    ("splits-tensor", {"kv_splits": torch.tensor([3, 4])}, TypeError, "kv_splits: got Tensor", "list or tuple"),
    ("splits-str", {"kv_splits": "34"}, TypeError, "kv_splits: got str", "list or tuple"),
]

OUT_DTYPE = [
    ("out_dtype-float64", {"out_dtype": torch.float64}, ValueError, "out_dtype: got torch.float64", "torch.bfloat16"),
    ("out_dtype-int", {"out_dtype": torch.int32}, ValueError, "out_dtype: got torch.int32", "torch.bfloat16"),
    ("out_dtype-str", {"out_dtype": "float32"}, TypeError, "out_dtype: got str", "torch.dtype"),
    ("out_dtype-none", {"out_dtype": None}, TypeError, "out_dtype: got NoneType", "torch.dtype"),
]

STATE = [
    ("return_state-int", {"return_state": 1}, TypeError, "return_state: got int", "bool"),
    ("return_state-none", {"return_state": None}, TypeError, "return_state: got NoneType", "bool"),
]

SUMS = [
    ("NUM-float", {"NUM": zeros(2, 4, 5, 8, 12)}, TypeError, "NUM: got dtype torch.float32", "int64"),
    ("NUM-11-digits", {"NUM": zeros(2, 4, 5, 8, 11, dtype=I64)}, ValueError, "NUM: got shape (2, 4, 5, 8, 11)", "12"),
    ("NUM-1d", {"NUM": zeros(12, dtype=I64)}, ValueError, "NUM: got shape (12,)", "12"),
    ("NUM-0d", {"NUM": zeros(dtype=I64)}, ValueError, "NUM: got shape ()", "12"),
    ("NUM-D257", {"NUM": zeros(2, 4, 5, 257, 12, dtype=I64)}, ValueError, "NUM: got head_dim 257", "1 to 256"),
    ("NUM-D0", {"NUM": zeros(2, 4, 5, 0, 12, dtype=I64)}, ValueError, "NUM: got head_dim 0", "1 to 256"),
    ("NUM-none", {"NUM": None}, TypeError, "NUM: got NoneType", "torch.Tensor"),
    ("DEN-float64", {"DEN": zeros(2, 4, 5, dtype=torch.float64)}, TypeError, "DEN: got dtype torch.float64", "int64"),
    ("DEN-shape", {"DEN": zeros(2, 4, 6, dtype=I64)}, ValueError, "DEN: got shape (2, 4, 6)", "(2, 4, 5)"),
    ("DEN-broadcast", {"DEN": zeros(1, 1, 1, dtype=I64)}, ValueError, "DEN: got shape (1, 1, 1)", "(2, 4, 5)"),
    ("DEN-meta", {"DEN": zeros(2, 4, 5, dtype=I64, device="meta")}, ValueError, "DEN: got device meta", "cpu"),
    ("shape-other", {"shape": (2, 4, 5, 9)}, ValueError, "shape: got (2, 4, 5, 9)", "(2, 4, 5, 8)"),
    ("shape-int", {"shape": 8}, TypeError, "shape: got int", "tuple or list"),
    ("precision-unknown", {"precision": "low"}, ValueError, "precision: got 'low'", "'highest', 'high'"),
    ("dropout_p-above", {"dropout_p": 2.0}, ValueError, "dropout_p: got 2.0", "0 to 1"),
    ("dropout_p-nan", {"dropout_p": math.nan}, ValueError, "dropout_p: got nan", "0 to 1"),
    ("dropout_p-str", {"dropout_p": "x"}, TypeError, "dropout_p: got str", "float"),
]

GRADIENT = [
    ("precision-unknown", {"precision": "low"}, ValueError, "precision: got 'low'", "'highest', 'high'"),
    ("precision-none", {"precision": None}, TypeError, "precision: got NoneType", "'highest', 'high'"),
]

ROWS = [
    ("x-3d", {"x": zeros(4, 5, 8)}, ValueError, "x: got shape (4, 5, 8)", "4-D"),
    ("x-float64", {"x": zeros(2, 4, 5, 8, dtype=torch.float64)}, TypeError, "x: got dtype torch.float64", "float16"),
    ("x-strided", {"x": strided(2, 4, 5, 8)}, ValueError, "x: got stride 2", ".contiguous()"),
    ("x-D257", {"x": zeros(2, 4, 5, 257)}, ValueError, "x: got head_dim 257", "1 to 256"),
    ("x-none", {"x": None}, TypeError, "x: got NoneType", "torch.Tensor"),
    ("kind-unknown", {"kind": "output"}, ValueError, "kind: got 'output'", "'query', 'key', 'value'"),
    ("kind-none", {"kind": None}, TypeError, "kind: got NoneType", "'query', 'key', 'value'"),
    ("scale-nan", {"scale": math.nan}, ValueError, "scale: got nan", "finite"),
    ("scale-for-keys", {"kind": "key", "scale": 1.0}, ValueError, "scale: got 1.0", "must be None"),
    ("precision-none", {"precision": None}, TypeError, "precision: got NoneType", "'highest', 'high'"),
]


def cases():
    found = []
    per_function = {
        "det_attn": TENSORS + OPTIONS + VALUES + OUT_DTYPE + STATE,
        "det_attn_sharded": TENSORS + OPTIONS + VALUES + SPLITS + OUT_DTYPE,
        "rowmax": TENSORS + OPTIONS + RANGES,
        "accumulate": TENSORS + OPTIONS + VALUES + RANGES + ROWMAX,
        "finalize": SUMS + OUT_DTYPE,
        "grad_finalize": GRADIENT + OUT_DTYPE,
        "rows": ROWS,
    }
    for function, table in per_function.items():
        for name, wrong, exception, start, word in table:
            found.append(pytest.param(function, wrong, exception, start, word, id=f"{function}-{name}"))
    return found


@pytest.mark.parametrize("function, wrong, exception, start, word", cases())
def test_bad_argument_is_named(kernel, function, wrong, exception, start, word):
    with pytest.raises(exception) as caught:
        call(kernel, function, **wrong)
    message = str(caught.value)
    assert type(caught.value) is exception
    assert message.startswith(start), message
    assert word in message, message


@pytest.mark.parametrize("function", ATTENTION + ("finalize", "grad_finalize", "rows"))
def test_good_arguments_are_taken(kernel, device, function):
    """The table above would prove nothing if the arguments it spoils were refused anyway."""
    call(kernel, function, device)


@pytest.mark.parametrize("function", ATTENTION)
@pytest.mark.parametrize(
    "option",
    [{"scale": 0}, {"scale": 1}, {"scale": -2.5}, {"scale": np.float64(0.5)}, {"causal": True, "q_offset": -(2**62)}],
    ids=str,
)
def test_unusual_but_allowed(kernel, device, function, option):
    call(kernel, function, device, **option)


def test_one_wide_head_takes_any_stride(kernel, device):
    """With D = 1 there is no last dimension to be dense."""
    x = torch.ones(1, 1, 3, 2, device=device)[..., :1].as_strided((1, 1, 3, 1), (6, 6, 2, 5))
    assert torch.equal(kernel.det_attn(x, x, x), torch.ones(1, 1, 3, 1, device=device))


def test_an_empty_tensor_need_not_be_dense(kernel, device):
    """contiguous() would leave its strides as they are."""
    q, k, v = (x.to(device) for x in (good()["Q"], strided(2, 2, 0, 8), strided(2, 2, 0, 8)))
    assert not kernel.det_attn(q, k, v).any()
    empty = strided(2, 4, 0, 8).to(device).requires_grad_()
    out = kernel.det_attn(empty, *(x.to(device) for x in (good()["K"], good()["V"])))
    out.sum().backward()
    assert out.shape == empty.grad.shape == (2, 4, 0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q", "K", "V"])
def test_mixed_devices(kernel, name):
    arguments = good("cuda")
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ValueError, match="^[KV]: got device .* must be on "):
        kernel.det_attn(**arguments)


@pytest.mark.gpu
def test_wgmma_on_another_gpu(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="^path: got 'wgmma' on a GPU without it"):
        kernel.det_attn(**good("cuda"), path="wgmma")


@pytest.mark.gpu
def test_mixed_devices_of_sums(kernel):
    with pytest.raises(ValueError, match="^rowmax: got device cpu, must be on Q's"):
        call(kernel, "accumulate", "cuda", rowmax=zeros(2, 4, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="^DEN: got device cpu, must be on NUM's"):
        call(kernel, "finalize", "cuda", DEN=zeros(2, 4, 5, dtype=torch.int64))


def test_nested_tensor(kernel):
    nested = torch.nested.nested_tensor([zeros(4, 5, 8), zeros(4, 3, 8)])
    with pytest.raises(ValueError, match="^Q: got a nested tensor"):
        kernel.det_attn(nested, zeros(2, 2, 7, 8), zeros(2, 2, 7, 8))


@pytest.mark.parametrize("function", ["det_attn", "scaled_dot_product_attention"])
@pytest.mark.parametrize(
    "q, k, error, said",
    [
        (zeros(1, 2, 5, 8).double(), None, TypeError, "dtype torch.float64"),
        (zeros(1, 2, 5, 0), None, ValueError, "head_dim 0"),
        (zeros(1, 2, 5, 257), None, ValueError, "head_dim 257"),
        (zeros(1, 2, 5, 8).to_sparse(), None, ValueError, "sparse_coo"),
        (zeros(1, 2, 5, 8).to_sparse_csr(), None, ValueError, "sparse_csr"),
        (zeros(1, 2, 5, 8).to_mkldnn(), None, ValueError, "torch._mkldnn"),
        (torch.nested.nested_tensor([zeros(2, 5, 8)]), None, ValueError, "nested"),
        (zeros(1, 2, 5, 8, device="meta"), None, ValueError, "device meta"),
        (zeros(1, 2, 5, 8), zeros(1, 0, 5, 8), ValueError, "multiple of (K|key)'s 0"),
        (zeros(1, 1, 1, 8), zeros(1, 1, 1, 8).expand(1, 1, 2**31 + 1, 8), ValueError, "at most 2147483648"),
    ],
    ids=["float64", "no-columns", "wide", "sparse", "csr", "mkldnn", "nested", "meta", "no-heads", "many-keys"],
)
def test_tensors_that_agree_may_all_be_wrong(kernel, function, q, k, error, said):
    k = q if k is None else k
    with pytest.raises(error, match=said):
        getattr(kernel, function)(q, k, k, **({} if function == "det_attn" else dict(enable_gqa=True)))


# ---- The ops themselves: whoever calls them past the Python layer must not be able to read or write out of bounds ----

Q, K, V = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 8)
M, NUM, DEN = zeros(2, 4, 5, dtype=torch.float64), zeros(2, 4, 5, 8, 12, dtype=I64), zeros(2, 4, 5, dtype=I64)
F32 = torch.float32
RAW = [
    ("rows", (zeros(5, 8), "key", 1.0, "high"), "x: got 2 dimensions"),
    ("rows", (strided(2, 4, 5, 8), "key", 1.0, "high"), "contiguous"),
    ("rows", (Q, "output", 1.0, "high"), "kind: got 'output'"),
    ("rows", (Q, "key", math.nan, "high"), "scale"),
    ("rows", (Q, "key", 1.0, "low"), "precision: got 'low'"),
    ("rows", (Q.double(), "key", 1.0, "high"), "x: got dtype Double"),
    ("rowmax", (Q, zeros(2, 3, 7, 8), False, 1.0, "high", 0, 0, 7, *NO_SCORES, "auto"), "multiple"),
    ("rowmax", (Q, zeros(2, 0, 7, 8), False, 1.0, "high", 0, 0, 7, *NO_SCORES, "auto"), "multiple"),
    ("rowmax", (Q, zeros(1, 2, 7, 8), False, 1.0, "high", 0, 0, 7, *NO_SCORES, "auto"), "batch"),
    ("rowmax", (Q, zeros(2, 2, 7, 4), False, 1.0, "high", 0, 0, 7, *NO_SCORES, "auto"), "head_dim"),
    ("rowmax", (zeros(2, 4, 5, 300), K, False, 1.0, "high", 0, 0, 7, *NO_SCORES, "auto"), "head_dim 300"),
    ("rowmax", (Q, K.half(), False, 1.0, "high", 0, 0, 7, *NO_SCORES, "auto"), "dtype"),
    ("rowmax", (Q, K, False, 1.0, "high", 0, -1, 7, *NO_SCORES, "auto"), "kv_lo"),
    ("rowmax", (Q, K, False, 1.0, "high", 0, 0, 8, *NO_SCORES, "auto"), "kv_hi"),
    ("rowmax", (Q, K, False, 1.0, "high", 0, 5, 4, *NO_SCORES, "auto"), "kv_lo"),
    ("rowmax", (Q, K, False, 1.0, "high", 0, 0, 7, *NO_SCORES, "fast"), "path: got 'fast'"),
    ("accumulate", (Q, K, zeros(2, 2, 6, 8), M, False, 1.0, "high", 0, 0, 7, *NO_MODIFIERS, "auto"), "v: its shape"),
    ("accumulate", (Q, K, V, M[:1], False, 1.0, "high", 0, 0, 7, *NO_MODIFIERS, "auto"), "rowmax: its shape"),
    ("accumulate", (Q, K, V, M.float(), False, 1.0, "high", 0, 0, 7, *NO_MODIFIERS, "auto"), "rowmax: got dtype"),
    ("finalize", (NUM[..., :11], DEN, "high", F32, 0.0), "num"),
    ("finalize", (NUM, DEN[:1], "high", F32, 0.0), "den: its shape"),
    ("finalize", (NUM, DEN, "high", torch.float64, 0.0), "out_dtype"),
    ("finalize", (NUM.float(), DEN, "high", F32, 0.0), "num: got dtype"),
    ("forward", (Q, K, V[:, :1], False, 1.0, "high", 0, 0, 7, F32, *NO_MODIFIERS, "auto", -1), "v: its shape"),
    ("forward", (Q, K, V, False, math.inf, "high", 0, 0, 7, F32, *NO_MODIFIERS, "auto", -1), "scale"),
    ("forward", (Q, K, V, False, 1.0, "high", 0, 0, 7, torch.int8, *NO_MODIFIERS, "auto", -1), "out_dtype"),
]


@pytest.mark.parametrize("op, arguments, message", RAW, ids=[f"{op}-{i}" for i, (op, _, _) in enumerate(RAW)])
def test_ops_keep_memory_safe_on_their_own(kernel, op, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(kernel.ops, op)(*arguments)


@pytest.mark.parametrize("diagonal", [2**63 - 1, -(2**63)])
def test_extreme_diagonals_do_not_overflow(kernel, diagonal):
    found = kernel.ops.rowmax(Q, K, True, 1.0, "high", diagonal, 0, 7, *NO_SCORES, "auto")
    assert torch.equal(found, torch.full_like(found, 0.0 if diagonal > 0 else -math.inf))


# ---- Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, name",
    [("rowmax", n) for n in "QK"]
    + [("accumulate", n) for n in ("Q", "K", "V", "rowmax")]
    + [("rows", "x")],
)
def test_stages_refuse_inputs_that_require_grad(kernel, function, name):
    x = dict(good(), x=zeros(2, 4, 5, 8), rowmax=zeros(2, 4, 5, dtype=torch.float64))[name]
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: got a tensor that requires grad"):
        call(kernel, function, **{name: x})
    with torch.no_grad():
        call(kernel, function, **{name: x})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_requires_grad(kernel, device, mode):
    arguments = {name: x.requires_grad_() for name, x in good(device).items()}
    with mode():
        assert not kernel.det_attn(**arguments).requires_grad


@pytest.mark.parametrize("name", ["Q", "K", "V"])
def test_forward_mode_is_refused_and_not_answered_with_zero(kernel, device, name):
    arguments = good(device)
    with pytest.raises(NotImplementedError, match=f"^{name}: got a tensor with a forward-mode tangent"):
        torch.func.jvp(lambda x: kernel.det_attn(**{**arguments, name: x}), (arguments[name],), (arguments[name],))
    with torch.autograd.forward_ad.dual_level():  # without a tangent nothing is lost
        assert_same_bits(kernel.det_attn_sharded(**arguments, kv_splits=[3, 4]), kernel.det_attn(**arguments))
