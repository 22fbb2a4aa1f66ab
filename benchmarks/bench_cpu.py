"""det_attn on the CPU against torch's float64 scaled_dot_product_attention: same inputs, same threads; with --backward
their backward passes alone.

The two alternate, so that whatever else the machine does slows both; medians and their ratio are printed. The target
is a ratio of at most 3 at batch 1, 8 heads, 2048 queries and keys, head dimension 64 and 128, precision "highest".
Exits non-zero if --check is given and a measured target is missed.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

REPO_ID = "phanerozoic/det-attn"
TARGET = 3.0


def load_kernel():
    root = Path(__file__).resolve().parent.parent
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={root}")
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=1, trust_remote_code=True)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def backward_calls(kernel, q, k, v, causal, precision):
    """The two backward passes to time, after one forward each."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    outs = kernel.det_attn(*ours, causal, precision=precision), sdpa(*theirs, is_causal=causal)
    gradient = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    gradients = gradient, gradient.double()
    return [
        lambda out=out, leaves=leaves, given=given: torch.autograd.grad(out, leaves, given, retain_graph=True)
        for out, leaves, given in zip(outs, (ours, theirs), gradients)
    ]


def forward_calls(kernel, q, k, v, causal, precision):
    wide = [x.double() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return (
        lambda: kernel.det_attn(q, k, v, causal, precision=precision),
        lambda: sdpa(*wide, is_causal=causal),
    )


def measure(calls_of, kernel, shape, precision, causal, repeats):
    """Median seconds of det_attn and of torch, and the median of the pairwise ratios."""
    batch, heads, queries, keys, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, heads, n, head_dim, generator=generator) for n in (queries, keys, keys))
    ours_call, theirs_call = calls_of(kernel, q, k, v, causal, precision)
    ours, theirs = [], []
    for repeat in range(repeats + 1):
        pair = seconds(ours_call), seconds(theirs_call)
        if repeat > 0:  # the first pair warms up
            ours.append(pair[0])
            theirs.append(pair[1])
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))
    return statistics.median(ours), statistics.median(theirs), ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="pairs of runs a row (default 9)")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: as torch chooses)")
    parser.add_argument("--length", type=int, default=2048, help="queries and keys of the prefill rows (default 2048)")
    parser.add_argument("--decode", action="store_true", help="add rows with one and sixteen queries")
    parser.add_argument("--backward", action="store_true", help="time the backward passes instead")
    parser.add_argument("--check", action="store_true", help="exit 1 if a `highest` prefill row misses the target")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    kernel = load_kernel()

    n = options.length
    rows = [((1, 8, n, n, d), p, c) for d in (64, 128) for p in ("highest", "high") for c in (False, True)]
    if options.decode:
        rows += [((1, 8, q, 8192, 128), "highest", False) for q in (1, 16)]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print("| B H Sq Skv D | precision | causal | det_attn ms | torch float64 ms | ratio |")
    print("|---|---|---|---|---|---|")
    missed = False
    calls_of = backward_calls if options.backward else forward_calls
    for shape, precision, causal in rows:
        ours, theirs, ratio = measure(calls_of, kernel, shape, precision, causal, options.repeats)
        size = " ".join(map(str, shape))
        print(f"| {size} | {precision} | {causal} | {ours * 1e3:.1f} | {theirs * 1e3:.1f} | {ratio:.2f} |", flush=True)
        missed |= precision == "highest" and shape[2] == n and ratio > TARGET
    if options.check and missed:
        sys.exit(f"a ratio above {TARGET}")


if __name__ == "__main__":
    main()
