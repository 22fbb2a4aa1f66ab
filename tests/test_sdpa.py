"""scaled_dot_product_attention: torch's shapes, masks and defaults, det-attn's bytes; replace_sdpa: in torch's place.

In: calls as programs write them for torch. Out: close to torch's float64 answer, and the bytes of det_attn.
"""

import math
import threading
import time
import timeit
import warnings

import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from helpers import RecordedOp
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

ORIGINAL = functional.scaled_dot_product_attention
INF = float("inf")


def randn(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def qkv(q_shape, k_shape=None, v_shape=None, **how):
    k_shape = k_shape or q_shape
    return [randn(*s, seed=i, **how) for i, s in enumerate((q_shape, k_shape, v_shape or k_shape))]


def assert_close_to_torch(out, q, k, v, mask=None, **how):
    """Against torch in float64 on the CPU: values, shape, dtype."""
    wide = [x.detach().cpu().double() for x in (q, k, v)]
    mask = mask if mask is None or mask.dtype is torch.bool else mask.double()
    truth = ORIGINAL(*wide, None if mask is None else mask.cpu(), **how)
    assert out.shape == truth.shape and out.dtype is q.dtype
    eps = torch.finfo(q.dtype).eps
    torch.testing.assert_close(out.detach().cpu().double(), truth, rtol=2 * eps, atol=16 * eps if eps > 1e-4 else 2e-6)


# ---- Shapes --------------------------------------------------------------------------------------------------------

SHAPES = [
    ((5, 16), (9, 16), (9, 16), {}),
    ((3, 5, 16), (3, 9, 16), (3, 9, 16), {}),
    ((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16), {}),
    ((2, 2, 3, 5, 16), (2, 2, 3, 9, 16), (2, 2, 3, 9, 16), {}),
    ((2, 1, 2, 3, 5, 8), (2, 1, 2, 3, 9, 8), (2, 1, 2, 3, 9, 8), {}),
    ((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 7), {}),
    ((2, 3, 5, 7), (2, 3, 9, 7), (2, 3, 9, 16), {}),
    ((2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16), dict(enable_gqa=True)),
    ((4, 5, 16), (2, 9, 16), (2, 9, 16), dict(enable_gqa=True)),
    ((3, 2, 4, 5, 16), (3, 2, 2, 9, 16), (3, 2, 2, 9, 5), dict(enable_gqa=True)),
    ((2, 3, 5, 16), (1, 3, 9, 16), (2, 1, 9, 16), {}),
    ((2, 3, 0, 16), (2, 3, 9, 16), (2, 3, 9, 16), {}),
    ((0, 3, 5, 16), (0, 3, 9, 16), (0, 3, 9, 16), {}),
]


@pytest.mark.parametrize("q_shape, k_shape, v_shape, how", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_leading_dimensions(kernel, device, q_shape, k_shape, v_shape, how, is_causal):
    q, k, v = qkv(q_shape, k_shape, v_shape, device=device)
    out = kernel.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **how)
    assert_close_to_torch(out, q, k, v, is_causal=is_causal, **how)


def test_leading_dimensions_and_a_padded_width_change_no_byte(kernel, device):
    q, k, v = qkv((6, 5, 16), (6, 9, 16), device=device)
    v[..., 0], v[..., 7:] = 1.0, v[..., 7:] / 16  # so that the columns cut off below do not set a row's exponent
    expected = kernel.det_attn(q[None], k[None], v[None])[0]
    sdpa = kernel.scaled_dot_product_attention
    assert_same_bits(sdpa(q, k, v), expected)
    assert_same_bits(sdpa(q.view(3, 2, 5, 16), k.view(3, 2, 9, 16), v.view(3, 2, 9, 16)).view(6, 5, 16), expected)
    assert_same_bits(sdpa(q, k, v[..., :7]), expected[..., :7])
    for i in range(6):
        assert_same_bits(sdpa(q[i], k[i], v[i]), expected[i])
    columns = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]  # last dimension not dense
    assert_same_bits(sdpa(*columns), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_output_has_the_dtype_of_the_input(kernel, device, dtype, precision):
    q, k, v = qkv((2, 3, 5, 16), (2, 3, 9, 16), device=device, dtype=dtype)
    out = kernel.scaled_dot_product_attention(q, k, v, precision=precision)
    assert_same_bits(out, kernel.det_attn(q, k, v, precision=precision, out_dtype=dtype))


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7), (1, 7)])
def test_is_causal_is_aligned_to_the_top_left(kernel, device, lengths):
    q, k, v = qkv((1, 2, lengths[0], 16), (1, 2, lengths[1], 16), device=device)
    out = kernel.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close_to_torch(out, q, k, v, is_causal=True)
    assert_same_bits(out, kernel.det_attn(q, k, v, causal=True, q_offset=0))


def test_scale_is_that_of_the_width_as_given(kernel, device):
    q, k, v = qkv((1, 2, 5, 9), (1, 2, 7, 9), (1, 2, 7, 16), device=device)
    for scale in (None, 0.5, 2):
        assert_close_to_torch(kernel.scaled_dot_product_attention(q, k, v, scale=scale), q, k, v, scale=scale)
    default = kernel.scaled_dot_product_attention(q, k, v)
    assert_same_bits(default, kernel.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(9)))


# ---- Masks ---------------------------------------------------------------------------------------------------------

MASK_SHAPES = [
    ((2, 3, 5, 16), (5, 9)),
    ((2, 3, 5, 16), (2, 1, 5, 9)),
    ((2, 3, 5, 16), (2, 3, 5, 9)),
    ((2, 3, 5, 16), (1, 3, 1, 9)),
    ((3, 5, 16), (3, 5, 9)),
    ((3, 5, 16), (5, 1)),
    ((5, 16), (5, 9)),
    ((2, 2, 3, 5, 16), (2, 1, 1, 5, 9)),
    ((2, 2, 3, 5, 16), (3, 5, 9)),
    ((2, 2, 3, 5, 16), (5, 9)),
]


@pytest.mark.parametrize("kind", ["bool", "float", "inf"])
@pytest.mark.parametrize("q_shape, mask_shape", MASK_SHAPES)
def test_masks_broadcast_as_in_torch(kernel, device, q_shape, mask_shape, kind):
    q, k, v = qkv(q_shape, (*q_shape[:-2], 9, 16), device=device)
    numbers = randn(*mask_shape, seed=9, device=device)
    mask = {"bool": numbers > -0.5, "float": numbers, "inf": numbers.masked_fill(numbers < -0.5, -INF)}[kind]
    assert_close_to_torch(kernel.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_mask_may_be_float32_or_of_the_input_dtype(kernel, device, dtype):
    q, k, v = qkv((2, 3, 5, 16), (2, 3, 9, 16), device=device, dtype=dtype)
    mask = randn(5, 9, seed=9, device=device, dtype=dtype)
    out = kernel.scaled_dot_product_attention(q, k, v, mask)
    assert_close_to_torch(out, q, k, v, mask)
    assert_same_bits(out, kernel.scaled_dot_product_attention(q, k, v, mask.float()))


def test_masked_keys_change_no_byte_whatever_they_hold(kernel, device):
    q, k, v = qkv((2, 3, 5, 16), (2, 3, 9, 16), device=device)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool, device=device)
    mask[0, ..., 6:] = False
    expected = torch.stack([
        kernel.det_attn(q[:1], k[:1, :, :6], v[:1, :, :6])[0],
        kernel.det_attn(q[1:], k[1:], v[1:])[0],
    ])  # fmt: skip
    k[0, :, 6:], v[0, :, 6:] = float("nan"), INF
    assert_same_bits(kernel.scaled_dot_product_attention(q, k, v, mask), expected)
    bias = torch.zeros(2, 1, 1, 9, device=device).masked_fill(~mask, -INF)
    assert_same_bits(kernel.scaled_dot_product_attention(q, k, v, bias), expected)


def test_a_causal_mask_is_is_causal(kernel, device):
    q, k, v = qkv((2, 3, 7, 16), device=device)
    mask = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
    expected = kernel.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_same_bits(kernel.scaled_dot_product_attention(q, k, v, mask), expected)


def test_a_query_that_attends_nothing_is_zero_as_in_torch(kernel, device):
    q, k, v = qkv((1, 1, 3, 16), device=device)
    mask = torch.tensor([[True, False, True], [False] * 3, [True] * 3], device=device)
    out = kernel.scaled_dot_product_attention(q, k, v, mask)
    assert out[0, 0, 1].eq(0).all()
    assert_close_to_torch(out, q, k, v, mask)


@pytest.mark.parametrize("shape", [(2, 4, 5, 16), (4, 5, 16), (2, 1, 4, 5, 16)])
def test_gradients_through_masks_and_groups(kernel, shape):
    """On the CPU, against float64."""
    kv = (*shape[:-3], 2, 9, 16)
    mask = randn(*shape[:-1], 9, seed=9).masked_fill(randn(*shape[:-1], 9, seed=8) < -0.5, -INF)
    ours = [x.requires_grad_() for x in qkv(shape, kv)]
    wide = [x.detach().double().requires_grad_() for x in ours]
    kernel.scaled_dot_product_attention(*ours, mask, enable_gqa=True).square().sum().backward()
    ORIGINAL(*wide, mask.double(), enable_gqa=True).square().sum().backward()
    for x, y in zip(ours, wide):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-5)


# ---- Dropout -------------------------------------------------------------------------------------------------------


def test_dropout_is_governed_by_torchs_seed(kernel, device):
    q, k, v = qkv((2, 3, 5, 16), (2, 3, 9, 16), device=device)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([kernel.scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2)])
    assert_same_bits(runs[0][0], runs[1][0])
    assert_same_bits(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[2][0]) and not torch.equal(runs[0][0], runs[0][1])


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_drops_what_det_attn_drops_with_the_seed_that_was_drawn(kernel, device, is_causal):
    q, k, v = qkv((2, 3, 5, 16), (2, 3, 9, 16), device=device)
    torch.manual_seed(7)
    seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64))
    torch.manual_seed(7)
    out = kernel.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=is_causal)
    assert_same_bits(out, kernel.det_attn(q, k, v, is_causal, q_offset=0, dropout_p=0.4, dropout_seed=seed))


def test_dropout_keeps_the_mean_and_p_1_drops_all(kernel, device):
    q, k, v = qkv((1, 1, 64, 16), (1, 1, 64, 16), device=device)
    torch.manual_seed(0)
    outs = [kernel.scaled_dot_product_attention(q, k, v, dropout_p=0.3) for _ in range(60)]
    plain = kernel.scaled_dot_product_attention(q, k, v)
    spread = torch.stack(outs).double()
    error = (spread.mean(0) - plain).abs() / (spread.std(0) / math.sqrt(len(outs)))
    assert error.mean() < 1.0 and error.max() < 6
    assert kernel.scaled_dot_product_attention(q, k, v, dropout_p=1.0).eq(0).all()


def test_dropout_draws_nothing_where_there_is_none(kernel):
    q, k, v = qkv((1, 1, 3, 16))
    before = torch.get_rng_state()
    kernel.scaled_dot_product_attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpointing_recomputes_the_same_dropout(kernel, device):
    from torch.utils.checkpoint import checkpoint

    grads = []
    for recompute in (False, True):
        torch.manual_seed(3)
        q, k, v = (x.requires_grad_() for x in qkv((1, 2, 5, 16), device=device))

        def block(q, k, v):
            return kernel.scaled_dot_product_attention(q, k, v, dropout_p=0.5).square()

        out = checkpoint(block, q, k, v, use_reentrant=False) if recompute else block(q, k, v)
        out.sum().backward()
        grads.append([q.grad, k.grad, v.grad])
    for x, y in zip(*grads):
        assert_same_bits(x, y)


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["function", "attention", "layer"])
def test_a_compiled_call_draws_the_seeds_of_the_eager_one(kernel, device, backend, name):
    """Inductor has a generator of its own for torch.randint and the like."""
    module = nn.Module()
    call = {
        "function": lambda q, k, v: kernel.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        "attention": lambda q, k, v: kernel.attention(module, q, k, v, dropout=0.5)[0].transpose(1, 2),
        "layer": lambda q, k, v: kernel.layers.ScaledDotProductAttention()(q, k, v, None, 0.5),
    }[name]

    def twice(q, k, v):
        return call(call(q * 2, k, v), k, v)

    torch._dynamo.reset()
    found = []
    for function in (torch.compile(twice, fullgraph=True, backend=backend), twice):
        inputs = [x.requires_grad_() for x in qkv((2, 3, 5, 16), device=device)]
        torch.manual_seed(11)
        out = function(*inputs)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs), torch.get_rng_state()))
    for x, y in zip(*found):
        assert_same_bits(x, y)


@pytest.mark.parametrize("q_shape, kv_len", [((0, 2, 4, 5, 8), 7), ((2, 2, 4, 0, 8), 7), ((2, 2, 4, 5, 8), 0)])
def test_a_mask_of_more_than_four_dimensions_may_be_empty(kernel, device, q_shape, kv_len):
    q, k, v = qkv(q_shape, (*q_shape[:3], kv_len, 8), device=device)
    out = kernel.scaled_dot_product_attention(q, k, v, torch.zeros(1, q_shape[3], kv_len, device=device))
    assert_same_bits(out, torch.zeros(q_shape, device=device))


# ---- Refusals ------------------------------------------------------------------------------------------------------


def zeros(*shape, **how):
    return torch.zeros(shape, **how)


def per_channel():
    return torch.quantize_per_channel(zeros(1, 1, 4, 4), torch.ones(4), torch.zeros(4), 3, torch.qint8)


REFUSED = [
    (ValueError, "attn_mask", lambda: (*qkv((1, 1, 3, 4)), zeros(3, 3), 0.0, True)),
    (ValueError, "query", lambda: (zeros(4), zeros(3, 4), zeros(3, 4))),
    (TypeError, "query: got NoneType", lambda: (None, zeros(3, 4), zeros(3, 4))),
    (TypeError, "key: got list", lambda: (zeros(3, 4), [1.0], zeros(3, 4))),
    (TypeError, "value: got NoneType", lambda: (zeros(3, 4), zeros(3, 4), None)),
    (ValueError, "key: got a torch.sparse_coo", lambda: (zeros(3, 4), zeros(3, 4).to_sparse(), zeros(3, 4))),
    (ValueError, "attn_mask: got shape", lambda: (*[zeros(1, 2, 1, 3, 4)] * 3, zeros(2, 3, 3))),
    (ValueError, "attn_mask: got shape", lambda: (*[zeros(1, 2, 1, 3, 4)] * 3, zeros(1, 1, 2, 1, 3, 3))),
    (TypeError, "attn_mask: got list", lambda: (*[zeros(1, 2, 1, 3, 4)] * 3, [1.0])),
    (TypeError, "attn_mask: got list", lambda: (*[zeros(1, 3, 4)] * 3, [1.0])),
    (TypeError, "attn_mask: got list", lambda: (zeros(1, 4, 3, 4), *[zeros(1, 1, 3, 4)] * 2, [1.0])),
    (ValueError, "^attn_mask: got a mask together", lambda: (*[zeros(3, 4)] * 3, causal_lower_right(3, 3), 0.0, True)),
    (ValueError, r"^attn_mask: got a CausalBias of \(3, 4\)", lambda: (*[zeros(3, 4)] * 3, causal_lower_right(3, 4))),
    (ValueError, r"CausalBias of \(4, 3\), must be of \(3, 3\)", lambda: (*[zeros(3, 4)] * 3, causal_upper_left(4, 3))),
    (TypeError, "^query: got dtype torch.qint8", lambda: [per_channel()] * 3),
    (
        ValueError,
        "do not broadcast",
        lambda: (zeros(4, 3, 4), zeros(2, 3, 4), zeros(3, 4), None, 0.0, False, None, True),
    ),
    (ValueError, "head_dim", lambda: (zeros(1, 1, 3, 4), zeros(1, 1, 3, 5), zeros(1, 1, 3, 5))),
    (ValueError, "value: got 4 rows", lambda: (zeros(1, 1, 3, 4), zeros(1, 1, 3, 4), zeros(1, 1, 4, 4))),
    (ValueError, "head_dim 257", lambda: (zeros(1, 1, 3, 257), zeros(1, 1, 3, 257), zeros(1, 1, 3, 4))),
    (ValueError, "do not broadcast", lambda: (zeros(1, 4, 3, 4), zeros(1, 2, 3, 4), zeros(1, 2, 3, 4))),
    (ValueError, "do not broadcast", lambda: (zeros(2, 1, 3, 4), zeros(3, 1, 3, 4), zeros(3, 1, 3, 4))),
    (ValueError, "multiple of", lambda: (zeros(1, 3, 3, 4), *[zeros(1, 2, 3, 4)] * 2, None, 0.0, False, None, True)),
    (TypeError, "dtype", lambda: [zeros(1, 1, 3, 4, dtype=torch.float64)] * 3),
    (TypeError, "dtype", lambda: (zeros(1, 1, 3, 4), zeros(1, 1, 3, 4).half(), zeros(1, 1, 3, 4))),
    (TypeError, "^attn_mask: got dtype torch.int64", lambda: (*[zeros(1, 1, 3, 4)] * 3, zeros(3, 3).long())),
    (ValueError, r"^attn_mask: got shape \(3, 4\)", lambda: (*[zeros(1, 1, 3, 4)] * 3, zeros(3, 4))),
    (ValueError, "attn_mask", lambda: (*[zeros(3, 4)] * 3, zeros(2, 1, 1, 3, 3))),
    (ValueError, "attn_mask", lambda: (*[zeros(2, 3, 4)] * 3, zeros(1, 1, 3, 3))),
    (NotImplementedError, "^attn_mask: got", lambda: (*[zeros(1, 1, 3, 4)] * 3, zeros(3, 3, requires_grad=True))),
    (ValueError, "dropout_p", lambda: (*[zeros(1, 1, 3, 4)] * 3, None, 1.5)),
    *((TypeError, "dropout_p", lambda p=p: (*[zeros(1, 1, 3, 4)] * 3, None, p)) for p in (None, "", [], zeros(2))),
    (TypeError, "is_causal", lambda: (*[zeros(1, 1, 3, 4)] * 3, zeros(3, 3), 0.0, zeros(2))),
    (TypeError, "enable_gqa", lambda: (*[zeros(1, 1, 3, 4)] * 3, None, 0.0, False, None, "x")),
    (ValueError, "^scale", lambda: (*[zeros(1, 1, 3, 4)] * 3, None, 0.0, False, INF)),
    *((TypeError, "^scale", lambda x=x: (*[zeros(1, 1, 3, 4)] * 3, None, 0.0, False, x)) for x in ("x", True, zeros())),
    (
        ValueError,
        "do not broadcast",
        lambda: (*[zeros(1, 2, 3, 4)] * 2, zeros(1, 4, 3, 4), None, 0.0, False, None, True),
    ),
    (ValueError, "^query: got head_dim 0", lambda: (zeros(1, 1, 3, 0), zeros(1, 1, 3, 0), zeros(1, 1, 3, 4))),
    (TypeError, "^query: got dtype torch.float64", lambda: [zeros(2, 3, 4, dtype=torch.float64)] * 3),
    (TypeError, "^value: got dtype torch.float16, must be query's", lambda: (*[zeros(3, 4)] * 2, zeros(3, 4).half())),
]


@pytest.mark.parametrize("error, said, arguments", REFUSED)
def test_what_is_refused_names_the_argument(kernel, error, said, arguments):
    with pytest.raises(error, match=said):
        kernel.scaled_dot_product_attention(*arguments())


@pytest.mark.parametrize("error, precision", [(ValueError, "low"), (TypeError, None)])
@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (3, 4)])
def test_an_unknown_precision_is_refused(kernel, error, precision, shape):
    with pytest.raises(error, match="^precision: got"):
        kernel.scaled_dot_product_attention(*[zeros(*shape)] * 3, precision=precision)


def test_a_scale_may_be_a_number_of_numpy(kernel):
    q, k, v = qkv((1, 1, 3, 4))
    expected = kernel.scaled_dot_product_attention(q, k, v, scale=0.5)
    assert_same_bits(kernel.scaled_dot_product_attention(q, k, v, scale=np.float32(0.5)), expected)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x[None]).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_of_torch_func_are_refused_or_fall_back(kernel, name):
    x, kv = qkv((1, 1, 3, 4))[:2]
    with pytest.raises(NotImplementedError, match="^query: got a tensor of torch.func's grad"):
        TRANSFORMS[name](lambda x: kernel.scaled_dot_product_attention(x, kv, kv), x)
    with pytest.raises(NotImplementedError, match="^V: got a tensor of torch.func's grad"):
        TRANSFORMS[name](lambda x: kernel.det_attn_sharded(kv, kv, x, [1, 2]), x)
    detached = TRANSFORMS[name](lambda x: x * kernel.det_attn(x.detach(), kv, kv), x)
    assert detached.isfinite().all()
    with kernel.replace_sdpa(fallback=True), pytest.warns(UserWarning, match="torch computes it"):
        found = TRANSFORMS[name](lambda x: functional.scaled_dot_product_attention(x, kv, kv), x)
    assert torch.equal(found, TRANSFORMS[name](lambda x: ORIGINAL(x, kv, kv), x))


def test_a_call_that_is_refused_draws_no_seed(kernel):
    q = zeros(1, 1, 3, 4)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with pytest.raises(NotImplementedError, match="attn_mask"):
        kernel.scaled_dot_product_attention(q, q, q, zeros(3, 3, requires_grad=True), 0.5)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_autocast_converts_only_what_attention_takes(kernel, dtype):
    q = zeros(1, 1, 3, 4).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="dtype"):
        kernel.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("of, offset", [(causal_upper_left, 0), (causal_lower_right, 4), (causal_lower_right, -4)])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_torchs_causal_bias_is_the_mask_it_stands_for(kernel, device, of, offset, lead):
    sizes = (9, 5) if offset < 0 else (5, 9)
    q, k, v = qkv((*lead, sizes[0], 16), (*lead, sizes[1], 16), device=device)
    pairs = torch.ones(sizes, dtype=torch.bool, device=device).tril(offset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of rows that attend nothing
        bias = of(*sizes)
    expected = kernel.scaled_dot_product_attention(q, k, v, pairs)
    assert_same_bits(kernel.scaled_dot_product_attention(q, k, v, bias), expected)
    with kernel.replace_sdpa(), torch.no_grad():
        assert_same_bits(functional.scaled_dot_product_attention(q, k, v, bias), expected)
    with kernel.replace_sdpa(fallback=True), pytest.warns(UserWarning, match="float64"):
        found = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias)
        with pytest.raises(TypeError):
            functional.scaled_dot_product_attention([1.0], k, v, bias)
    torch.testing.assert_close(found, ORIGINAL(q.double(), k.double(), v.double(), pairs), equal_nan=True)


def test_a_causal_bias_of_other_sizes_falls_back_to_torch(kernel):
    q, k, v = qkv((1, 2, 5, 16), (1, 2, 7, 16))
    with kernel.replace_sdpa(fallback=True), pytest.warns(UserWarning, match="CausalBias of"):
        found = functional.scaled_dot_product_attention(q, k, v, causal_upper_left(5, 9))
    assert torch.equal(found, ORIGINAL(q, k, v, is_causal=True))


def test_an_empty_tensor_need_not_be_dense(kernel, device):
    x = zeros(0, 2, 16, 5).transpose(2, 3).to(device)
    assert kernel.scaled_dot_product_attention(x, x, x).shape == x.shape == (0, 2, 5, 16)


# ---- In torch's place ----------------------------------------------------------------------------------------------


def test_within_the_block_torchs_function_gives_det_attns_bytes(kernel, device):
    q, k, v = qkv((2, 3, 5, 16), (2, 3, 9, 16), device=device)
    expected = kernel.det_attn(q, k, v)
    with kernel.replace_sdpa():
        assert_same_bits(functional.scaled_dot_product_attention(q, k, v), expected)
        assert_same_bits(functional.scaled_dot_product_attention(query=q, key=k, value=v, scale=None), expected)
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_modules_that_call_torchs_function_follow(kernel, device):
    """torch.nn.MultiheadAttention in training mode, forward and backward, bytes that batching cannot change."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True).to(device)
    calls = []
    inner = kernel.scaled_dot_product_attention

    x = randn(2, 7, 32, device=device)
    with kernel.replace_sdpa():
        replaced = layer(x, x, x, need_weights=False)[0]
        entry = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = lambda *a, **b: calls.append(1) or entry(*a, **b)
        layer(x, x, x, need_weights=False)
        functional.scaled_dot_product_attention = entry
    assert calls and inner is kernel.scaled_dot_product_attention
    torch.testing.assert_close(replaced, layer(x, x, x, need_weights=False)[0], rtol=1e-4, atol=1e-5)


MODULES = {
    "attention": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2),
    "decoder layer": lambda: nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True),
}


@pytest.mark.parametrize("name, calls", [("attention", 1), ("encoder", 2), ("decoder layer", 2)])
@pytest.mark.parametrize("padded", [False, True])
def test_layers_of_torch_follow_in_inference_too(kernel, device, name, calls, padded):
    """torch.nn's fast path, in eval() without gradients, would pass the function by."""
    torch.manual_seed(0)
    layer, x = MODULES[name]().eval().to(device), randn(2, 7, 32, device=device)
    mask = torch.arange(7, device=device) >= torch.tensor([[7], [4]], device=device) if padded else None
    given, how = {
        "attention": ((x, x, x), dict(key_padding_mask=mask, need_weights=False)),
        "encoder": ((x,), dict(src_key_padding_mask=mask)),
        "decoder layer": ((x, x), dict(tgt_key_padding_mask=mask)),
    }[name]
    seen = []
    with torch.no_grad(), kernel.replace_sdpa(), kernel.replace_sdpa():
        entry = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = lambda *a, **b: seen.append(1) or entry(*a, **b)
        layer(*given, **how)
        functional.scaled_dot_product_attention = entry
    assert len(seen) == calls


@pytest.mark.parametrize("enabled", [True, False])
def test_the_fast_path_comes_back_as_it_was(kernel, enabled):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        outer, inner = kernel.replace_sdpa(), kernel.replace_sdpa(fallback=True)
        for step, block in ((outer.__enter__, ()), (inner.__enter__, ()), (outer.__exit__, (None,) * 3)):
            step(*block)
            assert not torch.backends.mha.get_fastpath_enabled()
        inner.__exit__(None, None, None)
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_the_whole_process_sees_it(kernel):
    """Recomputation of checkpoints runs in autograd's threads."""
    seen = []
    with kernel.replace_sdpa():
        thread = threading.Thread(target=lambda: seen.append(functional.scaled_dot_product_attention))
        thread.start()
        thread.join()
    assert seen[0] is not ORIGINAL


def test_blocks_nest_and_end_in_any_order(kernel):
    q, k, v = qkv((1, 1, 5, 16))
    high, highest = (kernel.det_attn(q, k, v, precision=p) for p in ("high", "highest"))
    outer, inner = kernel.replace_sdpa(precision="high"), kernel.replace_sdpa()
    outer.__enter__()
    inner.__enter__()
    assert_same_bits(functional.scaled_dot_product_attention(q, k, v), highest)
    outer.__exit__(None, None, None)
    assert_same_bits(functional.scaled_dot_product_attention(q, k, v), highest)
    inner.__exit__(None, None, None)
    assert functional.scaled_dot_product_attention is ORIGINAL

    with kernel.replace_sdpa(), kernel.replace_sdpa(precision="high"):
        with kernel.replace_sdpa():
            assert_same_bits(functional.scaled_dot_product_attention(q, k, v), highest)
        assert_same_bits(functional.scaled_dot_product_attention(q, k, v), high)

    @kernel.replace_sdpa(precision="high")
    def decorated():
        return functional.scaled_dot_product_attention(q, k, v)

    assert_same_bits(decorated(), high)
    with pytest.raises(KeyError), kernel.replace_sdpa():
        raise KeyError
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_arguments_of_the_switch_are_checked_on_entering(kernel):
    for how, error in ((dict(fallback=1), TypeError), (dict(precision="low"), ValueError)):
        with pytest.raises(error, match=next(iter(how))), kernel.replace_sdpa(**how):
            raise AssertionError
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_a_function_that_someone_else_put_there_comes_back(kernel, monkeypatch):
    def theirs(*arguments, **keywords):
        return "theirs"

    monkeypatch.setattr(functional, "scaled_dot_product_attention", theirs)
    x = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    with kernel.replace_sdpa(fallback=True), pytest.warns(UserWarning):
        assert functional.scaled_dot_product_attention(x, x, x) == "theirs"
    assert functional.scaled_dot_product_attention is theirs


def test_an_unsupported_call_raises_or_falls_back_with_one_warning(kernel):
    q, k, v = (x.double() for x in qkv((1, 1, 5, 16)))
    with kernel.replace_sdpa(), pytest.raises(TypeError, match="float64"):
        functional.scaled_dot_product_attention(q, k, v)
    with kernel.replace_sdpa(fallback=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = [functional.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(3)]
        supported = functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert [("torch computes it" in str(w.message), w.filename) for w in caught] == [(True, __file__)]
    assert all(torch.equal(out, ORIGINAL(q, k, v, is_causal=True)) for out in outs)
    assert_same_bits(supported, kernel.det_attn(q.float(), k.float(), v.float()))


def test_a_compiled_call_falls_back_in_one_graph(kernel):
    q, k, v = (x.double() for x in qkv((1, 1, 5, 16)))
    torch._dynamo.reset()
    with kernel.replace_sdpa(fallback=True):
        call = lambda *x: functional.scaled_dot_product_attention(*x)
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert torch.equal(compiled(q, k, v), ORIGINAL(q, k, v))


def test_dropout_under_vmap_is_refused_or_falls_back(kernel):
    x = qkv((3, 1, 2, 5, 16))[0]

    def drop(x):
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    with kernel.replace_sdpa(), pytest.raises(NotImplementedError, match="^dropout: got one under torch.func.vmap"):
        torch.func.vmap(drop, randomness="different")(x)
    with kernel.replace_sdpa(fallback=True), pytest.warns(UserWarning, match="torch.func"):
        assert torch.func.vmap(drop, randomness="different")(x).shape == x.shape
    with kernel.replace_sdpa():
        torch.manual_seed(4)
        same = torch.func.vmap(drop, randomness="same")(x)
        torch.manual_seed(4)
        assert_same_bits(same[0], drop(x[0]))
        assert torch.func.grad(lambda w: (drop(x[0]) * w).sum())(torch.tensor(1.0)).isfinite()
        torch._dynamo.reset()
        with pytest.raises(Exception, match="dropout: got one under torch.func and torch.compile"):
            torch.compile(torch.func.vmap(drop, randomness="different"), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("strict", [True, False])
def test_dropout_is_exported(kernel, strict):
    class Drop(nn.Module):
        def forward(self, x):
            return kernel.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = randn(1, 2, 5, 16)
    exported = torch.export.export(Drop(), (x,), strict=strict).module()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(exported(x))
    assert_same_bits(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_autocast_gives_torchs_dtype(kernel, device):
    q, k, v = qkv((1, 2, 5, 16), device=device)
    with torch.autocast(device, torch.bfloat16), kernel.replace_sdpa():
        out = functional.scaled_dot_product_attention(q, k.bfloat16(), v)
        assert out.dtype is ORIGINAL(q, k, v).dtype
    low = [x.bfloat16() for x in (q, k, v)]
    assert_same_bits(out, kernel.det_attn(*low, out_dtype=torch.bfloat16))


def test_torch_compile_takes_it_in_one_graph(kernel, device):
    q, k, v = qkv((2, 4, 5, 16), (2, 2, 9, 16), device=device)
    mask = randn(5, 9, seed=9, device=device)

    def block(q, k, v, mask):
        return functional.scaled_dot_product_attention(q * 2, k, v, mask, enable_gqa=True) + 1

    with kernel.replace_sdpa():
        torch._dynamo.reset()
        assert_same_bits(torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, v, mask), block(q, k, v, mask))


X, LOW, GROUPED = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16).bfloat16(), torch.randn(1, 4, 1, 16)
CHEAP = {  # arguments, keywords, the dtype of autocast
    "plain": ((X, X, X), {}, None),
    "causal, scale": ((X, X, X), dict(is_causal=True, scale=0.3), None),
    "keywords": ((), dict(query=X, key=X, value=X, attn_mask=None, dropout_p=0.0, enable_gqa=False), None),
    "bool mask": ((X, X, X, torch.ones(1, 1, 1, 1).bool()), {}, None),
    "float mask": ((X, X, X, torch.zeros(1, 1, 1, 1)), {}, None),
    "grouped": ((GROUPED, X, X), dict(enable_gqa=True), None),
    "transposed": ((X.transpose(1, 2),) * 3, {}, None),
    "bfloat16": ((LOW, LOW, LOW), {}, None),
    "autocast to the dtype": ((LOW, LOW, LOW), {}, torch.bfloat16),
    "parameter": ((nn.Parameter(X), X, X), {}, None),
}


@pytest.mark.parametrize("case", CHEAP)
def test_the_switch_costs_less_than_ten_microseconds(kernel, case):
    """Of Python, beyond the op itself. Where a look at a tensor takes longer than the 78 ns of an Intel Xeon with
    Python 3.11, all else may take as much longer."""
    cost, allowed = cost_of_the_switch(kernel, *CHEAP[case])
    assert cost < allowed, f"{cost * 1e6:.1f} us"


def test_twelve_microseconds_more_would_be_noticed(kernel):
    def spin():
        end = time.perf_counter() + 12e-6
        while time.perf_counter() < end:
            pass

    cost, allowed = cost_of_the_switch(kernel, *CHEAP["plain"], spin)
    assert cost > allowed, f"{cost * 1e6:.1f} us"


def cost_of_the_switch(kernel, arguments, how, autocast, before=None):
    """(seconds a call, seconds allowed): the smallest of many short measurements, as the machine has other work to do.
    What is not low enough is measured on: other work goes away, a cost does not."""
    call = arguments_of_the_op(kernel, arguments, how)
    op = kernel.ops.forward.default

    def alone():
        op(*call)

    def replaced():
        functional.scaled_dot_product_attention(*arguments, **how)

    def slowed():
        before()
        replaced()

    def looks():
        for _ in range(100):
            X.dim()

    ways = (alone, slowed if before else replaced, looks)
    least = [INF] * len(ways)
    with torch.no_grad(), kernel.replace_sdpa(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        for _ in range(10):
            for _ in range(400):
                least = [min(t, timeit.timeit(way, number=10) / 10) for t, way in zip(least, ways)]
            cost, allowed = least[1] - least[0], 10e-6 * max(1.0, least[2] / 7.8e-6)
            if cost < allowed:
                break
    return cost, allowed


def arguments_of_the_op(kernel, arguments, how):
    """What the function hands to the op for this call."""
    with torch.no_grad(), RecordedOp(kernel.ops.forward.default) as recorded:
        kernel.scaled_dot_product_attention(*arguments, **how)
    return recorded.arguments
