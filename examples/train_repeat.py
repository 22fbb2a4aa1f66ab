"""Train the same small GPT with the keys of its attention cut in different ways: does it become the same model?

Everything else is fixed: seed, data, device, threads, torch's deterministic algorithms. In: Python's own documentation,
byte by byte. Out: the loss and the SHA-256 of all weights of every run; exit status 1 if det-attn's hashes differ.
"""

import argparse
import hashlib
import importlib.util
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "phanerozoic/det-attn"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode asks for it on CUDA


def load_kernel():
    # Without this the kernel would come from the Hub; with it, from build/ of this checkout.
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")
    from kernels import get_kernel

    try:
        return get_kernel(REPO_ID, version=1, trust_remote_code=True)
    except FileNotFoundError as error:
        raise SystemExit(f"no build of det-attn that fits this torch, run `make build` first\n{error}")


# ---- Two attentions over pieces of the keys, both causal ------------------------------------------------------------


def online_softmax(q, k, v, pieces):
    """The usual combine, in float32: a running maximum, a running sum, and a rescaled output, piece after piece."""
    length, scale = q.shape[2], q.shape[3] ** -0.5
    masked = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    maximum = torch.full((*q.shape[:3], 1), -1e30, device=q.device)
    total, out, end = torch.zeros_like(maximum), torch.zeros_like(q), 0
    for size in pieces:
        piece = slice(end, end + size)
        end += size
        scores = (q @ k[:, :, piece].transpose(2, 3) * scale).masked_fill(masked[:, piece], -torch.inf)
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True)).detach()
        old, weights = torch.exp(maximum - new), torch.exp(scores - new)
        total = total * old + weights.sum(-1, keepdim=True)
        out = out * old + weights @ v[:, :, piece]
        maximum = new
    return out / total


def exact(kernel):
    def attention(q, k, v, pieces):
        if len(pieces) == 1:
            return kernel.det_attn(q, k, v, True)
        return kernel.det_attn_sharded(q, k, v, pieces, True)

    return attention


# ---- The model and its training -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attention, pieces):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = attention(*(y.transpose(1, 2) for y in qkv.unbind(2)), pieces)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, length, width, heads, layers):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens, attention, pieces):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attention, pieces)
        return self.head(self.norm(x))


def text():
    """Real text that comes with Python: the language reference behind help()."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[t] for t in sorted(topics)).encode()), dtype=torch.uint8)


def weights_hash(model):
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(attention, pieces, data, args):
    """(loss of every step, SHA-256 of the weights after the last)."""
    torch.manual_seed(args.seed)
    model = GPT(args.length, args.width, args.heads, args.layers).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    draw = torch.Generator().manual_seed(args.seed)
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.length - 1, (args.batch, 1), generator=draw)
        tokens = data[starts + torch.arange(args.length + 1)].long().to(args.device)
        logits = model(tokens[:, :-1], attention, pieces)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu().tolist(), weights_hash(model)


def compare(name, attention, splits, data, args):
    """Trains once per split. Returns the losses of every run, and the number of different models."""
    print(name)
    runs = []
    for label, pieces in splits.items():
        start = time.perf_counter()
        losses, digest = train(attention, pieces, data, args)
        runs.append((label, losses, digest))
        print(f"  {label:24} loss {losses[0]:.4f} -> {losses[-1]:.9f}   weights {digest[:16]}…   "
              f"{time.perf_counter() - start:.0f} s", flush=True)
    distinct = len({digest for _, _, digest in runs})
    print(f"  {len(runs)} runs, {distinct} model{'s' if distinct > 1 else ''}\n")
    return runs, distinct


def plot(path, online, ours):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (loss, away) = plt.subplots(1, 2, figsize=(12, 4.2), dpi=150, sharex=True)
    loss.set(title="Training loss", xlabel="step")
    away.set(title="How far the loss is from the first run's", xlabel="step", yscale="log", ylim=(5e-8, 1))
    reds, green, quiet = ("#c8324b", "#e0913c", "#7a2a6f"), "#0b7f6b", {"linewidth": 0.8, "alpha": 0.7}
    kinds = (online, reds[0], "-", "float32 online softmax"), (ours, green, "--", "det-attn")
    for runs, colour, style, name in kinds:
        for i, (_, losses, _) in enumerate(runs):
            loss.plot(losses, style, color=colour, label=name if i == 0 else None, **quiet)
    first = torch.tensor(online[0][1], dtype=torch.float64)
    for colour, (label, losses, _) in zip(reds, online[1:]):
        distance = (torch.tensor(losses, dtype=torch.float64) - first).abs()
        if distance.any():  # the repeated run has nothing to draw on this axis
            away.plot(distance.masked_fill(distance == 0, torch.nan), ".-", color=colour, markersize=2,
                      label=f"online softmax, {label}", **quiet)
    if all(losses == ours[0][1] for _, losses, _ in ours):
        away.axhline(5e-8, color=green, linewidth=5, label="det-attn: exactly 0 in every run")
    for ax in (loss, away):
        ax.legend(frameon=False)
        ax.grid(alpha=0.25)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of every run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=96, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="bytes of a sequence, at least 8 (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=6e-3, help="learning rate (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more do not pay at this size (%(default)s)")
    parser.add_argument("--plot", type=Path, nargs="?", const=ROOT / "docs" / "train_repeat.png", metavar="PNG",
                        help="draw the losses (docs/train_repeat.png)")
    args = parser.parse_args()
    if args.length < 8 or args.width % args.heads or min(args.steps, args.layers, args.batch, args.threads) < 1:
        parser.error("--length must be at least 8, --width a multiple of --heads, the others at least 1")
    return args


def main():
    args = arguments()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(args.threads)
    kernel = load_kernel()
    n = args.length
    splits = {
        "keys in one piece": [n],
        "the same again": [n],
        "two halves": [n // 2, n - n // 2],
        "a quarter and the rest": [n // 4, n - n // 4],
    }
    data = text()
    print(f"a GPT of {args.layers} layers, width {args.width}, {args.steps} steps of {args.batch} x {n} bytes of "
          f"Python's documentation, on {args.device}\n")
    online, different = compare("float32 online softmax", online_softmax, splits, data, args)
    ours, same = compare("det-attn", exact(kernel), splits, data, args)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        print("!! matplotlib is not installed: no picture\n")
    elif args.plot:
        plot(args.plot, online, ours)
    if same != 1:
        print("FAILED: det-attn trained different models")
        return 1
    print(f"{len(splits)} runs: online softmax trained {different} different model{'s' if different > 1 else ''}, "
          "det-attn 1, every bit of it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
