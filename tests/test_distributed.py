"""det_attn_context_parallel: out, dq, dk and dv of a split sequence are those of one process, to the last bit.

In: inputs that every rank makes anew, a slicing of the sequence, a method. Processes are started once (ranks.py): eight
with gloo on the CPU, and one for each GPU with NCCL.
"""

import functools

import pytest
import ranks
import torch
from conftest import assert_same_bits
from generators import integers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

METHODS = ("ring", "gather", "reduce")
LAYOUTS = ("contiguous", "uneven", "zigzag", "striped", "shuffled", "shuffled ranks")
INPUTS = dict(family="normal", B=2, heads=(4, 2), Sq=29, D=16)


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def team(request, tmp_path_factory):
    count = 8 if request.param == "gloo" else torch.cuda.device_count()
    team = ranks.Ranks(count, request.param, tmp_path_factory.mktemp("ranks"))
    yield team
    team.close()


@pytest.fixture(params=ranks.SIZES)
def size(request, team):
    if request.param not in team.sizes:
        pytest.skip(f"no CUDA device for rank {team.count}: {team.count} here, {request.param} wanted")
    return request.param


# ---- Slicings of a sequence: a list of indices for each rank --------------------------------------------------------


def cut(order, lengths):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [order[end - length : end] for end, length in zip(ends, lengths)]


def even(length, size):
    return [length // size + (rank < length % size) for rank in range(size)]


def uneven(length, size, seed):
    """Some of any length, zero included."""
    ends = sorted(int(x) for x in integers(seed, 1, (size - 1,), 0, length + 1))
    return [b - a for a, b in zip([0, *ends], [*ends, length])]


def permuted(items, seed):
    keys = integers(seed, 2, (len(items),), 0, 2**31)
    return [items[i] for i in sorted(range(len(items)), key=lambda i: int(keys[i]))]


def zigzag(lengths):
    """As the documentation says it, part after part."""
    first, second = [n - n // 2 for n in lengths], [n // 2 for n in lengths]
    parts = cut(list(range(sum(lengths))), first + second[::-1])
    return [a + b for a, b in zip(parts, reversed(parts))][: len(lengths)]


def slicing(layout, length, size, seed=0):
    order = list(range(length))
    if layout == "contiguous":
        return cut(order, even(length, size))
    if layout == "uneven":
        return cut(order, uneven(length, size, seed))
    if layout == "zigzag":
        return zigzag(uneven(length, size, seed))
    if layout == "striped":
        return [order[rank::size] for rank in range(size)]
    if layout == "shuffled":
        return cut(permuted(order, seed), uneven(length, size, seed))
    return permuted(cut(order, even(length, size)), seed)  # shuffled ranks


# ---- One process ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _one_process(kernel, inputs, how):
    q, k, v, dO = ranks.whole(dict(inputs))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = kernel.det_attn(*leaves, **dict(how))
    out.backward(dO.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def one_process(kernel, inputs, **how):
    return _one_process(kernel, tuple(inputs.items()), tuple(how.items()))


def check(team, kernel, size, inputs, by_rank, how, expected, named=None, grid=None):
    """Every rank's rows against the whole; `by_rank` are its queries and keys."""
    for own in by_rank if named else ():
        assert own[0] == own[1] or len(inputs) > 0
    names = ("out", "dq", "dk", "dv")
    layout = {"named": True, "layout": named} if named else {}
    rows = [{"rows": own} for own in by_rank]
    answers = team.results(size, "attend", rows, inputs=inputs, grid=grid, **layout, **how)
    for rank, (own, answer) in enumerate(zip(by_rank, answers)):
        for name, found, all_rows in zip(names, answer, expected):
            index = torch.tensor(own[0] if name in ("out", "dq") else own[1], dtype=torch.int64)
            assert_same_bits(ranks.tensor_of(found), all_rows[:, :, index], f"{name} of rank {rank} of {size}")


def same(team, kernel, size, inputs, layout, method, seed=0, distributed=None, **how):
    """A case of one slicing for queries and keys."""
    own = slicing(layout, inputs["Sq"], size, seed)
    named = {"contiguous": "contiguous", "uneven": "contiguous", "zigzag": "zigzag"}.get(layout)
    expected = one_process(kernel, inputs, **how)
    call = {"method": method, **how, **(distributed or {})}
    check(team, kernel, size, inputs, [(rows, rows) for rows in own], call, expected, named)


# ---- The bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_layout_and_method_at_every_world_size(team, kernel, size, method, layout, causal):
    same(team, kernel, size, INPUTS, layout, method, causal=causal)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("method", METHODS)
def test_every_dtype_and_precision(team, kernel, method, precision, dtype):
    size = team.sizes[-1] if team.count < 3 else 3
    inputs = dict(INPUTS, dtype=dtype)
    same(team, kernel, size, inputs, "uneven", method, seed=1, causal=True, precision=precision)
    same(team, kernel, size, inputs, "uneven", method, seed=1, precision=precision, out_dtype=torch.bfloat16, scale=0.3)


@pytest.mark.parametrize("family", ["sharp", "mixed", "ties", "denormals", "saturating", "special"])
@pytest.mark.parametrize("method", METHODS)
def test_wild_inputs(team, kernel, method, family):
    """Special values too: NaN must survive every collective."""
    size = team.sizes[-1] if team.count < 4 else 4
    same(team, kernel, size, dict(INPUTS, family=family), "uneven", method, seed=2, causal=True)
    same(team, kernel, size, dict(INPUTS, family=family), "zigzag", method, seed=2, causal=False)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_of_queries_change_nothing(team, kernel, method):
    size = team.sizes[-1] if team.count < 3 else 3
    for chunk_bytes in (1, 50_000):
        same(team, kernel, size, INPUTS, "uneven", method, seed=3, causal=True, distributed={"chunk_bytes": chunk_bytes})


@pytest.mark.parametrize("causal,q_offset", [(False, None), (True, None), (True, 0), (True, -7), (True, 40)])
@pytest.mark.parametrize("method", METHODS)
def test_queries_and_keys_of_different_numbers(team, kernel, size, method, causal, q_offset):
    """Queries and keys are cut apart; with a low q_offset some queries attend nothing."""
    inputs = dict(INPUTS, Sq=13, Skv=23)
    expected = one_process(kernel, inputs, causal=causal, q_offset=q_offset)
    how = dict(method=method, causal=causal, q_offset=q_offset)
    cuts = [slicing("uneven", n, size, seed=n) for n in (13, 23)]
    check(team, kernel, size, inputs, list(zip(*cuts)), how, expected, named="contiguous")


@pytest.mark.parametrize("method", METHODS)
def test_nothing_at_all(team, kernel, method):
    """No queries, no keys, neither; heads without rows on most ranks."""
    size = min(4, team.sizes[-1])
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0), (1, 1)):
        inputs = dict(INPUTS, Sq=q_len, Skv=kv_len)
        expected = one_process(kernel, inputs, causal=True)
        cuts = [slicing("uneven", n, size, seed=4) for n in (q_len, kv_len)]
        check(team, kernel, size, inputs, list(zip(*cuts)), dict(method=method, causal=True), expected, "contiguous")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_split_as_well(team, kernel, method, causal):
    """Ulysses inside, another method outside, on a mesh; three key heads on two or four ranks do not divide."""
    inputs = dict(INPUTS, heads=(6, 3))
    for grid in sorted({(max(1, team.count // 2), min(2, team.count)), (min(2, team.count), max(1, team.count // 2))}):
        if grid[0] * grid[1] != team.count:
            continue
        for layout in ("uneven", "zigzag", "shuffled"):
            own = slicing(layout, inputs["Sq"], team.count, seed=5)
            named = {"uneven": "contiguous", "zigzag": "zigzag"}.get(layout)
            expected = one_process(kernel, inputs, causal=causal)
            how = dict(method=method, causal=causal)
            check(team, kernel, team.count, inputs, [(x, x) for x in own], how, expected, named, grid=grid)


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_decode_over_a_sharded_cache(team, kernel, size, causal, q_len):
    """Queries are whole on every rank, and so are out and dq."""
    inputs = dict(INPUTS, Sq=q_len, Skv=37)
    expected = one_process(kernel, inputs, causal=causal)
    whole_q = list(range(q_len))
    how = dict(method="reduce", replicated_q=True, causal=causal)
    own = [(whole_q, keys) for keys in slicing("uneven", 37, size, seed=6)]
    check(team, kernel, size, inputs, own, how, expected, "contiguous")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_slicing(team, kernel, data):
    """Queries and keys in any order on any rank, by positions."""
    size = data.draw(st.sampled_from(team.sizes), "ranks")
    length = data.draw(st.integers(0, 24), "length")
    inputs = dict(INPUTS, B=1, heads=(2, 1), Sq=length, D=8)
    method, causal = data.draw(st.sampled_from(METHODS), "method"), data.draw(st.booleans(), "causal")
    order = data.draw(st.permutations(range(length)), "order")
    ends = sorted(data.draw(st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1), label="cuts"))
    own = cut(order, [b - a for a, b in zip([0, *ends], [*ends, length])])
    expected = one_process(kernel, inputs, causal=causal)
    check(team, kernel, size, inputs, [(x, x) for x in own], dict(method=method, causal=causal), expected)
