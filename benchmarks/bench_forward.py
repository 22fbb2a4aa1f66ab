"""det_attn's forward on a GPU against torch's scaled_dot_product_attention, all rivals in one run on the same inputs.

    python benchmarks/bench_forward.py                                   the shapes that have a target; under a minute
    python benchmarks/bench_forward.py --shapes all --plot docs/forward_speed.png

Before a case is timed, every path must give the same bytes: on fresh inputs of a reduced size against the reference
path, and of a tiny size against the CPU. Times are medians of CUDA events, one pair a call, taken in rounds that
alternate between the contestants, over enough input sets that no L2 cache holds them. Calls are queued ahead of the
GPU, so that launch costs hide for everyone as they do in a running model. TFLOPS count 4 * B * H * Sq * Skv * D, halved
for causal. `highest` returns float32, `high` bfloat16; torch's float32 is without TF32, its default. "Extra MB" is peak
memory beyond inputs and output.
"""

import argparse
import itertools
import statistics
import time
import warnings
from dataclasses import dataclass, replace
from typing import Optional

import torch
from bench_cpu import load_kernel
from forward_report import append_results, device_name, plot, print_case, print_targets
from torch.nn.attention import SDPBackend, sdpa_kernel

CACHE_BYTES = 256 << 20  # input sets together exceed every L2
MOST_SETS = 16
SLOW_SECONDS = 0.5  # contestants with a rate are left out of cases that would take them longer
ROUNDS = 3
VIDEO_HEADS, VIDEO_DIM = 56, 128


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    interleaved: bool = False  # Q, K, V are views of one projection [B, S, 3, H, D]
    float32: bool = True  # also with float32 input
    batch: int = 1

    @property
    def flops(self):
        pairs = self.batch * self.heads * self.queries * self.keys
        return 4.0 * pairs * self.head_dim * (0.5 if self.causal else 1.0)

    def __str__(self):
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"S{self.queries}" if self.queries == self.keys else f"Sq{self.queries} Skv{self.keys}"
        extra = ", causal" * self.causal + ", Q K V interleaved" * self.interleaved
        return f"B{self.batch} H{heads} {length} D{self.head_dim}{extra}"

    def shrunk(self, most_queries, most_keys, most_heads=4):
        """The same kind of case, small."""
        kv_heads = max(1, min(self.kv_heads, most_heads * self.kv_heads // self.heads))
        heads = kv_heads * (self.heads // self.kv_heads)
        queries, keys = min(self.queries, most_queries), min(self.keys, most_keys)
        return replace(self, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys)


@dataclass(frozen=True)
class Contestant:
    """det_attn with a precision and a path, or torch with a backend."""

    name: str
    dtype: torch.dtype
    precision: Optional[str] = None
    path: Optional[str] = None
    backend: Optional[SDPBackend] = None
    rate: Optional[float] = None  # TFLOPS to expect, of slow ones: see SLOW_SECONDS

    @property
    def ours(self):
        return self.path is not None


@dataclass
class Result:
    contestant: Contestant
    ms: Optional[float] = None
    tflops: Optional[float] = None
    extra_mb: Optional[float] = None
    note: str = ""


KINDS = {"float32 highest": (torch.float32, "highest"), "bf16 highest": (torch.bfloat16, "highest"),
         "bf16 high": (torch.bfloat16, "high")}  # fmt: skip
RATES = {"auto": None, "mma": 20.0, "reference": 1.15}
CONTESTANTS = [
    Contestant(f"det-attn {kind}, {path}", dtype, precision, path, rate=rate)
    for kind, (dtype, precision) in KINDS.items()
    for path, rate in RATES.items()
] + [
    Contestant("torch float32 EFFICIENT", torch.float32, backend=SDPBackend.EFFICIENT_ATTENTION),
    Contestant("torch float32 MATH", torch.float32, backend=SDPBackend.MATH, rate=5.0),
    Contestant("torch bf16 FLASH", torch.bfloat16, backend=SDPBackend.FLASH_ATTENTION),
    Contestant("torch bf16 cuDNN", torch.bfloat16, backend=SDPBackend.CUDNN_ATTENTION),
]


def square(length, head_dim, causal=False, heads=16, kv_heads=16):
    return Case(heads, kv_heads, length, length, head_dim, causal)


TARGET = square(8192, 128)
TARGET_CAUSAL = square(8192, 128, True)
DECODE = Case(32, 8, 1, 131072, 128, float32=False)
VIDEO = Case(VIDEO_HEADS, VIDEO_HEADS, 37810, 37810, VIDEO_DIM, interleaved=True, float32=False)
DECODES = [Case(32, 8, queries, keys, 128, float32=False) for queries in (1, 16) for keys in (8192, 32768, 131072)]
GRID = [square(n, d, c) for d, n, c in itertools.product((64, 128, 256), (512, 2048, 8192, 32768), (False, True))]
GROUPED = [square(n, 128, c, 32, 8) for n, c in itertools.product((2048, 8192), (False, True))]
SHAPES = {
    "main": [TARGET, TARGET_CAUSAL, DECODE],
    "decode": DECODES,
    "video": [VIDEO],
    "all": GRID + GROUPED + DECODES + [VIDEO],
}


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def inputs(case, dtype, device):
    """Fresh Q, K, V."""
    if case.interleaved:
        wide = torch.randn(case.batch, case.queries, 3, case.heads, case.head_dim, dtype=dtype, device=device)
        return [wide[:, :, part].transpose(1, 2) for part in range(3)]
    rows = [(case.heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys)]
    return [torch.randn(case.batch, *row, case.head_dim, dtype=dtype, device=device) for row in rows]


def input_sets(case, dtype, device):
    sets = [inputs(case, dtype, device)]
    size = sum(x.numel() * x.element_size() for x in sets[0])
    while len(sets) < MOST_SETS and len(sets) * size < CACHE_BYTES:
        sets.append(inputs(case, dtype, device))
    return sets


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


# ---- Calls -----------------------------------------------------------------------------------------------------------


def our_call(kernel, contestant, case):
    out_dtype = torch.float32 if contestant.precision == "highest" else contestant.dtype
    how = dict(precision=contestant.precision, path=contestant.path, out_dtype=out_dtype)
    return lambda q, k, v: kernel.det_attn(q, k, v, case.causal, **how)


def torch_call(contestant, case, sets):
    """(call, note). Where a backend has no grouped queries it is given repeated keys, made before the clock starts."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    grouped = case.heads != case.kv_heads

    def call(q, k, v, gqa=grouped):
        with sdpa_kernel(contestant.backend):
            return sdpa(q, k, v, is_causal=case.causal, enable_gqa=gqa)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains each backend it does not take
        try:
            call(*sets[0])
            return call, ""
        except RuntimeError:
            if not grouped:
                raise
        group = case.heads // case.kv_heads
        repeated = {k.data_ptr(): [x.repeat_interleave(group, 1) for x in (k, v)] for _, k, v in sets}
        call(sets[0][0], *repeated[sets[0][1].data_ptr()], gqa=False)
    return lambda q, k, v: call(q, *repeated[k.data_ptr()], gqa=False), "keys repeated beforehand"


def reason_to_skip(contestant, case, device):
    if contestant.rate is not None and case.flops / contestant.rate * 1e-12 > SLOW_SECONDS:
        return "slow"
    if contestant.backend is SDPBackend.MATH and device == "cuda":
        needed = 4 * 4 * case.batch * case.heads * case.queries * case.keys  # a few copies of the scores
        if needed > torch.cuda.mem_get_info()[0]:
            return "memory"
    return ""


# ---- Bytes -----------------------------------------------------------------------------------------------------------


def same_bytes(a, b):
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.to(a.device).contiguous().view(bits))


def check_layout(out, case):
    """An interleaved projection gets its output as [B, S, H, D], without a copy."""
    if not case.interleaved:
        return
    rows = out.transpose(1, 2)
    assert rows.is_contiguous(), f"{case}: the output's strides are {out.stride()}, not those of [B, S, H, D]"
    assert rows[0].shape == (case.queries, case.heads, case.head_dim) and rows[0].data_ptr() == out.data_ptr()


def check_bytes(kernel, case, device):
    """Raises unless every path that is there gives the reference path's bytes, and the CPU's."""
    for dtype, precision in set(KINDS.values()):
        if dtype == torch.float32 and not case.float32:
            continue
        for small, expected_on in ((case.shrunk(640, 1500), device), (case.shrunk(80, 200), "cpu")):
            x = inputs(small, dtype, device)
            how = dict(precision=precision, out_dtype=dtype)
            expected = kernel.det_attn(*(t.to(expected_on) for t in x), small.causal, path="reference", **how)
            for path in ("auto", "mma") if device == "cuda" else ("auto",):
                found = kernel.det_attn(*x, small.causal, path=path, **how)
                assert same_bytes(found, expected), f"{small}, {dtype}, {precision}: {path} differs from {expected_on}"
                check_layout(found, small)


# ---- Times -----------------------------------------------------------------------------------------------------------


def times(call, sets, count, device, head_start):
    """Milliseconds of `count` calls, each on the next input set."""
    if device != "cuda":
        found = []
        for i in range(count):
            start = time.perf_counter()
            call(*sets[i % len(sets)])
            found.append((time.perf_counter() - start) * 1e3)
        return found
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    if head_start:
        torch.cuda._sleep(10_000_000)  # about 5 ms in which the calls queue up
    for i, (start, end) in enumerate(events):
        start.record()
        call(*sets[i % len(sets)])
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def extra_memory(call, qkv, device):
    """Peak MB of one call beyond its inputs and outputs."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*qkv)
    torch.cuda.synchronize()
    results = out if isinstance(out, tuple) else (out,)
    own = sum(x.numel() * x.element_size() for x in results)
    return (torch.cuda.max_memory_allocated() - before - own) / 1e6


def prepare(kernel, contestant, case, sets, device, outputs):
    """The call, warm, and its note. Outputs of full size must agree between paths as well."""
    if not contestant.ours:
        return torch_call(contestant, case, sets)
    call = our_call(kernel, contestant, case)
    out = call(*sets[0])
    check_layout(out, case)
    same = outputs.setdefault((contestant.dtype, contestant.precision), out)
    assert same_bytes(out, same), f"{case}: {contestant.name} has other bytes than auto"
    return call, ""


def measure(kernel, case, device, seconds, repeats):
    """Results of every contestant of a case, in order."""
    results, ready, sets, outputs = [], [], {}, {}
    for contestant in CONTESTANTS:
        if contestant.dtype == torch.float32 and not case.float32:
            continue
        result = Result(contestant, note=reason_to_skip(contestant, case, device))
        results.append(result)
        if result.note:
            continue
        try:
            if contestant.dtype not in sets:
                sets[contestant.dtype] = input_sets(case, contestant.dtype, device)
            call, result.note = prepare(kernel, contestant, case, sets[contestant.dtype], device, outputs)
            if contestant.ours:
                result.extra_mb = extra_memory(call, sets[contestant.dtype][0], device)
            probe = times(call, sets[contestant.dtype], 1, device, False)[0]
            ready.append((result, call, probe))
        except (RuntimeError, ValueError) as error:  # not here, or no memory; bytes that differ still raise
            result.note = str(error).strip().splitlines()[0][:70] or type(error).__name__
            synchronize(device)
    outputs.clear()
    found = {id(result): [] for result, _, _ in ready}
    share = seconds * 1e3 / max(1, len(ready)) / ROUNDS
    for _ in range(ROUNDS):
        for result, call, probe in ready:
            count = max(1, min(-(-repeats // ROUNDS), int(share / max(probe, 1e-3))))
            found[id(result)] += times(call, sets[result.contestant.dtype], count, device, probe < 2.0)
    for result, _, _ in ready:
        result.ms = statistics.median(found[id(result)])
        result.tflops = case.flops / result.ms * 1e-9
    return results


def memory_growth(kernel, case, device):
    """(extra MB, and the factor by which they grow with twice the queries and keys); 4 would mean Sq x Skv."""
    if device != "cuda":
        return None
    call = our_call(kernel, CONTESTANTS[0], case)
    double = replace(case, queries=2 * case.queries, keys=2 * case.keys)
    small, large = (extra_memory(call, inputs(c, torch.float32, device), device) for c in (case, double))
    return small, large / small


def parser_of(description, shapes, repeats, seconds):
    """The arguments of this script and of bench_backward.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=shapes, default="main", help="which cases (default main)")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="most calls of a contestant in a case (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="time to measure a case in, about (default %(default)s)"
    )
    parser.add_argument("--output", metavar="FILE", help="append the tables here, e.g. benchmarks/RESULTS.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries this script out")
    return parser


def start(device):
    """The kernel, on a device that is there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --device cpu runs tiny shapes, to try this script out")
    kernel = load_kernel()
    torch.manual_seed(0)
    print(device_name(device))
    return kernel


def run_cases(kernel, chosen, shapes, check_bytes, measure):
    """[(case, case as run, results)] of the chosen shapes, each printed when it is done."""
    table = []
    for case in shapes[chosen.shapes]:
        run = case if chosen.device == "cuda" else case.shrunk(32, 64)
        check_bytes(kernel, run, chosen.device)
        results = measure(kernel, run, chosen.device, chosen.seconds, chosen.repeats)
        table.append((case, run, results))
        print_case(run, results)
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
    return table


def options():
    parser = parser_of(__doc__, SHAPES, 30, 4.0)
    parser.add_argument("--plot", metavar="FILE", help="draw TFLOPS over length, e.g. docs/forward_speed.png")
    return parser.parse_args()


def main():
    chosen = options()
    device = chosen.device
    kernel = start(device)
    table = run_cases(kernel, chosen, SHAPES, check_bytes, measure)
    cases = {case: results for case, _, results in table}
    growth = memory_growth(kernel, TARGET, device) if TARGET in cases else None
    targets = print_targets(cases, TARGET, TARGET_CAUSAL, DECODE, growth)
    if chosen.output:
        append_results(chosen.output, device, table, targets)
    if chosen.plot:
        plot(chosen.plot, device, table)


if __name__ == "__main__":
    main()
