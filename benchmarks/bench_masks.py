"""What masks and modifiers cost on a GPU: det_attn with each of them beside the call without, a pair of attention.

    python benchmarks/bench_masks.py --output benchmarks/RESULTS.md          under a minute

A time over the number of attended pairs is divided by that of an unmasked call of the same work, in one run and on the
same bfloat16 inputs, laid out [B, S, H, D]; a mask, a bias and modifiers leave the number of pairs as it is. The target
is at most 1.15 for windows, padding and packed sequences. Before a case is timed its bytes are compared: at a tiny size
with the CPU's, and at full size with those of an unmasked call, where rows of both attend the same. Times are medians
of CUDA events, taken as in bench_forward.py.
"""

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch
from bench_forward import CACHE_BYTES, ROUNDS, same_bytes, start, times
from forward_report import append_results, number, verdict

TARGET = 1.15
PRECISIONS = {"highest": torch.float32, "high": torch.bfloat16}  # and what each returns
DROPOUT = dict(dropout_p=0.1, dropout_seed=7)
SOFTCAP = 30.0


@dataclass(frozen=True)
class Sizes:
    heads: int
    head_dim: int
    length: int  # of one long sequence, under windows
    windows: tuple
    batch: int
    short: int  # queries and keys of each sequence of a batch
    shorter: int  # by which each has fewer keys than the one before it, under padding
    step: int  # keys of the call beside padding are a multiple

    @property
    def used(self):
        return [self.short - self.shorter * i for i in range(self.batch)]


FULL = Sizes(16, 128, 8192, (4096, 1024), 8, 2048, 190, 64)
TINY = Sizes(2, 16, 96, (48, 20), 4, 40, 7, 8)


class Beside(NamedTuple):
    name: str
    call: Callable  # of q, k, v [B, H, S, D]
    pairs: int
    target: bool = False


class Case(NamedTuple):
    name: str
    batch: int
    length: int
    call: Callable
    pairs: int
    besides: list
    check: Callable  # of the output and q, k, v: (some of its rows, what an unmasked call gives for them)


# ---- Cases -----------------------------------------------------------------------------------------------------------


class Calls:
    """The calls of one precision, and the masks they share."""

    def __init__(self, kernel, precision, sizes, device):
        self.kernel, self.sizes, self.device, self.precision = kernel, sizes, device, precision
        self.how: dict[str, Any] = dict(precision=precision, out_dtype=PRECISIONS[precision])
        generator = torch.Generator().manual_seed(1)
        n, heads = sizes.short, sizes.heads
        # Row 0 of either is that of the plain call, as is head 0 under slopes.
        mask, bias = torch.rand(1, 1, n, n, generator=generator) < 0.9, torch.randn(1, heads, n, n, generator=generator)
        mask[:, :, 0], bias[:, :, 0] = True, 0.0
        self.mask, self.bias = mask.to(device), bias.to(torch.bfloat16).to(device)
        self.slopes = (torch.arange(heads) / (8.0 * heads)).to(device)
        ends = torch.tensor(sizes.used, dtype=torch.int32)[:, None].expand(-1, n)
        self.ranges = torch.stack([torch.zeros_like(ends), ends], 2).to(device)
        self.starts = torch.arange(0, (sizes.batch + 1) * n, n, dtype=torch.int32).to(device)

    def plain(self, q, k, v, **options):
        return self.kernel.det_attn(q, k, v, **self.how, **options)

    def cut(self, keys):
        return lambda q, k, v: self.plain(q, k[:, :, :keys], v[:, :, :keys])

    def packed(self, q, k, v, **options):
        """As [B, H, S, D] again."""
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # views
        n = self.sizes.short
        out = self.kernel.det_attn_varlen(*rows, self.starts, self.starts, n, n, **self.how, **options)
        return out.unflatten(0, (-1, n)).transpose(1, 2)

    def sdpa(self, q, k, v, **options):
        return self.kernel.scaled_dot_product_attention(q, k, v, precision=self.precision, **options)

    def cases(self):
        yield from (self.window(size) for size in self.sizes.windows)
        yield self.padding()
        s, batch = self.sizes, self.sizes.batch
        pairs = batch * s.short**2
        for name, options, count in (("", {}, pairs), (", causal", dict(causal=True), pairs // 2)):
            beside = Beside(f"a{name[1:]} batch of {batch}", lambda *x, o=options: self.plain(*x, **o), count, True)
            call = lambda *x, o=options: self.packed(*x, **o)
            check = lambda out, *x, call=beside.call: (out, call(*x))
            yield Case(f"packed sequences, {batch} x {s.short}{name}", batch, s.short, call, count, [beside], check)

        def with_options(name, check, plain=self.plain, **options):
            besides = [Beside("the plain call", plain, pairs)]
            return Case(name, batch, s.short, lambda *x: plain(*x, **options), pairs, besides, check)

        first_row = lambda plain: lambda out, *x: (out[:, :, :1], plain(*x)[:, :, :1])
        yield with_options("bool attn_mask", first_row(self.sdpa), self.sdpa, attn_mask=self.mask)
        yield with_options("attn_bias, bfloat16", first_row(self.plain), attn_bias=self.bias)
        yield with_options("dropout", self.same_den, **DROPOUT)
        last_rows = lambda out, q, k, v: (out[:, :, -8:], self.plain(q[:, :, -8:], k, v, softcap=SOFTCAP))
        yield with_options("softcap", last_rows, softcap=SOFTCAP)
        yield with_options("ALiBi", lambda out, *x: (out[:, :1], self.plain(*x)[:, :1]), alibi_slopes=self.slopes)

    def window(self, size):
        n = self.sizes.length
        pairs = size * (size + 1) // 2 + (n - size) * size
        besides = [
            Beside(f"unmasked, {n} queries, {size} keys", self.cut(size), n * size, True),
            Beside("the causal call", lambda *x: self.plain(*x, causal=True), n * (n + 1) // 2),
        ]
        check = lambda out, q, k, v: (
            out[:, :, -1:],
            self.plain(*(x[:, :, n - m :] for x, m in zip((q, k, v), (1, size, size)))),
        )
        call = lambda *x: self.plain(*x, causal=True, window=(size - 1, 0))
        return Case(f"causal window of {size}, S {n}", 1, n, call, pairs, besides, check)

    def padding(self):
        s = self.sizes
        mean = round(statistics.mean(s.used) / s.step) * s.step
        besides = [
            Beside(f"unmasked, {mean} keys", self.cut(mean), s.batch * s.short * mean, True),
            Beside("the plain call", self.plain, s.batch * s.short**2),
        ]
        check = lambda out, q, k, v: (
            out[-1:],
            self.plain(q[-1:], k[-1:, :, : s.used[-1]], v[-1:, :, : s.used[-1]]),
        )
        name = f"padding by key_ranges, {s.used[-1]} to {s.used[0]} keys"
        call = lambda *x: self.plain(*x, key_ranges=self.ranges)
        return Case(name, s.batch, s.short, call, s.short * sum(s.used), besides, check)

    def same_den(self, out, *x):
        """Dropout leaves the sums of weights alone, so these are compared, in place of an output that has no equal."""
        dens = [self.plain(*x, return_state=True, **options)[1].den for options in (DROPOUT, {})]
        return tuple(den.view(torch.int32) for den in dens)


# ---- Measuring -------------------------------------------------------------------------------------------------------


def inputs(case, sizes, device):
    shape = (case.batch, case.length, sizes.heads, sizes.head_dim)
    return [torch.randn(shape, device=device).to(torch.bfloat16).transpose(1, 2) for _ in range(3)]


def check_bytes(kernel, precision, device):
    """Raises unless every call, at tiny sizes, gives the CPU's bytes."""
    for ours, theirs in zip(*(Calls(kernel, precision, TINY, where).cases() for where in (device, "cpu"))):
        x = inputs(ours, TINY, "cpu")
        found, expected = ours.call(*(t.to(device) for t in x)), theirs.call(*x)
        assert same_bytes(expected, found), f"{ours.name}, {precision}: differs from the CPU"
        assert same_bytes(*theirs.check(expected, *x)), f"{ours.name}, {precision}: differs from the unmasked call"


def measure(case, sizes, device, repeats):
    """Milliseconds of the call, and of each beside it."""
    sets = [inputs(case, sizes, device)]
    size = sum(x.numel() * x.element_size() for x in sets[0])
    while device == "cuda" and len(sets) * size < CACHE_BYTES:
        sets.append(inputs(case, sizes, device))
    assert same_bytes(*case.check(case.call(*sets[0]), *sets[0])), f"{case.name}: differs from the unmasked call"
    calls = [case.call, *(beside.call for beside in case.besides)]
    found = [[] for _ in calls]
    for call in calls[1:]:
        call(*sets[0])
    for _ in range(ROUNDS):
        for call, ms in zip(calls, found):
            ms += times(call, sets, max(1, repeats // ROUNDS), device, True)
    return [statistics.median(ms) for ms in found]


def rows_of(case, milliseconds):
    """(case, beside, its milliseconds, those beside it, their ratio a pair, whether that has a target)."""
    own, *others = milliseconds
    for beside, ms in zip(case.besides, others):
        yield case.name, beside.name, own, ms, own / case.pairs / (ms / beside.pairs), beside.target


def table_of(rows, sizes):
    """Markdown lines; rows[precision] are those of rows_of()."""
    heads = ["", "beside"]
    for precision in PRECISIONS:
        heads += [f"`{precision}`, ms", "beside, ms", "a pair", f"<= {TARGET}"]
    lines = [f"### Masks and modifiers: bfloat16, H{sizes.heads} D{sizes.head_dim}, B{sizes.batch} S{sizes.short}", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for same in zip(*rows.values()):
        cells = list(same[0][:2])
        for _, _, own, ms, ratio, target in same:
            cells += [number(own, 3), number(ms, 3), number(ratio, 2), verdict(ratio, TARGET, False) if target else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="calls of each kind (default %(default)s)")
    parser.add_argument("--output", metavar="FILE", help="append the table here, e.g. benchmarks/RESULTS.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries this script out")
    return parser.parse_args()


def main():
    chosen = options()
    device, sizes = chosen.device, FULL if chosen.device == "cuda" else TINY
    kernel = start(device)
    rows = {}
    for precision in PRECISIONS:
        check_bytes(kernel, precision, device)
        cases = Calls(kernel, precision, sizes, device).cases()
        measured = (rows_of(case, measure(case, sizes, device, chosen.repeats)) for case in cases)
        rows[precision] = list(itertools.chain.from_iterable(measured))
    lines = table_of(rows, sizes)
    print("\n" + "\n".join(lines), flush=True)
    if chosen.output:
        append_results(chosen.output, device, [], lines, "masks")


if __name__ == "__main__":
    main()
