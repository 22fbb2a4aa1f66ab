"""What bench_forward.py and bench_backward.py print and append to benchmarks/RESULTS.md, and what the first draws.

In: cases and their results. Out: Markdown tables, the table of targets, a plot of TFLOPS over length.
"""

import datetime
import subprocess
import sys
from pathlib import Path

import torch

RIVALS = {"EFFICIENT": "torch float32 EFFICIENT", "MATH": "torch float32 MATH", "FLASH": "torch bf16 FLASH",
          "cuDNN": "torch bf16 cuDNN"}  # fmt: skip
MISSING = "n/a"


def device_name(device):
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}{cuda}"


def number(x, digits):
    return MISSING if x is None else f"{x:.{digits}f}"


def times_of(results):
    return {r.contestant.name: r.ms for r in results if r.ms is not None}


def faster(ours, theirs):
    """How many times as fast as the rival."""
    return None if ours is None or theirs is None else theirs / ours


# ---- Cases -----------------------------------------------------------------------------------------------------------


def case_lines(case, results):
    """A Markdown table: one row a contestant, one ratio a rival."""
    known = times_of(results)
    rivals = {name: rival for name, rival in RIVALS.items() if rival in {r.contestant.name for r in results}}
    heads = ["", "ms", "TFLOPS", "extra MB", *(f"x {name}" for name in rivals), "x reference", "note"]
    lines = [f"### {case}", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for r in results:
        ratios = [""] * (len(rivals) + 1)
        if r.contestant.ours and r.ms is not None:
            reference = r.contestant.name.rsplit(", ", 1)[0] + ", reference"
            ratios = [number(faster(r.ms, known.get(rival)), 2) for rival in (*rivals.values(), reference)]
        time = f"{MISSING} ({r.note})" if r.ms is None else number(r.ms, 3)
        extra = number(r.extra_mb, 0) if r.contestant.ours else ""
        note = r.note if r.ms is not None else ""
        cells = [r.contestant.name, time, number(r.tflops, 1), extra, *ratios, note]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def print_case(case, results):
    print("\n" + "\n".join(case_lines(case, results)), flush=True)


# ---- Targets ---------------------------------------------------------------------------------------------------------


def verdict(measured, bound, at_least):
    if measured is None:
        return MISSING
    return "PASS" if (measured >= bound if at_least else measured <= bound) else "FAIL"


def target_rows(cases, target, causal, decode, growth):
    """(what, measured, first, aim, whether more is better)."""
    plain, masked, single = (times_of(cases.get(c, [])) for c in (target, causal, decode))
    kinds = ("float32 highest", "bf16 highest", "bf16 high")
    ours = [f"det-attn {kind}, auto" for kind in kinds]

    def over(a, b, factor=1.0):
        return None if a is None or b is None else factor * a / b

    rows = []
    for name, short, first, aim in zip(ours, ("EFFICIENT", "EFFICIENT", "FLASH"), (1.0, 1.0, 0.25), (2.0, 2.0, 0.6)):
        rival = RIVALS[short]
        rows.append((f"{name}, over {rival}", faster(plain.get(name), plain.get(rival)), first, aim, True))
    for name in ours:
        ratio = over(masked.get(name), plain.get(name), 2.0)
        rows.append((f"{name}, causal: time over half of non-causal", ratio, 1.25, 1.1, False))
    best = min((single[r] for r in (RIVALS["FLASH"], RIVALS["cuDNN"]) if r in single), default=None)
    for name in ours[1:]:
        ratio = over(single.get(name), best)
        rows.append((f"{name}, decode: time over the faster of FLASH and cuDNN", ratio, 6.0, 3.0, False))
    extra, factor = growth or (None, None)
    size = "" if extra is None else f" ({extra:.0f} MB)"
    rows.append((f"memory beyond inputs and output{size}: growth with twice the length", factor, 2.2, 2.2, False))
    return rows


def print_targets(cases, target, causal, decode, growth):
    """Prints the table of targets and returns its lines; empty if no case of it was run."""
    if not {target, causal, decode} & set(cases):
        return []
    return print_target_rows(target, target_rows(cases, target, causal, decode, growth))


def print_target_rows(target, rows):
    """Prints the rows of a table of targets and returns its lines."""
    lines = ["### Targets", "", f"{target} unless said; ratios within this run.", "",
             "| | measured | first | | aim | |", "|---|---|---|---|---|---|"]  # fmt: skip
    for what, measured, first, aim, more in rows:
        sign = ">=" if more else "<="
        lines.append(
            f"| {what} | {number(measured, 2)} | {sign} {first} | {verdict(measured, first, more)} | {sign} {aim} | "
            f"{verdict(measured, aim, more)} |"
        )
    print("\n" + "\n".join(lines), flush=True)
    return lines


# ---- Files -----------------------------------------------------------------------------------------------------------


def commit():
    root = Path(__file__).resolve().parent.parent
    try:
        run = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:
        return ""
    return f", commit {run.stdout.strip()}" if run.returncode == 0 else ""


def append_results(path, device, table, targets, what="forward"):
    """Adds a dated section to the results."""
    path = Path(path)
    start = "" if path.exists() else "# Measured speed\n\nWritten by the scripts in benchmarks/, newest last.\n"
    command = " ".join(["python", *sys.argv])
    lines = [f"## {datetime.date.today()}, {what}: {device_name(device)}", "", f"`{command}`{commit()}", ""]
    if targets:
        lines += [*targets, ""]
    for _, case, results in table:
        lines += [*case_lines(case, results), ""]
    with path.open("a") as file:
        file.write(start + "\n" + "\n".join(lines).rstrip() + "\n")
    print(f"\nappended to {path}")


LINES = {
    "det-attn float32 highest, auto": ("tab:blue", "-"),
    "det-attn bf16 highest, auto": ("tab:cyan", "-"),
    "det-attn bf16 high, auto": ("tab:green", "-"),
    "torch float32 EFFICIENT": ("tab:red", "--"),
    "torch bf16 FLASH": ("tab:orange", "--"),
    "torch bf16 cuDNN": ("tab:brown", "--"),
    "det-attn float32 highest, reference": ("tab:gray", ":"),
}


def plot(path, device, table):
    """TFLOPS over length at D 128 with as many key heads as heads; one panel causal, one not."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for panel, causal in zip(panels, (False, True)):
        for name, (color, style) in LINES.items():
            points = sorted(
                (case.queries, r.tflops)
                for _, case, results in table
                for r in results
                if (case.queries, case.kv_heads, case.head_dim, case.causal) == (case.keys, case.heads, 128, causal)
                and not case.interleaved and r.contestant.name == name and r.tflops is not None
            )  # fmt: skip
            if points:
                panel.plot(*zip(*points), color=color, linestyle=style, marker="o", label=name.removesuffix(", auto"))
        panel.set(title="causal" if causal else "not causal", xlabel="queries and keys", xscale="log", yscale="log")
        panel.set_xticks([512, 2048, 8192, 32768], ["512", "2k", "8k", "32k"])
        panel.minorticks_off()
        panel.grid(True, which="both", alpha=0.25)
    panels[0].set_ylabel("TFLOPS")
    panels[0].set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    drawn = {line.get_label(): line for panel in panels for line in panel.lines}
    if drawn:
        panels[1].legend(drawn.values(), drawn, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"Forward, batch 1, 16 heads, D 128: {device_name(device)}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"drew {path}")
