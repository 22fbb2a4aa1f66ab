"""Train one small GPT with its sequence split over N ranks: is it the same model for every N?

    torchrun --nproc-per-node N examples/train_world_size.py

det-attn gives the attention, forward and backward, the same bytes for every N. The rest is this file's: every other
layer runs on blocks of a fixed number of tokens, so no matrix product knows N, and the gradients of the weights are
kept block by block and added in the order of the sequence. In: Python's own documentation, byte by byte. Out: the loss,
and the SHA-256 of all weights; with --check FILE the first run writes both there, and a later one that differs exits
with status 1. With --attention online the attention is an online-softmax ring, all else being the same.
"""

import argparse
import copy
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from context_parallel import online_ring
from torch import nn
from torch.nn import functional as F
from train_repeat import GPT, load_kernel, text, weights_hash

# ---- The two attentions ---------------------------------------------------------------------------------------------


class Online(torch.autograd.Function):
    """context_parallel.online_ring as a layer. It does both passes at once, so the backward pass repeats it."""

    @staticmethod
    def forward(ctx, q, k, v, rows):
        ctx.save_for_backward(q, k, v)
        ctx.rows = rows
        with torch.enable_grad():
            return online_ring(q, k, v, torch.zeros_like(q), rows, True)[0]

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            return (*online_ring(*ctx.saved_tensors, gradient, ctx.rows, True)[1:], None)


# ---- Layers on blocks of tokens -------------------------------------------------------------------------------------


class Blocks:
    """Own blocks of the sequence. Each has a copy of the model whose weights are the same memory, and whose gradients
    are those of that block alone."""

    def __init__(self, model, size, count):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model, self.size, self.count = model, size, count
        self.all_own = [chunk.tolist() for chunk in torch.arange(count).tensor_split(ranks)]
        self.own = self.all_own[rank]
        self.rows = [[b * size + i for b in blocks for i in range(size)] for blocks in self.all_own]
        self.copies = [copy.deepcopy(model) for _ in self.own]
        for twin in self.copies:
            for mine, theirs in zip(twin.parameters(), model.parameters()):
                mine.data = theirs.data

    def forward(self, tokens, attention):
        """Sum over own tokens of -log p, a number for each own block. tokens: [batch, length + 1]."""
        cuts = [slice(b * self.size, (b + 1) * self.size) for b in self.own]
        xs = [twin.token(tokens[:, cut]) + twin.position.weight[cut] for twin, cut in zip(self.copies, cuts)]
        batch, _, width = xs[0].shape
        for layer in range(len(self.model.blocks)):
            parts = [twin.blocks[layer] for twin in self.copies]
            heads = parts[0].heads
            qkv = torch.cat([part.qkv(part.norm_1(x)) for part, x in zip(parts, xs)], 1)
            qkv = qkv.view(batch, -1, 3, heads, width // heads).unbind(2)
            mixed = attention(*(y.transpose(1, 2) for y in qkv)).transpose(1, 2).reshape(batch, -1, width)
            mixed = [piece.contiguous() for piece in mixed.split(self.size, 1)]
            xs = [x + part.project(piece) for part, x, piece in zip(parts, xs, mixed)]
            xs = [x + part.mlp(part.norm_2(x)) for part, x in zip(parts, xs)]
        losses = []
        for twin, x, cut in zip(self.copies, xs, cuts):
            wanted = tokens[:, cut.start + 1 : cut.stop + 1]
            losses.append(F.cross_entropy(twin.head(twin.norm(x)).flatten(0, 1), wanted.flatten(), reduction="sum"))
        return losses

    def in_order(self, own):
        """A float32 vector of every block, own ones in, added up in the order of the sequence."""
        most = max(map(len, self.all_own))
        padded = own.new_zeros(most, own.shape[1])
        padded[: len(own)] = own
        everyone = [torch.empty_like(padded) for _ in self.all_own]
        dist.all_gather(everyone, padded)
        total = torch.zeros_like(own[0])
        for blocks, found in zip(self.all_own, everyone):  # ranks hold blocks in the order of the sequence
            for row in found[: len(blocks)]:
                total += row
        return total

    def gradients(self, losses, tokens):
        """Sets the model's gradients to those of the mean loss, which it returns."""
        torch.autograd.backward([loss / tokens for loss in losses])
        own = [torch.cat([p.grad.flatten() for p in twin.parameters()]) for twin in self.copies]
        total = self.in_order(torch.stack(own))
        for p, gradient in zip(self.model.parameters(), total.split([p.numel() for p in self.model.parameters()])):
            p.grad = gradient.view_as(p)
        for twin in self.copies:
            twin.zero_grad()
        return self.in_order(torch.stack(losses).detach()[:, None])[0] / tokens


def train(kernel, data, args):
    """(loss of every step, SHA-256 of the weights after the last)."""
    torch.manual_seed(args.seed)
    model = GPT(args.length, args.width, args.heads, args.layers).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    draw = torch.Generator().manual_seed(args.seed)
    blocks = Blocks(model, args.block, args.length // args.block)

    def attention(q, k, v):
        if args.attention == "online":
            return Online.apply(q, k, v, blocks.rows)
        return kernel.det_attn_context_parallel(q, k, v, None, True, method=args.method)

    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.length - 1, (args.batch, 1), generator=draw)
        tokens = data[starts + torch.arange(args.length + 1)].long().to(args.device)
        losses.append(blocks.gradients(blocks.forward(tokens, attention), args.batch * args.length))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.stack(losses).cpu().tolist(), weights_hash(model)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=96, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="bytes of a sequence (%(default)s)")
    parser.add_argument("--block", type=int, default=8, help="tokens of a block, which divide --length (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=6e-3, help="learning rate (%(default)s)")
    parser.add_argument("--method", choices=("ring", "gather", "reduce"), default="ring", help="(%(default)s)")
    parser.add_argument("--attention", choices=("det-attn", "online"), default="det-attn", help="(%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU a rank (%(default)s)")
    parser.add_argument("--check", type=Path, metavar="FILE", help="losses and hash of the first run")
    args = parser.parse_args()
    if args.width % args.heads or args.length % args.block or min(args.steps, args.layers, args.batch) < 1:
        parser.error("--width must be a multiple of --heads, --length of --block, the others at least 1")
    return args


def main():
    args = arguments()
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node N " + sys.argv[0])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the same for every N
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > args.length // args.block:
        raise SystemExit(f"{size} ranks, but only {args.length // args.block} blocks of {args.block} tokens")
    start = time.perf_counter()
    losses, digest = train(load_kernel(), text(), args)
    failed = False
    if rank == 0:
        print(f"{size} rank{'s' * (size > 1)}, {args.attention}: loss {losses[0]:.4f} -> {losses[-1]:.9f}   "
              f"weights {digest[:16]}…   {time.perf_counter() - start:.0f} s", flush=True)
        record = "\n".join([digest, *map(float.hex, losses)]) + "\n"
        if args.check and args.check.exists():
            failed = args.check.read_text() != record
            print("FAILED: not the first run's model" if failed else "  the first run's model and losses, every bit")
        elif args.check:
            args.check.parent.mkdir(parents=True, exist_ok=True)
            args.check.write_text(record)
    dist.barrier()
    sys.stdout.flush()
    # Not destroy_process_group(): torch sometimes aborts while it takes a gloo group down, when all is done.
    os._exit(failed)


if __name__ == "__main__":
    main()
