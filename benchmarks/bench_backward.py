"""det_attn's backward on a GPU against that of torch's scaled_dot_product_attention, all rivals in one run.

    python benchmarks/bench_backward.py                 the shapes that have a target; under a minute
    python benchmarks/bench_backward.py --shapes all --output benchmarks/RESULTS.md

As bench_forward.py, whose inputs, clock and rules these are: bytes are compared before anything is timed, times are
medians of CUDA events in rounds that alternate between the contestants, and calls are queued ahead of the GPU. What is
timed is dQ, dK and dV from the gradient of the output, with the forward pass done beforehand. TFLOPS count
10 * B * H * Sq * Skv * D, halved for causal. `highest` takes a float32 gradient, `high` a bfloat16 one. "Extra MB" is
peak memory beyond inputs, saved tensors and gradients.
"""

import itertools
import statistics
from dataclasses import replace

import torch
from bench_forward import (
    KINDS,
    ROUNDS,
    Contestant,
    Result,
    extra_memory,
    input_sets,
    inputs,
    parser_of,
    reason_to_skip,
    run_cases,
    same_bytes,
    square,
    start,
    synchronize,
    times,
    torch_call,
)
from forward_report import (
    RIVALS,
    append_results,
    faster,
    print_target_rows,
    times_of,
)
from torch.nn.attention import SDPBackend

# The op's arguments of score modifiers and dropout: none.
PLAIN = (None, None, None, 0.0, -1, -1, 0.0, 0, 0, 0, 0, None, None)
FORWARDS = 2.5  # the flops of a backward pass over those of its forward
RATES = {"auto": None, "mma": None, "reference": 2.0}
CONTESTANTS = [
    Contestant(f"det-attn {kind}, {path}", dtype, precision, path, rate=rate)
    for kind, (dtype, precision) in KINDS.items()
    for path, rate in RATES.items()
] + [
    Contestant("torch float32 EFFICIENT", torch.float32, backend=SDPBackend.EFFICIENT_ATTENTION),
    Contestant("torch bf16 FLASH", torch.bfloat16, backend=SDPBackend.FLASH_ATTENTION),
    Contestant("torch bf16 cuDNN", torch.bfloat16, backend=SDPBackend.CUDNN_ATTENTION),
]

TARGET = square(8192, 128)
TARGET_CAUSAL = square(8192, 128, True)
GRID = [square(n, d, c) for d, n, c in itertools.product((64, 128, 256), (512, 2048, 8192), (False, True))]
SHAPES = {
    "main": [TARGET, TARGET_CAUSAL],
    "all": GRID + [square(32768, 128), square(8192, 128, True, 32, 8)],
}


def our_sets(kernel, contestant, case, sets):
    """What the op takes for each input set: the gradient, Q, K, V, and what the forward pass keeps."""
    found = []
    for q, k, v in sets:
        out, state = kernel.det_attn(q, k, v, case.causal, precision=contestant.precision, return_state=True)
        found.append((torch.randn_like(q), q, k, v, out, state.rowmax, state.den))
    return found


def our_call(kernel, contestant, case):
    call = (case.causal, case.head_dim**-0.5, contestant.precision, case.keys - case.queries, 0, case.keys)
    return lambda *given: kernel.ops.backward.default(*given, *call, True, True, True, *PLAIN, contestant.path)


def torch_sets(contestant, case, sets):
    """([(out, leaves, gradient)], note), with the forward pass done."""
    leaves = [[x.detach().requires_grad_() for x in qkv] for qkv in sets]
    call, note = torch_call(contestant, case, leaves)
    return [(call(*qkv), qkv, torch.randn_like(qkv[0])) for qkv in leaves], note


def torch_backward(out, leaves, gradient):
    return torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def check_bytes(kernel, case, device):
    """Raises unless every path gives the reference path's bytes at a reduced size, and the CPU's at a tiny one."""
    for dtype, precision in sorted(set(KINDS.values()), key=str):
        for small, expected_on in ((case.shrunk(640, 1500), device), (case.shrunk(80, 200), "cpu")):
            contestant = Contestant("", dtype, precision, "reference")
            (given,) = our_sets(kernel, contestant, small, [inputs(small, dtype, device)])
            expected = our_call(kernel, contestant, small)(*(x.to(expected_on) for x in given))
            for path in ("auto", "mma") if device == "cuda" else ("auto",):
                found = our_call(kernel, replace(contestant, path=path), small)(*given)
                for name, x, y in zip(("dQ", "dK", "dV"), found, expected):
                    assert same_bytes(x, y), f"{small}, {dtype}, {precision}: {name} of {path} is not {expected_on}'s"


def prepare(kernel, contestant, case, sets, device, outputs):
    """(call, its sets, its note), warm. Gradients of full size must agree between paths as well."""
    if not contestant.ours:
        found, note = torch_sets(contestant, case, sets)
        return torch_backward, found, note
    call = our_call(kernel, contestant, case)
    key = (contestant.dtype, contestant.precision)
    if key not in outputs:
        given = our_sets(kernel, contestant, case, sets)
        outputs[key] = given, call(*given[0])
    given, same = outputs[key]
    assert all(same_bytes(x, y) for x, y in zip(call(*given[0]), same)), f"{case}: {contestant.name} has other bytes"
    return call, given, ""


def measure(kernel, case, device, seconds, repeats):
    """Results of every contestant of a case, in order."""
    results, ready, sets, outputs = [], [], {}, {}
    for contestant in CONTESTANTS:
        result = Result(contestant, note=reason_to_skip(contestant, case, device))
        results.append(result)
        if result.note:
            continue
        try:
            if contestant.dtype not in sets:
                sets[contestant.dtype] = input_sets(case, contestant.dtype, device)
            call, given, result.note = prepare(kernel, contestant, case, sets[contestant.dtype], device, outputs)
            if contestant.ours:
                result.extra_mb = extra_memory(call, given[0], device)
            ready.append((result, call, given, times(call, given, 1, device, False)[0]))
        except (RuntimeError, ValueError) as error:  # not here, or no memory; bytes that differ still raise
            result.note = str(error).strip().splitlines()[0][:70] or type(error).__name__
            synchronize(device)
    found = {id(result): [] for result, *_ in ready}
    share = seconds * 1e3 / max(1, len(ready)) / ROUNDS
    for _ in range(ROUNDS):
        for result, call, given, probe in ready:
            count = max(1, min(-(-repeats // ROUNDS), int(share / max(probe, 1e-3))))
            found[id(result)] += times(call, given, count, device, probe < 2.0)
    for result, *_ in ready:
        result.ms = statistics.median(found[id(result)])
        result.tflops = FORWARDS * case.flops / result.ms * 1e-9
    return results


def target_rows(cases):
    """(what, measured, first, aim, whether more is better)."""
    plain = times_of(cases[TARGET])
    kinds = (("float32 highest", "EFFICIENT", 0.7, 1.5), ("bf16 high", "FLASH", 0.2, 0.5))
    return [
        (f"backward: det-attn {kind}, auto, over {RIVALS[rival]}",
         faster(plain.get(f"det-attn {kind}, auto"), plain.get(RIVALS[rival])), first, aim, True)
        for kind, rival, first, aim in kinds
    ]  # fmt: skip


def main():
    chosen = parser_of(__doc__, SHAPES, 15, 5.0).parse_args()
    table = run_cases(start(chosen.device), chosen, SHAPES, check_bytes, measure)
    cases = {case: results for case, _, results in table}
    targets = print_target_rows(TARGET, target_rows(cases)) if TARGET in cases else []
    if chosen.output:
        append_results(chosen.output, chosen.device, table, targets, "backward")


if __name__ == "__main__":
    main()
