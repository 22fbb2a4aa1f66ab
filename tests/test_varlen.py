"""Promise: packed sequences, and keys in pages, give the bytes of each sequence alone, forward and backward.

In: sequences of uneven lengths, empty ones included. Out: equality with one det_attn call for each.
"""

import itertools
import math

import pytest
import torch

import generators
from conftest import assert_same_bits
from helpers import RecordedOp, paths, syncs_are_errors, tensor

LENGTHS = [(5, 9), (0, 4), (40, 40), (1, 130), (7, 0), (33, 20)]
HEADS = (4, 2)
D = 24


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def packed(lengths=LENGTHS, device="cpu", dtype=torch.float32, heads=HEADS):
    """q, k, v, dO, cu_seqlens_q, cu_seqlens_k."""
    totals = [sum(x) for x in zip(*lengths)]
    shapes = ((totals[0], heads[0], D), (totals[1], heads[1], D), (totals[1], heads[1], D), (totals[0], heads[0], D))
    tensors = [tensor(generators.normal(5, n, s)).to(device, dtype) for n, s in enumerate(shapes)]
    cu = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device) for x in zip(*lengths)]
    return (*tensors, *cu)


def alone(call, lengths, q, k, v, dO=None):
    """out, and dQ, dK, dV for dO, of one call(Q, K, V, number) a sequence, packed again."""
    found, start_q, start_k = [], 0, 0
    for number, (n_q, n_k) in enumerate(lengths):
        where = ((q, start_q, n_q), (k, start_k, n_k), (v, start_k, n_k))
        parts = [x[start : start + n].transpose(0, 1)[None] for x, start, n in where]
        leaves = [x.detach().clone().requires_grad_(dO is not None) for x in parts]
        out = call(*leaves, number)
        if dO is not None:
            out.backward(dO[start_q : start_q + n_q].transpose(0, 1)[None].to(out.dtype))
        results = [out.detach()] + ([x.grad for x in leaves] if dO is not None else [])
        found.append([x[0].transpose(0, 1) for x in results])
        start_q, start_k = start_q + n_q, start_k + n_k
    return [torch.cat(x) for x in zip(*found)]


CASES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(6, 2)),
    "window, causal": dict(window=(6, -1), causal=True, precision="high"),
    "softcap": dict(softcap=1.5, scale=0.7),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]), causal=True),
    "narrow": dict(out_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_sequences_give_the_bytes_of_each_alone(kernel, device, case):
    q, k, v, dO, cu_q, cu_k = packed(device=device)
    how = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in CASES[case].items()}
    expected = alone(lambda *x: kernel.det_attn(*x[:3], **how), LENGTHS, q, k, v, dO)
    for path in paths(kernel, device):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = kernel.det_attn_varlen(*leaves, cu_q, cu_k, 40, 130, path=path, **how)
        assert_same_bits(out.detach(), expected[0], f"{path}: out")
        out.backward(dO.to(out.dtype))
        for name, x, y in zip(("dq", "dk", "dv"), leaves, expected[1:]):
            assert_same_bits(x.grad, y, f"{path}: {name}")


# Queries and keys of the same lengths: then max_seqlen_k bounds how far apart the keys of a GPU's tile lie. 1280 rows.
ALIKE = [(n, n) for n in (200, 1, 0, 128, 65, 200, 127, 129, 3, 200, 90, 137)]
LONGEST = 200


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("case", ["plain", "causal", "window", "window, causal", "softcap"])
def test_sequences_packed_alike_give_the_bytes_of_each_alone(kernel, device, case, heads):
    q, k, v, dO, cu, _ = packed(ALIKE, device, heads=heads)
    expected = alone(lambda *x: kernel.det_attn(*x[:3], **CASES[case]), ALIKE, q, k, v, dO)
    for path in paths(kernel, device):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = kernel.det_attn_varlen(*leaves, cu, cu, LONGEST, LONGEST, path=path, **CASES[case])
        assert_same_bits(out.detach(), expected[0], f"{path}: out")
        out.backward(dO)
        for name, x, y in zip(("dq", "dk", "dv"), leaves, expected[1:]):
            assert_same_bits(x.grad, y, f"{path}: {name}")


REACH = [
    (dict(), 398),
    (dict(causal=True), 199),
    (dict(window=(6, 2)), 8),
    (dict(window=(6, -1)), 205),
    (dict(window=(-1, 2), causal=True), 199),
    (dict(window=(2**62, 2**62)), 398),
    (dict(max_seqlen_k=1), 0),
    (dict(max_seqlen_k=0), None),
    (dict(cu_seqlens_k=lambda cu: cu[:]), 398),
    (dict(cu_seqlens_k=lambda cu: cu.clone()), None),
    (dict(seqused_k=lambda cu: cu.diff()), None),
]


@pytest.mark.parametrize("how, expected", REACH)
def test_what_the_op_learns_of_the_longest_sequence(kernel, how, expected):
    """None: nothing, a negative number."""
    q, k, v, _, cu, _ = packed(ALIKE)
    given = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=LONGEST, max_seqlen_k=LONGEST)
    given.update({name: x(cu) if callable(x) else x for name, x in how.items()})
    with RecordedOp(kernel.ops.forward.default) as recorded:
        kernel.det_attn_varlen(q, k, v, **given)
    reach = recorded.arguments[-1]
    assert reach == expected or (expected is None and reach < 0)


@pytest.mark.parametrize("longest", [0, 1, 50, 199])
@pytest.mark.parametrize("causal", [False, True])
def test_too_small_a_max_seqlen_k_is_harmless_or_loud(kernel, device, causal, longest):
    """Each row has its bytes or, on a GPU only, is NaN."""
    lengths = [(n, n) for n in (1000, 1, 128, 700)]
    q, k, v, _, cu, _ = packed(lengths, device, heads=(2, 2))
    expected = kernel.det_attn_varlen(q, k, v, cu, cu.clone(), 1000, 1000, causal)
    for path in paths(kernel, device):
        found = kernel.det_attn_varlen(q, k, v, cu, cu, longest, longest, causal, path=path)
        lost = found.isnan().all(-1, keepdim=True)
        assert_same_bits(torch.where(lost, expected, found), expected, path)
        assert lost.any() == (device == "cuda" and path != "reference" and longest > 0), path


@pytest.mark.gpu
def test_the_longest_sequence_bounds_the_workspace(kernel):
    q, k, v = (torch.randn(16384, 1, 64, device="cuda") for _ in range(3))
    cu = torch.arange(0, 16385, 2048, dtype=torch.int32, device="cuda")
    peaks = []
    for cu_k in (cu, cu.clone()):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernel.det_attn_varlen(q, k, v, cu, cu_k, 2048, 2048)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < 0.7 * peaks[1], peaks


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_is_that_of_sequence_n_as_batch_n(kernel, device, causal):
    q, k, v, dO, cu_q, cu_k = packed(device=device)
    drop = dict(dropout_p=0.4, dropout_seed=2**50 + 3)

    class Staged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, Q, K, V, number):
            n_q, n_k = Q.shape[2], K.shape[2]
            rows = (number << 32) + (torch.arange(n_q, device=device) + n_k - n_q & 0xFFFFFFFF)
            ctx.how = dict(causal=causal, dropout_rows=rows[None].contiguous(), **drop)
            rowmax = kernel.rowmax(Q, K, causal)
            sums = kernel.accumulate(Q, K, V, rowmax, **ctx.how)
            out = kernel.finalize(*sums, dropout_p=0.4)
            ctx.given = (out, rowmax, sums[1])
            ctx.inputs = (Q, K, V)
            return out

        @staticmethod
        def backward(ctx, grad):
            given = (*ctx.inputs, grad.contiguous(), *ctx.given)
            references = kernel.grad_reference(*given, **ctx.how)
            sums = kernel.grad_accumulate(*given, *references, **ctx.how)
            kinds = ("query", "key", "value")
            found = [kernel.grad_finalize(s, r, kind) for s, r, kind in zip(sums, references, kinds)]
            return (*found, None)

    expected = alone(Staged.apply, LENGTHS, q, k, v, dO)
    for path in paths(kernel, device):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        found = kernel.det_attn_varlen(*leaves, cu_q, cu_k, 40, 130, causal, path=path, **drop)
        assert_same_bits(found.detach(), expected[0], f"{path}: out")
        found.backward(dO)
        for name, x, y in zip(("dq", "dk", "dv"), leaves, expected[1:]):
            assert_same_bits(x.grad, y, f"{path}: {name}")
    assert not torch.equal(found, kernel.det_attn_varlen(q, k, v, cu_q, cu_k, 40, 130, causal))


def test_a_sequence_cannot_reach_its_neighbours(kernel, device):
    q, k, v, _, cu_q, cu_k = packed(device=device)
    expected = kernel.det_attn_varlen(q, k, v, cu_q, cu_k, 40, 130)
    k[13:53], v[13:53] = math.nan, math.inf  # sequence 2
    found = kernel.det_attn_varlen(q, k, v, cu_q, cu_k, 40, 130)
    assert found[5:45].isnan().all()
    for rows in (slice(0, 5), slice(45, None)):
        assert_same_bits(found[rows], expected[rows])


def test_seqused_k_shortens_sequences_and_rows_behind_them_are_zero(kernel, device):
    q, k, v, _, cu_q, cu_k = packed(device=device)
    used = [max(0, n - 3) for _, n in LENGTHS]
    extra = torch.ones(3, *q.shape[1:], device=device)

    def one(Q, K, V, number):
        return kernel.det_attn(Q, K[:, :, : used[number]], V[:, :, : used[number]], True)

    expected = alone(one, LENGTHS, q, k, v)
    seqused = torch.tensor(used, dtype=torch.int32, device=device)
    found = kernel.det_attn_varlen(torch.cat([q, extra]), k, v, cu_q, cu_k, 40, 130, True, seqused_k=seqused)
    assert_same_bits(found[:-3], expected[0])
    assert (found[-3:] == 0).all()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_pages_give_the_bytes_of_the_packed_call(kernel, device, causal, page_size):
    q, k, v, _, cu_q, cu_k = packed(device=device)
    blocks = [-(-n // page_size) for _, n in LENGTHS]
    order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    caches = [torch.full((len(order), page_size, HEADS[1], D), math.nan, device=device) for _ in "kv"]
    table = torch.full((len(LENGTHS), max(blocks) + 1), -1, dtype=torch.int32)
    start = 0
    for n, (_, length) in enumerate(LENGTHS):
        for block in range(blocks[n]):
            table[n, block] = order.pop()
            rows = slice(start + block * page_size, min(start + (block + 1) * page_size, start + length))
            for cache, x in zip(caches, (k, v)):
                cache[table[n, block], : rows.stop - rows.start] = x[rows]
        start += length
    how = dict(causal=causal, window=(50, -1), dropout_p=0.3, dropout_seed=4)
    expected = kernel.det_attn_varlen(q, k, v, cu_q, cu_k, 40, 130, **how)
    paged = dict(block_table=table.to(device), **how)
    assert_same_bits(kernel.det_attn_varlen(q, *caches, cu_q, cu_k, 40, 130, **paged), expected)
    ends = torch.full_like(cu_k, 10**6)  # lengths by seqused_k alone
    assert_same_bits(
        kernel.det_attn_varlen(q, *caches, cu_q, ends, 40, 130, seqused_k=cu_k.diff(), **paged), expected
    )
    with pytest.raises(NotImplementedError, match="^k: got a tensor that requires grad"):
        kernel.det_attn_varlen(q, caches[0].requires_grad_(), caches[1], cu_q, cu_k, 40, 130, **paged)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_packed_calls_give_the_same_bytes(kernel, device, dynamic):
    q, k, v, _, cu_q, cu_k = packed(device=device)

    def call(q, k, v, cu_q, cu_k):
        return kernel.det_attn_varlen(q, k, v, cu_q, cu_k, 40, 130, True, window=(20, 0), dropout_p=0.2) * 2

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same_bits(compiled(q, k, v, cu_q, cu_k), call(q, k, v, cu_q, cu_k))


@pytest.mark.gpu
def test_nothing_waits_for_the_device(kernel):
    q, k, v, _, cu_q, cu_k = packed(device="cuda")
    kernel.det_attn_varlen(q, k, v, cu_q, cu_k, 40, 130, dropout_p=0.1)
    with syncs_are_errors():
        kernel.det_attn_varlen(q, k, v, cu_q, cu_k, 40, 130, True, window=(9, 0), dropout_p=0.1)


REFUSED = [
    ("q", lambda x: x[None], ValueError, r"q: got shape .*, must be 3-D"),
    ("k", lambda x: x[:, :, 1:], ValueError, "k: got head_dim 23, must be q's, 24"),
    ("v", lambda x: x[1:], ValueError, r"v: got shape \(202, 2, 24\), must be k's, \(203, 2, 24\)"),
    ("v", lambda x: x.double(), TypeError, "v: got dtype torch.float64"),
    ("cu_seqlens_q", lambda x: x.long(), TypeError, "cu_seqlens_q: got dtype torch.int64, must be int32"),
    ("cu_seqlens_q", lambda x: x[:1], ValueError, r"cu_seqlens_q: got shape \(1,\)"),
    ("cu_seqlens_q", lambda x: x + 1, ValueError, "cu_seqlens_q: got 1 first, must be 0"),
    ("cu_seqlens_q", lambda x: x - 5, ValueError, "cu_seqlens_q: got -5 first, must be 0"),
    ("cu_seqlens_q", lambda x: x * 2, ValueError, "cu_seqlens_q: got 172 last, must be at most q's 86 rows"),
    ("cu_seqlens_k", lambda x: x + 1, ValueError, "cu_seqlens_k: got 1 first, must be 0"),
    ("cu_seqlens_k", lambda x: -x, ValueError, "cu_seqlens_k: got -9 after 0, must never fall"),
    ("cu_seqlens_k", lambda x: x * 2, ValueError, "cu_seqlens_k: got 406 last, must be at most k's 203 rows"),
    ("seqused_k", lambda x: int32(9, 5, 0, 0, 0, 0), ValueError, "seqused_k: got 5 keys of sequence 1, allowed is"),
    ("seqused_k", lambda x: int32(0, -1, 0, 0, 0, 0), ValueError, "seqused_k: got -1 keys of sequence 1, allowed is"),
    ("cu_seqlens_k", lambda x: x[1:], ValueError, r"cu_seqlens_k: got shape \(6,\), must be \[7\]"),
    ("cu_seqlens_k", lambda x: x.tolist(), TypeError, "cu_seqlens_k: got list"),
    ("max_seqlen_q", lambda x: 1.5, TypeError, "max_seqlen_q: got float"),
    ("max_seqlen_k", lambda x: -1, ValueError, "max_seqlen_k: got -1"),
    ("seqused_k", lambda x: torch.zeros(7, dtype=torch.int32), ValueError, r"seqused_k: got shape \(7,\)"),
    ("block_table", lambda x: torch.zeros(6, dtype=torch.int32), ValueError, r"block_table: got shape \(6,\)"),
    ("block_table", lambda x: torch.zeros(6, 2), TypeError, "block_table: got dtype torch.float32"),
    ("alibi_slopes", lambda x: torch.zeros(6, 4), ValueError, r"alibi_slopes: got shape \(6, 4\), must be \[Hq\]"),
    ("q", lambda x: None, TypeError, "q: got NoneType"),
    ("k", lambda x: None, TypeError, "k: got NoneType"),
    ("window", lambda x: 3, TypeError, "window: got int"),
    ("dropout_p", lambda x: 2.0, ValueError, "dropout_p: got 2.0"),
    ("precision", lambda x: "low", ValueError, "precision: got 'low'"),
    ("causal", lambda x: 1, TypeError, "causal: got int, must be a bool"),
    ("scale", lambda x: math.nan, ValueError, "scale: got nan, must be finite"),
    ("softcap", lambda x: -1.0, ValueError, "softcap: got -1.0"),
    ("dropout_seed", lambda x: 0.5, TypeError, "dropout_seed: got float"),
    ("out_dtype", lambda x: torch.float64, ValueError, "out_dtype: got torch.float64"),
    ("path", lambda x: "fast", ValueError, "path: got 'fast'"),
    ("alibi_slopes", lambda x: torch.zeros(5), ValueError, r"alibi_slopes: got shape \(5,\), must be \[Hq\], \(4,\)"),
]


@pytest.mark.parametrize("name, change, error, message", REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_bad_arguments_are_refused(kernel, name, change, error, message):
    q, k, v, _, cu_q, cu_k = packed()
    given = dict(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=40, max_seqlen_k=130)
    given[name] = change(given.get(name))
    with pytest.raises(error, match="^" + message):
        kernel.det_attn_varlen(**given)


@pytest.mark.parametrize(
    "k_pages, v_pages, columns, message",
    [
        (3, 2, 2, r"v: got shape \(2, 16, 2, 8\), must be k's, \(3, 16, 2, 8\)"),
        (0, 0, 2, "k: got no pages"),
    ],
)
def test_pages_that_the_table_cannot_mean_are_refused(kernel, k_pages, v_pages, columns, message):
    """A value page that is not there would be taken from another place without a word."""
    q, starts = torch.zeros(6, 4, 8), torch.tensor([0, 3, 6], dtype=torch.int32)
    k, v = torch.zeros(k_pages, 16, 2, 8), torch.zeros(v_pages, 16, 2, 8)
    table = torch.zeros(2, columns, dtype=torch.int32)
    with pytest.raises(ValueError, match="^" + message):
        kernel.det_attn_varlen(q, k, v, starts, starts, 3, 3, block_table=table)


def unread(call, *integers):
    """call(*integers), where their values are not checked: on a GPU, or in vmap, where they cannot be read."""
    if integers[0].is_cuda:
        return call(*integers)
    return torch.vmap(call)(*(x[None] for x in integers))[0]


@pytest.mark.parametrize("k_ends", [(9, 4, 0), (-(2**31), 2**31 - 1, -(2**31)), (2**31 - 1,) * 3])
@pytest.mark.parametrize("q_ends", [(0, 6, 3), (-5, 2**31 - 1, 6), (2**31 - 1, -(2**31), 2**31 - 1)])
def test_nothing_beyond_the_keys_is_read_whatever_the_starts(kernel, device, q_ends, k_ends):
    """Around the keys lie NaN, which any read of them would bring to the output."""
    q = torch.ones(6, 4, 8, device=device)
    around = torch.full((200, 2, 8), float("nan"), device=device)
    around[100:109] = 1.0
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (q_ends, k_ends))
    how = dict(window=(2**62, 3), alibi_slopes=torch.ones(4, device=device), dropout_p=0.5)
    keys = around[100:109]
    out = unread(lambda *cu: kernel.det_attn_varlen(q, keys, keys, *cu, 3, 3, True, **how), cu_q, cu_k)
    assert out.isfinite().all()


# Two sequences of 5 queries and at most 8 keys, which are 12 packed rows or two pages of 4 for each. What is wrong
# with the first, and what its queries give: the number of its keys that count, or NaN.
APART = [
    (dict(seqused_k=(8, 6)), 6),
    (dict(seqused_k=(2**31 - 1, 6)), 6),
    (dict(seqused_k=(-5, 6)), 0),
    (dict(block_table=((0, 1), (2, 3)), seqused_k=(9, 8)), 8),
    (dict(block_table=((0, 1), (2, 3)), seqused_k=(2**31 - 1, 8)), 8),
    (dict(block_table=((0, 1), (2, 3)), cu_seqlens_k=(0, 9, 17)), 8),
    (dict(block_table=((0,), (2,)), cu_seqlens_k=(0, 6, 10)), 4),
    (dict(block_table=((0, 9), (2, 3))), math.nan),
    (dict(block_table=((-1, 1), (2, 3))), math.nan),
]


@pytest.mark.parametrize("wrong, used", APART, ids=str)
def test_wrong_numbers_reach_no_other_sequence(kernel, device, wrong, used):
    """Its keys are 1, those of the other sequence NaN. Refused where the numbers can be read."""
    q = torch.ones(10, 4, 16, device=device)
    paged = "block_table" in wrong
    k = torch.ones(4, 4, 2, 16, device=device) if paged else torch.ones(12, 2, 16, device=device)
    k[2 if paged else 6 :] = math.nan
    given = {"cu_seqlens_q": (0, 5, 10), "cu_seqlens_k": (0, 6, 12), **wrong}
    given = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in given.items()}

    def call(*integers):
        return kernel.det_attn_varlen(q, k, k, **dict(zip(given, integers)), max_seqlen_q=5, max_seqlen_k=8)

    found = unread(call, *given.values())[:5]
    keys = torch.full((1, 2, 0 if math.isnan(used) else used, 16), 1.0, device=device)
    expected = kernel.det_attn(q[:5].transpose(0, 1)[None], keys, keys)[0].transpose(0, 1)
    assert found.isnan().all() if math.isnan(used) else torch.equal(found, expected)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"^(seqused_k|cu_seqlens_k|block_table): got"):
            call(*given.values())


def test_values_that_nothing_reads_may_be_anything(kernel, device):
    """Entries behind a sequence's pages, and cu_seqlens_k beside a block_table with seqused_k."""
    q, pages = torch.ones(2, 4, 16, device=device), torch.ones(2, 4, 2, 16, device=device)
    table, cu_q, cu_k, used = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (((1, -7), (0, 99)), (0, 1, 2), (5, 1, -3), (4, 2))
    )
    out = kernel.det_attn_varlen(q, pages, pages, cu_q, cu_k, 1, 4, block_table=table, seqused_k=used)
    assert torch.equal(out, torch.ones_like(out))
