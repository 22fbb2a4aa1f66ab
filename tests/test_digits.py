"""The long accumulator: digits, carries, merging, and the one rounding of f64(NUM) (sections 5 and 6).

Expected values come from Python integers and fractions alone: int / int and Fraction round once, to even.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch

import generators
import oracle
from conftest import assert_same_bits
from helpers import make, paths, tensor, threads

T = 31  # weight bits of `highest`
EDGE = 1 - 2.0**-24  # its row integer is 2^23 - 1; that of -EDGE is -2^23


def digits_of(value):
    """Normal digits of a Python integer in units of 2^-180."""
    return [(value >> (32 * k)) & 0xFFFFFFFF for k in range(10)] + [value >> 320, 0]


def value_of(digits):
    return sum(int(d) << (32 * k) for k, d in enumerate(digits[:11]))


def expected_output(value, den):
    """f32(f64(NUM) / f64(DEN)) with NUM = value * 2^-180."""
    if value == 0 or den == 0:
        return np.float32(0)
    num = float(Fraction(value, 2**180))
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(np.float64(num) / (np.float64(den) * 2.0**-T))


def check_finalize(kernel, device, rows_of_digits, dens):
    """Each row of digits over each denominator."""
    num = torch.tensor(rows_of_digits, dtype=torch.int64)
    expected = torch.tensor([[expected_output(value_of(r), den) for r in rows_of_digits] for den in dens])
    num = num[None].expand(len(dens), *num.shape).contiguous()  # [dens, rows as D, 12]
    den = torch.tensor(dens, dtype=torch.int64)
    for first in range(0, num.shape[1], 256):  # D is at most 256
        part = num[:, first : first + 256].contiguous()
        shape = (1, 1, len(dens))
        out = kernel.finalize(part.reshape(*shape, -1, 12).to(device), den.reshape(shape).to(device))
        assert_same_bits(out.reshape(len(dens), -1).cpu(), expected[:, first : first + 256].to(torch.float32))


DENS = [2**31, 3, 2**31 + 1, 2**53 + 1, 2**60 + 2**7 + 1, 2**62 - 1]


def test_one_rounding_at_every_position(kernel, device):
    """Values next to a float32 tie, decided by a bit far below float64's last: only one exact rounding gets them."""
    half, fine = Fraction(1, 2**24), Fraction(1, 2**53)
    below = [Fraction(0), fine, fine / 2, 2 * fine, fine + fine / 2**40, fine - fine / 2**40, fine + fine / 2**150]
    near = [1 + m * half + s * d for m in (0, 1, 3) for s in (1, -1) for d in below]
    values = []
    for position in range(0, 306, 7):
        for x in near:
            values += [int(x * 2**position), -int(x * 2**position)]
    check_finalize(kernel, device, [digits_of(v) for v in sorted(set(values))], [2**31])


def test_the_far_bit_decides():
    """What the previous test relies on: 1 + 2^-24 + 2^-53 is a tie twice over, one bit 2^-203 below breaks it."""
    tie = (1 + Fraction(1, 2**24) + Fraction(1, 2**53)) * 2**300
    assert expected_output(int(tie), 2**31) < expected_output(int(tie + 2**97), 2**31)


def test_any_digits_normal_or_not(kernel, device):
    """Digits of any size and sign, as sums of shards leave them; large ones overflow float32 to infinity."""
    random = generators.hashes(1, 0, 300 * 11).astype(np.int64).reshape(300, 11)
    shift = generators.integers(1, 1, random.shape, 2, 63)
    digits = random >> shift
    keep = generators.integers(1, 2, digits.shape, 0, 3) > 0
    top = generators.integers(1, 3, (300, 1), 0, 12)
    digits = np.where(keep & (np.arange(11) < top), digits, 0)
    check_finalize(kernel, device, [[*map(int, row), 0] for row in digits], DENS)


def test_digits_at_the_extremes(kernel, device):
    big = 2**62
    rows = [[0] * 12]
    for k in range(11):
        for x in (1, -1, 2**31, -(2**31), 2**32 - 1, 2**32, -(2**32), big, -big):
            rows.append([x if j == k else 0 for j in range(12)])
    for x in (big, -big, 2**32 - 1, -(2**32) + 1, -1, 1):
        rows.append([x] * 11 + [0])
        rows.append([x if j % 2 else -x for j in range(11)] + [0])
    check_finalize(kernel, device, rows, DENS)


def test_equal_values_in_other_digits_same_bytes(kernel, device):
    """Moving carries between digits, and cancelling ones, changes nothing."""
    Q, K, V = make("mixed", device, Sq=9, Skv=40, D=24, seed=2)
    num, den = kernel.accumulate(Q, K, V, kernel.rowmax(Q, K))
    expected = kernel.finalize(num, den)
    for trial in range(8):
        carry = generators.hashes(3, trial, num[..., :10].numel()).astype(np.int64) >> (33 + trial)
        carry = tensor(carry.reshape(num[..., :10].shape)).to(device)
        moved = num.clone()
        moved[..., :10] += carry << 32
        moved[..., 1:11] -= carry
        assert not torch.equal(moved, num)
        assert_same_bits(kernel.finalize(moved, den), expected)


def test_a_zero_sum_is_plus_zero(kernel, device):
    """Cancelling digits, cancelling values and negative zeros."""
    rows = [[0] * 12, [2**32, -1] + [0] * 10, [0, -(2**32), 1] + [0] * 9, [-(2**32)] + [1] + [0] * 10]
    check_finalize(kernel, device, rows, [2**31, 0, 1])
    K = torch.zeros(1, 1, 2, 3, device=device)
    V = torch.tensor([[1.5, -0.0, 1e-45], [-1.5, -0.0, -1e-45]], device=device).reshape(1, 1, 2, 3)
    assert_same_bits(kernel.det_attn(K, K, V).cpu(), torch.zeros(1, 1, 2, 3))


def test_nothing_attended_is_plus_zero(kernel, device):
    """DEN = 0 gives +0 whatever the digits say."""
    check_finalize(kernel, device, [digits_of(v) for v in (0, 2**200, -(2**200))], [0])


def test_special_digit(kernel, device):
    nan, neg, pos = 1 << 42, 1 << 21, 1
    inf = float("inf")
    cases = [(0, 1.0), (pos, inf), (5 * pos, inf), (neg, -inf), (7 * neg, -inf), (neg + pos, float("nan")),
             (nan, float("nan")), (3 * nan + pos, float("nan")), (nan + neg + pos, float("nan")),
             ((2**21 - 1) * pos, inf), ((2**21 - 1) * neg, -inf)]
    num = torch.tensor([[*digits_of(2**180)[:11], special] for special, _ in cases], dtype=torch.int64)
    expected = torch.tensor([out for _, out in cases], dtype=torch.float32)
    for den in (2**31, 0):
        found = kernel.finalize(num.reshape(1, 1, 1, -1, 12).to(device), torch.full((1, 1, 1), den).to(device))
        if den == 0:
            expected[0] = 0.0
        assert_same_bits(found.reshape(-1).cpu(), expected)


def test_digits_are_normal_and_signed(kernel, device):
    """accumulate leaves digits 0..9 in [0, 2^32) and the sign in digit 10, at the largest and smallest exponents."""
    for exponent in (-149, -126, -64, 0, 63, 127):
        for sign in (1, -1):
            V = torch.full((1, 1, 1, 2), sign * 2.0**exponent, dtype=torch.float32)
            K = torch.zeros(1, 1, 1, 2)
            num, den = kernel.accumulate(*(x.to(device) for x in (K, K, V, torch.zeros(1, 1, 1, dtype=torch.float64))))
            value = sign * 2 ** (exponent + 180)
            assert num.cpu()[0, 0, 0].tolist() == [digits_of(value)] * 2
            assert den.cpu().tolist() == [[[2**T]]]


def test_many_shards_without_a_carry(kernel, device):
    """2^30 copies of a shard, added digit by digit, equal the integer product."""
    Q, K, V = make("mixed", device, Sq=5, Skv=20, D=8, seed=4)
    num, den = kernel.accumulate(Q, K, V, kernel.rowmax(Q, K))
    total = (num.cpu() * 2**30).reshape(-1, 12)
    values = [value_of(row) for row in num.cpu().reshape(-1, 12).tolist()]
    assert [value_of(row) for row in total.tolist()] == [v * 2**30 for v in values]
    check_finalize(kernel, device, total.tolist(), [2**31, 2**61 + 12345])
    assert_same_bits(kernel.finalize(num * 2**20, den * 2**20), kernel.finalize(num, den))


def test_shards_of_one_key_add_up(kernel, device):
    """Every key its own shard, with signs that make every digit borrow."""
    Q = torch.zeros(1, 1, 1, 4)
    K = torch.zeros(1, 1, 24, 4)
    exponent = torch.arange(24, dtype=torch.float64).reshape(24, 1) * 11 - 126
    V = (torch.tensor([1.0, -1.0, -1.75, -1.875]) * 2.0**exponent).float().reshape(1, 1, 24, 4)
    V[0, 0, ::3] *= -1
    Q, K, V = (x.to(device) for x in (Q, K, V))
    rowmax = kernel.rowmax(Q, K)
    whole, den = kernel.accumulate(Q, K, V, rowmax)
    parts = [kernel.accumulate(Q, K, V, rowmax, kv_lo=j, kv_hi=j + 1) for j in range(24)]
    total = sum(num for num, _ in parts)
    found = [value_of(row) for row in whole.reshape(-1, 12).tolist()]
    assert [value_of(row) for row in total.reshape(-1, 12).tolist()] == found
    assert_same_bits(kernel.finalize(total, sum(d for _, d in parts)), kernel.finalize(whole, den))
    values = [sum(Fraction(float(x)) for x in V[0, 0, :, d].cpu()) * 2**180 for d in range(4)]
    assert found == values  # 24 equal scores: all weights 2^T


# -- Every flush of every accumulator ------------------------------------------------------------------------------


def extremes(pattern, shape):
    """Rows whose integers are the b-bit extremes, -2^23 or 2^23 - 1."""
    B, H, S, D = shape
    j, d = torch.arange(S).reshape(S, 1), torch.arange(D).reshape(1, D)
    sign = {
        "all plus": torch.ones(S, D),
        "all minus": -torch.ones(S, D),
        "alternating keys": 1.0 - 2.0 * (j % 2) + 0 * d,
        "alternating channels": 1.0 - 2.0 * (d % 2) + 0 * j,
        "alternating pairs": 1.0 - 2.0 * ((j + d) % 2),
        "halves": torch.where(j < S // 2, 1.0, -1.0) + 0 * d,
        "near exponents": 2.0 ** (j % 5) + 0 * d,  # rows that may share an accumulator, with a smaller budget
        "spread exponents": 2.0 ** (j * 7 % 23) + 0 * d,  # and rows that may not
    }[pattern]
    return (sign * EDGE).float().expand(B, H, S, D).contiguous()


PATTERNS = ["all plus", "all minus", "alternating keys", "alternating channels", "alternating pairs", "halves",
            "near exponents", "spread exponents"]  # fmt: skip


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("Skv,D", [(70001, 2), (3000, 256)])
def test_long_rows_of_extreme_values(kernel, device, Skv, D, pattern, precision):
    """All values extreme, all weights near 2^T: partial sums reach every bound that a budget of keys is derived from.

    Query 0: all weights 2^T. Query 1: 0x7fffff80 and the like, bytes as large as they get. Queries 2, 3: 0x7fff....
    with changing low bits, so that a sum that outgrew its accumulator, or a float64's 53 bits, shows.
    """
    V = extremes(pattern, (1, 1, Skv, D))
    Q = torch.zeros(1, 1, 4, D)
    Q[0, 0, :, :2] = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    K = torch.zeros(1, 1, Skv, D)
    K[0, 0, :, 0] = -(2.0**-24) * (torch.arange(Skv) % 2)
    K[0, 0, :, 1] = -(2.0**-24) * tensor(generators.integers(8, 0, (Skv,), 0, 2**10)).float()
    # One thread, or a batch for every multiprocessor: keys are then not shared out, and one accumulator meets them all.
    with threads(1):
        compare(kernel, device, (Q, K, V), 1.0, precision, copies=1 if device == "cpu" else 160)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("q_pattern", PATTERNS)
def test_scores_of_extreme_rows(kernel, device, q_pattern, precision):
    """D = 256 rows of extreme integers: dot products up to +-2^54, where float64 no longer holds every integer."""
    Q = extremes(q_pattern, (1, 1, 6, 256))
    K = torch.cat([extremes(p, (1, 1, 20, 256)) for p in PATTERNS], 2)
    small = generators.integers(5, 0, K.shape, 0, 2**12)  # odd low bits, so that a rounded dot product shows
    K = torch.where(torch.arange(K.shape[2]).reshape(-1, 1) % 2 == 0, K, K * (1 - tensor(small) * 2.0**-23)).float()
    V = extremes("alternating pairs", tuple(K.shape))
    for scale in (2.0**-8, 1.0, 2.0**19, 2.0**20, 2.0**21, 2.0**30):  # from 2^19 on, S keeps nearly every bit of I
        compare_scores(kernel, device, Q, K, scale, precision)
        compare(kernel, device, (Q, K, V), scale, precision)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_scores_at_every_shift(kernel, device, precision):
    """r from far right to far left: ties of rhu go up, for negative sums too, and S saturates where it must."""
    q = generators.integers(6, 0, (1, 1, 6, 3), -40, 41)
    k = generators.integers(6, 1, (1, 1, 40, 3), -40, 41)
    Q, K = tensor(q).float(), tensor(k).float()
    K[0, 0, :9] *= EDGE  # rows with every bit
    V = make("normal", Skv=40, D=3, seed=6)[2]
    for power in range(-75, 70):
        compare_scores(kernel, device, Q, K, 2.0**power, precision)
        compare(kernel, device, (Q, K, V), 2.0**power, precision)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_values_at_every_exponent(kernel, device, precision):
    """NUM lands on the right bit for each ev from -126 to 128, alone and beside its neighbours."""
    Q, K, _ = make("normal", Sq=2, Skv=6, D=3, seed=7)
    value = tensor(generators.integers(7, 9, (1, 1, 6, 3), -(2**23), 2**23)).double()
    for exponent in range(-126, 129):
        V = torch.ldexp(value, torch.tensor(exponent - 23))
        V[0, 0, 3:] *= 2.0 ** -(exponent % 5)
        compare(kernel, device, (Q, K, V.float()), None, precision)


def compare_scores(kernel, device, Q, K, scale, precision):
    """Every score by itself: with one key a batch, the maximum is the score."""
    keys = K.transpose(0, 2).contiguous()
    Q = Q.expand(keys.shape[0], *Q.shape[1:])
    expected = tensor(oracle.rowmax(Q, keys, False, scale, precision=precision))
    for path in paths(kernel, device):
        found = kernel.rowmax(Q.to(device), keys.to(device), False, scale, precision=precision, path=path)
        assert_same_bits(found.cpu(), expected, "scores")


def compare(kernel, device, inputs, scale, precision, copies=1):
    """The stages and the fused call against the oracle; `copies` repeats the batch without repeating its memory."""
    Q, K, V = inputs
    rowmax = oracle.rowmax(Q, K, False, scale, precision=precision)
    num, den = oracle.accumulate(Q, K, V, rowmax, False, scale, precision=precision)
    out = oracle.finalize(num, den, precision)
    expected = [tensor(x).expand(copies, *x.shape[1:]) for x in (rowmax, num, den, out)]
    Q, K, V = (x.to(device).expand(copies, *x.shape[1:]) for x in inputs)
    for path in paths(kernel, device):
        how = dict(precision=precision, path=path)
        found = kernel.rowmax(Q, K, False, scale, **how)
        sums = kernel.accumulate(Q, K, V, found, False, scale, **how)
        found = (found, *sums, kernel.det_attn(Q, K, V, False, scale, **how))
        for name, a, b in zip(("rowmax", "NUM", "DEN", "out"), found, expected):
            assert_same_bits(a.cpu(), b, name)
