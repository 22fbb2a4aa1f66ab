"""Section 7: NaN, infinities, denormals, zeros, ties, empty rows, saturation. Against stated outcomes and the oracle.

Each test says in words what must come out, asserts it bit by bit, and holds every boundary to the oracle as well.
"""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import generators
import oracle
from conftest import REPO_ID, assert_same_bits
from helpers import check_against_oracle, make, paths, sha256, tensor, threads

NAN, INF = float("nan"), float("inf")
NON_FINITE = [NAN, INF, -INF]
PRECISIONS = ["highest", "high"]
LARGEST = 3.4028234663852886e38


def base(dtype="float32", **sizes):
    return make("normal", **{**dict(heads=(2, 1), Sq=20, Skv=35, D=16, dtype=dtype, seed=11), **sizes})


def check(kernel, device, inputs, causal=False, scale=None, precision="highest", q_offset=None):
    """`out` on the CPU, after every boundary of every path has met the oracle."""
    return check_against_oracle(kernel, device, inputs, causal, scale, precision, q_offset)["out"]


def fused(inputs, *args, **how):
    """out of the oracle alone, for the numbers a special value must leave alone."""
    return tensor(oracle.det_attn(*inputs, *args, **how).out)


def quiet_nan(x):
    assert_same_bits(x, torch.full_like(x, NAN))
    assert (x.view(torch.int32) == 0x7FC00000).all()


# -- Queries and keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_bad_query_row_makes_its_own_output_row_nan(kernel, device, bad, causal, precision):
    Q, K, V = base()
    clean = fused((Q, K, V), causal, precision=precision)
    Q[0, 1, 7, 3] = bad
    out = check(kernel, device, (Q, K, V), causal, precision=precision)
    quiet_nan(out[0, 1, 7])
    out[0, 1, 7] = clean[0, 1, 7]
    assert_same_bits(out, clean)


@pytest.mark.parametrize("dtype", list(generators.DTYPES))
@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_bad_key_reaches_the_rows_that_attend_it_and_no_other(kernel, device, bad, dtype):
    Q, K, V = base(dtype)
    clean = fused((Q, K, V), True)
    K[0, 0, 22, 0] = bad  # attended by queries 7.. : j <= i + 15
    out = check(kernel, device, (Q, K, V), True)
    quiet_nan(out[:, :, 7:])
    assert_same_bits(out[:, :, :7], clean[:, :, :7])


@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_bad_query_or_key_beside_zeros(kernel, device, bad):
    """0 * infinity never happens: a row of zeros on the other side still gives NaN where attended."""
    Q, K, V = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4), torch.ones(1, 1, 5, 4)
    Q[0, 0, 1, 2] = bad
    out = check(kernel, device, (Q, K, V))
    quiet_nan(out[0, 0, 1])
    assert_same_bits(out[0, 0, [0, 2]], torch.ones(2, 4))
    Q[0, 0, 1, 2] = 0
    K[0, 0, 4, 1] = bad
    quiet_nan(check(kernel, device, (Q, K, V)))


def test_a_bad_row_under_a_zero_scale(kernel, device):
    """f64(NaN * 0) and f64(inf * 0) are NaN: the row is bad whatever the scale."""
    Q, K, V = base()
    Q[0, 0, 0, 0], Q[0, 1, 1, 1] = INF, NAN
    out = check(kernel, device, (Q, K, V), scale=0.0)
    quiet_nan(out[0, 0, 0])
    quiet_nan(out[0, 1, 1])
    assert out.isnan().sum() == 2 * 16


@pytest.mark.parametrize("which", ["query", "key"])
def test_rowmax_and_sums_of_a_nan_row(kernel, device, which):
    """rowmax is NaN; accumulate on it writes DEN 0, empty sums and a nan_count of 1 for every d."""
    Q, K, V = (x.to(device) for x in base())
    (Q if which == "query" else K)[0, 0, 3, 0] = NAN
    V[0, 0, 5, 1] = INF  # not counted in a NaN row
    rows = torch.zeros(2, 20, dtype=torch.bool)
    rows[0, 3] = True
    if which == "key":
        rows[:] = True
    for path in paths(kernel, device):
        rowmax = kernel.rowmax(Q, K, path=path)
        num, den = (x.cpu() for x in kernel.accumulate(Q, K, V, rowmax, path=path))
        assert torch.equal(rowmax.isnan().cpu()[0], rows)
        assert (den[0][rows] == 0).all() and (den[0][~rows] > 0).all()
        assert (num[0][rows][..., :11] == 0).all() and (num[0][rows][..., 11] == 1 << 42).all()


def test_a_nan_rowmax_of_another_shard_empties_this_one(kernel, device):
    """The bad key lives elsewhere: this shard sees only its NaN, of any bits."""
    Q, K, V = (x.to(device) for x in base())
    rowmax = kernel.rowmax(Q, K)
    bits = torch.tensor([0x7FF8000000000000, -1, 0x7FF0000000000001, -0x0007FFFFFFFFFFFF], dtype=torch.int64)
    rowmax[0, 0, :4] = bits.view(torch.float64).to(device)
    for path in paths(kernel, device):
        num, den = (x.cpu() for x in kernel.accumulate(Q, K, V, rowmax, path=path))
        assert (den[0, 0, :4] == 0).all() and (den[0, 0, 4:] > 0).all()
        assert (num[0, 0, :4, :, :11] == 0).all() and (num[0, 0, :4, :, 11] == 1 << 42).all()
        assert (num[0, 0, 4:, :, 11] == 0).all()
        quiet_nan(kernel.finalize(num.to(device), den.to(device))[0, 0, :4].cpu())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("Sq,Skv", [(6, 35), (2, 4000)])
def test_sums_under_any_rowmax(kernel, device, Sq, Skv, precision):
    """Section 4's table: -inf hides what the keys hold, any number is clamped and truncated, dist is never below 0.

    Poisoned pairs make a row NaN once, whatever else the rowmax says; only -inf hides them, and only in keys.
    """
    Q, K, V = make("normal", heads=(14, 2), Sq=Sq, Skv=Skv, D=5, seed=19)
    V[0, 0, Skv // 2] = torch.tensor([NAN, INF, -INF, 1.0, LARGEST])  # attended by heads 0..6
    K[0, 1, Skv // 3, 0] = INF  # attended by heads 7..13
    Q[0, ::2, 1, 2] = NAN
    given = [-INF, 0.0, 2.0**-24 / 3, -1.7, 1e300, INF, -1e300]
    rowmax = torch.tensor(given * 2, dtype=torch.float64).reshape(1, 14, 1).repeat(1, 1, Sq)
    num, den = oracle.accumulate(Q, K, V, rowmax.numpy(), precision=precision)
    assert not num[0, [0, 7], 0].any() and not den[0, [0, 7], 0].any()
    assert (num[0, 8:, :, :, 11] == oracle.NAN).all() and not num[0, 8:, :, :, :11].any() and not den[0, 8:].any()
    assert (num[0, ::2, 1, :, 11] == oracle.NAN).all()
    on_device = [x.to(device) for x in (Q, K, V, rowmax)]
    for path in paths(kernel, device):
        with threads(8):  # more than query tiles: the CPU cuts the keys
            found = kernel.accumulate(*on_device, precision=precision, path=path)
        assert_same_bits(found[0].cpu(), tensor(num), f"NUM, path {path}")
        assert_same_bits(found[1].cpu(), tensor(den), f"DEN, path {path}")


# -- Values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", list(generators.DTYPES))
@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_bad_value_reaches_one_column_of_the_rows_attending_it(kernel, device, bad, dtype, precision):
    Q, K, V = base(dtype)
    clean = fused((Q, K, V), True, precision=precision)
    V[0, 0, 22, 5] = bad
    out = check(kernel, device, (Q, K, V), True, precision=precision)
    assert_same_bits(out[:, :, 7:, 5], torch.full((1, 2, 13), bad))
    assert_same_bits(out[:, :, :7], clean[:, :, :7])
    others = [d for d in range(16) if d != 5]
    # The row's other columns: its exponent is taken over the finite elements, so at most it gets finer.
    assert torch.isfinite(out[:, :, 7:][..., others]).all()
    torch.testing.assert_close(out[:, :, 7:][..., others], clean[:, :, 7:][..., others], rtol=1e-3, atol=1e-3)


def test_infinities_of_both_signs_make_a_nan(kernel, device):
    Q, K, V = base()
    V[0, 0, 3, 0] = V[0, 0, 9, 0] = INF
    V[0, 0, 3, 1], V[0, 0, 9, 1] = INF, -INF
    V[0, 0, 3, 2], V[0, 0, 9, 2] = INF, NAN
    V[0, 0, 3, 3] = V[0, 0, 9, 3] = -INF
    out = check(kernel, device, (Q, K, V))
    assert_same_bits(out[0, 0, 0, :4], torch.tensor([INF, NAN, NAN, -INF]))
    quiet_nan(out[..., 1])
    quiet_nan(out[..., 2])
    assert torch.isfinite(out[..., 4:]).all()


@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_bad_value_counts_whatever_its_weight(kernel, device, bad):
    """The key's weight is 0: its score lies 2^29 and more below the maximum."""
    Q, K, V = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    K[0, 0, 1] = -1000.0
    V[0, 0, 1, 0] = bad
    out = check(kernel, device, (Q, K, V))
    assert_same_bits(out, torch.tensor([[[[bad, 1.0]]]]))
    den = kernel.det_attn(*(x.to(device) for x in (Q, K, V)), return_state=True)[1].den
    assert den.item() == 2 * 2**31  # so the weight was 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bad_values_count_in_long_runs_of_weightless_keys(kernel, device, precision):
    """Whole tiles of keys without any weight may be skipped, their special values may not."""
    Q, K, V = torch.ones(1, 1, 40, 2), torch.full((1, 1, 1000, 2), -1000.0), torch.ones(1, 1, 1000, 2)
    K[0, 0, 500] = 0.0  # the only key with weight
    V[0, 0, 100, 0], V[0, 0, 900, 1] = INF, NAN
    out = check(kernel, device, (Q, K, V), precision=precision)
    assert_same_bits(out, torch.tensor([INF, NAN]).expand(1, 1, 40, 2))
    out = check(kernel, device, (Q, K, V), True, precision=precision, q_offset=860)  # key 900 from query 40 on
    assert_same_bits(out, torch.tensor([INF, 1.0]).expand(1, 1, 40, 2))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("where", [0, 1000, 2500, 3999])
def test_a_bad_row_counts_once_however_many_parts_the_keys_are_cut_in(kernel, device, where, precision):
    """Few queries over many keys: an implementation may cut the keys, and must not count its parts."""
    Q, K, V = make("normal", Sq=2, Skv=4000, D=3, seed=17)
    bad_key = K.clone()
    bad_key[0, 0, where, 1] = -INF
    quiet_nan(check(kernel, device, (Q, bad_key, V), precision=precision))
    Q[0, 0, 1, 2], V[0, 0, where, 0] = NAN, INF
    out = check(kernel, device, (Q, K, V), precision=precision)
    assert out[0, 0, 0, 0] == INF
    quiet_nan(out[0, 0, 1])


@pytest.mark.parametrize("shape", ["all non-finite", "one finite"])
def test_rows_of_values_with_hardly_a_finite_element(kernel, device, shape):
    Q, K, V = base()
    V[0, 0, 4] = torch.tensor([NAN, INF, -INF, INF] * 4)
    if shape == "one finite":
        V[0, 0, 4, 0] = 2.0**-130
    out = check(kernel, device, (Q, K, V))
    assert_same_bits(out[0, 0, 0, 1:4], torch.tensor([INF, -INF, INF]))
    assert out[0, 0, 0, 0].isnan() == (shape == "all non-finite")


def test_many_bad_values_count_apart(kernel, device):
    """Digit 11 is nan_count * 2^42 + neg_inf_count * 2^21 + pos_inf_count, added over shards."""
    Q, K, V = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 3000, 3), torch.zeros(1, 1, 3000, 3)
    V[0, 0, :1000, 0], V[0, 0, 1000:1100, 0], V[0, 0, 2000:2007, 0] = INF, -INF, NAN
    V[0, 0, :, 1] = -INF
    on_device = [x.to(device) for x in (Q, K, V)]
    for path in paths(kernel, device):
        rowmax = kernel.rowmax(*on_device[:2], path=path)
        whole, _ = kernel.accumulate(*on_device, rowmax, path=path)
        assert whole[0, 0, :, :, 11].tolist() == [[7 * 2**42 + 100 * 2**21 + 1000, 3000 * 2**21, 0]] * 2
        shards = [dict(kv_lo=a, kv_hi=a + 500, path=path) for a in range(0, 3000, 500)]
        parts = [kernel.accumulate(*on_device, rowmax, **shard)[0] for shard in shards]
        assert torch.equal(sum(parts)[..., 11], whole[..., 11])
    check(kernel, device, (Q, K, V))


# -- Masked --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [*NON_FINITE, LARGEST, -LARGEST])
def test_a_masked_key_changes_nothing(kernel, device, bad, precision):
    Q, K, V = base()
    clean = fused((Q, K, V), True, precision=precision, q_offset=0)
    K[0, 0, 20:] = bad  # queries 0..19 attend keys 0..19
    V[0, 0, 20:] = bad
    assert_same_bits(check(kernel, device, (Q, K, V), True, precision=precision, q_offset=0), clean)


@pytest.mark.parametrize("contents", ["normal", "special"])
def test_fully_masked_rows_are_plus_zero(kernel, device, contents):
    """q_offset -5: queries 0..4 attend nothing. rowmax -inf, DEN 0, out +0; what the keys hold is nobody's business."""
    Q, K, V = base()
    if contents == "special":
        K[...], V[...] = NAN, INF
    check(kernel, device, (Q, K, V), True, q_offset=-5)
    on_device = [x.to(device) for x in (Q, K, V)]
    for path in paths(kernel, device):
        out, state = kernel.det_attn(*on_device, True, q_offset=-5, return_state=True, path=path)
        assert_same_bits(out[:, :, :5].cpu(), torch.zeros(1, 2, 5, 16))
        assert (state.rowmax[:, :, :5] == -INF).all() and (state.den[:, :, :5] == 0).all()
        assert (state.rowmax[:, :, 5:] > -INF).all() or contents == "special"


@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_bad_query_that_attends_nothing_is_nan_all_the_same(kernel, device, bad):
    """Section 7 speaks of the query row alone; so prefill and shards agree."""
    Q, K, V = base()
    Q[0, 0, 2, 0] = bad
    out = check(kernel, device, (Q, K, V), True, q_offset=-5)
    quiet_nan(out[0, 0, 2])
    assert_same_bits(out[0, 1, :5], torch.zeros(5, 16))


# -- Small, large, equal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", list(generators.DTYPES))
def test_denormals_are_ordinary_numbers(kernel, device, dtype, precision):
    """Values that are denormal come out as such, not as zeros; denormal queries and keys still rank the keys."""
    Q, K, V = make("denormals", heads=(2, 1), Sq=9, Skv=33, D=16, dtype=dtype, seed=12)
    out = check(kernel, device, (Q, K, V), precision=precision)
    assert (out != 0).any()
    Q, K = (x * 2.0**120 if dtype != "float16" else x * 2.0**14 for x in (Q.float(), K.float()))
    Q, K = (x.to(V.dtype) for x in (Q, K))
    check(kernel, device, (Q, K, V), precision=precision)


def test_flush_to_zero_mode_changes_nothing(kernel, device):
    """torch.set_flush_denormal sets the calling thread's CPU flags; the kernel must not see them."""
    Q, K, V = make("denormals", heads=(2, 1), Sq=200, Skv=300, D=16, seed=16)
    expected = fused((Q, K, V))
    on_device = [x.to(device) for x in (Q, K, V)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        found = [kernel.det_attn(*on_device, path=path) for path in paths(kernel, device)]
        rows = kernel.rows(on_device[2], "value")
    finally:
        torch.set_flush_denormal(False)
    for out in found:
        assert_same_bits(out.cpu(), expected)
    assert_same_bits(rows[0].cpu(), tensor(oracle.rows(V, "value")[0]))
    assert_same_bits(rows[1].cpu(), tensor(oracle.rows(V, "value")[1]))


def test_flush_to_zero_mode_of_new_threads_changes_nothing(kernel):
    """Worker threads inherit the mode of the thread that starts them: here all start under flush-to-zero."""
    program = f"""
import sys, torch
from kernels import get_kernel
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from helpers import make, sha256
inputs = make("denormals", heads=(4, 2), Sq=300, Skv=300, D=16, seed=18)
kernel = get_kernel({REPO_ID!r}, version=1, trust_remote_code=True)
torch.set_flush_denormal(True)
torch.set_num_threads(7)
print(sha256(kernel.det_attn(*inputs)), sha256(kernel.accumulate(*inputs, kernel.rowmax(*inputs[:2]))[0]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    inputs = make("denormals", heads=(4, 2), Sq=300, Skv=300, D=16, seed=18)
    expected = oracle.det_attn(*inputs)
    assert run.stdout.split() == [sha256(tensor(expected.out)), sha256(tensor(expected.NUM))]


def test_the_smallest_denormal_survives(kernel, device):
    tiny = 2.0**-149
    K = torch.zeros(1, 1, 3, 2)
    V = torch.tensor([tiny, -tiny]).expand(1, 1, 3, 2).contiguous()
    assert_same_bits(check(kernel, device, (K, K, V)), V)


def test_denormal_queries_rank_large_keys(kernel, device):
    Q = torch.full((1, 1, 1, 1), 2.0**-140)
    K = torch.tensor([2.0**120, -(2.0**120), 2.0**126]).reshape(1, 1, 3, 1)
    V = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
    out = check(kernel, device, (Q, K, V), scale=2.0**20)
    assert out.item() == 3.0


def test_results_that_underflow_round_to_a_signed_zero(kernel, device):
    """-2^-149 / 3 rounds to -0: the sum is not zero, only its float32 is."""
    K = torch.zeros(1, 1, 3, 1)
    V = torch.tensor([-(2.0**-149), 0.0, 0.0]).reshape(1, 1, 3, 1)
    assert_same_bits(check(kernel, device, (K, K, V)), torch.full((1, 1, 3, 1), -0.0))


@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_signed_zeros_are_one_zero(kernel, device, sign):
    """Rows of -0 rank and sum as rows of +0, and a zero output is +0."""
    Q, K, V = base()
    Q[0, 0, 1], K[0, 0, 4], V[0, 0, :, 2] = sign, sign, sign
    out = check(kernel, device, (Q, K, V), True)
    assert_same_bits(out[..., 2], torch.zeros(1, 2, 20))
    Q[0, 0, 1], K[0, 0, 4], V[0, 0, :, 2] = 0.0, 0.0, 0.0
    assert_same_bits(out, fused((Q, K, V), True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_zeros_average_the_values(kernel, device, precision):
    """Equal scores: every weight is 2^T, and out is the mean, rounded once."""
    T = oracle.BITS[precision][1]
    Q, K, V = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 7, 4), torch.arange(28.0).reshape(1, 1, 7, 4)
    out = check(kernel, device, (Q, K, V), precision=precision)
    assert_same_bits(out, V.mean(2, keepdim=True).expand(1, 1, 2, 4).contiguous())
    state = kernel.det_attn(*(x.to(device) for x in (Q, K, V)), precision=precision, return_state=True)[1]
    assert (state.den == 7 * 2**T).all() and (state.rowmax == 0).all()
    zero = torch.zeros_like(V)
    assert_same_bits(check(kernel, device, (Q, K, zero), precision=precision), torch.zeros(1, 1, 2, 4))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ties(kernel, device, precision):
    """Few values, so equal maxima; and elements half-way between two integers of their row, which go to the even."""
    Q, K, V = make("ties", heads=(2, 1), Sq=33, Skv=65, D=16, seed=13)
    check(kernel, device, (Q, K, V), True, 1.0, precision)
    b = oracle.BITS[precision][0]
    row = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.0 ** (b - 2) - 0.5, 2.0 ** (b - 2)])
    for kind in ("query", "key", "value"):
        integers, exponents = kernel.rows(row.reshape(1, 1, 1, 8).to(device), kind, 1.0 if kind == "query" else None,
                                          precision=precision)
        assert exponents.item() == b - 1  # 2^(e-1) is the largest element: units of 1
        assert integers.flatten().tolist() == [0, 2, 2, 0, -2, -2, 2 ** (b - 2), 2 ** (b - 2)]


def test_row_exponents_at_powers_of_two(kernel, device):
    """2^(e-1) <= max < 2^e, and the clamp at both ends of the b-bit integers."""
    for largest, exponent, integer in (
        (1.0, 1, 2**22),
        (1 - 2.0**-24, 0, 2**23 - 1),  # rounds to 2^23, one too many: clamped
        (-(1 - 2.0**-24), 0, -(2**23)),  # -2^23 is allowed
        (2.0**127, 128, 2**22),
        (LARGEST, 128, 2**23 - 1),
        (-LARGEST, 128, -(2**23)),
        (2.0**-127, -126, 2**22),
        (2.0**-149, -126, 1),
        (-(2.0**-149), -126, -1),
        (0.0, -126, 0),
    ):
        for kind in ("query", "key", "value"):
            x = torch.full((1, 1, 1, 1), largest, device=device)
            integers, exponents = kernel.rows(x, kind, 1.0 if kind == "query" else None)
            assert (exponents.item(), integers.item()) == (exponent, integer), (largest, kind)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_saturate(kernel, device, precision):
    """Scores beyond +-2^28 are all +-2^28: the largest tie, and the others get no weight."""
    Q = torch.tensor([1e30, -1e30, 1e-30, 2.0**28, 1.0]).reshape(1, 1, 5, 1)
    K = torch.tensor([1e30, 2e30, -1e30, 1.0, 2.0, 2.0**27, 0.0]).reshape(1, 1, 7, 1)
    V = torch.tensor([1.0, 3.0, 100.0, 100.0, 100.0, 100.0, 100.0]).reshape(1, 1, 7, 1)
    check(kernel, device, (Q, K, V), scale=1.0, precision=precision)
    on_device = [x.to(device) for x in (Q, K, V)]
    for path in paths(kernel, device):
        out, state = kernel.det_attn(*on_device, scale=1.0, precision=precision, return_state=True, path=path)
        assert state.rowmax.flatten().tolist()[:2] == [2.0**28, 2.0**28]
        assert state.rowmax.flatten().tolist()[3:] == [2.0**28, 2.0**28]
        assert out[0, 0, 1].item() == 100.0 and out[0, 0, 4].item() == 2.0  # the two saturated keys alone
    far = torch.full((1, 1, 1, 1), -1e30)  # every score at the lower end: a tie, not nothing
    out = check(kernel, device, (far, K[:, :, :2], V[:, :, :2]), scale=1.0, precision=precision)
    assert out.item() == 2.0


@pytest.mark.parametrize("scale", [1e300, -1e300, 1e-300, 2.0**-1060, 1.7e308])
def test_extreme_scales(kernel, device, scale):
    """The scaled query is a float64: it may be huge, tiny or denormal there; where it overflows the row is bad."""
    Q, K, V = base()
    out = check(kernel, device, (Q, K, V), True, scale=scale)
    assert out.isnan().any() == (scale == 1.7e308)


def test_values_of_the_largest_size(kernel, device):
    """+LARGEST stays; -LARGEST has the row integer -2^23, that is -2^128, which float32 calls -infinity."""
    K = torch.zeros(1, 1, 4, 2)
    V = torch.tensor([LARGEST, -LARGEST]).expand(1, 1, 4, 2).contiguous()
    out = check(kernel, device, (K, K, V))
    assert out[0, 0, 0].tolist() == [(2.0**23 - 1) * 2.0**105, -INF]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", list(generators.DTYPES))
def test_huge_and_tiny_rows_mixed(kernel, device, dtype, precision):
    """A row of 2^125 beside one of 2^-149: both are in NUM, exactly."""
    Q, K, V = make("mixed", B=2, heads=(4, 2), Sq=33, Skv=129, D=24, dtype=dtype, seed=14)
    check(kernel, device, (Q, K, V), True, precision=precision)


def test_a_tiny_value_outlives_two_huge_ones(kernel, device):
    """2^127 - 2^127 + 2^-149 summed in any order: the tiny one is left, over three."""
    K = torch.zeros(1, 1, 3, 1)
    for order in ([0, 1, 2], [2, 0, 1], [0, 2, 1]):
        V = torch.tensor([2.0**127, -(2.0**127), 2.0**-147])[order].reshape(1, 1, 3, 1)
        out = check(kernel, device, (K, K, V))
        assert_same_bits(out, torch.full((1, 1, 3, 1), np.float32(2.0**-147 / 3).item()))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", list(generators.DTYPES))
@pytest.mark.parametrize("causal", [False, True])
def test_everything_at_once(kernel, device, causal, dtype, precision):
    Q, K, V = make("special", B=2, heads=(6, 2), Sq=65, Skv=140, D=40, dtype=dtype, seed=15)
    out = check(kernel, device, (Q, K, V), causal, precision=precision)
    assert out.isnan().any() and out.isinf().any() and out.isfinite().any()
