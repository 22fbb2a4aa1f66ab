"""Attention over the ranks of torch.distributed: each holds a slice of the sequence, and gets one device's bytes.

In: own rows of Q, K and V, and where they lie in the sequence. Out: own rows of the output; by autograd, own rows of
dQ, dK and dV. Who computes a pair (queries of one rank, keys of another), and what travels for it, is the method's
choice; maxima meet by max and exact sums by + (contract sections 3, 5, 6, 8, 11), so the choice changes no byte.

    ring    own queries; keys and values go round, and their gradients' sums go home behind them
    gather  own queries; keys and values of all ranks are here
    reduce  own keys and values; queries of all ranks are here, and their sums are reduced and scattered
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import checks
from ._ops import ops
from .collectives import Returning, Team, agree
from .gradients import Narrow, Once, grad_accumulate, grad_finalize, grad_reference
from .positions import Mask, Slice, ascending, join, slices_of
from .stages import accumulate, finalize, rowmax

Group = Union[ProcessGroup, DeviceMesh, None]
Layout = Union[str, Tensor, Tuple[Tensor, Tensor]]


@torch.compiler.disable
def det_attn_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    causal: bool = False,
    scale: Optional[float] = None,
    *,
    layout: Layout = "contiguous",
    method: str = "ring",
    heads_group: Group = None,
    precision: str = "highest",
    q_offset: Optional[int] = None,
    window: Sequence[int] = checks.EVERYWHERE,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    replicated_q: bool = False,
    out_dtype: torch.dtype = torch.float32,
    chunk_bytes: int = 2**31,
    path: str = "auto",
) -> Tensor:
    """`det_attn` of a sequence that is split over the ranks of a process group; the same bytes at every world size.

    Every rank of the group must call it, and backward() of the result, with the same arguments but for q, k, v and an
    explicit layout.

    Args:
        q: [B, Hq, Sq, D]; k, v: [B, Hkv, Skv, D]: own rows, as `det_attn` takes them. B, Hq, Hkv, D and the dtype are
            the same on every rank; Sq and Skv may differ, and may be 0.
        group: ProcessGroup, or 1-D DeviceMesh (mesh["name"]), whose ranks hold the sequence; None is the default group.
        causal: a query attends the keys at its own position and before it.
        scale: factor on the scores, finite; None is 1 / sqrt(D).
        layout: where own rows lie in the sequence, the same for queries and for keys.
            "contiguous": the rows of rank 0, then those of rank 1, ...
            "zigzag": each slice is two parts, the first longer by one if the length is odd; the sequence is the first
                parts of ranks 0, 1, ..., then the second parts of ..., 1, 0. It balances causal attention.
            int64 tensor: the global positions of own rows, of queries and of keys alike; any order, any set within
                -2**60 to 2**60.
            (int64 tensor, int64 tensor): the positions of own queries [Sq] and of own keys [Skv].
        method: "ring": keys and values go round while the next ones are under way; memory for one slice more.
            "gather": all keys and values are brought to every rank; the fastest where they fit.
            "reduce": queries are brought to every rank instead; for few queries over many keys, as in decoding.
        heads_group: ProcessGroup or 1-D DeviceMesh over which heads are split by all-to-all (Ulysses), besides `group`;
            the sequence is then split over both, rank w of `group` and u of `heads_group` holding slice w * U + u.
        precision: "highest" or "high".
        q_offset: position, among the keys, of the first query; None is all keys - all queries, and 0 for explicit
            positions, to which it is added.
        window, softcap: those of `det_attn`; a window counts positions.
        dropout_p, dropout_seed: those of `det_attn`, the ids of queries and keys being their positions.
        replicated_q: q is whole on every rank and the layout is that of the keys only; every rank gets the whole
            output, and must give the same gradient for it. Needs method="reduce", and explicit positions of queries
            if the keys' are.
        out_dtype: torch.float32, or torch.bfloat16 or torch.float16 by one further rounding.
        chunk_bytes: most memory that exact sums of the forward pass take at a time; queries go in chunks ("ring" and
            "reduce"). The bytes are the same.
        path: which kernels run, as in `det_attn`; it may differ between ranks. The bytes are the same.

    Returns:
        out_dtype [B, Hq, Sq, D]: own rows of the output of `det_attn` over the whole sequence.

    Raises:
        TypeError, ValueError: an argument is not as above, on this rank or on another one, or not the same on all:
            raised on every rank, the message names the rank. Nothing is computed.
        RuntimeError: there is no process group; or, from torch.distributed, a rank died or did not call within the
            group's timeout.
        NotImplementedError: an input has a forward-mode tangent; from the backward() of a gradient: the second
            derivative does not exist.

    Gradients are those of `det_attn` for the whole sequence, own rows, the same bytes; section 8 of the contract.
    """
    team = Team(group, "group")
    teams = [team] if heads_group is None else [Team(heads_group, "heads_group"), team]
    call = _Call(
        causal, scale, layout, method, precision, q_offset, window, softcap, dropout_p, dropout_seed, replicated_q,
        out_dtype, chunk_bytes, path,
    )  # fmt: skip
    error, common, own = None, {}, [0] * 6
    try:
        common, own = _checked(call, q, k, v, teams)
    except Exception as caught:  # whatever it is, the others must learn of it
        error = caught
    headers = agree(teams, "det_attn_context_parallel", error, common, own)
    queries, keys = _slices(call, teams, headers, q.device)
    if heads_group is None:
        return _attend(q, k, v, call, team, queries, keys)

    # Ulysses: the rows of the ranks of heads_group come together, their heads part; then there is only `group`.
    heads, size = teams[0], teams[0].size
    rows = slice(team.rank * size, (team.rank + 1) * size)
    q_lengths, kv_lengths = ([len(s) for s in slices[rows]] for slices in (queries, keys))
    kv_heads = [k.shape[1] // size + (rank < k.shape[1] % size) for rank in range(size)]
    q_heads = [count * (q.shape[1] // max(1, k.shape[1])) for count in kv_heads]
    q = _Transpose.apply(q, heads, 1, q_heads, 2, q_lengths)
    k, v = (_Transpose.apply(x, heads, 1, kv_heads, 2, kv_lengths) for x in (k, v))
    queries, keys = ([join(s[i : i + size], q.device) for i in range(0, len(s), size)] for s in (queries, keys))
    out = _attend(q, k, v, call, team, queries, keys, first_head=sum(q_heads[: heads.rank]))
    return _Transpose.apply(out, heads, 2, q_lengths, 1, q_heads)


# ---- Arguments and positions ----------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The arguments as they were given, but for tensors and groups."""

    causal: bool
    scale: Optional[float]
    layout: Layout
    method: str
    precision: str
    q_offset: Optional[int]
    window: Sequence[int]
    softcap: float
    dropout_p: float
    dropout_seed: int
    replicated_q: bool
    out_dtype: torch.dtype
    chunk_bytes: int
    path: str


def _checked(call: _Call, q: Tensor, k: Tensor, v: Tensor, teams: Sequence[Team]) -> Tuple[dict, List[int]]:
    """What all ranks must have alike, by name, and this rank's own lengths and least and largest positions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if hasattr(x, "to_local"):
            raise TypeError(f"{name}: got a DTensor, must be own rows as an ordinary tensor: {name}.to_local()")
    q_shape, k_shape = checks.inputs(q, k, v, ("q", "k", "v"))
    for team in teams:
        if q.device.type not in team.devices:
            raise ValueError(f"q: got device {q.device}, the group's backend is for {' and '.join(team.devices)}")
    checks.modifiers(
        q, k_shape, call.causal, call.q_offset, 0, None, call.window, call.softcap, None, None, call.dropout_p,
        call.dropout_seed,
    )  # fmt: skip
    checks.softmax_scale(call.scale, q_shape[3])
    checks.precision_name(call.precision)
    checks.path_name(call.path, q)
    checks.output_dtype(call.out_dtype)
    checks.distribution(call.method, call.replicated_q, len(teams) - 1, call.q_offset, call.chunk_bytes)
    positions = checks.layout(call.layout, q_shape[2], k_shape[2], q.device)
    common = {name: x for name, x in call._asdict().items() if name not in ("layout", "path")}
    common.update({
        "layout": call.layout if positions is None else "positions",
        "window": tuple(call.window),
        "dtype of q": q.dtype,
        "shape of q without its length": (*q_shape[:2], q_shape[3]),
        "heads of k": k_shape[1],
        "length of q, with replicated_q": call.replicated_q and q_shape[2],
        "requires_grad of q, k, v": tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)),
    })  # fmt: skip
    ends = [0, -1] * 2
    if positions is not None:
        ends = sum(([int(x.min()), int(x.max())] if len(x) else [0, -1] for x in positions), [])
        checks.position_ends(ends)
    return common, [q_shape[2], k_shape[2], *ends]


def _slices(call: _Call, teams: Sequence[Team], headers: List[list], device) -> Tuple[List[Slice], List[Slice]]:
    """Queries and keys of every rank of the teams, in the order of `headers`."""
    q_lengths, kv_lengths = ([header[i] for header in headers] for i in (0, 1))
    explicit = checks.layout(call.layout, q_lengths[_own(teams)], kv_lengths[_own(teams)], device)
    if explicit is not None:
        return tuple(
            [Slice(x, header[at], header[at + 1], False).moved(offset) for x, header in zip(rows, headers)]
            for rows, at, offset in (
                (_all_positions(explicit[0], q_lengths, teams), 2, call.q_offset or 0),
                (_all_positions(explicit[1], kv_lengths, teams), 4, 0),
            )
        )
    total = q_lengths[0] if call.replicated_q else sum(q_lengths)
    offset = sum(kv_lengths) - total if call.q_offset is None else call.q_offset
    keys = slices_of(call.layout, kv_lengths, 0, device)
    if call.replicated_q:
        return slices_of("contiguous", [total], offset, device) * len(headers), keys
    return slices_of(call.layout, q_lengths, offset, device), keys


def _own(teams: Sequence[Team]) -> int:
    """This rank's place in the order of all ranks of the teams."""
    place = 0
    for team in reversed(teams):
        place = place * team.size + team.rank
    return place


def _all_positions(own: Tensor, lengths: List[int], teams: Sequence[Team]) -> List[Tensor]:
    rows, held = own[None, None], [lengths[_own(teams)]]
    count = 1
    for team in teams:
        block = _own(teams) // (count * team.size) * count * team.size  # the ranks that this step brings together
        held = [sum(lengths[i : i + count]) for i in range(block, block + count * team.size, count)]
        rows, count = team.all_rows(rows, held), count * team.size
    return list(rows[0, 0].split(lengths))


# ---- The methods ----------------------------------------------------------------------------------------------------


class _Method:
    """One call on one rank. forward() and backward() work on own rows; the keys are by position where the mask asks."""

    def __init__(self, call: _Call, team: Team, queries: List[Slice], keys: List[Slice], first_head: int):
        self.team, self.mask, self.queries, self.keys = team, Mask(call.causal, *call.window), queries, keys
        self.q_lengths, self.kv_lengths = ([len(s) for s in slices] for slices in (queries, keys))
        self.scale, self.precision, self.dropout_p = call.scale, call.precision, call.dropout_p
        self.chunk_bytes, self.replicated_q = call.chunk_bytes, call.replicated_q
        self.scores = {"scale": call.scale, "precision": call.precision, "softcap": call.softcap, "path": call.path}
        self.dropout = {"dropout_p": call.dropout_p, "dropout_seed": call.dropout_seed, "dropout_head": first_head}
        self.order = None
        if self.mask.needs_order:
            self.keys, orders = zip(*map(ascending, keys))
            self.order = orders[team.rank]

    def pair(self, q: Tensor, queries: Slice, keys: Slice, needed: bool) -> Optional[Tuple[dict, dict]]:
        """Arguments of `rowmax`, and what later stages take more, for these queries and keys. None if they would do
        nothing; where a pair is `needed` they attend no key, but still find special values of the queries."""
        mask = self.mask.arguments(queries, keys)
        if mask is None:
            if not needed:
                return None
            mask = {"kv_hi": 0}
        dropout = {}
        if self.dropout_p:
            batch = torch.arange(q.shape[0], device=q.device)[:, None] << 32
            rows = batch | (queries.positions & 0xFFFFFFFF)
            dropout = {**self.dropout, "dropout_rows": rows, "dropout_keys": keys.positions}
        return {**self.scores, **mask}, dropout

    def chunks(self, q: Tensor, ranks: int) -> List[Tuple[int, int]]:
        """Ranges of every rank's queries: as many on all ranks, for the longest slice; `ranks` of them at a time."""
        row_bytes = q.shape[0] * q.shape[1] * q.shape[3] * checks.DIGITS * 8 * ranks
        longest = max(self.q_lengths)
        count = max(1, -(-longest * row_bytes // self.chunk_bytes))
        step = max(1, -(-longest // count))
        return [(lo, lo + step) for lo in range(0, max(1, longest), step)]

    def output(self, num: Tensor, den: Tensor) -> Tensor:
        return finalize(num, den, precision=self.precision, dropout_p=self.dropout_p)

    def gradients(self, sums, references, dtype: torch.dtype) -> tuple:
        how = zip(sums, references, ("query", "key", "value"), (self.scale, None, None))
        return tuple(
            grad_finalize(total, reference, kind, scale, precision=self.precision, out_dtype=dtype)
            for total, reference, kind, scale in how
        )


class _Ring(_Method):
    def pair_with(self, owner: int, q: Tensor, lo: int, hi: int) -> Optional[Tuple[dict, dict]]:
        rank = self.team.rank
        return self.pair(q, self.queries[rank].part(lo, hi), self.keys[owner], needed=owner == rank)

    def forward(self, q, k, v):
        found = []
        for lo, hi in self.chunks(q, 1):
            rows = q[:, :, lo:hi]
            maximum = q.new_full(rows.shape[:3], -torch.inf, dtype=torch.float64)
            for owner, (keys,) in self.team.travel((k,), self.kv_lengths):
                pair = self.pair_with(owner, q, lo, hi)
                if owner != self.team.rank and pair is not None:
                    maximum = torch.maximum(maximum, rowmax(rows, keys, **pair[0]))
            # Own keys come first now, and were not in the maximum yet: their scores are computed once for both.
            for owner, (keys, values) in self.team.travel((k, v), self.kv_lengths):
                pair = self.pair_with(owner, q, lo, hi)
                if owner == self.team.rank:
                    call = _op_arguments(rows, keys, **pair[0], **pair[1])
                    num, den, maximum = ops.accumulate_last.default(rows, keys, values, maximum, *call)
                elif pair is not None:
                    block = accumulate(rows, keys, values, maximum, **pair[0], **pair[1])
                    num, den = num.add_(block[0]), den.add_(block[1])
            found.append((self.output(num, den), maximum, den))
        return tuple(torch.cat(parts, 2) for parts in zip(*found))

    def backward(self, dO, q, k, v, *state):
        length = q.shape[2]
        a, references = None, Returning(self.team, self.kv_lengths, torch.maximum)
        for owner, (keys, values) in self.team.travel((k, v), self.kv_lengths):
            pair, of_keys = self.pair_with(owner, q, 0, length), None
            if pair is not None:
                block, *of_keys = grad_reference(q, keys, values, dO, *state, **pair[0], **pair[1])
                a = block if a is None else torch.maximum(a, block)
            references.add(of_keys)
        b, c = references.home()

        dq, sums = None, Returning(self.team, self.kv_lengths, torch.add)
        for owner, (keys, values, *of_keys) in self.team.travel((k, v, b, c), self.kv_lengths):
            pair, found = self.pair_with(owner, q, 0, length), None
            if pair is not None:
                block, *found = grad_accumulate(q, keys, values, dO, *state, a, *of_keys, **pair[0], **pair[1])
                dq = block if dq is None else dq.add_(block)
            sums.add(found)
        return self.gradients((dq, *sums.home()), (a, b, c), q.dtype)


class _Gather(_Method):
    def everything(self, q, *own):
        """Rows of all keys, by position where the mask asks; the order they were brought into; arguments of a stage."""
        keys, order = join(self.keys, q.device), None
        if self.mask.needs_order:
            keys, order = ascending(keys)
        rows = [_ordered(self.team.all_rows(x, self.kv_lengths), order) for x in own]
        scores, dropout = self.pair(q, self.queries[self.team.rank], keys, needed=True)
        return rows, order, {**scores, **dropout}

    def forward(self, q, k, v):
        (keys, values), _, pair = self.everything(q, k, v)
        *call, path = _op_arguments(q, keys, **pair)
        return ops.forward.default(q, keys, values, *call[:6], torch.float32, *call[6:], path, -1)

    def backward(self, dO, q, k, v, *state):
        (keys, values), order, pair = self.everything(q, k, v)
        if self.team.size == 1:  # the fused call
            *call, path = _op_arguments(q, keys, **pair)
            how = (*call[:6], True, True, True, *call[6:], path)
            dq, *found = ops.backward.default(dO, q, keys, values, *state, *how)
            return (dq, *(_disordered(x, order) for x in found))
        a, *of_keys = grad_reference(q, keys, values, dO, *state, **pair)
        b, c = map(self.team.maximum_, of_keys)
        dq, *sums = grad_accumulate(q, keys, values, dO, *state, a, b, c, **pair)
        sums = [self.team.own_sums(_disordered(x, order), self.kv_lengths) for x in sums]
        of_keys = [self.team.own_rows(_disordered(x, order), self.kv_lengths) for x in (b, c)]
        return self.gradients((dq, *sums), (a, *of_keys), q.dtype)


class _Reduce(_Method):
    def everyone(self, q, lo: int, hi: int):
        """Of rows [lo, hi) of every rank's queries: how many each has, how to bring them here, arguments of stages."""
        if self.replicated_q:
            queries = self.queries[self.team.rank].part(lo, hi)
            lengths, bring = [len(queries)], _same
        else:
            parts = [s.part(lo, hi) for s in self.queries]
            queries = join(parts, q.device)
            lengths, bring = [len(s) for s in parts], self.team.all_rows
        return lengths, bring, *self.pair(q, queries, self.keys[self.team.rank], needed=True)

    def share(self, sums, lengths):
        """The sums of all ranks, of own queries."""
        return self.team.sum_(sums) if self.replicated_q else self.team.own_sums(sums, lengths)

    def own(self, rows, lengths):
        return rows if self.replicated_q else self.team.own_rows(rows, lengths)

    def forward(self, q, k, v):
        found = []
        for lo, hi in self.chunks(q, 1 if self.replicated_q else self.team.size):
            lengths, bring, scores, dropout = self.everyone(q, lo, hi)
            rows = bring(q[:, :, lo:hi], lengths)
            maximum = _from_integers(self.team.maximum_(_to_integers(rowmax(rows, k, **scores))))
            num, den = accumulate(rows, k, v, maximum, **scores, **dropout)
            window = _Window(num, self.team)
            sums = self.share(torch.cat((window.shrunk(num), den[..., None]), -1), lengths)
            num, den = window.grown(sums[..., :-1], q.shape[3]), sums[..., -1].contiguous()
            found.append((self.output(num, den), self.own(maximum, lengths), den))
        return tuple(torch.cat(parts, 2) for parts in zip(*found))

    def backward(self, dO, q, k, v, *state):
        lengths, bring, scores, dropout = self.everyone(q, 0, max(self.q_lengths))
        pair = {**scores, **dropout}
        queries, gradient, *state = (bring(x, lengths) for x in (q, dO, *state))
        a, b, c = grad_reference(queries, k, v, gradient, *state, **pair)
        a = self.team.maximum_(a)
        dq, dk, dv = grad_accumulate(queries, k, v, gradient, *state, a, b, c, **pair)
        return self.gradients((self.share(dq, lengths), dk, dv), (self.own(a, lengths), b, c), q.dtype)


_METHODS = {"ring": _Ring, "gather": _Gather, "reduce": _Reduce}


def _op_arguments(
    q, k, causal=False, scale=None, q_offset=None, kv_offset=0, kv_hi=None, *, precision, softcap, path,
    window=checks.EVERYWHERE, key_ranges=None, **dropout,
):  # fmt: skip
    """A stage's arguments as its op takes them: six of the call, the modifiers, the path."""
    diagonal, modifiers = checks.modifiers(
        q, k.shape, causal, q_offset, kv_offset, None, window, softcap, None, key_ranges, **dropout
    )
    scale = checks.softmax_scale(scale, q.shape[3])
    return (causal, scale, precision, diagonal, *checks.key_range(0, kv_hi, k.shape[2]), *modifiers, path)


def _same(x, lengths):
    return x


def _ordered(x: Tensor, order: Optional[Tensor]) -> Tensor:
    return x if order is None else x.index_select(2, order)


def _disordered(x: Tensor, order: Optional[Tensor]) -> Tensor:
    return x if order is None else torch.empty_like(x).index_copy_(2, order, x)


def _to_integers(maximum: Tensor) -> Tensor:
    """rowmax as the contract's integers (section 3): collectives need not keep a NaN, but they keep the largest int."""
    finite = (maximum * 2.0**24).nan_to_num(0.0, neginf=0.0).to(torch.int64)
    finite = finite.masked_fill_(maximum == -torch.inf, -(2**63))
    return finite.masked_fill_(maximum.isnan(), 2**63 - 1)


def _from_integers(maximum: Tensor) -> Tensor:
    found = maximum.to(torch.float64) * 2.0**-24  # exact: below 2^53
    found = found.masked_fill_(maximum == -(2**63), -torch.inf)
    return found.masked_fill_(maximum == 2**63 - 1, torch.nan)


class _Window:
    """The digits of NUM (section 5) that hold anything on any rank: few of the twelve, and the sum of the same ones.

    NUM is normal. Above its highest significant digit there is only the sign, 0 or -1: it goes into that digit, which
    then is in [-2^32, 2^32), so 2^31 ranks add up without a carry.
    """

    def __init__(self, num: Tensor, team: Team):
        digits = num[..., : checks.DIGITS - 1].flatten(0, -2)
        index = torch.arange(checks.DIGITS - 1, device=num.device)
        sign = (digits[:, -1:] < 0).to(torch.int64)
        fill = torch.cat(((sign * 0xFFFFFFFF).expand(-1, checks.DIGITS - 2), -sign), 1)
        lowest = torch.where((digits != 0).any(0), index, checks.DIGITS - 2).min()
        highest = torch.where((digits != fill).any(0), index, 0).max()
        special = (num[..., -1] != 0).any().to(torch.int64)
        found = team.maximum_(torch.stack((-lowest, highest, special))).tolist()
        self.lo, self.special = -found[0], bool(found[2])
        self.hi = max(self.lo, found[1])

    def shrunk(self, num: Tensor) -> Tensor:
        """[..., D, 12] -> [..., D * digits]."""
        top = num[..., self.hi : self.hi + 1]
        if self.hi < checks.DIGITS - 2:
            top = top + (num[..., checks.DIGITS - 2 : checks.DIGITS - 1] >> 63) * 2**32
        special = num[..., checks.DIGITS - 1 :][..., : self.special]
        return torch.cat((num[..., self.lo : self.hi], top, special), -1).flatten(-2)

    def grown(self, sums: Tensor, head_dim: int) -> Tensor:
        sums = sums.unflatten(-1, (head_dim, -1))
        num = sums.new_zeros(*sums.shape[:-1], checks.DIGITS)
        width = self.hi + 1 - self.lo
        num[..., self.lo : self.hi + 1] = sums[..., :width]
        if self.special:
            num[..., -1] = sums[..., -1]
        return num


# ---- Autograd -------------------------------------------------------------------------------------------------------


def _attend(q, k, v, call: _Call, team: Team, queries: List[Slice], keys: List[Slice], first_head: int = 0) -> Tensor:
    """Own rows of the output, the rows of `group` alone being those of the slices."""
    method = "gather" if team.size == 1 else call.method  # the fused call
    out = _Attend.apply(q, k, v, _METHODS[method](call, team, queries, keys, first_head))
    return out if call.out_dtype is torch.float32 else Narrow.apply(out, call.out_dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, method):
        k, v = (_ordered(x, method.order) for x in (k, v))
        out, maximum, den = method.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, maximum, den)
        ctx.method = method
        return out

    @staticmethod
    def backward(ctx, dO):
        q, k, v, *state = ctx.saved_tensors
        order = ctx.method.order
        with torch.no_grad():
            dq, dk, dv = ctx.method.backward(dO, q, k, v, *state)
            found = [dq, _disordered(dk, order), _disordered(dv, order)]
        if torch.is_grad_enabled():  # create_graph=True
            found = [Once.apply(x, dO, q, k, v) for x in found]
        return (*(x if needed else None for x, needed in zip(found, ctx.needs_input_grad)), None)


class _Transpose(torch.autograd.Function):
    """`Team.transpose`, whose gradient goes the way back."""

    @staticmethod
    def forward(ctx, x, team, split, sizes, cat, lengths):
        ctx.back = (team, cat, lengths, split, sizes)
        return team.transpose(x, split, sizes, cat, lengths)

    @staticmethod
    def backward(ctx, grad):
        return (_Transpose.apply(grad.contiguous(), *ctx.back), None, None, None, None, None)
