"""The promise of the project: how the work is cut changes nothing. Every comparison is of bits.

Keys split, shards reordered, keys permuted, batches grouped, threads counted, heads apart, prefill against decode.
Inputs are drawn over every family, NaN and infinities included, and every dtype.
"""

import hashlib
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import generators
from conftest import REPO_ID, assert_same_bits
from helpers import make, one_nan, paths, sha256, threads

QUICK = settings(derandomize=True, deadline=None, max_examples=25, database=None,
                 suppress_health_check=list(HealthCheck))  # fmt: skip
HEADS = [(1, 1), (2, 2), (4, 2), (3, 1)]


@st.composite
def problems(draw, causal=st.booleans(), max_keys=90, families=generators.FAMILIES):
    """(arguments of `make`, arguments of the kernel)."""
    sizes = dict(family=draw(st.sampled_from(families)), seed=draw(st.integers(0, 99)),
                 dtype=draw(st.sampled_from(list(generators.DTYPES))), B=draw(st.integers(1, 3)),
                 heads=draw(st.sampled_from(HEADS)), Sq=draw(st.integers(1, 40)),
                 Skv=draw(st.integers(1, max_keys)), D=draw(st.sampled_from([1, 5, 16, 64, 72])))  # fmt: skip
    how = dict(causal=draw(causal), precision=draw(st.sampled_from(["highest", "high"])))
    return sizes, how


@st.composite
def splits(draw, total):
    """Sizes that add up to `total`, zeros among them."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


def each_path(kernel, device):
    return [dict(path=p) for p in paths(kernel, device)]


@QUICK
@given(data=st.data(), problem=problems())
def test_any_split_of_the_keys_same_bytes(kernel, device, data, problem):
    sizes, how = problem
    Q, K, V = make(device=device, **sizes)
    kv_splits = data.draw(splits(K.shape[2]))
    for path in each_path(kernel, device):
        assert_same_bits(kernel.det_attn_sharded(Q, K, V, kv_splits, **how, **path), kernel.det_attn(Q, K, V, **how))


@QUICK
@given(data=st.data(), problem=problems())
def test_any_order_of_shards_same_bytes(kernel, device, data, problem):
    """Each shard alone, with its own K, V and global position, combined in any order."""
    sizes, how = problem
    Q, K, V = make(device=device, **sizes)
    expected, state = kernel.det_attn(Q, K, V, **how, return_state=True)
    whole, _ = kernel.accumulate(Q, K, V, state.rowmax, **how)
    starts, start = [], 0
    for size in data.draw(splits(K.shape[2])):
        starts.append((start, size))
        start += size
    offset = K.shape[2] - Q.shape[2]
    for path in each_path(kernel, device):
        shards = [(K[:, :, at : at + n].clone(), V[:, :, at : at + n].clone(),
                   dict(q_offset=offset, kv_offset=at, **how, **path)) for at, n in starts]  # fmt: skip
        rowmax = torch.full(Q.shape[:3], float("-inf"), dtype=torch.float64, device=device)
        for k, _, where in data.draw(st.permutations(shards)):
            rowmax = torch.maximum(rowmax, kernel.rowmax(Q, k, **where))
        assert_same_bits(one_nan(rowmax), one_nan(state.rowmax))
        num = torch.zeros(*Q.shape, 12, dtype=torch.int64, device=device)
        den = torch.zeros(Q.shape[:3], dtype=torch.int64, device=device)
        for k, v, where in data.draw(st.permutations(shards)):
            part = kernel.accumulate(Q, k, v, rowmax, **where)
            num, den = num + part[0], den + part[1]
        assert_same_bits(den, state.den)
        assert_same_bits(kernel.finalize(num, den, precision=how["precision"]), expected)
        if not rowmax.isnan().any():  # a poisoned row counts one NaN per shard
            assert_same_bits(normalised(num), whole)


def normalised(num):
    num = num.clone()
    for k in range(10):
        carry = num[..., k] >> 32
        num[..., k] -= carry << 32
        num[..., k + 1] += carry
    return num


@QUICK
@given(data=st.data(), problem=problems(causal=st.just(False)))
def test_any_permutation_of_the_keys_same_bytes(kernel, device, data, problem):
    sizes, how = problem
    Q, K, V = make(device=device, **sizes)
    order = torch.tensor(data.draw(st.permutations(range(K.shape[2]))), device=device)
    for path in each_path(kernel, device):
        found = kernel.det_attn(Q, K[:, :, order], V[:, :, order], **how, **path)
        assert_same_bits(found, kernel.det_attn(Q, K, V, **how))


@QUICK
@given(data=st.data(), problem=problems())
def test_any_batch_grouping_same_bytes(kernel, device, data, problem):
    """Batches apart, in groups, and next to a batch of other numbers."""
    sizes, how = problem
    sizes["B"] = 3
    Q, K, V = make(device=device, **sizes)
    expected = kernel.det_attn(Q, K, V, **how)
    other = make(device=device, **{**sizes, "family": "special", "seed": 1234})
    for path in each_path(kernel, device):
        start = 0
        for size in data.draw(splits(3)):
            part = [x[start : start + size] for x in (Q, K, V)]
            assert_same_bits(kernel.det_attn(*part, **how, **path), expected[start : start + size])
            start += size
        joined = [torch.cat([b, a]) for a, b in zip((Q, K, V), other)]
        assert_same_bits(kernel.det_attn(*joined, **how, **path)[3:], expected)


@QUICK
@given(problem=problems())
def test_head_by_head_same_bytes(kernel, device, problem):
    sizes, how = problem
    Q, K, V = make(device=device, **sizes)
    group = Q.shape[1] // K.shape[1]
    expected = kernel.det_attn(Q, K, V, **how)
    for path in each_path(kernel, device):
        for h in range(Q.shape[1]):
            k, v = K[:, h // group : h // group + 1], V[:, h // group : h // group + 1]
            assert_same_bits(kernel.det_attn(Q[:, h : h + 1], k, v, **how, **path), expected[:, h : h + 1])
        repeated = [x.repeat_interleave(group, 1) for x in (K, V)]
        assert_same_bits(kernel.det_attn(Q, *repeated, **how, **path), expected)


@QUICK
@given(problem=problems(causal=st.just(True)), start=st.integers(0, 5))
def test_prefill_same_bytes_as_decode(kernel, device, problem, start):
    """All queries at once against one at a time over a growing cache, and in chunks."""
    sizes, how = problem
    sizes["Skv"] = sizes["Sq"] + start
    Q, K, V = make(device=device, **sizes)
    expected = kernel.det_attn(Q, K, V, **how)
    for path in each_path(kernel, device):
        for i in range(Q.shape[2]):
            seen = start + i + 1
            token = kernel.det_attn(Q[:, :, i : i + 1], K[:, :, :seen], V[:, :, :seen], **how, **path)
            assert_same_bits(token, expected[:, :, i : i + 1])
        half = Q.shape[2] // 2
        first = kernel.det_attn(Q[:, :, :half], K[:, :, : start + half], V[:, :, : start + half], **how, **path)
        assert_same_bits(first, expected[:, :, :half])


@QUICK
@given(problem=problems(families=[f for f in generators.FAMILIES if f != "special"]), garbage=st.booleans())
def test_masked_keys_change_nothing(kernel, device, problem, garbage):
    """Keys outside [kv_lo, kv_hi), or ahead of a causal query, may hold anything."""
    sizes, how = problem
    Q, K, V = make(device=device, **sizes)
    tail = [torch.full_like(x[:, :, :7], float("nan") if garbage else float("inf")) for x in (K, V)]
    longer = [torch.cat([x, t], 2) for x, t in zip((K, V), tail)]
    expected, state = kernel.det_attn(Q, K, V, **how, return_state=True)
    offset = K.shape[2] - Q.shape[2]
    for path in each_path(kernel, device):
        if how["causal"]:
            assert_same_bits(kernel.det_attn(Q, *longer, q_offset=offset, **how, **path), expected)
        where = dict(kv_hi=K.shape[2], q_offset=offset, **how, **path)
        assert_same_bits(kernel.rowmax(Q, longer[0], **where), state.rowmax)
        num, den = kernel.accumulate(Q, *longer, state.rowmax, **where)
        assert_same_bits(kernel.finalize(num, den, precision=how["precision"]), expected)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("causal", [False, True])
def test_any_thread_count_same_bytes(kernel, causal, precision):
    Q, K, V = make("special", B=2, heads=(4, 2), Sq=150, Skv=333, D=80, seed=7)
    hashes = set()
    for count in (1, 2, 3, 5, 8):
        with threads(count):
            hashes.add(every_hash(kernel, Q, K, V, causal, precision))
    assert len(hashes) == 1


def hash_of_many_problems(kernel):
    """One hash over every family, dtype and precision, and over many and few queries a key."""
    digest = hashlib.sha256()
    for seed, family in enumerate(generators.FAMILIES):
        for Sq, Skv, D in ((50, 140, 20), (2, 600, 33)):
            dtype = list(generators.DTYPES)[seed % 3]
            inputs = make(family, heads=(2, 1), Sq=Sq, Skv=Skv, D=D, dtype=dtype, seed=seed)
            for precision in ("highest", "high"):
                digest.update(every_hash(kernel, *inputs, True, precision).encode())
                digest.update(modified_hash(kernel, *inputs, precision).encode())
    return digest.hexdigest()


def modified_hash(kernel, Q, K, V, precision):
    """One hash of the output and the gradients with every modifier."""
    leaves = [x.detach().clone().requires_grad_() for x in (Q, K, V)]
    bias = torch.from_numpy(generators.normal(9, 0, (Q.shape[2], K.shape[2])))
    slopes = torch.tensor([0.5, 0.01])
    how = dict(softcap=3.0, attn_bias=bias, alibi_slopes=slopes, window=(500, 2), dropout_p=0.3, dropout_seed=5)
    out = kernel.det_attn(*leaves, precision=precision, **how)
    out.sum().backward()
    return "".join(map(sha256, (out, *(x.grad for x in leaves))))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic"])
def test_any_instruction_set_same_bytes(kernel, isa):
    """The choice is made once a process, so each instruction set has its own."""
    program = f"""
import sys
from kernels import get_kernel
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from test_invariance import hash_of_many_problems
print(hash_of_many_problems(get_kernel({REPO_ID!r}, version=1, trust_remote_code=True)))
"""
    environment = dict(os.environ, DET_ATTN_CPU_ISA=isa)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    if f"DET_ATTN_CPU_ISA: got '{isa}'" in run.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [hash_of_many_problems(kernel)]


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("family", ["normal", "special"])
def test_twenty_runs_one_hash(kernel, device, family, precision):
    Q, K, V = make(family, device, B=2, heads=(4, 2), Sq=130, Skv=300, D=64, dtype="bfloat16", seed=8)
    hashes = {every_hash(kernel, Q, K, V, True, precision, path) for _ in range(20) for path in paths(kernel, device)}
    assert len(hashes) == 1


def every_hash(kernel, Q, K, V, causal, precision, path="auto"):
    how = dict(precision=precision, path=path)
    out, state = kernel.det_attn(Q, K, V, causal, return_state=True, **how)
    num, den = kernel.accumulate(Q, K, V, kernel.rowmax(Q, K, causal, **how), causal, **how)
    return hashlib.sha256("".join(map(sha256, (out, state.rowmax, state.den, num, den))).encode()).hexdigest()
