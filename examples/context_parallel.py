"""One attention, its sequence split over N ranks: does its output, do its gradients depend on N?

    torchrun --nproc-per-node N examples/context_parallel.py

Run it with several N. In: the same random sequence for every N. Out: a SHA-256 of the output and one of the gradients,
for the usual ring (online softmax in float32, gradients added over the ranks) and for det-attn. With --check FILE the
first run writes det-attn's hashes there, and a later run with others exits with status 1.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from train_repeat import load_kernel

# ---- Layouts: the rows of each rank -------------------------------------------------------------------------------


def contiguous(length, ranks):
    return [chunk.tolist() for chunk in torch.arange(length).tensor_split(ranks)]


def zigzag(length, ranks):
    """A part from the front and one from the back: so each rank has as much to do under a causal mask."""
    parts = torch.arange(length).tensor_split(2 * ranks)
    return [parts[rank].tolist() + parts[-1 - rank].tolist() for rank in range(ranks)]


def shuffled(length, ranks):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(ranks))
    return [chunk.tolist() for chunk in order.tensor_split(ranks)]


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "shuffled": shuffled}

# ---- The usual ring -------------------------------------------------------------------------------------------------


def online_ring(q, k, v, gradient, rows, causal):
    """(out, dq, dk, dv) of own rows: keys of all ranks, from own ones on round the ring; float32 throughout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    all_k, all_v = (gathered(x.detach(), rows).requires_grad_() for x in (k, v))
    q = q.detach().clone().requires_grad_()
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (all_k, all_v))
    mine = torch.tensor(rows[rank], device=q.device)
    maximum = torch.full((*q.shape[:3], 1), -1e30, device=q.device)
    total, out = torch.zeros_like(maximum), torch.zeros_like(q)
    for step in range(size):
        theirs = torch.tensor(rows[(rank - step) % size], device=q.device)
        scores = q @ keys[:, :, theirs].transpose(2, 3) * q.shape[3] ** -0.5
        if causal:
            scores = scores.masked_fill(theirs > mine[:, None], -torch.inf)
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True)).detach()
        old, weights = torch.exp(maximum - new), torch.exp(scores - new)
        total = total * old + weights.sum(-1, keepdim=True)
        out = out * old + weights @ values[:, :, theirs]
        maximum = new
    out = out / total
    out.backward(gradient)
    for x in (all_k, all_v):
        dist.all_reduce(x.grad)
    return out.detach(), q.grad, all_k.grad[:, :, mine], all_v.grad[:, :, mine]


# ---- The same, exactly ----------------------------------------------------------------------------------------------


def exact(kernel, q, k, v, gradient, rows, causal, method):
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    positions = torch.tensor(rows[dist.get_rank()], device=q.device)
    out = kernel.det_attn_context_parallel(*own, None, causal, layout=positions, method=method)
    out.backward(gradient)
    return out.detach(), *(x.grad for x in own)


# ---- Hashes of the whole --------------------------------------------------------------------------------------------


def gathered(x, rows):
    """Rows of all ranks, in the order of the sequence."""
    longest = max(map(len, rows))
    padded = x.new_zeros(*x.shape[:2], longest, x.shape[3])
    padded[:, :, : x.shape[2]] = x
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded)
    whole = x.new_empty(*x.shape[:2], sum(map(len, rows)), x.shape[3])
    for part, at in zip(parts, rows):
        whole[:, :, at] = part[:, :, : len(at)]
    return whole


def hashes(found, rows):
    """Of the output, and of the three gradients together."""
    out, *gradients = (gathered(x, rows).cpu().numpy().tobytes() for x in found)
    return hashlib.sha256(out).hexdigest(), hashlib.sha256(b"".join(gradients)).hexdigest()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1000, help="rows of the sequence (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of the queries; keys have half of them (%(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="(%(default)s)")
    parser.add_argument("--method", choices=("ring", "gather", "reduce"), default="ring", help="(%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU a rank (%(default)s)")
    parser.add_argument("--check", type=Path, metavar="FILE", help="det-attn's hashes of the first run")
    args = parser.parse_args()
    if args.length < 0 or args.heads < 2 or args.heads % 2:
        parser.error("--length must not be negative, --heads even")
    return args


def main():
    args = arguments()
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node N " + sys.argv[0])
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    kernel = load_kernel()
    torch.manual_seed(0)
    heads = (args.heads, args.heads // 2, args.heads // 2, args.heads)
    rows = LAYOUTS[args.layout](args.length, size)
    own = [torch.randn(1, h, args.length, 64)[:, :, rows[rank]].to(args.device) for h in heads]
    usual = hashes(online_ring(*own, rows, True), rows)
    ours = hashes(exact(kernel, *own, rows, True, args.method), rows)
    failed = False
    if rank == 0:
        print(f"{size} rank{'s' * (size > 1)}, {args.length} rows, causal, {args.layout}, {args.device}")
        for name, (out, gradients) in (("online-softmax ring", usual), (f"det-attn, {args.method}", ours)):
            print(f"  {name:20} out {out[:16]}…  gradients {gradients[:16]}…", flush=True)
        if args.check and args.check.exists():
            failed = args.check.read_text().split() != list(ours)
            print("FAILED: det-attn's hashes are not those of the first run" if failed else "  the first run's bytes")
        elif args.check:
            args.check.parent.mkdir(parents=True, exist_ok=True)
            args.check.write_text("\n".join(ours) + "\n")
    dist.barrier()
    sys.stdout.flush()
    # Not destroy_process_group(): torch sometimes aborts while it takes a gloo group down, when all is done.
    os._exit(failed)


if __name__ == "__main__":
    main()
