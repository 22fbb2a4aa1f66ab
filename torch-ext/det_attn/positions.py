"""Where the rows of every rank lie in the whole sequence. Any layout is a list of global positions.

In: how many queries and keys each rank holds, and a layout. Out: `Slice`s, and which keys of one slice the queries of
another attend, as arguments of a stage (contract sections 2, 10).
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor


class Slice:
    """Rows in the order in which they lie in memory: int64 positions, and the ints between which they all are.

    A run is positions first, first + 1, ..., so that the ops need no list of them.
    """

    def __init__(self, positions: Tensor, first: int, last: int, run: bool):
        self.positions, self.first, self.last, self.run = positions, first, last, run

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, lo: int, hi: int) -> "Slice":
        """Rows [lo, hi). Of a run the ends are exact, otherwise those of the whole still hold."""
        positions = self.positions[lo:hi]
        if not self.run:
            return Slice(positions, self.first, self.last, False)
        return Slice(positions, self.first + lo, self.first + lo + len(positions) - 1, True)

    def moved(self, offset: int) -> "Slice":
        """The same rows, all `offset` further on."""
        return Slice(self.positions + offset, self.first + offset, self.last + offset, self.run) if offset else self


def join(slices: Sequence[Slice], device: torch.device) -> Slice:
    """The rows of all slices, one slice after another."""
    held = [s for s in slices if len(s)]
    if not held:
        return Slice(torch.empty(0, dtype=torch.int64, device=device), 0, -1, True)
    run = all(s.run for s in held) and all(a.last + 1 == b.first for a, b in zip(held, held[1:]))
    first, last = min(s.first for s in held), max(s.last for s in held)
    return Slice(torch.cat([s.positions for s in held]), first, last, run)


def ascending(rows: Slice) -> Tuple[Slice, Optional[Tensor]]:
    """The same rows by position, and the order that brings them there; None where they lie so already."""
    if rows.run:
        return rows, None
    positions, order = torch.sort(rows.positions, stable=True)
    return Slice(positions, rows.first, rows.last, False), order


def slices_of(name: str, lengths: Sequence[int], offset: int, device: torch.device) -> List[Slice]:
    """The slices of all ranks, `lengths` rows each, in the layout `name`; the sequence starts at position `offset`.

    contiguous: the rows of rank 0, then those of rank 1, ... zigzag: each slice is cut in two, the first part the
    longer by one if its length is odd; the first parts of ranks 0, 1, ..., then the second parts of ..., 1, 0.
    """
    parts = {(rank, 0): length - length // 2 if name == "zigzag" else length for rank, length in enumerate(lengths)}
    if name == "zigzag":
        parts.update({(rank, 1): lengths[rank] // 2 for rank in reversed(range(len(lengths)))})
    runs, end = {}, offset
    for key, length in parts.items():  # in the order of the sequence
        positions = torch.arange(end, end + length, device=device)
        runs[key] = Slice(positions, end, end + length - 1, True)
        end += length
    return [join([runs[key] for key in ((rank, 0), (rank, 1)) if key in runs], device) for rank in range(len(lengths))]


class Mask(NamedTuple):
    """What decides, beside the positions, whether a query attends a key (contract sections 2, 10)."""

    causal: bool
    left: int  # of the window; -1 is no limit
    right: int

    @property
    def needs_order(self) -> bool:
        """Whether the keys of a slice must be ascending, so that a query attends an interval of them."""
        return self.causal or self.left >= 0 or self.right >= 0

    @property
    def ahead(self) -> Optional[int]:
        """How far after its own position a query attends; None without a limit."""
        if self.causal:
            return 0
        return self.right if self.right >= 0 else None

    def arguments(self, queries: Slice, keys: Slice) -> Optional[dict]:
        """Arguments of a stage for this pair of slices; None if no query attends a key."""
        if not self.needs_order:
            return {}
        if not len(queries) or not len(keys):
            return None
        behind, ahead = self.left if self.left >= 0 else None, self.ahead
        if ahead is not None and keys.first > queries.last + ahead:
            return None
        if behind is not None and keys.last < queries.first - behind:
            return None
        if (ahead is None or keys.last <= queries.first + ahead) and (
            behind is None or keys.first >= queries.last - behind
        ):
            return {}
        if queries.run and keys.run:
            window = (self.left, self.right)
            return {"causal": self.causal, "window": window, "q_offset": queries.first, "kv_offset": keys.first}
        begin = torch.zeros_like(queries.positions)
        if behind is not None:
            begin = torch.searchsorted(keys.positions, queries.positions - behind)
        end = torch.full_like(begin, len(keys))
        if ahead is not None:
            end = torch.searchsorted(keys.positions, queries.positions + ahead, right=True)
        return {"key_ranges": torch.stack((begin, end), -1).to(torch.int32)[None]}
