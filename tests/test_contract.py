"""The contract: the same bytes as the oracle at every named boundary, on every device and path (sections 1-6).

The oracle is itself held to the worked examples in tests/vectors/, which were made independently of it.
"""

import itertools
import json
import pathlib

import numpy as np
import pytest
import torch

import generators
import oracle
from conftest import assert_same_bits
from helpers import (assert_same_boundaries, check_against_oracle, kernel_boundaries, make, paths, tensor)

VECTORS = pathlib.Path(__file__).parent / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())

# -- Worked examples -----------------------------------------------------------------------------------------------


def example(name):
    return INDEX[name], dict(np.load(VECTORS / f"{name}.npz"))


@pytest.mark.parametrize("name", INDEX)
def test_oracle_meets_the_worked_examples(name):
    settings, x = example(name)
    precision, scale, causal = settings["precision"], settings["scale"], settings["causal"]
    b, T = oracle.BITS[precision]
    for source, kind in (("Q", "query"), ("K", "key"), ("V", "value")):
        integers, exponents = oracle.rows(x[source], kind, scale, precision)
        assert_same_bits(tensor(integers), tensor(x[f"{source.lower()}_int"]))
        assert_same_bits(tensor(exponents), tensor(x[f"{source.lower()}_exp"]))
    for head in range(settings["query_heads"]):
        S = oracle.scores(x["q_int"][head], x["q_exp"][head], x["k_int"], x["k_exp"], b)
        assert_same_bits(tensor(S), tensor(x["S"][head]))
        mask, _ = oracle.attended(*S.shape, causal)
        W = np.where(mask, oracle.weights(np.where(mask, x["M"][head][:, None] - S, 0), T), 0)
        assert_same_bits(tensor(W), tensor(x["W"][head]))
    found = oracle.det_attn(x["Q"][None], x["K"][None, None], x["V"][None, None], causal, scale, precision=precision)
    assert_same_bits(tensor(found.rowmax[0]), tensor(oracle.public_rowmax(x["M"])))
    for name, y in (("DEN", found.DEN), ("NUM", found.NUM), ("out", found.out)):
        assert_same_bits(tensor(y[0]), tensor(x[name]))


@pytest.mark.parametrize("name", INDEX)
def test_oracle_meets_the_worked_gradients(name):
    settings, x = example(name)
    one_key_head = (x["Q"][None], x["K"][None, None], x["V"][None, None], x["dO"][None])
    found = oracle.gradients(*one_key_head, settings["causal"], settings["scale"], precision=settings["precision"])
    for name in ("dQ", "dK", "dV"):
        assert_same_bits(tensor(getattr(found, name).reshape(x[name].shape)), tensor(x[name]))


@pytest.mark.parametrize("name", INDEX)
def test_kernel_meets_the_worked_examples(kernel, device, name):
    settings, x = example(name)
    dtype = torch.bfloat16 if settings["dtype"].startswith("bfloat16") else torch.float32
    Q, K, V = (tensor(y).to(dtype).to(device) for y in (x["Q"][None], x["K"][None, None], x["V"][None, None]))
    expected = {
        "rows(Q).integers": x["q_int"][None], "rows(Q).exponents": x["q_exp"][None],
        "rows(K).integers": x["k_int"][None, None], "rows(K).exponents": x["k_exp"][None, None],
        "rows(V).integers": x["v_int"][None, None], "rows(V).exponents": x["v_exp"][None, None],
        "rowmax": oracle.public_rowmax(x["M"])[None], "NUM": x["NUM"][None], "DEN": x["DEN"][None],
        "out": x["out"][None],
    }  # fmt: skip
    expected = {name: tensor(y) for name, y in expected.items()}
    for path in paths(kernel, device):
        found = kernel_boundaries(kernel, Q, K, V, settings["causal"], settings["scale"], settings["precision"],
                                  path=path)
        assert_same_boundaries(found, expected)


# -- Many shapes ---------------------------------------------------------------------------------------------------

FACTORS = {
    "D": (1, 3, 32, 64, 80, 96, 128, 160, 256),
    "Sq": (1, 2, 17, 31, 33, 127, 129),
    "Skv": (1, 2, 17, 31, 33, 127, 129),
    "mask": ("full", "causal", "causal from 0", "causal behind", "causal far ahead"),
    "heads": ((1, 1), (2, 2), (4, 2), (6, 1)),
    "dtype": ("float32", "bfloat16", "float16"),
    "family": generators.FAMILIES,
    "precision": ("highest", "high"),
    "scale": (None, 1.0, -0.3, 0.0),
    "layout": ("dense", "transposed", "interleaved", "expanded"),
    "B": (1, 2),
}


def pairwise(factors):
    """Few cases that hold every pair of values of every two factors; greedy, always the same."""
    names = list(factors)

    def pairs(case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2) if a in case and b in case}

    open_pairs = set()
    for a, b in itertools.combinations(names, 2):
        open_pairs |= {(a, x, b, y) for x in range(len(factors[a])) for y in range(len(factors[b]))}
    while open_pairs:
        a, x, b, y = min(open_pairs)
        case = {a: x, b: y}
        for name in names:
            if name not in case:
                values = range(len(factors[name]))
                case[name] = max(values, key=lambda v: (len(pairs({**case, name: v}) & open_pairs), -v))
        open_pairs -= pairs(case)
        yield {name: factors[name][case[name]] for name in names}


CASES = list(pairwise(FACTORS))


def mask_arguments(mask, Sq, Skv):
    q_offset = {"causal from 0": 0, "causal behind": -(Sq // 2) - 1, "causal far ahead": 10**9}.get(mask)
    return {"causal": mask != "full", "q_offset": q_offset}


def lay_out(x, layout):
    """The same numbers in another memory layout; the last dimension stays dense."""
    B, H, S, D = x.shape
    if layout == "transposed":  # [B, S, H, D] in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "interleaved":  # a slice of a wider projection
        wide = torch.full((B, S, H, 3, D), float("nan"), dtype=x.dtype, device=x.device)
        wide[:, :, :, 1] = x.transpose(1, 2)
        return wide[:, :, :, 1].transpose(1, 2)
    if layout == "expanded":  # stride 0 over the batch; only the first batch's numbers are left
        return x[:1].expand(B, H, S, D)
    return x


def name_of(case):
    return "-".join(str(v).replace(" ", "_") for v in case.values())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_bytes_at_every_boundary(kernel, device, case):
    sizes = {k: case[k] for k in ("B", "heads", "Sq", "Skv", "D", "dtype")}
    inputs = [lay_out(x, case["layout"]) for x in make(case["family"], seed=CASES.index(case), **sizes)]
    check_against_oracle(kernel, device, inputs, scale=case["scale"], precision=case["precision"],
                         **mask_arguments(case["mask"], case["Sq"], case["Skv"]))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("family", generators.FAMILIES)
def test_bytes_of_each_family(kernel, device, family, precision):
    inputs = make(family, B=2, heads=(4, 2), Sq=33, Skv=129, D=64, seed=1)
    check_against_oracle(kernel, device, inputs, True, generators.torch_scale(family), precision)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Sq,Skv", [(1, 1000), (513, 700), (700, 513), (5, 0), (0, 5), (0, 0)])
def test_bytes_beyond_one_tile_and_of_nothing(kernel, device, Sq, Skv, causal):
    check_against_oracle(kernel, device, make("normal", heads=(2, 1), Sq=Sq, Skv=Skv, D=16, seed=2), causal)


@pytest.mark.parametrize("kv_lo,kv_hi,kv_offset", [(0, None, 0), (5, 40, 0), (0, 33, 64), (17, 18, 100), (9, 9, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_bytes_of_a_range_of_keys(kernel, device, causal, kv_lo, kv_hi, kv_offset):
    """A shard alone: rows kv_lo..kv_hi of the K given, whose row 0 is global key kv_offset, under the whole maximum."""
    Q, K, V = make("normal", heads=(2, 1), Sq=70, Skv=65, D=32, seed=3)
    where = dict(causal=causal, kv_lo=kv_lo, kv_hi=kv_hi, kv_offset=kv_offset, q_offset=60)
    local = oracle.rowmax(Q, K, **where)
    whole = np.maximum(local, 3.0)  # another shard holds a larger score
    num, den = oracle.accumulate(Q, K, V, whole, **where)
    on_device = [x.to(device) for x in (Q, K, V)]
    for path in paths(kernel, device):
        assert_same_bits(kernel.rowmax(*on_device[:2], path=path, **where).cpu(), tensor(local))
        found = kernel.accumulate(*on_device, tensor(whole).to(device), path=path, **where)
        assert_same_bits(found[0].cpu(), tensor(num))
        assert_same_bits(found[1].cpu(), tensor(den))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["normal", "special", "mixed", "denormals"])
def test_output_dtypes_are_one_further_rounding(kernel, device, family, out_dtype):
    Q, K, V = make(family, heads=(2, 1), Sq=31, Skv=33, D=48, seed=4)
    # torch's CPU conversions are IEEE; every NaN becomes the quiet one by the contract.
    expected = tensor(oracle.det_attn(Q, K, V).out).to(out_dtype)
    expected = torch.where(expected.isnan(), torch.tensor(float("nan"), dtype=out_dtype), expected)
    on_device = [x.to(device) for x in (Q, K, V)]
    for path in paths(kernel, device):
        assert_same_bits(kernel.det_attn(*on_device, out_dtype=out_dtype, path=path).cpu(), expected)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_output_dtypes_round_ties_to_even(kernel, device, out_dtype):
    """One key, so out is V: halves of the output's last bit, its denormals, and what overflows it."""
    half = 2.0**-8 if out_dtype == torch.bfloat16 else 2.0**-11
    near = torch.tensor([1 + n * half + e for n in (1, 3, 5, 2) for e in (0.0, 2.0**-22, -(2.0**-22))])
    powers = torch.cat([near * 2.0**p for p in (-30, -25, -24, -16, -15, -14, 0, 14, 15)])
    edges = torch.tensor([65519.0, 65520.0, 65535.0, 65504.0, (2 - 2.0**-8) * 2.0**127, 2.0**-25, 3 * 2.0**-26,
                          2.0**-133, 2.0**-134])  # fmt: skip
    V = torch.cat([powers, -powers, edges, -edges]).reshape(1, 1, 1, -1)
    K = torch.zeros_like(V[..., :1])
    for v in V.flatten():
        v = v.reshape(1, 1, 1, 1)
        on_device = [x.to(device) for x in (K, K, v)]
        for path in paths(kernel, device):
            assert_same_bits(kernel.det_attn(*on_device, path=path).cpu(), v)
            found = kernel.det_attn(*on_device, out_dtype=out_dtype, path=path)
            assert_same_bits(found.cpu(), v.to(out_dtype), f"{v.item()!r}")


def test_scale_is_float64(kernel, device):
    """A scale that float32 cannot hold changes the rows."""
    scale = 1 / 3 + 2.0**-40
    Q, K, V = make("normal", Sq=64, D=32, seed=5)
    check_against_oracle(kernel, device, (Q, K, V), scale=scale)
    rounded = float(np.float32(scale))
    assert not np.array_equal(oracle.rows(Q, "query", scale)[0], oracle.rows(Q, "query", rounded)[0])


# -- CPU against CUDA ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("block", range(8))
def test_cpu_and_cuda_same_bytes(kernel, block):
    """Random ragged shapes; the CPU kernel is held to the oracle elsewhere, so larger sizes are quick here."""
    for seed in range(25 * block, 25 * block + 25):
        inputs, how = random_case(seed)
        expected = kernel_boundaries(kernel, *inputs, **how)
        on_device = [x.cuda() for x in inputs]
        for path in paths(kernel, "cuda"):
            assert_same_boundaries(kernel_boundaries(kernel, *on_device, path=path, **how), expected)


def random_case(seed):
    pick = generators.integers(seed, 9000, (13,), 0, 2**31)

    def choose(n, values):
        return values[pick[n] % len(values)]

    Hkv, group = choose(0, (1, 2, 3)), choose(1, (1, 2, 5))
    Sq, Skv = 1 + pick[2] % choose(3, (3, 40, 300)), 1 + pick[4] % choose(5, (3, 70, 900))
    inputs = make(choose(6, generators.FAMILIES), B=choose(7, (1, 2)), heads=(Hkv * group, Hkv), Sq=int(Sq),
                  Skv=int(Skv), D=int(1 + pick[8] % 256), dtype=choose(9, list(generators.DTYPES)), seed=seed)
    return inputs, dict(causal=bool(pick[10] % 2), precision=choose(11, ("highest", "high")),
                        q_offset=choose(12, (None, 0, 7)))
