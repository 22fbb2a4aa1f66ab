"""Context parallelism over N GPUs against one GPU for the same total sequence, in one run, on all ranks it is given.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/bench_distributed.py --output FILE

"one" is the fused call for the whole sequence on one GPU. Every method's bytes are compared with it before a time is
taken. A time is the median over calls of the slowest rank's, between barriers. "no wire" is the same call with copies
on the device in place of messages, "wire" the messages of the ring without the computation; hidden is the share of the
wire's time that the whole does not show. The pieces (one rank's queries against one rank's keys) give the model of
larger worlds: what a rank computes and what it waits for. --device cpu with --length 256 only tries this script out.
"""

import argparse
import contextlib
import datetime
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from bench_cpu import load_kernel

MODELLED = (2, 8, 64, 1024)


class Bench:
    def __init__(self, kernel, args):
        self.kernel, self.args = kernel, args
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.cuda = args.device == "cuda"
        self.collectives = sys.modules[f"{kernel.__name__}.collectives"]
        self.team = self.collectives.Team(None, "group")
        self.lines = []

    def say(self, line=""):
        if self.rank == 0:
            print(line, flush=True)
        self.lines.append(line)

    def seconds(self, call, repeats, warm=False):
        """Median over `repeats` of the slowest rank's time; a call that is not warm runs once before."""
        found = []
        for _ in range(repeats + (not warm)):
            dist.barrier()
            if self.cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if self.cuda:
                torch.cuda.synchronize()
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=self.args.device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found.append(took.item())
        return statistics.median(found[-repeats:])

    @contextlib.contextmanager
    def no_wire(self):
        """Messages become copies on the device: of own data, so the bytes are wrong and the work is the same."""
        real = self.collectives.Team.post

        def post(team, sent, received):
            for a, b in zip(sent, received):
                b.copy_(a)
            return []

        self.collectives.Team.post = post
        try:
            yield
        finally:
            self.collectives.Team.post = real

    def inputs(self):
        """Own rows, and the whole."""
        a = self.args
        generator = torch.Generator(a.device).manual_seed(0)
        shape = (1, a.heads, a.length * self.size, a.head_dim)
        whole = [torch.randn(shape, generator=generator, device=a.device).to(torch.bfloat16) for _ in range(4)]
        rows = slice(self.rank * a.length, (self.rank + 1) * a.length)
        return whole, [x[:, :, rows].contiguous() for x in whole], rows

    def case(self, precision, causal, backward):
        a = self.args
        whole, own, rows = self.inputs()
        layout = "zigzag" if causal else "contiguous"
        if causal:
            half, last = a.length // 2, 2 * self.size
            parts = [range(i * half, (i + 1) * half) for i in (self.rank, last - 1 - self.rank)]
            rows = torch.tensor([i for part in parts for i in part], device=a.device)
            own = [x[:, :, rows].contiguous() for x in whole]
        leaves, all_leaves = ([x.requires_grad_(backward) for x in xs[:3]] for xs in (own, whole))

        def run(leaves, gradient, call):
            out = call(*leaves)
            if not backward:
                return [out]
            return [out, *torch.autograd.grad(out, leaves, gradient)]

        def one():
            call = lambda q, k, v: self.kernel.det_attn(q, k, v, causal, precision=precision, out_dtype=torch.bfloat16)
            return run(all_leaves, whole[3], call)

        def many(method):
            call = lambda q, k, v: self.kernel.det_attn_context_parallel(
                q, k, v, None, causal, method=method, layout=layout, precision=precision, out_dtype=torch.bfloat16
            )
            return run(leaves, own[3], call)

        name = f"{precision}, {'zigzag causal' if causal else 'not causal'}, forward{' + backward' * backward}"
        expected = [x[:, :, rows] for x in one()]
        alone = self.seconds(one, a.repeats, warm=True)
        self.say(f"| {name} | one | {alone * 1e3:.1f} | 1 | |")
        for method in a.methods.split(","):
            for found, wanted in zip(many(method), expected):
                assert torch.equal(found.view(torch.int16), wanted.contiguous().view(torch.int16)), (name, method)
            took = self.seconds(lambda: many(method), a.repeats, warm=True)
            note = ""
            if method == "ring":
                with self.no_wire():
                    still = self.seconds(lambda: many(method), a.repeats, warm=True)
                wire = self.seconds(lambda: self.wire(own, backward), a.repeats)
                hidden = 1 - max(0.0, took - still) / wire if wire > 0 else 1.0
                note = f"no wire {still * 1e3:.1f}, wire {wire * 1e3:.1f}, hidden {hidden:.0%}"
            self.say(f"| {name} | {method} | {took * 1e3:.1f} | {took / alone:.3f} | {note} |")

    def wire(self, own, backward):
        """What the ring sends, alone: keys, then keys and values, for each chunk of queries; then the gradients'."""
        q, k, v, _ = (x.detach() for x in own)
        lengths = [self.args.length] * self.size
        row_bytes = q.shape[0] * q.shape[1] * q.shape[3] * 12 * 8
        chunks = max(1, -(-self.args.length * row_bytes // 2**31))
        for _ in range(chunks):
            for tensors in ((k,), (k, v)):
                for _ in self.team.travel(tensors, lengths):
                    pass
        if not backward:
            return
        reference = k.new_zeros(k.shape[:3], dtype=torch.int32)
        sums = k.new_zeros(*k.shape, 3, dtype=torch.int64)
        for constant, variable in (((k, v), (reference,) * 2), ((k, v, reference, reference), (sums,) * 2)):
            home = self.collectives.Returning(self.team, lengths, lambda a, b: a)
            for _ in self.team.travel(constant, lengths):
                home.add(variable)
            home.home()

    def pieces(self, precision):
        """Milliseconds of one rank's queries against one rank's keys, and of one hop."""
        _, (q, k, v, _), _ = self.inputs()
        lengths, kernel, a = [self.args.length] * self.size, self.kernel, self.args
        how = {"precision": precision}
        maximum = kernel.rowmax(q, k, **how)
        step = max(1, a.length // 4)  # as the ring's chunks

        def accumulate():
            for lo in range(0, a.length, step):
                kernel.accumulate(q[:, :, lo : lo + step], k, v, maximum[:, :, lo : lo + step], **how)

        times = {
            "fused": self.seconds(lambda: kernel.det_attn(q, k, v, **how), a.repeats),
            "rowmax": self.seconds(lambda: kernel.rowmax(q, k, **how), a.repeats),
            "accumulate": self.seconds(accumulate, a.repeats),
        }
        hops = max(1, self.size - 1)
        times["hop"] = self.seconds(lambda: [None for _ in self.team.travel((k, v), lengths)], a.repeats) / hops
        return times

    def model(self, precision):
        t = self.pieces(precision)
        megabytes = 2 * self.args.heads * self.args.head_dim * self.args.length * 2 / 1e6
        self.say(f"\n{precision}: S x S pieces in ms: " + ", ".join(f"{k} {x * 1e3:.2f}" for k, x in t.items())
                 + f"; a hop of K and V is {megabytes:.0f} MB, {megabytes / 1e3 / t['hop']:.0f} GB/s")
        self.say(
            "\n| ranks | ring, forward, s | of one rank's time | gather, s | of one rank's time | wire of a step |"
        )
        self.say("|---|---|---|---|---|---|")
        chunks = 4
        for n in MODELLED:
            step = t["rowmax"] + t["accumulate"]
            ring = t["fused"] + (n - 1) * max(step, 1.5 * chunks * t["hop"])
            gather = n * t["fused"] + (n - 1) * t["hop"]
            one = n * n * t["fused"]
            share = 1.5 * chunks * t["hop"] / step
            self.say(f"| {n} | {ring:.3g} | {ring / one:.2g} ({ring / one * n:.2f} / {n}) | {gather:.3g} "
                     f"| {gather / one:.2g} ({gather / one * n:.2f} / {n}) | {share:.1%} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=65536, help="rows of each rank (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="calls that are timed (%(default)s)")
    parser.add_argument("--precisions", default="high,highest", help="(%(default)s)")
    parser.add_argument("--methods", default="ring,gather", help="(%(default)s)")
    parser.add_argument("--causal", choices=("no", "yes", "both"), default="no", help="(%(default)s)")
    parser.add_argument("--backward", choices=("no", "yes", "both"), default="both", help="(%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", metavar="FILE", help="append the tables here, e.g. benchmarks/RESULTS.md")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("no ranks here: start it with torchrun --standalone --nproc-per-node N")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    else:
        dist.init_process_group("gloo")
    bench = Bench(load_kernel(), args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    bench.say(f"\n## {datetime.date.today()}: {bench.size} x {device}, torch {torch.__version__}, context parallel\n")
    bench.say(f"`bench_distributed.py {' '.join(sys.argv[1:])}`: B1 H{args.heads} D{args.head_dim}, bfloat16, S "
              f"{args.length} on each of {bench.size} ranks\n")
    bench.say("| case | method | ms | of one rank's time | ms |\n|---|---|---|---|---|")
    choices = {"no": (False,), "yes": (True,), "both": (False, True)}
    for precision in args.precisions.split(","):
        for causal in choices[args.causal]:
            for backward in choices[args.backward]:
                bench.case(precision, causal, backward)
    for precision in args.precisions.split(","):
        bench.model(precision)
    if args.output and bench.rank == 0:
        with open(args.output, "a") as file:
            file.write("\n".join(bench.lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
