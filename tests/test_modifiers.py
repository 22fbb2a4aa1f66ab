"""Promise: masks, bias, softcap, ALiBi and dropout are the contract's, bit for bit (sections 10 and 11), forward and
backward, alone and together, over shards, permutations and splits; and they mean what users of torch expect.

In: the cases below on every path. Out: every boundary against the oracle, and float64 autograd for the meaning.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import generators
import oracle
from conftest import assert_same_bits
from helpers import (
    assert_same_boundaries,
    every_modifier,
    kernel_boundaries,
    make,
    oracle_boundaries,
    paths,
    tensor,
    to,
)

NAMES = ("dQ", "dK", "dV")
SIZES = dict(B=2, heads=(4, 2), Sq=33, Skv=150, D=24)


def real(seed, *shape):
    return tensor(generators.normal(seed, 40, shape))


def integers(seed, shape, low, high):
    return tensor(generators.integers(seed, 41, shape, low, high))


def holes(x, seed=1, value=-math.inf):
    """x with about a third of its elements replaced."""
    return torch.where(integers(seed, x.shape, 0, 3) == 0, torch.full_like(x, value), x)


def cases(B, Hq, Sq, Skv):
    """name -> modifiers, all on the CPU."""
    bias = holes(real(1, B, 1, Sq, Skv))
    bad = bias.clone()
    bad[0, 0, 3, 5], bad[0, 0, 4, 2], bad[1, 0, 5] = math.nan, math.inf, -math.inf
    slopes = 2.0 ** -torch.arange(1, Hq + 1, dtype=torch.float32)
    ranges = integers(2, (B, Sq, 2), -3, Skv + 4).int()
    place = torch.arange(Sq).expand(B, Sq) * 3 + 1
    places = torch.stack([torch.zeros(B, Sq), torch.full((B, Sq), Skv), place], 2).int()
    return {
        "bias": dict(attn_bias=bias),
        "bias per head": dict(attn_bias=real(3, Hq, Sq, 1)),
        "bias bfloat16": dict(attn_bias=bias.bfloat16()),
        "bias float16 of keys": dict(attn_bias=bias[:, :, :1].half()),
        "bias of another layout": dict(attn_bias=bias.transpose(2, 3).contiguous().transpose(2, 3)),
        "bias huge": dict(attn_bias=bias * 2.0**100),
        "bias not finite": dict(attn_bias=bad),
        "bool": dict(attn_bias=integers(4, (Sq, Skv), 0, 3) > 0),
        "bool of keys, causal": dict(attn_bias=integers(5, (B, 1, 1, Skv), 0, 2) > 0, causal=True),
        "window": dict(window=(5, 2)),
        "window, causal": dict(window=(7, 3), causal=True),
        "window to the right": dict(window=(-1, 0), q_offset=-3),
        "window beyond the keys": dict(window=(3, 3), q_offset=-20),
        "softcap": dict(softcap=1.5),
        "softcap 50, causal": dict(softcap=50.0, causal=True),
        "softcap tiny": dict(softcap=2.0**-26),
        "softcap huge": dict(softcap=1e300),
        "alibi": dict(alibi_slopes=slopes),
        "alibi per batch, not finite": dict(
            alibi_slopes=torch.stack([slopes, torch.where(slopes == 0.25, torch.full_like(slopes, math.inf), -slopes)])
        ),
        "ranges": dict(key_ranges=ranges),
        "ranges of one batch": dict(key_ranges=ranges[:1].clone(), causal=True),
        "ranges with places": dict(key_ranges=places, window=(6, 6), alibi_slopes=slopes),
        "dropout": dict(dropout_p=0.3, dropout_seed=1234567890123),
        "dropout of everything": dict(dropout_p=1.0, dropout_seed=5),
        "together": dict(
            attn_bias=bias, window=(20, 5), softcap=2.0, alibi_slopes=slopes, key_ranges=ranges, dropout_p=0.5,
            dropout_seed=-7, causal=True,
        ),
    }  # fmt: skip


CASES = cases(2, 4, 33, 150)


def check(kernel, device, inputs, how):
    """Every boundary on every path against the oracle, forward and backward."""
    Q, K, V, dO = inputs
    precision = how.get("precision", "highest")
    expected = oracle_boundaries(Q, K, V, **how)
    q, k, v, do = (x.to(device) for x in inputs)
    on_device = to(device, how)
    for path in paths(kernel, device):
        assert_same_boundaries(kernel_boundaries(kernel, q, k, v, path=path, **on_device), expected)
    wanted = oracle.gradients(*inputs, **how)
    references = [oracle.public_reference(r, g) for r, g in zip(wanted[3:], wanted[:3])]
    given = (q, k, v, do, *(expected[name].to(device) for name in ("out", "rowmax", "DEN")))
    given_references = [tensor(x).to(device) for x in references]
    for path in paths(kernel, device):
        on_path = dict(path=path, **on_device)
        found = gradients(lambda *x: kernel.det_attn(*x, **on_path), q, k, v, do)
        for name, x, y in zip(NAMES, found, wanted):
            assert_same_bits(x, y, f"{path}: fused {name}")
        for name, x, y in zip("ABC", kernel.grad_reference(*given, **on_path), references):
            assert_same_bits(x, y, f"{path}: {name}")
        sums = kernel.grad_accumulate(*given, *given_references, **on_path)
        for name, total, reference, kind, y in zip(NAMES, sums, given_references, ("query", "key", "value"), wanted):
            x = kernel.grad_finalize(total, reference, kind, precision=precision)
            assert_same_bits(x, y, f"{path}: staged {name}")


def gradients(call, *inputs):
    """dQ, dK, dV of call(Q, K, V) for dO."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    call(*leaves).backward(inputs[3])
    return [x.grad for x in leaves]


def with_gradient(family, seed=3, **sizes):
    Q, K, V = make(family, seed=seed, **sizes)
    return Q, K, V, tensor(generators.normal(seed + 77, 900, Q.shape)).to(Q.dtype)


# ---- Against the oracle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("case", CASES)
def test_every_boundary_meets_the_oracle(kernel, device, case, precision):
    check(kernel, device, with_gradient("normal", **SIZES), dict(CASES[case], precision=precision))


@pytest.mark.parametrize("family", ["special", "mixed", "saturating", "ties"])
@pytest.mark.parametrize("case", ["bias not finite", "window", "softcap", "dropout", "together"])
def test_unusual_numbers_meet_the_oracle(kernel, device, case, family):
    check(kernel, device, with_gradient(family, **SIZES), CASES[case])


@pytest.mark.parametrize("sizes", [(1, 3, 1, 1), (1, 6, 130, 70), (3, 2, 5, 400)])
def test_ragged_shapes_meet_the_oracle(kernel, device, sizes):
    B, Hq, Sq, Skv = sizes
    inputs = with_gradient("normal", B=B, heads=(Hq, 1), Sq=Sq, Skv=Skv, D=40)
    bias = holes(real(8, B, Hq, Sq, Skv))
    how = dict(attn_bias=bias, window=(300, 1), softcap=3.0, dropout_p=0.25, dropout_seed=2**63 + 11)
    check(kernel, device, inputs, how)


def test_backward_beyond_the_kept_pairs_meets_the_small_calls(kernel, device):
    """So many pairs that p and ds are computed again on the CPU, with keys as rows: the same bytes as in parts."""
    Q, K, V, dO = (x.to(device) for x in with_gradient("normal", heads=(2, 1), Sq=1100, Skv=8200, D=8))
    bias = holes(real(9, 1, 1, 1, 8200)).to(device)
    slopes = torch.tensor([0.5, 0.25], device=device)
    how = dict(attn_bias=bias, window=(3000, 700), softcap=2.0, alibi_slopes=slopes, dropout_p=0.5, dropout_seed=3)
    parts = gradients(lambda *x: kernel.det_attn_sharded(*x, [2000, 5, 3195, 3000], **how), Q, K, V, dO)
    for path in paths(kernel, device):
        whole = gradients(lambda *x: kernel.det_attn(*x, path=path, **how), Q, K, V, dO)
        for name, x, y in zip(NAMES, whole, parts):
            assert_same_bits(x, y, f"{path}: {name}")


# ---- Shards, permutations, splits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [[150], [70, 0, 3, 77], [1] * 150])
@pytest.mark.parametrize("case", ["bias not finite", "window, causal", "alibi", "ranges with places", "together"])
def test_any_shards_of_the_keys_give_the_same_bytes(kernel, device, case, splits):
    inputs = [x.to(device) for x in with_gradient("normal", **SIZES)]
    how = to(device, CASES[case])
    expected = kernel.det_attn(*inputs[:3], **how)
    assert_same_bits(kernel.det_attn_sharded(*inputs[:3], splits, **how), expected)
    found = gradients(lambda *x: kernel.det_attn_sharded(*x, splits, **how), *inputs)
    for x, y in zip(found, gradients(lambda *x: kernel.det_attn(*x, **how), *inputs)):
        assert_same_bits(x, y)


def test_permuted_keys_with_their_bias_and_ids_give_the_same_bytes(kernel, device):
    Q, K, V, _ = (x.to(device) for x in with_gradient("normal", **SIZES))
    bias = CASES["bias"]["attn_bias"].to(device)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(2)).to(device)
    ids = torch.arange(150, device=device)
    how = dict(softcap=2.0, dropout_p=0.4, dropout_seed=9)
    expected = kernel.det_attn(Q, K, V, attn_bias=bias, **how)
    scores = dict(softcap=2.0, attn_bias=bias[..., order])
    K, V = K[:, :, order], V[:, :, order]
    rowmax = kernel.rowmax(Q, K, **scores)
    how.update(scores, dropout_keys=ids[order].contiguous())
    num, den = kernel.accumulate(Q, K, V, rowmax, **how)
    assert_same_bits(kernel.finalize(num, den, dropout_p=0.4), expected)


def test_shards_of_queries_heads_and_batches_with_their_own_tensors_give_the_same_bytes(kernel, device):
    """As ranks hold them: a part of the batch, heads, queries and keys, with ids instead of places in the tensor."""
    Q, K, V, _ = (x.to(device) for x in with_gradient("normal", **SIZES))
    bias = CASES["bias"]["attn_bias"].to(device)
    how = dict(window=(60, 20), dropout_p=0.4, dropout_seed=2**40 + 1)
    expected = kernel.det_attn(Q, K, V, attn_bias=bias, **how)
    batch, heads, queries, halves = 1, slice(2, 4), slice(10, 30), (slice(0, 61), slice(61, 150))
    q = Q[batch : batch + 1, heads, queries].clone()
    rows = ((batch << 32) + torch.arange(10, 30, device=device) + 150 - 33)[None]
    shards = []
    for keys in halves:
        k, v = (x[batch : batch + 1, 1:2, keys].clone() for x in (K, V))
        where = dict(q_offset=117 + 10, kv_offset=keys.start, window=how["window"])
        shards.append((k, v, dict(where, attn_bias=bias[batch : batch + 1, :, queries, keys])))
    rowmax = torch.stack([kernel.rowmax(q, k, **where) for k, _, where in shards]).amax(0)
    drop = dict(dropout_p=0.4, dropout_seed=how["dropout_seed"], dropout_head=2, dropout_rows=rows)
    sums = [kernel.accumulate(q, k, v, rowmax, **where, **drop) for k, v, where in shards]
    out = kernel.finalize(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], dropout_p=0.4)
    assert_same_bits(out, expected[batch : batch + 1, heads, queries].contiguous())


def test_key_ranges_equal_a_mask_of_each_row(kernel, device):
    inputs = [x.to(device) for x in with_gradient("special", **SIZES)]
    ranges = CASES["ranges"]["key_ranges"]
    j = torch.arange(150)[None, None]
    mask = ((j >= ranges[..., :1]) & (j < ranges[..., 1:]))[:, None]
    ranged, masked = dict(key_ranges=ranges.to(device)), dict(attn_bias=mask.to(device))
    assert_same_bits(kernel.det_attn(*inputs[:3], **ranged), kernel.det_attn(*inputs[:3], **masked))
    found = [gradients(lambda *x: kernel.det_attn(*x, **how), *inputs) for how in (ranged, masked)]
    for x, y in zip(*found):
        assert_same_bits(x, y)


def test_padding_by_ranges_equals_the_sequences_alone(kernel, device):
    """Whatever stands behind the end of a sequence: here NaN."""
    Q, K, V, _ = (x.to(device) for x in with_gradient("normal", B=3, heads=(2, 2), Sq=20, Skv=50, D=16))
    lengths = (50, 0, 17)
    for batch, length in enumerate(lengths):
        K[batch, :, length:], V[batch, :, length:] = math.nan, math.nan
    ranges = torch.tensor([[0, n] for n in lengths], dtype=torch.int32, device=device)[:, None].repeat(1, 20, 1)
    found = kernel.det_attn(Q, K, V, softcap=5.0, key_ranges=ranges)
    for batch, length in enumerate(lengths):
        at = slice(batch, batch + 1)
        alone = kernel.det_attn(Q[at], K[at, :, :length], V[at, :, :length], softcap=5.0)
        assert_same_bits(found[at], alone, f"sequence {batch}")


def test_absent_modifiers_change_no_byte(kernel, device):
    Q, K, V, _ = (x.to(device) for x in with_gradient("mixed", **SIZES))
    expected = kernel.det_attn(Q, K, V)
    nothing = torch.zeros(1, device=device)
    everything = torch.tensor([0, 150], dtype=torch.int32, device=device).repeat(1, 33, 1)
    for how in (
        dict(attn_bias=nothing),
        dict(attn_bias=nothing == 0),
        dict(window=(150, 150)),
        dict(alibi_slopes=nothing.expand(4)),
        dict(key_ranges=everything),
        dict(dropout_p=2.0**-40, dropout_seed=1),
        dict(dropout_p=0, dropout_seed=1),
        dict(softcap=0),
    ):
        assert_same_bits(kernel.det_attn(Q, K, V, **how), expected, str(how))


# ---- What they mean -------------------------------------------------------------------------------------------------


def reference(Q, K, V, how, kept):
    """float64 attention by the textbook, differentiable; kept [B, Hq, Sq, Skv] multiplies the weights."""
    Q, K, V = Q.double(), *(x.double().repeat_interleave(Q.shape[1] // K.shape[1], 1) for x in (K, V))
    Sq, Skv = Q.shape[2], K.shape[2]
    s = Q @ K.transpose(2, 3) / math.sqrt(Q.shape[3])
    if how.get("softcap"):
        s = how["softcap"] * torch.tanh(s / how["softcap"])
    ahead = (torch.arange(Sq)[:, None] + Skv - Sq - torch.arange(Skv)[None]).to(Q.device)
    if "alibi_slopes" in how:
        s = s - how["alibi_slopes"].double()[:, None, None] * ahead.abs()
    if "attn_bias" in how:
        s = s + how["attn_bias"].double()
    left, right = how.get("window", (-1, -1))
    s = s.masked_fill(((ahead > left) & (left >= 0)) | ((-ahead > right) & (right >= 0)), -math.inf)
    return (s.softmax(-1) * kept) @ V


MEANING = {
    "bias": dict(attn_bias=real(1, 2, 1, 33, 150)),
    "window": dict(window=(40, 10)),
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "dropout": dict(dropout_p=0.4, dropout_seed=11),
    "together": dict(
        attn_bias=real(1, 2, 1, 33, 150), window=(140, 10), softcap=2.0, alibi_slopes=torch.full((4,), 0.01),
        dropout_p=0.2, dropout_seed=12,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANING)
def test_output_and_gradients_are_those_of_float64_autograd(kernel, device, case):
    inputs = [x.to(device) for x in with_gradient("normal", **SIZES)]
    how = to(device, MEANING[case])
    kept = torch.ones(2, 4, 33, 150, dtype=torch.float64)
    if "dropout_p" in how:
        mask = oracle.Modifiers(dropout_p=how["dropout_p"], dropout_seed=how["dropout_seed"])
        for b in range(2):
            for h in range(4):
                kept[b, h] = tensor(mask.kept((b, h), 33, 150, None, 0)) / (1 - how["dropout_p"])
    kept = kept.to(device)
    exact = reference(*inputs[:3], how, kept)
    assert (kernel.det_attn(*inputs[:3], **how) - exact).abs().max() < 1e-6
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    wanted = torch.autograd.grad(reference(*leaves, how, kept), leaves, inputs[3].double())
    for name, x, y in zip(NAMES, gradients(lambda *x: kernel.det_attn(*x, **how), *inputs), wanted):
        assert (x - y).abs().max() < 4e-6, name


def test_softcap_is_tanh_and_odd(kernel):
    """One query of 1 against keys: rowmax shows each capped score."""
    for c in (0.001, 0.7, 1.0, 3.5, 30.0, 1e6):
        x = torch.cat([torch.linspace(-8 * c, 8 * c, 4001), torch.tensor([2.0**-24, 1e-5, 2.0**27])]).double()
        x = (torch.round(x * 2.0**24) * 2.0**-24).float()  # scores without a tie, which would round upwards
        Q, K = torch.ones(len(x), 1, 1, 1), x.view(-1, 1, 1, 1)
        exact = kernel.rowmax(Q, K, scale=1.0).flatten()
        found = kernel.rowmax(Q, K, scale=1.0, softcap=c).flatten()
        true = torch.tensor([c * math.tanh(s / c) for s in exact.tolist()], dtype=torch.float64)
        assert (found - true).abs().max() <= 2.0**-25 * 1.001 + c * 2.0**-50, c
        assert torch.equal(kernel.rowmax(Q, -K, scale=1.0, softcap=c).flatten(), -found)
        assert (found.diff()[:4000] >= 0).all()


def test_tanh_is_accurate(kernel):
    """The oracle's tanh, which the kernel meets bit for bit, against a correctly rounded one: below 2^-50."""
    import mpmath

    x = np.concatenate([np.linspace(0, 24, 3001), 2.0 ** np.arange(-60, 5), [1e300, np.inf]])
    t = oracle.tanh(x)
    with mpmath.workdps(40):
        true = [mpmath.tanh(mpmath.mpf(float(v))) for v in x]
        assert max(abs(mpmath.mpf(float(a)) - b) for a, b in zip(t, true)) < mpmath.mpf(2) ** -50
        small = [abs(mpmath.mpf(float(a)) / b - 1) for a, b, v in zip(t, true, x) if 0 < v < 1]
        assert max(small) < mpmath.mpf(2) ** -50


# ---- Dropout --------------------------------------------------------------------------------------------------------

# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, words.
PHILOX = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, words", PHILOX)
def test_philox_gives_the_published_words(kernel, device, counter, key, words):
    """By the oracle, and by the kernel: a probability just above a word drops its key, at the word itself keeps it."""
    seed = key[0] | key[1] << 32
    assert oracle.philox(np.array(counter, np.uint64), seed).tolist() == words
    row = counter[3] << 32 | counter[1]
    rows = torch.tensor([[row - 2**64 if row >= 2**63 else row]], device=device)
    x = torch.ones(1, 1, 1, 1, device=device)
    for word_number, word in enumerate(words):
        keys = torch.tensor([counter[0] << 2 | word_number], device=device)
        for p, expected in ((word / 2**32, 1), ((word + 1) / 2**32, 0)):
            ids = dict(dropout_seed=seed, dropout_head=counter[2], dropout_rows=rows, dropout_keys=keys)
            num, _ = kernel.accumulate(x, x, x, kernel.rowmax(x, x), dropout_p=p, **ids)
            assert bool(num.any()) is bool(expected)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_drops_the_share_it_says(kernel, device, p):
    """One-hot values show the weights of each key: uniform ones, all kept or dropped whole."""
    Q, K = torch.zeros(2, 2, 512, 64, device=device), torch.zeros(2, 2, 64, 64, device=device)
    V = torch.eye(64, device=device).expand(2, 2, 64, 64)
    out = kernel.det_attn(Q, K, V, dropout_p=p, dropout_seed=77)
    share = (out == 0).double().mean().item()
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / out.numel()) + 1e-12
    kept = out[out != 0]
    assert p == 1 or torch.allclose(kept, torch.full_like(kept, 1 / 64 / (1 - p)))
    for other in (dict(dropout_seed=78), dict(dropout_seed=77 + 2**32), dict(dropout_seed=77, q_offset=5)):
        again = kernel.det_attn(Q, K, V, dropout_p=p, **other)
        assert torch.equal(out, again) is (p in (0.0, 1.0))
    for axis in (0, 1, 2):  # batches, heads and rows drop different keys
        first, second = (out.narrow(axis, n, 1) for n in (0, 1))
        assert torch.equal(first, second) is (p in (0.0, 1.0))


def test_special_values_travel_whether_kept_or_not(kernel, device):
    Q, K = torch.zeros(1, 1, 1, 8, device=device), torch.zeros(1, 1, 4, 8, device=device)
    V = torch.zeros(1, 1, 4, 8, device=device)
    V[0, 0, 1, 2] = math.inf
    out = kernel.det_attn(Q, K, V, dropout_p=1.0)
    assert out[0, 0, 0, 2] == math.inf and (out[0, 0, 0, 3:] == 0).all()


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_give_the_same_bytes(kernel, device, dynamic):
    inputs = [x.to(device) for x in with_gradient("normal", **SIZES)]
    how = to(device, CASES["together"])

    def call(q, k, v):
        return kernel.det_attn(q, k, v, **how) * 2

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same_bits(compiled(*inputs[:3]), call(*inputs[:3]))
    for x, y in zip(gradients(compiled, *inputs), gradients(call, *inputs)):
        assert_same_bits(x, y)


# ---- Refusals -------------------------------------------------------------------------------------------------------

Z = torch.zeros
REFUSED = [
    ("attn_bias", [[0.0]], TypeError, "attn_bias: got list, must be a torch.Tensor"),
    ("attn_bias", Z(5, 7, dtype=torch.float64), TypeError, "attn_bias: got dtype torch.float64, allowed are bool"),
    ("attn_bias", Z(5, 7, dtype=torch.int32), TypeError, "attn_bias: got dtype torch.int32"),
    ("attn_bias", Z(5, 6), ValueError, r"attn_bias: got shape \(5, 6\), must be broadcastable"),
    ("attn_bias", Z(1, 2, 4, 5, 7), ValueError, r"attn_bias: got shape \(1, 2, 4, 5, 7\)"),
    ("attn_bias", Z(2, 2, 5, 7), ValueError, r"attn_bias: got shape \(2, 2, 5, 7\)"),
    ("attn_bias", Z(5, 7, requires_grad=True), NotImplementedError, "attn_bias: got a tensor that requires grad"),
    ("window", 3, TypeError, "window: got int"),
    ("window", np.array([1, 1]), TypeError, "window: got ndarray"),
    ("window", (1,), ValueError, "window: got 1 numbers"),
    ("attn_bias", causal_lower_right(5, 7), TypeError, "attn_bias: got torch's CausalBias"),
    ("window", (1.0, 2), TypeError, "window: got float in it"),
    ("window", (True, 2), TypeError, "window: got bool in it"),
    ("window", (-2, 0), ValueError, r"window: got \(-2, 0\), allowed is -1"),
    ("softcap", -1.0, ValueError, "softcap: got -1.0, must be finite and positive"),
    ("softcap", math.inf, ValueError, "softcap: got inf"),
    ("softcap", math.nan, ValueError, "softcap: got nan"),
    ("softcap", "3", TypeError, "softcap: got str"),
    ("softcap", None, TypeError, "softcap: got NoneType"),
    ("alibi_slopes", [1.0] * 4, TypeError, "alibi_slopes: got list"),
    ("alibi_slopes", Z(4, dtype=torch.bfloat16), TypeError, "alibi_slopes: got dtype torch.bfloat16"),
    ("alibi_slopes", Z(2), ValueError, r"alibi_slopes: got shape \(2,\), must be \[Hq\] or \[B, Hq\]"),
    ("alibi_slopes", Z(4, requires_grad=True), NotImplementedError, "alibi_slopes: got a tensor that requires grad"),
    ("key_ranges", [(0, 7)] * 5, TypeError, "key_ranges: got list"),
    ("key_ranges", Z(1, 5, 2, dtype=torch.int64), TypeError, "key_ranges: got dtype torch.int64, must be int32"),
    ("key_ranges", Z(5, 2, dtype=torch.int32), ValueError, r"key_ranges: got shape \(5, 2\)"),
    ("key_ranges", Z(2, 5, 4, dtype=torch.int32), ValueError, r"key_ranges: got shape \(2, 5, 4\)"),
    ("key_ranges", Z(2, 2, 5, dtype=torch.int32).transpose(1, 2), ValueError, "key_ranges: got a tensor that is"),
    ("dropout_p", -0.1, ValueError, "dropout_p: got -0.1, allowed is 0 to 1"),
    ("dropout_p", 1.5, ValueError, "dropout_p: got 1.5"),
    ("dropout_p", math.nan, ValueError, "dropout_p: got nan"),
    ("dropout_p", True, TypeError, "dropout_p: got bool"),
    ("dropout_seed", 0.5, TypeError, "dropout_seed: got float"),
    ("dropout_seed", 2**64, ValueError, "dropout_seed: got 18446744073709551616"),
]
REFUSED_BY_STAGES = [
    ("dropout_head", -1, ValueError, "dropout_head: got -1"),
    ("dropout_head", 1.0, TypeError, "dropout_head: got float"),
    ("dropout_rows", Z(2, 5, dtype=torch.int32), TypeError, "dropout_rows: got dtype torch.int32, must be torch.int64"),
    ("dropout_rows", Z(1, 5, dtype=torch.int64), ValueError, r"dropout_rows: got shape \(1, 5\), must be \[B, Sq\]"),
    ("dropout_rows", Z(5, 2, dtype=torch.int64).T, ValueError, "dropout_rows: got a tensor that is not contiguous"),
    ("dropout_keys", Z(6, dtype=torch.int64), ValueError, r"dropout_keys: got shape \(6,\), must be \[Skv\]"),
    ("dropout_keys", Z(7), TypeError, "dropout_keys: got dtype torch.float32"),
]


def small():
    return Z(2, 4, 5, 8), Z(2, 2, 7, 8), Z(2, 2, 7, 8)


@pytest.mark.parametrize("name, value, error, message", REFUSED)
def test_bad_modifiers_are_refused(kernel, name, value, error, message):
    for call in (kernel.det_attn, lambda *x, **how: kernel.det_attn_sharded(*x, [3, 4], **how)):
        with pytest.raises(error, match="^" + message):
            call(*small(), **{name: value})


@pytest.mark.parametrize("name, value, error, message", REFUSED + REFUSED_BY_STAGES)
def test_bad_modifiers_of_the_stages_are_refused(kernel, name, value, error, message):
    rowmax, DEN = Z(2, 4, 5, dtype=torch.float64), Z(2, 4, 5, dtype=torch.int64)
    Q, K, V = small()
    with pytest.raises(error, match="^" + message):
        kernel.accumulate(Q, K, V, rowmax, **{name: value})
    with pytest.raises(error, match="^" + message):
        kernel.grad_reference(Q, K, V, Q, Q, rowmax, DEN, **{name: value})
    if not name.startswith("dropout"):
        with pytest.raises(error, match="^" + message):
            kernel.rowmax(Q, K, **{name: value})


@pytest.mark.parametrize("how", [dict(window=(3, -1)), dict(alibi_slopes=Z(4)), dict(dropout_p=0.5)], ids=str)
def test_places_need_a_query_offset_beside_a_key_offset(kernel, how):
    rowmax = Z(2, 4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="^q_offset: got None with kv_offset=3"):
        kernel.accumulate(*small(), rowmax, kv_offset=3, **how)
    kernel.accumulate(*small(), rowmax, kv_offset=3, q_offset=1, **how)


def test_a_learned_bias_is_refused_by_the_op_too(kernel):
    Q, K, V = (x.requires_grad_() for x in small())
    bias = Z(2, 4, 5, 7, requires_grad=True)
    out, _, _ = kernel.ops.forward(
        Q, K, V, False, 1.0, "high", 0, 0, 7, torch.float32, bias, *every_modifier(Q, K)[1:], "auto", -1
    )
    with pytest.raises(NotImplementedError, match="bias and alibi_slopes have no gradient"):
        out.sum().backward()


BOUNDARIES = ("out", "rowmax", "DEN", "rowmax of a part", "NUM", "DEN of a part", *NAMES, "A", "B", "C")
BOUNDARIES += ("sum of dQ", "sum of dK", "sum of dV")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("block", range(6))
def test_tiles_on_cuda_under_modifiers(kernel, block, precision):
    """Rows and keys over many tiles, some without a key, forward and backward: every path against the CPU."""
    for seed in range(10 * block, 10 * block + 10):
        pick = iter(generators.integers(seed, 9200, (40,), 0, 2**31).tolist())

        def choose(*values):
            return values[next(pick) % len(values)]

        B, heads = choose((1, (4, 2)), (2, (2, 2)), (1, (3, 1)))
        Sq, Skv, D = choose(1, 3, 40, 129, 256, 300), choose(64, 200, 777, 1500), choose(16, 64, 72, 128, 200)
        dtype, family = choose("float32", "bfloat16", "float16"), choose(*generators.FAMILIES)
        inputs = make(family, B=B, heads=heads, Sq=Sq, Skv=Skv, D=D, dtype=dtype, seed=seed)
        how = dict(causal=choose(False, True), precision=precision, q_offset=choose(None, 0, 5, Skv // 2))
        if choose(0, 1):
            how["window"] = (choose(-1, 0, 30, 200), choose(-1, 0, 7, 130))
        if choose(0, 1):
            begin = integers(seed, (B, Sq, 1), -3, Skv)
            how["key_ranges"] = torch.cat([begin, begin + integers(seed + 1, (B, Sq, 1), -5, Skv)], 2).int()
        if choose(0, 0, 1):
            how["softcap"] = 3.0
        if choose(0, 0, 1):
            how["alibi_slopes"] = 2.0 ** -torch.arange(1, heads[0] + 1, dtype=torch.float32)
        if choose(0, 0, 1):
            bias = holes(real(seed, B, 1, Sq, Skv), seed)
            how["attn_bias"] = choose(bias, bias.bfloat16(), bias > -1)
        if choose(0, 0, 1) and "attn_bias" in how and how["attn_bias"].dtype is not torch.bool:
            how["attn_bias"].view(-1)[:: choose(97, 7919)] = choose(math.nan, math.inf)
        dropout = dict(dropout_p=0.3, dropout_seed=seed) if choose(0, 0, 1) else {}
        lo = next(pick) % (Skv + 1)
        part = (lo, lo + next(pick) % (Skv - lo + 1))

        def boundaries(q, k, v, device, path):
            call, drop = to(device, how), dict(path=path, **dropout)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out, state = kernel.det_attn(*leaves, return_state=True, **call, **drop)
            grad = dO.to(device)
            out.backward(grad)
            given = (q, k, v, grad, out.detach(), state.rowmax, state.den)
            causal = call.pop("causal")
            maxima = kernel.rowmax(q, k, causal, None, *part, path=path, **call)
            sums = kernel.accumulate(q, k, v, state.rowmax, causal, None, *part, **call, **drop)
            references = kernel.grad_reference(*given, causal, None, *part, **call, **drop)
            parts = kernel.grad_accumulate(*given, *references, causal, None, *part, **call, **drop)
            fused = (out.detach(), state.rowmax, state.den)
            return (*fused, maxima, *sums, *(x.grad for x in leaves), *references, *parts)

        dO = tensor(generators.normal(seed + 77, 900, inputs[0].shape))
        expected = boundaries(*inputs, "cpu", "auto")
        on_device = [x.cuda() for x in inputs]
        for path in paths(kernel, "cuda"):
            found = boundaries(*on_device, "cuda", path)
            for name, x, y in zip(BOUNDARIES, found, expected):
                assert_same_bits(x, y, f"seed {seed}, {Sq} {Skv} {D} {heads} {dtype} {sorted(how)} {path}: {name}")
