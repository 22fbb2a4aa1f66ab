"""det_attn_context_parallel: out, dq, dk and dv of a split sequence are those of one process, to the last bit.

In: inputs that every rank makes anew, a slicing of the sequence, a method. Processes are started once (ranks.py): eight
with gloo on the CPU, and one for each GPU with NCCL.
"""

import contextlib
import functools
import os
import subprocess
import sys

import pytest
import ranks
import torch
import torch.distributed.tensor
from conftest import ROOT, assert_same_bits
from generators import integers
from helpers import one_nan
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
        pytest.skip(f"too few GPUs: {request.param} wanted, {team.count} here")
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
        how = {"chunk_bytes": chunk_bytes}
        same(team, kernel, size, INPUTS, "uneven", method, seed=3, causal=True, distributed=how)


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
def test_any_slicing_of_any_shape(team, kernel, data):
    """Queries and keys in any order on any rank, by positions; larger shapes on GPUs."""
    size = data.draw(st.sampled_from(team.sizes), "ranks")
    longest = 24 if team.backend == "gloo" else 700
    lengths = data.draw(st.integers(0, longest), "queries"), data.draw(st.integers(0, longest), "keys")
    kv_heads, head_dim = data.draw(st.integers(1, 3), "heads"), data.draw(st.sampled_from([1, 8, 17, 64, 128]), "D")
    family = data.draw(st.sampled_from(["normal", "mixed"]), "family")
    inputs = dict(
        family=family if min(lengths) > 0 else "normal", B=data.draw(st.integers(1, 2), "batch"),
        heads=(kv_heads * data.draw(st.integers(1, 2), "group"), kv_heads), Sq=lengths[0], Skv=lengths[1], D=head_dim,
        dtype=data.draw(st.sampled_from(["float32", "bfloat16", "float16"]), "dtype"),
    )  # fmt: skip
    how = dict(causal=data.draw(st.booleans(), "causal"), precision=data.draw(st.sampled_from(["high", "highest"])))
    method, seed = data.draw(st.sampled_from(METHODS), "method"), data.draw(st.integers(0, 2**31), "order and cuts")
    own = zip(*(slicing("shuffled", length, size, seed + i) for i, length in enumerate(lengths)))
    expected = one_process(kernel, inputs, q_offset=0, **how)
    check(team, kernel, size, inputs, list(own), dict(method=method, **how), expected)


@pytest.mark.full
@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_long_sequence(team, kernel, method):
    """262,144 tokens, bfloat16, 8 heads, D 128, causal: every rank against one GPU. On CPUs 2,048 tokens."""
    length = 2**18 if team.backend == "nccl" else 2**11
    for rank, differing in enumerate(team.results(team.count, "long", length=length, method=method)):
        assert differing == [], f"rank {rank}"


@pytest.mark.parametrize("layout", ["uneven", "zigzag", "shuffled"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "how",
    [
        dict(dropout_p=0.4, dropout_seed=7),
        dict(dropout_p=0.4, dropout_seed=7, causal=True, q_offset=3),
        dict(window=(5, 2)),
        dict(window=(3, -1)),
        dict(window=(-1, 4)),
        dict(window=(4, 9), causal=True),
        dict(softcap=1.5, causal=True),
    ],
    ids=lambda how: "-".join(how),
)
def test_dropout_windows_and_softcap(team, kernel, method, layout, how):
    """Dropout counts global positions, so which weights are dropped does not depend on the slicing either."""
    size = team.sizes[-1] if team.count < 3 else 3
    own = slicing(layout, INPUTS["Sq"], size, seed=7)
    named = {"uneven": "contiguous", "zigzag": "zigzag"}.get(layout)
    expected = one_process(kernel, INPUTS, **how)
    explicit = how if named or "q_offset" not in how else dict(how, q_offset=3)
    check(team, kernel, size, INPUTS, [(x, x) for x in own], dict(method=method, **explicit), expected, named)


def test_dropout_with_split_heads(team, kernel):
    """A head keeps its number where heads part."""
    grid = (team.count, 1) if team.count == 1 else (team.count // 2, 2)
    own = slicing("uneven", INPUTS["Sq"], team.count, seed=8)
    how = dict(dropout_p=0.3, dropout_seed=2**63 + 5)
    expected = one_process(kernel, INPUTS, **how)
    check(team, kernel, team.count, INPUTS, [(x, x) for x in own], how, expected, "contiguous", grid=grid)


def test_inside_torchs_context_parallel(team, kernel):
    """It cuts the sequence head and tail, which is layout="zigzag", and puts the output together again."""
    inputs = dict(INPUTS, Sq=6 * team.count)
    answers = team.results(team.count, "torch_context_parallel", inputs=inputs, causal=True)
    expected = one_process(kernel, inputs, causal=True)[0]
    for length, out in answers:
        assert length == 6
        assert_same_bits(ranks.tensor_of(out), expected)


def test_gradient_of_q_alone_checkpoint_and_no_second_derivative(team, kernel):
    size = min(3, team.sizes[-1])
    expected = one_process(kernel, INPUTS)[1]
    for rank, (refused, dq, repeated, same_out, requires_grad) in enumerate(
        team.results(size, "once_only", inputs=INPUTS, by_rank=[{}] * size)
    ):
        assert "second derivative" in refused
        assert_same_bits(ranks.tensor_of(repeated), ranks.tensor_of(dq))
        assert same_out and not requires_grad
        assert dq[1][2] == len(range(rank, INPUTS["Sq"], size))
    assert expected.shape[2] == INPUTS["Sq"]


# ---- Larger worlds, by shards in one process ------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_64_shards_in_random_order(kernel, device, causal):
    """What 64 ranks would compute, combined in an order that no ring has; and det_attn_sharded."""
    inputs = dict(INPUTS, Sq=33, Skv=150)
    q, k, v, _ = ranks.whole(inputs, device)
    expected = kernel.det_attn(q, k, v, causal)
    lengths = uneven(150, 64, seed=9)
    assert torch.equal(kernel.det_attn_sharded(q, k, v, lengths, causal), expected)
    ends = [sum(lengths[: i + 1]) for i in range(64)]
    shards = permuted(list(zip([0, *ends], ends)), seed=10)
    maximum = torch.stack([kernel.rowmax(q, k, causal, kv_lo=lo, kv_hi=hi) for lo, hi in shards]).amax(0)
    sums = [kernel.accumulate(q, k, v, maximum, causal, kv_lo=lo, kv_hi=hi) for lo, hi in permuted(shards, seed=11)]
    assert_same_bits(kernel.finalize(sum(num for num, _ in sums), sum(den for _, den in sums)), expected)


@pytest.mark.parametrize("family", ["normal", "sharp", "saturating", "special"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_last_shard_raises_the_row_maximum_itself(kernel, device, family, precision):
    """accumulate_last against rowmax, maximum and accumulate: the same three tensors, whatever other shards held."""
    q, k, v, _ = ranks.whole(dict(INPUTS, family=family, Sq=70, Skv=300, D=32), device)
    for cut in (0, 1, 120, 299, 300):
        for causal in (False, True):
            of_others = kernel.rowmax(q, k, causal, kv_hi=cut, precision=precision)
            maximum = torch.maximum(of_others, kernel.rowmax(q, k, causal, kv_lo=cut, precision=precision))
            expected = (*kernel.accumulate(q, k, v, maximum, causal, kv_lo=cut, precision=precision), maximum)
            call = (causal, 32**-0.5, precision, 230, cut, 300, *kernel.checks.NO_MODIFIERS)
            found = kernel.ops.accumulate_last.default(q, k, v, of_others, *call, "auto")
            for name, a, b in zip(("NUM", "DEN", "rowmax"), found, expected):
                if name == "rowmax":
                    a, b = one_nan(a), one_nan(b)
                assert_same_bits(a, b, f"{name}, cut at {cut}, causal {causal}")


# ---- Refusals: the same moment on every rank ------------------------------------------------------------------------

SHAPES = dict.fromkeys("qkv", ((1, 2, 5, 8), "float32"))


@pytest.mark.parametrize(
    "one,text",
    [
        (dict.fromkeys("qkv", ((1, 2, 5, 8), "float16")), "dtype of q: got"),
        (dict.fromkeys("qkv", ((1, 2, 5, 4), "float32")), "shape of q"),
        (dict(k=((1, 1, 5, 8), "float32"), v=((1, 1, 5, 8), "float32")), "heads of k: got"),
        (dict(causal=True), "causal: got"),
        (dict(scale=2.0), "scale: got"),
        (dict(method="gather"), "method: got"),
        (dict(layout="zigzag"), "layout: got"),
        (dict(precision="high"), "precision: got"),
        (dict(dropout_p=0.5), "dropout_p: got"),
    ],
)
def test_ranks_that_disagree_all_learn_of_it(team, one, text):
    """Whatever a rank alone does differently, all refuse, naming the argument and the ranks; and can go on."""
    size = min(3, team.sizes[-1])
    if size == 1:
        pytest.skip("too few GPUs: 2 wanted, 1 here")
    found = team.run(size, "refused", [{**SHAPES, **(one if rank == size - 1 else {})} for rank in range(size)])
    for answer in found:
        assert (answer.kind, text in answer.text) == ("ValueError", True), answer.trace
        assert "rank 0" in answer.text and f"rank {size - 1}" in answer.text
    assert team.results(size, "refused", **SHAPES) == [None] * size


@pytest.mark.parametrize(
    "one,kind,text",
    [
        (dict(q=((1, 2, 5), "float32")), "ValueError", "q: got shape"),
        (dict(q=((1, 2, 5, 8), "float64")), "TypeError", "q: got dtype"),
        (dict(v=((1, 2, 4, 8), "float32")), "ValueError", "v: got shape"),
        (dict(method="rings"), "ValueError", "method: got 'rings'"),
        (dict(layout="spiral"), "ValueError", "layout: got 'spiral'"),
        (dict(layout=3), "TypeError", "layout: got int"),
        (dict(layout=("zigzag",)), "ValueError", "layout: got a tuple of 1"),
        (dict(layout=torch.arange(5.0)), "TypeError", "layout: got positions of dtype"),
        (dict(layout=torch.arange(4)), "ValueError", "layout: got positions of shape"),
        (dict(layout=torch.arange(5) + 2**60), "ValueError", "layout: got position 1152921504606846980"),
        (dict(replicated_q=True), "ValueError", "replicated_q: got True with method='ring'"),
        (dict(chunk_bytes=0), "ValueError", "chunk_bytes: got 0"),
        (dict(q_offset=1.5), "TypeError", "q_offset: got float"),
        (dict(dropout_p=2.0), "ValueError", "dropout_p: got 2.0"),
        (dict(window=(1,)), "ValueError", "window: got 1 numbers"),
    ],
)
def test_a_rank_that_refuses_tells_the_others(team, one, kind, text):
    size = min(3, team.sizes[-1])
    if team.backend == "nccl" and isinstance(one.get("layout"), torch.Tensor):
        pytest.skip("positions on the CPU")
    found = team.run(size, "refused", [{**SHAPES, **(one if rank == size - 1 else {})} for rank in range(size)])
    own = found.pop()
    assert (own.kind, text in own.text) == (kind, True), own.trace
    for answer in found:
        assert answer.kind == "ValueError", answer.trace
        assert f"rank {size - 1} of the group refused its arguments: {kind}: {text}" in answer.text
    assert team.results(size, "refused", **SHAPES) == [None] * size


def test_a_rank_that_refuses_tells_both_its_groups(team):
    """With split heads every rank of the grid learns of it, also those that share no group with it."""
    grid = (max(1, team.count // 2), min(2, team.count))
    last = team.count - 1
    cases = [{**SHAPES, "grid": grid, **({"causal": 3} if rank == last else {})} for rank in range(team.count)]
    for rank, answer in enumerate(team.run(team.count, "refused", cases)):
        assert answer.kind == ("TypeError" if rank == last else "ValueError"), answer.trace
        assert rank == last or f"rank {last} of the group refused its arguments: TypeError: causal" in answer.text
    assert team.results(team.count, "refused", **SHAPES, grid=grid) == [None] * team.count


def test_groups_that_are_none(kernel, tmp_path):
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(RuntimeError, match="torch.distributed has no process group"):
        kernel.det_attn_context_parallel(x, x, x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="group: got int, must be a ProcessGroup"):
            kernel.det_attn_context_parallel(x, x, x, 3)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        with pytest.raises(ValueError, match="group: got a mesh of 2 dimensions"):
            kernel.det_attn_context_parallel(x, x, x, mesh)
        assert torch.equal(kernel.det_attn_context_parallel(x, x, x, mesh["a"]), x)
        whole = torch.distributed.tensor.DTensor.from_local(x, mesh["a"])
        with pytest.raises(TypeError, match="k: got a DTensor"):
            kernel.det_attn_context_parallel(x, whole, x, mesh["a"])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_a_gpu_rank_that_dies_is_an_error_and_no_hang(tmp_path, monkeypatch):
    """NCCL's watchdog ends the others, if nothing raises before, soon after the group's timeout. The communicator is
    there by then: while it is made, NCCL waits for every rank for good."""
    if torch.cuda.device_count() < 2:
        pytest.skip("too few GPUs: 2 wanted, 1 here")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # its record of the group: a minute more before the end
    team = ranks.Ranks(2, "nccl", tmp_path, timeout=10)
    try:
        team.results(2, "refused", **SHAPES)  # which is not: it runs
        team.pipes[1].send(("die", {"size": 2}))
        team.processes[1].join(10)
        team.pipes[0].send(("refused", {"size": 2, **SHAPES}))
        assert team.pipes[0].poll(ranks.PATIENCE), "rank 0 hangs"  # true also when the process has ended
        with contextlib.suppress(EOFError):
            assert team.pipes[0].recv().kind != ""
    finally:
        team.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_dies_is_an_error_and_no_hang(tmp_path, method):
    """gloo notices at once, or at the latest when the group's timeout of 10 seconds is over."""
    team = ranks.Ranks(3, "gloo", tmp_path, timeout=10)
    try:
        team.pipes[1].send(("die", {"size": 3}))
        team.processes[1].join(10)
        for rank in (0, 2):
            team.pipes[rank].send(("refused", {"size": 3, "method": method, **SHAPES}))
        for rank in (0, 2):
            assert team.pipes[rank].poll(30), f"rank {rank} hangs"
            answer = team.pipes[rank].recv()
            assert answer.kind in ("RuntimeError", "DistBackendError", "DistNetworkError"), answer.trace
    finally:
        team.close()


# ---- The examples ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "example,sizes", [("context_parallel.py --length 100", (1, 3)), ("train_world_size.py", (2, 4))]
)
def test_the_examples_print_the_same_for_every_number_of_ranks(tmp_path, example, sizes):
    script, *options = example.split()
    for size in sizes:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [*launch, f"{ROOT}/examples/{script}", *options, f"--check={tmp_path}/first"]
        command += ["--steps=2"] * script.startswith("train")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("the first run's" in done.stdout) == (size != sizes[0]), done.stdout
