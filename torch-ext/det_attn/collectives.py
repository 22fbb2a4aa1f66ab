"""What the ranks of a process group do together, in terms of rows [batch, heads, length, ...] of uneven lengths.

Nothing here computes with floats: rows move, int64 sums combine by + and integers by max. So no bit depends on the
backend, on the number of ranks or on their order. With one rank every function returns its argument.
"""

import hashlib
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 calls them by new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Team:
    """A process group as seen by this rank."""

    def __init__(self, group, name: str):
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(f"{name}: torch.distributed has no process group: call init_process_group() first")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"{name}: got a mesh of {group.ndim} dimensions, must be one of them: mesh['name']")
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{name}: got {type(group).__name__}, must be a ProcessGroup, a 1-D DeviceMesh or None")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"{name}: this process is not a member of the group")
        backends = str(dist.get_backend_config(self.group))
        self.devices = [pair.split(":")[0] for pair in backends.split(",")]

    @property
    def device(self) -> torch.device:
        """Where small messages live: the group's own kind of device, whatever this rank's arguments are."""
        return torch.device("cpu" if "cpu" in self.devices else f"cuda:{torch.cuda.current_device()}")

    # ---- All ranks at once --------------------------------------------------------------------------------------

    def integers(self, own: Sequence[int]) -> List[List[int]]:
        """The same number of int64 of every rank."""
        if self.size == 1:
            return [list(own)]
        mine = torch.tensor(own, dtype=torch.int64, device=self.device)
        everyone = mine.new_empty(self.size * len(own))
        _all_gather(everyone, mine, group=self.group)
        return everyone.view(self.size, -1).tolist()

    def objects(self, own) -> list:
        """A picklable object of every rank, for messages about errors."""
        if self.size == 1:
            return [own]
        everyone = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    def all_rows(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, H, own length, ...] -> [B, H, sum of lengths, ...], rank after rank."""
        if self.size == 1:
            return x
        rows = x.movedim(2, 0)
        longest = max(lengths)
        padded = rows.new_empty(longest, *rows.shape[1:])  # rows first, so that ranks lie one after another
        padded[: len(rows)] = rows
        everyone = padded.new_empty(self.size * longest, *rows.shape[1:])
        if everyone.numel():
            _all_gather(everyone, padded, group=self.group)
        if min(lengths) < longest:
            everyone = torch.cat([everyone[r * longest :][:n] for r, n in enumerate(lengths)])
        return everyone.movedim(0, 2)

    def own_sums(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """int64 [B, H, sum of lengths, ...] of every rank -> their sum, own rows only: [B, H, own length, ...]."""
        if self.size == 1:
            return x
        rows = x.movedim(2, 0)
        longest = max(lengths)
        if min(lengths) < longest:
            padded = rows.new_zeros(self.size, longest, *rows.shape[1:])
            for part, piece in zip(padded, rows.split(list(lengths))):
                part[: len(piece)] = piece
        else:
            padded = rows.contiguous()
        own = rows.new_empty(longest, *rows.shape[1:])
        if own.numel():
            _reduce_scatter(own, padded.view(-1, *rows.shape[1:]), group=self.group)
        return own[: lengths[self.rank]].movedim(0, 2)

    def own_rows(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, H, sum of lengths, ...] -> own rows; nothing is sent."""
        return x.split(list(lengths), 2)[self.rank]

    def maximum_(self, x: Tensor) -> Tensor:
        """Integers of every rank, combined in place."""
        if self.size > 1 and x.numel():
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """int64 of every rank, combined in place."""
        if self.size > 1 and x.numel():
            dist.all_reduce(x, group=self.group)
        return x

    def transpose(self, x: Tensor, split: int, sizes: Sequence[int], cat: int, lengths: Sequence[int]) -> Tensor:
        """All-to-all: dimension `split` is cut into `sizes`, a piece for each rank; theirs are joined along `cat`, of
        which rank r holds lengths[r]."""
        pieces = x.split(list(sizes), split)
        shapes = []
        for length in lengths:
            shape = list(x.shape)
            shape[split], shape[cat] = sizes[self.rank], length
            shapes.append(shape)
        counts = [torch.Size(shape).numel() for shape in shapes]
        received = x.new_empty(sum(counts))
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        dist.all_to_all_single(received, sent, counts, [piece.numel() for piece in pieces], group=self.group)
        return torch.cat([part.view(shape) for part, shape in zip(received.split(counts), shapes)], cat)

    # ---- Around the ring ----------------------------------------------------------------------------------------

    def post(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list:
        """Starts sending to the next rank and receiving from the one before. wait() on the result."""
        ahead, behind = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        operations = [dist.P2POp(dist.isend, x, ahead, self.group) for x in sent if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, behind, self.group) for x in received if x.numel()]
        return dist.batch_isend_irecv(operations) if operations else []

    def travel(self, own: Sequence[Tensor], lengths: Sequence[int]) -> Iterator[Tuple[int, List[Tensor]]]:
        """Yields (owner, its rows) for every rank, own first: while the caller computes with one, the next arrives."""
        held = [x.contiguous() for x in own]
        for step in range(self.size):
            owner = (self.rank - step) % self.size
            works, coming = [], []
            if step + 1 < self.size:
                coming = [_of_length(x, lengths[owner - 1]) for x in held]
                works = self.post(held, coming)
            yield owner, held
            wait(works)
            held = coming


def wait(works: list) -> None:
    """Until what post() started has arrived."""
    for work in works:
        work.wait()


def _of_length(x: Tensor, length: int) -> Tensor:
    return x.new_empty(*x.shape[:2], length, *x.shape[3:])


class Returning:
    """What is gathered for the rows that travel, and travels one step behind them, home in the end.

    add() once a step of `travel`, in its order; None if this rank has nothing for these rows (never for its own).
    """

    def __init__(self, team: Team, lengths: Sequence[int], combine: Callable[[Tensor, Tensor], Tensor]):
        self.team, self.lengths, self.combine = team, lengths, combine
        self.step, self.held, self.coming, self.works = 0, [], [], []

    def add(self, found: Optional[Sequence[Tensor]]) -> None:
        """Takes what the held rows were found to need and sends the total on."""
        wait(self.works)
        if self.step == 0:
            total = [x.contiguous() for x in found]
        elif found is None:
            total = self.coming
        else:
            total = [self.combine(a, b) for a, b in zip(self.coming, found)]
        self.step += 1
        if self.team.size == 1:
            self.coming = total
            return
        owner = (self.team.rank - self.step) % self.team.size
        self.held, self.coming = total, [_of_length(x, self.lengths[owner]) for x in total]
        self.works = self.team.post(self.held, self.coming)

    def home(self) -> List[Tensor]:
        """The totals of own rows, after as many steps as there are ranks."""
        wait(self.works)
        return self.coming


# ---- Agreement ------------------------------------------------------------------------------------------------------


def agree(teams: Sequence[Team], name: str, error: Optional[Exception], common: dict, own: Sequence[int]) -> List[list]:
    """The `own` integers of every rank, once all are known to take part with the same `common` arguments.

    Ranks are those of the last team, for each of them those of the team before, ... A rank with an error takes part as
    well, so that the others learn of it instead of waiting for it. Raises on every rank.
    """
    digest = int.from_bytes(hashlib.sha256(repr(common).encode()).digest()[:7], "little")
    headers = [[error is not None, digest, *own]]
    for team in teams:
        width = len(headers[0])
        flat = sum(team.integers(sum(headers, [])), [])
        headers = [flat[i : i + width] for i in range(0, len(flat), width)]
    failed = any(header[0] for header in headers)
    if not failed and all(header[1] == digest for header in headers):
        return [header[2:] for header in headers]
    everyone = [common if error is None else f"{type(error).__name__}: {error}"]
    for team in teams:
        everyone = sum(team.objects(everyone), [])
    if error is not None:
        raise error
    if failed:
        rank, why = next((rank, x) for rank, x in enumerate(everyone) if isinstance(x, str))
        raise ValueError(f"{name}: rank {rank} of the group refused its arguments: {why}")
    rank, key = next((r, key) for r, x in enumerate(everyone) for key in x if x[key] != everyone[0][key])
    mine, theirs = everyone[0][key], everyone[rank][key]
    raise ValueError(f"{key}: got {mine} on rank 0 and {theirs} on rank {rank} of the group, must be the same")
