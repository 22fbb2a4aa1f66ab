"""Every CUDA path gives the CPU's gradients, where GPUs go wrong: ragged tiles, terms at their limits, full
accumulators, strips and parts, strides.

The CPU is held to the oracle by test_gradients.py, which also runs on CUDA, so it is the expectation here. Memory,
streams, graphs and devices are in test_cuda_runs.py.
"""

import pytest
import torch

import generators
from conftest import assert_same_bits
from helpers import make, paths, tensor
from test_contract import lay_out
from test_cuda import compare, ragged_case
from test_digits import PATTERNS, extremes

pytestmark = pytest.mark.gpu

PRECISIONS = ["highest", "high"]
KINDS = ("query", "key", "value")


def with_gradient(inputs, seed=0, dtype=None):
    """(Q, K, V, dO): dO normal, of Q's dtype unless said."""
    Q = inputs[0]
    return *inputs, tensor(generators.normal(seed + 77, 900, Q.shape)).to(dtype or Q.dtype)


def stages(kernel, given, references=None, part=None, **how):
    """References and sums of the keys [lo, hi): under references over all keys, unless others are given."""
    lo, hi = part or (0, given[1].shape[2])
    found = dict(zip("ABC", kernel.grad_reference(*given, kv_lo=lo, kv_hi=hi, **how)))
    if references is None:
        references = kernel.grad_reference(*given, **how)
    sums = kernel.grad_accumulate(*given, *references, kv_lo=lo, kv_hi=hi, **how)
    found.update({f"sums of {kind}": x for kind, x in zip(KINDS, sums)})
    return found


def results(kernel, inputs, part=None, staged=True, **how):
    """dQ, dK, dV of the fused call, and what the stages give for a part of the keys."""
    Q, K, V, dO = inputs
    leaves = [x.detach().requires_grad_() for x in (Q, K, V)]
    out, state = kernel.det_attn(*leaves, return_state=True, **how)
    out.backward(dO.to(torch.float32), retain_graph=False)
    found = {name: x.grad for name, x in zip(("dQ", "dK", "dV"), leaves)}
    if staged:
        found.update(stages(kernel, (Q, K, V, dO, out.detach(), state.rowmax, state.den), part=part, **how))
    return found


def check(kernel, inputs, what="", layout="dense", repeat=1, **how):
    """Every path against the CPU on the same numbers in the same layout; `inputs` are on the CPU."""
    expected = results(kernel, [lay_out(x, layout) for x in inputs], **how)
    on_device = [lay_out(x.cuda(), layout) for x in inputs]
    how = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    for path in paths(kernel, "cuda"):
        for _ in range(repeat):
            compare(results(kernel, on_device, path=path, **how), expected, f"{what} {path}")


# ---- Shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(8))
def test_ragged_shapes(kernel, block):
    """320 of them."""
    for seed in range(40 * block, 40 * block + 40):
        sizes, how = ragged_case(seed)
        dtype = list(generators.DTYPES.values())[seed % 3]
        inputs = with_gradient(make(**sizes), seed, dtype)
        check(kernel, inputs, f"seed {seed}: {sizes} {how} dO {dtype}:", **how)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "B,heads,Sq,Skv,D",
    [(2, (40, 20), 300, 200, 64), (1, (2, 2), 2200, 2100, 32), (1, (1, 1), 9000, 8900, 8), (1, (2, 1), 5, 70000, 16)],
)
def test_heads_and_rows_in_rounds(kernel, B, heads, Sq, Skv, D, causal, precision):
    """Many heads at once; heads whose pairs do not fit the workspace, which are computed twice; inner dimensions that
    go in parts."""
    inputs = with_gradient(make("normal", B=B, heads=heads, Sq=Sq, Skv=Skv, D=D, seed=41))
    check(kernel, inputs, causal=causal, precision=precision, part=(70, 190), staged=Sq * Skv < 10**7)


@pytest.mark.parametrize(
    "need", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
def test_only_what_is_wanted(kernel, need):
    inputs = with_gradient(make("normal", heads=(4, 2), Sq=150, Skv=170, D=72, seed=42))
    expected = results(kernel, inputs, staged=False)
    for path in paths(kernel, "cuda"):
        leaves = [x.cuda().requires_grad_(n) for x, n in zip(inputs, need)]
        kernel.det_attn(*leaves, path=path).backward(inputs[3].cuda())
        for x, n, y in zip(leaves, need, expected.values()):
            assert x.grad is None if not n else assert_same_bits(x.grad, y) is None


# ---- Terms and accumulators at their limits --------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [-(2**31) + 1, -400, -100, -30, -20, -10, 0, 10, 40, 2**31 - 2])
def test_references_that_no_call_had(kernel, value, precision):
    """Terms of every size up to the clamp, of which those from 2^23 on do not fit the kernels' three bytes."""
    inputs = with_gradient(make("normal", heads=(4, 2), Sq=70, Skv=130, D=40, seed=43))
    out, state = kernel.det_attn(*inputs[:3], return_state=True, precision=precision)
    given = (*inputs, out, state.rowmax, state.den)
    references = [torch.full_like(x, value) for x in kernel.grad_reference(*given, precision=precision)]
    for x in references:  # some rows are as they should be
        x[..., ::7] = -3
    expected = stages(kernel, given, references, precision=precision)
    on_device = [x.cuda() for x in given]
    for path in paths(kernel, "cuda"):
        found = stages(kernel, on_device, [x.cuda() for x in references], precision=precision, path=path)
        compare(found, expected, path)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("Sq,Skv,D", [(20, 8200, 64), (8200, 20, 64), (3, 20000, 128), (20000, 3, 128)])
def test_int32_positions_hold_a_part(kernel, Sq, Skv, D, precision):
    """Long inner dimensions, every factor extreme, every term at its clamp. One pattern of factors a head."""
    K = torch.cat([extremes(p, (1, 1, Skv, D)) for p in PATTERNS], 1)
    Q = torch.cat([extremes(p, (1, 1, Sq, D)) for p in PATTERNS], 1)
    heads = Q.shape[1]
    V = tensor(generators.normal(44, 1, (1, heads, Skv, D)))
    dO = torch.cat([extremes(p, (1, 1, Sq, D)) for p in PATTERNS], 1)
    how = dict(scale=2.0**-30, precision=precision)
    out, state = kernel.det_attn(Q, K, V, return_state=True, **how)
    for sign in (1, -1):
        given = (Q, K, V, sign * dO, out, state.rowmax, state.den)
        references = [torch.full_like(x, -400) for x in kernel.grad_reference(*given, **how)]
        expected = stages(kernel, given, references, **how)
        for path in paths(kernel, "cuda"):
            found = stages(kernel, [x.cuda() for x in given], [x.cuda() for x in references], path=path, **how)
            compare(found, expected, path)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("D", [64, 128, 200])
def test_one_hot_weights_and_terms_of_all_ones(kernel, D, precision):
    """Sharp rows, so that p is 1 or 0; values for which ds has 24 ones, the largest term that there can be."""
    Q, K, V = make("sharp", heads=(2, 2), Sq=150, Skv=140, D=D, seed=45)
    inputs = with_gradient((Q * 8, K, V))
    check(kernel, inputs, precision=precision)
    ones = float(2 - 2**-23)
    V, dO = torch.zeros_like(V), torch.zeros_like(Q)
    V[..., 0], dO[..., 0] = ones, 1.0
    V[:, :, 1::2] *= -1
    check(kernel, (torch.zeros_like(Q), K, V, dO), precision=precision)


@pytest.mark.parametrize("family", generators.FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("exponent", [-140, -60, 0, 60, 120])
def test_gradients_of_any_size(kernel, family, exponent, precision):
    """dO at both ends of float32: dP and delta underflow to denormals, or overflow and make rows NaN."""
    Q, K, V, dO = with_gradient(make(family, heads=(4, 2), Sq=90, Skv=100, D=48, seed=46))
    dO = tensor(generators.scaled(dO.numpy(), exponent))
    check(kernel, (Q, K, V * 4, dO), precision=precision, causal=True, part=(3, 90))


SCALES = [(0, None), (-10, 0.5), (100, -2.0), (3, 0.0), (5, 1e30), (5, 1e-30), (5, 1e300)]


@pytest.mark.parametrize("q_offset, scale", SCALES)
def test_offsets_and_scales(kernel, q_offset, scale):
    inputs = with_gradient(make("normal", heads=(4, 2), Sq=100, Skv=130, D=32, seed=47))
    check(kernel, inputs, causal=True, scale=scale, q_offset=q_offset)


WINDOWS = [dict(window=(40, 0)), dict(window=(-1, 70)), dict(window=(100, 30), causal=True, part=(90, 300))]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("how", WINDOWS)
def test_windows(kernel, how, precision):
    """Keys that begin after the first: forward and backward of whichever path takes them."""
    inputs = with_gradient(make("normal", B=2, heads=(4, 2), Sq=300, Skv=420, D=72, seed=57))
    check(kernel, inputs, precision=precision, **how)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_key_ranges(kernel, precision):
    """Any interval for each query, none and all among them."""
    inputs = with_gradient(make("normal", B=2, heads=(4, 2), Sq=300, Skv=420, D=40, seed=58))
    ranges = tensor(generators.integers(58, 1, (2, 300, 2), -5, 430)).to(torch.int32)
    ranges[:, ::9] = torch.tensor([0, 420], dtype=torch.int32)
    ranges[0, 64:192] = 0  # whole tiles of queries without a key
    check(kernel, inputs, precision=precision, key_ranges=ranges)


def bias_of(seed, shape, bad=()):
    """Normal numbers, a third of them -inf, and a few of each of `bad`."""
    bias = tensor(generators.normal(seed, 59, shape))
    bias[tensor(generators.integers(seed, 60, shape, 0, 3)) == 0] = -float("inf")
    for n, x in enumerate(bad):
        bias.view(-1)[n :: bias.numel() // 5] = x
    return bias


# Each modifier alone, so that the others' code is skipped, and all at once.
MODIFIERS = {
    "bias": lambda heads, Sq, Skv: dict(attn_bias=bias_of(1, (heads, Sq, Skv)), causal=True),
    "bias not finite": lambda heads, Sq, Skv: dict(
        attn_bias=bias_of(2, (1, Sq, Skv), (float("nan"), float("inf"))).bfloat16(), part=(3, Skv - 5)
    ),
    "bool of keys": lambda heads, Sq, Skv: dict(attn_bias=bias_of(3, (Skv,)) > -1, part=(64, Skv)),
    "softcap": lambda heads, Sq, Skv: dict(softcap=0.75),
    "softcap tiny": lambda heads, Sq, Skv: dict(softcap=2.0**-26, causal=True),
    "alibi": lambda heads, Sq, Skv: dict(alibi_slopes=2.0 ** -torch.arange(1.0, heads + 1), part=(1, Skv - 1)),
    "alibi not finite": lambda heads, Sq, Skv: dict(
        alibi_slopes=torch.where(torch.arange(heads) == 1, float("inf"), 0.125), causal=True
    ),
    "dropout": lambda heads, Sq, Skv: dict(dropout_p=0.3, dropout_seed=61),
    "dropout of nearly everything": lambda heads, Sq, Skv: dict(dropout_p=1 - 2.0**-9, dropout_seed=62, causal=True),
    "dropout of everything": lambda heads, Sq, Skv: dict(dropout_p=1.0, dropout_seed=63),
    "together": lambda heads, Sq, Skv: dict(
        attn_bias=bias_of(4, (heads, 1, Skv)), softcap=2.0, alibi_slopes=torch.full((heads,), 0.01), dropout_p=0.25,
        dropout_seed=64, window=(Skv // 2, 9), part=(7, Skv - 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("D", [64, 128, 200])
@pytest.mark.parametrize("case", MODIFIERS)
def test_modifiers(kernel, case, D, precision):
    """Many tiles, of each size that the pairs kernel has under modifiers."""
    inputs = with_gradient(make("normal", B=2, heads=(4, 2), Sq=290, Skv=420, D=D, seed=65))
    check(kernel, inputs, case, precision=precision, **MODIFIERS[case](4, 290, 420))


@pytest.mark.parametrize("family", generators.FAMILIES)
@pytest.mark.parametrize("exponent", [-140, 0, 120])
@pytest.mark.parametrize("case", ["bias", "together"])
def test_gradients_of_any_size_under_modifiers(kernel, case, exponent, family):
    Q, K, V, dO = with_gradient(make(family, heads=(4, 2), Sq=90, Skv=100, D=48, seed=66))
    dO = tensor(generators.scaled(dO.numpy(), exponent))
    check(kernel, (Q, K, V * 4, dO), case, **MODIFIERS[case](4, 90, 100))


@pytest.mark.parametrize("Sq,Skv", [(9000, 8900), (5, 70000)])
def test_heads_in_strips_under_modifiers(kernel, Sq, Skv):
    """Pairs that are computed twice, in strips; few rows and many keys."""
    inputs = with_gradient(make("normal", heads=(2, 1), Sq=Sq // 2, Skv=Skv, D=8, seed=67))
    check(kernel, inputs, staged=False, **MODIFIERS["together"](2, Sq // 2, Skv))


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("case", ["bias", "together"])
def test_special_values_under_modifiers(kernel, case, where, bad):
    """In a row, or a key that some rows attend and others do not."""
    inputs = [x.clone() for x in with_gradient(make("normal", heads=(4, 2), Sq=140, Skv=150, D=64, seed=68))]
    inputs[where][0, 1, 100, 3] = bad
    check(kernel, inputs, case, **MODIFIERS[case](4, 140, 150))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", range(4))
def test_special_values(kernel, where, bad):
    inputs = [x.clone() for x in with_gradient(make("normal", heads=(4, 2), Sq=140, Skv=150, D=64, seed=48))]
    inputs[where][0, 1, 100, 3] = bad
    for how in (dict(), dict(causal=True, part=(90, 101)), dict(causal=True, q_offset=-80, part=(0, 90))):
        check(kernel, inputs, **how)


# ---- Views -----------------------------------------------------------------------------------------------------------


def test_strides_of_zero_and_interleaved_projections(kernel):
    B, H, S, D = 2, 3, 150, 72
    inputs = with_gradient(make("normal", B=B, heads=(H, H), Sq=S, D=D, seed=50))
    expected = results(kernel, inputs, causal=True)
    wide = torch.full((B, S, 4 * H * D + 1), float("nan"), device="cuda")
    views = [x.transpose(1, 2) for x in wide[:, :, 1:].unflatten(2, (4, H, D)).unbind(2)]
    for view, x in zip(views, inputs):
        view.copy_(x)
    for path in paths(kernel, "cuda"):
        compare(results(kernel, views, causal=True, path=path), expected, path)
    same = [x[:1, :1, :1].expand(x.shape) for x in inputs]
    expected = results(kernel, [x.contiguous() for x in same], causal=True)
    for path in paths(kernel, "cuda"):
        on_device = [x[:1, :1, :1].cuda().expand(x.shape) for x in same]
        compare(results(kernel, on_device, causal=True, path=path), expected, path)


# ---- Runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ten_runs_same_bytes(kernel, precision):
    """Atomic additions arrive in another order every time."""
    inputs = with_gradient(make("mixed", heads=(8, 2), Sq=700, Skv=3000, D=96, seed=51))
    check(kernel, inputs, repeat=10, precision=precision)
