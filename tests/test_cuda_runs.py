"""How a CUDA call runs changes no byte, forward and backward: dirty memory, graphs, streams, devices. No op waits for
the GPU, and none takes memory of size queries times keys.

In: what test_cuda.py and test_cuda_gradients.py compute of a problem, on every path. Out: the CPU's bytes.
"""

from typing import Callable, NamedTuple

import pytest
import torch

import test_cuda
import test_cuda_gradients
from helpers import make, paths, syncs_are_errors
from test_cuda import PRECISIONS, compare

pytestmark = pytest.mark.gpu

SLEEP = 500_000_000  # GPU cycles, about a quarter of a second
GPUS = torch.cuda.device_count()


class Pass(NamedTuple):
    inputs: Callable  # (seed=, **sizes): tensors on the CPU
    results: Callable  # (kernel, inputs, **how): tensors by name
    Sq: int
    seed: int


def all_forward(kernel, inputs, **how):
    """Every op of the forward pass."""
    found = test_cuda.results(kernel, inputs, **how)
    found["out of a part"] = kernel.finalize(found["NUM of a part"], found["DEN of a part"])
    for kind, x in zip(("query", "key", "value"), inputs):
        found[f"{kind} rows"], found[f"{kind} exponents"] = kernel.rows(x, kind)
    return found


def with_gradient(seed, **sizes):
    return test_cuda_gradients.with_gradient(make(seed=seed, **sizes), seed)


PASSES = {
    "forward": Pass(make, all_forward, Sq=100, seed=31),
    "backward": Pass(with_gradient, test_cuda_gradients.results, Sq=300, seed=52),
}


@pytest.fixture(params=PASSES)
def which(request):
    return PASSES[request.param]


# ---- Memory ----------------------------------------------------------------------------------------------------------


def poison(byte):
    """Fills free blocks of the caching allocator with `byte`, and shows that fresh memory then starts so."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    blocks = [torch.full((1 << 19,), byte, dtype=torch.uint8, device="cuda") for _ in range(96)]  # the small pool
    blocks += [torch.full((size << 20,), byte, dtype=torch.uint8, device="cuda") for size in (8, 8, 1024)]
    torch.cuda.synchronize()
    del blocks
    for size in (1 << 18, 5 << 20, 500 << 20):
        # The allocator may prefer a leftover of a segment that is still in use: that one is filled, too.
        torch.empty(size, dtype=torch.uint8, device="cuda").fill_(byte)
        assert torch.empty(size, dtype=torch.uint8, device="cuda")[:: size // 8].tolist() == [byte] * 8


DIRTY = [
    (dict(family="normal", heads=(4, 2), Sq=5, Skv=3000, D=40), dict()),
    (dict(family="normal", heads=(2, 1), Sq=200, Skv=300, D=200), dict(causal=True)),
    (dict(family="special", B=2, heads=(6, 2), Sq=65, Skv=140, D=40), dict(causal=True, part=(3, 77))),
    (dict(family="mixed", heads=(2, 1), Sq=33, Skv=1100, D=64), dict(part=(0, 1100))),
    (dict(family="normal", Sq=150, Skv=70, D=16), dict(causal=True, q_offset=-60, part=(40, 41))),
    (dict(family="normal", heads=(2, 2), Sq=30, Skv=40, D=130), dict(part=(9, 9))),
    (dict(family="normal", Sq=30, Skv=0, D=64), dict()),
    (dict(family="normal", Sq=0, Skv=30, D=64), dict()),
    (dict(family="special", heads=(6, 2), Sq=3, Skv=3000, D=72, dtype="bfloat16"), dict(causal=True, part=(100, 777))),
    (dict(family="normal", heads=(6, 2), Sq=1, Skv=0, D=64, dtype="float16"), dict()),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x01])
@pytest.mark.parametrize("case", range(len(DIRTY)))
def test_dirty_memory_changes_nothing(kernel, which, case, byte, precision):
    """Workspaces and outputs that start as NaN, as huge numbers, as small ones."""
    sizes, how = DIRTY[case]
    inputs, how = which.inputs(seed=24, **sizes), dict(how, precision=precision)
    expected = which.results(kernel, inputs, **how)
    for path in paths(kernel, "cuda"):
        poison(byte)
        on_device = [x.cuda() for x in inputs]
        compare(which.results(kernel, on_device, path=path, **how), expected, path)
        compare(which.results(kernel, on_device, path=path, **how), expected, f"{path} again")


def extra_memory(kernel, length, path, backward):
    """Peak bytes of a call beyond what is there before it."""
    leaves = [torch.randn(1, 1, length, 64, device="cuda", requires_grad=backward) for _ in range(3)]
    if backward:
        out = kernel.det_attn(*leaves, path=path)
        grad = torch.ones_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if backward:
        out.backward(grad)
    else:
        kernel.det_attn(*leaves, path=path)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("backward", [False, True])
def test_no_memory_of_size_queries_times_keys(kernel, backward):
    """Twice the length takes at most twice the memory, not four times."""
    length = 16384 if backward else 32768
    for path in ("auto", "mma") if backward else paths(kernel, "cuda"):
        small, large = (extra_memory(kernel, n, path, backward) for n in (length, 2 * length))
        assert large < 2.2 * small, f"{path}: {small} bytes, {large} for twice the length"


# ---- Streams, graphs, devices ----------------------------------------------------------------------------------------

HOW = dict(causal=True, part=(10, 1400))


def problem(kernel, which, number):
    """Inputs on the CPU, different for every number, and what the CPU makes of them."""
    sizes = dict(family="normal", B=2, heads=(4, 2), Sq=which.Sq, Skv=1500, D=64)
    inputs = which.inputs(seed=which.seed + number, **sizes)
    return inputs, which.results(kernel, inputs, **HOW)


def test_graph_capture_and_replay(kernel, which):
    """Captured once, replayed on other inputs: every replay starts its sums afresh."""
    problems = [problem(kernel, which, number) for number in (0, 1)]
    for path in paths(kernel, "cuda"):
        static = [x.cuda() for x in problems[0][0]]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            which.results(kernel, static, path=path, **HOW)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = which.results(kernel, static, path=path, **HOW)
        for inputs, expected in (problems[1], problems[0], problems[1]):
            for to, x in zip(static, inputs):
                to.copy_(x)
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            compare(found, expected, f"{path} replayed")


def test_no_host_synchronisation(kernel, which):
    """Every op returns while the GPU is still busy with what came before it."""
    inputs, expected = problem(kernel, which, 2)
    static = [x.cuda() for x in inputs]
    for path in paths(kernel, "cuda"):
        which.results(kernel, static, path=path, **HOW)  # loads the kernels and fills the allocator
        torch.cuda.synchronize()
        with syncs_are_errors():
            torch.cuda._sleep(SLEEP)
            found = which.results(kernel, static, path=path, **HOW)
            still_busy = not torch.cuda.current_stream().query()
        assert still_busy, f"{path}: an op waited for the GPU"
        compare(found, expected, path)


def test_current_stream(kernel, which):
    """Ops see inputs that their own stream writes late, and run beside another stream without touching its memory."""
    problems = [problem(kernel, which, number) for number in (3, 4)]
    pinned = [[x.pin_memory() for x in inputs] for inputs, _ in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for path in paths(kernel, "cuda"):
        static = [[torch.full_like(x, float("nan"), device="cuda") for x in inputs] for inputs, _ in problems]
        found = []
        torch.cuda.synchronize()
        for stream, to, inputs in zip(streams, static, pinned):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP // 5)
                for a, b in zip(to, inputs):
                    a.copy_(b, non_blocking=True)
                found.append([which.results(kernel, to, path=path, **HOW) for _ in range(3)][-1])
        torch.cuda.synchronize()
        for one, (_, expected) in zip(found, problems):
            compare(one, expected, path)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs" if GPUS else "no CUDA device")
def test_a_device_that_is_not_the_current_one(kernel, which):
    inputs, expected = problem(kernel, which, 5)
    torch.cuda.set_device(0)
    on_second = [x.to("cuda:1") for x in inputs]
    for path in paths(kernel, "cuda"):
        found = which.results(kernel, on_second, path=path, **HOW)
        assert torch.cuda.current_device() == 0
        assert all(x.device == torch.device("cuda:1") for x in found.values())
        compare(found, expected, path)
