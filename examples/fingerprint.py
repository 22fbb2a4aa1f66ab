"""Fingerprints of one attention call: SHA-256 at every named boundary, and where two machines part.

    python examples/fingerprint.py call.safetensors --causal --json here.json    # Q, K, V, and dO if gradients count
    python examples/fingerprint.py --compare here.json there.json

In: tensors Q [B, Hq, Sq, D], K and V [B, Hkv, Skv, D], dO like Q, saved with safetensors, and if the call has them
attn_bias, alibi_slopes and key_ranges. Out: a hash per boundary, as docs/contract.md section 5 defines it; or the first
boundary at which two reports differ, and exit status 1. Status 2: a file or an option is not what it should be.
"""

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path

import torch

from shard_rotation import load_kernel  # beside this file

CONTRACT = 1
TENSORS = ("Q", "K", "V", "dO", "attn_bias", "alibi_slopes", "key_ranges")
REPORT = {"contract": int, "where": dict, "settings": dict, "shapes": dict, "boundaries": dict}
SETTINGS = ("causal", "scale", "precision", "q_offset", "window", "softcap", "dropout_p", "dropout_seed")
# What to look at when a boundary is the first to differ: all before it were the same bytes.
MEANING = {
    "input": "the machines were given different tensors",
    "rows": "one row's rounding (contract section 1)",
    "rowmax": "scores, or which keys are attended (sections 2, 3)",
    "NUM": "weights, or sums of weights times values (sections 4, 5)",
    "DEN": "weights, or their sums (sections 4, 5)",
    "out": "the division and its rounding (section 6)",
    "fused out": "the fused call, whose stages agree one by one: a bug",
    "reference": "dP, ds, or the largest exponents of the gradients (section 8)",
    "sum": "the gradients' integer sums (section 8)",
    "gradient": "the gradients' rounding (section 8)",
    "backward": "autograd of the fused call, whose stages agree one by one: a bug",
}


def refuse(path, what):
    print(f"{path}: {what}", file=sys.stderr)
    raise SystemExit(2)


def sha256(x):
    """The canonical hash of a boundary: the tensor's bytes, C-contiguous, little endian."""
    return hashlib.sha256(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def rows_of(kernel, name, x, kind, scale, precision):
    try:
        return kernel.rows(x, kind, scale, precision=precision)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("x: ", f"{name}: ", 1)) from None


def fingerprint(kernel, tensors, settings):
    """boundary -> hash, in the order of the data flow. A boundary is named "kind: what" where a kind has several."""
    Q, K, V = (tensors[name] for name in "QKV")
    scale, precision = settings["scale"], settings["precision"]
    scores = {name: value for name, value in settings.items() if not name.startswith("dropout")}
    scores.update({name: tensors[name] for name in TENSORS[4:] if name in tensors})
    call = {**settings, **scores}
    found = {f"input: {name}": sha256(x) for name, x in tensors.items()}
    for name, kind in (("Q", "query"), ("K", "key"), ("V", "value")):
        integers, exponents = rows_of(kernel, name, tensors[name], kind, scale if name == "Q" else None, precision)
        found[f"rows: {name} integers"], found[f"rows: {name} exponents"] = sha256(integers), sha256(exponents)

    rowmax = kernel.rowmax(Q, K, **scores)
    num, den = kernel.accumulate(Q, K, V, rowmax, **call)
    out = kernel.finalize(num, den, precision=precision, dropout_p=settings["dropout_p"])
    found.update({"rowmax": sha256(rowmax), "NUM": sha256(num), "DEN": sha256(den), "out": sha256(out)})
    del num  # the largest tensor: 96 bytes per output number
    found["fused out"] = sha256(kernel.det_attn(Q, K, V, **call))
    if "dO" not in tensors:
        return found

    dO = tensors["dO"]
    integers, exponents = rows_of(kernel, "dO", dO, "key", None, precision)
    found["rows: dO integers"], found["rows: dO exponents"] = sha256(integers), sha256(exponents)
    state = (Q, K, V, dO, out, rowmax, den)
    references = kernel.grad_reference(*state, **call)
    sums = kernel.grad_accumulate(*state, *references, **call)
    found.update({f"reference: {name}": sha256(x) for name, x in zip("ABC", references)})
    found.update({f"sum: d{name}": sha256(x) for name, x in zip("QKV", sums)})
    for name, kind, total, reference in zip("QKV", ("query", "key", "value"), sums, references):
        factor = scale if name == "Q" else None
        gradient = kernel.grad_finalize(total, reference, kind, factor, precision=precision, out_dtype=Q.dtype)
        found[f"gradient: d{name}"] = sha256(gradient)
    leaves = [x.detach().clone().requires_grad_() for x in (Q, K, V)]
    kernel.det_attn(*leaves, **call).backward(dO.to(torch.float32))
    found.update({f"backward: d{name}": sha256(x.grad) for name, x in zip("QKV", leaves)})
    return found


def report(kernel, path, device, settings):
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        refuse(path, f"not a readable .safetensors file: {error}")
    missing = [name for name in "QKV" if name not in stored]
    if missing:
        refuse(path, f"has no tensor named {', '.join(missing)}, only {', '.join(sorted(stored)) or 'none'}")
    unknown = sorted(stored.keys() - set(TENSORS))
    if unknown:  # to leave it out would be to hash another call
        refuse(path, f"has a tensor named {', '.join(unknown)}, allowed are {', '.join(TENSORS)}")
    tensors = {name: stored[name] for name in TENSORS if name in stored}
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()
    try:
        boundaries = fingerprint(kernel, tensors, settings)
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse(path, f"with these options no call of det_attn: {error}")
    return {
        "contract": CONTRACT,
        "where": {"kernel": kernel.__name__, "torch": torch.__version__, "device": f"{device} ({name})"},
        "settings": settings,
        "shapes": {n: [str(x.dtype).removeprefix("torch."), *x.shape] for n, x in tensors.items()},
        "boundaries": boundaries,
    }


def read_report(path):
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(path, f"not a report of this script: {error}")
    parts = found if isinstance(found, dict) else {}
    missing = [name for name, kind in REPORT.items() if not isinstance(parts.get(name), kind)]
    if missing:
        refuse(path, f"not a report of this script: it lacks {', '.join(missing)}")
    if not found["boundaries"] or not all(isinstance(x, str) for x in found["boundaries"].values()):
        refuse(path, "not a report of this script: its boundaries are no hashes")
    foreign = [name for name in found["boundaries"] if name.split(":")[0] not in MEANING]
    if foreign:
        refuse(path, f"not a report of this script: {', '.join(foreign)} is no boundary of it")
    return found


def compare(first, second):
    """(What to print, whether the reports agree)."""
    for what in ("contract", "settings", "shapes"):
        if first[what] != second[what]:
            return f"not the same call: {what} {first[what]} against {second[what]}", False
    if list(first["boundaries"]) != list(second["boundaries"]):
        return "not the same boundaries: one report has gradients, or comes from another version of this script", False
    differing = [n for n, value in first["boundaries"].items() if value != second["boundaries"][n]]
    if not differing:
        return f"the same bytes at all {len(first['boundaries'])} boundaries", True
    names = list(first["boundaries"])
    before = names[: names.index(differing[0])]
    lines = [
        f"first difference: {differing[0]}",
        f"  {first['boundaries'][differing[0]]}  {first['where']}",
        f"  {second['boundaries'][differing[0]]}  {second['where']}",
        f"  look at: {MEANING[differing[0].split(':')[0]]}",
        f"  the same until then: {', '.join(before) or 'nothing'}",
        f"  different too: {', '.join(differing[1:]) or 'nothing'}",
    ]
    return "\n".join(lines), False


def device_of(text):
    """--device, if it is there."""
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None
    count = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= count):
        raise argparse.ArgumentTypeError(f"got {text}, must be cpu, or one of {count} CUDA devices here")
    return device


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help=".safetensors with Q, K, V, and dO for gradients")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--scale", type=float, help="1 / sqrt(D) if not given")
    parser.add_argument("--precision", choices=("highest", "high"), default="highest", help="(%(default)s)")
    parser.add_argument("--q-offset", type=int, help="Skv - Sq if not given")
    parser.add_argument("--window", type=int, nargs=2, default=[-1, -1], metavar=("LEFT", "RIGHT"), help="-1: no limit")
    parser.add_argument("--softcap", type=float, default=0.0, help="0: none")
    parser.add_argument("--dropout-p", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--dropout-seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--device", type=device_of, default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the report there as well")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="JSON", help="compare two reports instead")
    args = parser.parse_args()
    if (args.file is None) == (args.compare is None):
        parser.error("give a .safetensors file, or --compare and two reports")
    if args.compare:
        text, same = compare(*map(read_report, args.compare))
        print(text)
        return 0 if same else 1
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json: got {args.json}, must be a file in a folder that is there")
    settings = {name: getattr(args, name) for name in SETTINGS}
    found = report(load_kernel(), args.file, args.device, settings)
    for name, value in found["boundaries"].items():
        print(f"{name:18} {value}")
    if args.json:
        try:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            refuse(args.json, f"cannot be written: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
