"""The picture of shard_rotation.py. In: the hashes per shard order, of both ways to combine. Out: one PNG.

A hash is drawn as a bar code of its 32 bytes. Stacked, equal hashes are unbroken stripes; different ones are noise.
"""

import colorsys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

INK, QUIET, CARD, EDGE = "#1f2933", "#66727f", "#ffffff", "#d5dbe1"
RED, GREEN = "#c8324b", "#0b7f6b"
WARM, COOL = (0.955, 0.125), (0.36, 0.62)  # hue ranges of the bar codes; the first one wraps around red
SHARDS = ["#3b6fb6", "#e0a02f", "#8a5fb0", "#4aa564", "#c8553d", "#2b9eb3", "#8d6e63", "#7a8793"]
SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"  # matplotlib brings both

WIDTH, ROW = 12.0, 0.56  # inches
TOP, BOTTOM = 1.38, 0.98  # above and below the rows
ORDER_X, ONLINE_X, OURS_X = 0.45, 2.62, 7.38
BAR = 2.9  # width of a bar code; its hash stands to the right


def byte_colour(byte, hues):
    lo, hi = hues
    hue = (lo + ((hi - lo) % 1.0) * byte / 255) % 1.0
    return colorsys.hls_to_rgb(hue, 0.34 + 0.46 * ((byte * 37) % 256) / 255, 0.62)


def card(ax, height):
    """An opaque card on a transparent page, so that it reads on light and dark backgrounds alike."""
    ax.add_patch(FancyBboxPatch((0.12, 0.12), WIDTH - 0.24, height - 0.24, boxstyle="round,pad=0,rounding_size=0.22",
                                facecolor=CARD, edgecolor=EDGE, linewidth=1.2))


def shard_order(ax, order, y):
    pitch = min(0.42, (ONLINE_X - ORDER_X - 0.2) / len(order))  # many shards: smaller squares
    side = 0.81 * pitch
    for i, shard in enumerate(order):
        x = ORDER_X + i * pitch
        ax.add_patch(FancyBboxPatch((x, y - side / 2), side, side, boxstyle="round,pad=0,rounding_size=0.07",
                                    facecolor=SHARDS[shard % len(SHARDS)], edgecolor="none"))
        ax.text(x + side / 2, y - 0.01, str(shard), color="white", fontsize=12.5 * pitch / 0.42, weight="bold",
                ha="center", va="center", family=SANS)


def column(ax, x, rows_y, title, result, colour, hues):
    top = rows_y[0] + ROW / 2
    ax.text(x, top + 0.62, title, color=INK, fontsize=15, weight="bold", va="baseline", family=SANS)
    count = result.distinct
    verdict = f"{len(rows_y)} shard orders, {count} result{'s' if count > 1 else ''}"
    ax.text(x, top + 0.27, verdict, color=colour, fontsize=15, weight="bold", va="baseline", family=SANS)
    for y, digest, difference, changed in zip(rows_y, result.hashes, result.differences, result.changed):
        for i, byte in enumerate(bytes.fromhex(digest)):
            ax.add_patch(Rectangle((x + i * BAR / 32, y - ROW / 2), BAR / 32, ROW, linewidth=0, antialiased=False,
                                   facecolor=byte_colour(byte, hues)))
        ax.text(x + BAR + 0.15, y + 0.12, digest[:10] + "…", color=INK, fontsize=12.5, va="center", family=MONO)
        first = y == rows_y[0]
        note = "first order" if first else f"off by {difference:.1e}" if changed else "off by 0"
        ax.text(x + BAR + 0.15, y - 0.13, note, color=QUIET if first else colour, fontsize=11.5, va="center",
                family=SANS)


def draw(path, online, ours, orders, what, shape):
    """online, ours: shard_rotation.Result. orders: lists of shard numbers. what, shape: of Q, for the caption."""
    height = TOP + BOTTOM + ROW * len(orders)
    figure = plt.figure(figsize=(WIDTH, height), dpi=200)
    ax = figure.add_axes([0, 0, 1, 1])
    ax.set(xlim=(0, WIDTH), ylim=(0, height))
    ax.axis("off")
    card(ax, height)

    rows_y = [height - TOP - ROW * (i + 0.5) for i in range(len(orders))]
    top = rows_y[0] + ROW / 2
    ax.text(ORDER_X, top + 0.62, "The same keys,", color=INK, fontsize=15, weight="bold", va="baseline", family=SANS)
    ax.text(ORDER_X, top + 0.27, "shard by shard", color=INK, fontsize=15, weight="bold", va="baseline", family=SANS)
    for y, order in zip(rows_y, orders):
        shard_order(ax, order, y)
    column(ax, ONLINE_X, rows_y, "float32 online softmax", online, RED, WARM)
    column(ax, OURS_X, rows_y, "det-attn", ours, GREEN, COOL)

    batch, heads, length, head_dim = shape
    ax.text(ORDER_X, 0.62, "Each bar code is the SHA-256 of the whole attention output, one stripe a byte.", color=INK,
            fontsize=12.5, va="center", family=SANS)
    ax.text(ORDER_X, 0.36, f"{what[0].upper()}{what[1:]}: {heads} heads, {length} queries, head dimension {head_dim}.",
            color=QUIET, fontsize=11.5, va="center", family=SANS)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True)
    plt.close(figure)
    print(f"wrote {path}\n")
