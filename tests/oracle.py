"""The oracle: docs/contract.md in numpy and Python integers. Short and slow on purpose; shares nothing with csrc/.

In: float32 arrays (or torch tensors of any input dtype), Q [B, Hq, Sq, D], K and V [B, Hkv, Skv, D].
Out: the integers and bytes of every named boundary. One function per section of the contract.
"""

from typing import NamedTuple

import numpy as np

BITS = {"highest": (24, 31), "high": (16, 23)}  # b operand bits, T weight bits
POLY = np.array([0x3F800000, 0xBF317218, 0x3E75FDEC, 0xBD635780, 0x3C1D96CE, 0xBAAF9F01, 0x3920FB96], np.uint32)
POLY = POLY.view(np.float32)
POISONED = np.iinfo(np.int64).max  # M of a row that a NaN or infinity in Q or K reaches
EMPTY = np.iinfo(np.int64).min  # M of a row that attends nothing
NAN, NEG_INF, POS_INF = 1 << 42, 1 << 21, 1  # what one special value adds to digit 11
BAD_ROW = np.iinfo(np.int32).max  # exponent that `rows` gives a query or key row with a NaN or infinity
V_MARK = {"nan": -(2**31), "+inf": 2**31 - 1, "-inf": -(2**31) + 1}  # integers that `rows` gives such values


def to_f32(x):
    """Every input dtype is a subset of float32, so this is exact."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().float().numpy()
    return np.asarray(x, np.float32)


def rhu(x, s):
    """(x + 2^(s-1)) >> s, and x for s = 0; 0 <= s <= 61 and |x| < 2^62."""
    half = np.where(s > 0, np.int64(1) << np.maximum(s - 1, 0), 0)
    return (x + half) >> s


# -- 1. Rows -----------------------------------------------------------------------------------------------------


def rows(x, kind, scale=None, precision="highest"):
    """(x^ int32 [..., D], e int32 [...]). `kind` is query, key or value; only queries are scaled."""
    b = BITS[precision][0]
    x = to_f32(x).astype(np.float64)
    if kind == "query":
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            x = x * np.float64(default_scale(scale, x.shape[-1]))
    finite = np.isfinite(x)
    largest = np.abs(np.where(finite, x, 0)).max(-1, initial=0)
    e = np.where(largest > 0, np.frexp(largest)[1], -126).clip(min=-126)
    scaled = np.ldexp(np.where(finite, x, 0), b - 1 - e[..., None])
    xi = np.rint(scaled).clip(-(2.0 ** (b - 1)), 2.0 ** (b - 1) - 1).astype(np.int64)
    if kind == "value":
        xi = np.where(np.isnan(x), V_MARK["nan"], xi)
        xi = np.where(np.isposinf(x), V_MARK["+inf"], xi)
        xi = np.where(np.isneginf(x), V_MARK["-inf"], xi)
    else:
        bad = ~finite.all(-1)
        xi = np.where(bad[..., None], 0, xi)
        e = np.where(bad, BAD_ROW, e)
    return xi.astype(np.int32), e.astype(np.int32)


def default_scale(scale, head_dim):
    return 1 / float(np.sqrt(np.float64(head_dim))) if scale is None else float(scale)


# -- 2. Scores ---------------------------------------------------------------------------------------------------


def scores(q, eq, k, ek, b):
    """S int64 [Sq, Skv] of the integer rows q [Sq, D] and k [Skv, D]."""
    dot = q.astype(np.int64) @ k.astype(np.int64).T
    r = 2 * (b - 1) - 24 - eq.astype(np.int64)[:, None] - ek.astype(np.int64)[None, :]
    right = rhu(dot, r.clip(0, 60))  # |I| <= 2^54, so every r >= 56 gives 0
    left = (-r).clip(0, 52)
    limit = np.int64(2**52) >> left  # from |I| = limit on, I * 2^-r saturates
    return np.where(r > 0, right, dot.clip(-limit, limit) << left).clip(-(2**52), 2**52)


def attended(q_len, kv_len, causal, kv_lo=0, kv_hi=None, q_offset=None, kv_offset=0, window=(-1, -1), ranges=None):
    """Mask [Sq, Skv], and the place [Sq, 1] of each query among the keys given.

    kv_lo and kv_hi count rows of the K given; row 0 of it is global key kv_offset. ranges [Sq, 2 or 3].
    """
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    mask = (j >= kv_lo) & (j < (kv_len if kv_hi is None else kv_hi)) & (i >= 0)
    place = i + (kv_len - q_len if q_offset is None else q_offset) - kv_offset
    if ranges is not None:
        mask &= (j >= ranges[:, :1]) & (j < ranges[:, 1:2])
        place = ranges[:, 2:].astype(np.int64) if ranges.shape[1] == 3 else place
    left, right = window
    right = 0 if causal else right
    if left >= 0:
        mask &= j >= place - left
    if right >= 0:
        mask &= j <= place + right
    return mask, place


# -- 3. Row maximum ----------------------------------------------------------------------------------------------


def row_maximum(S, mask, q_bad, pair_bad):
    """M int64 [Sq]."""
    M = np.where(mask, S, EMPTY).max(-1, initial=EMPTY)
    return np.where(q_bad | pair_bad.any(-1), POISONED, M)


def public_rowmax(M):
    m = np.where((M == EMPTY) | (M == POISONED), 0, M) * 2.0**-24
    return np.where(M == POISONED, np.nan, np.where(M == EMPTY, -np.inf, m))


def integer_rowmax(m):
    """M of any float64 rowmax, one that no row can have included."""
    M = (np.where(np.isnan(m), 0, m) * 2.0**24).clip(-(2.0**52), 2.0**52).astype(np.int64)
    return np.where(np.isnan(m), POISONED, np.where(np.isneginf(m), EMPTY, M))


# -- 4. Weights --------------------------------------------------------------------------------------------------


def fma32(a, b, c):
    """f32(a * b + c) rounded once, for float32 arrays: the float64 sum is rounded to odd, then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)  # 48 bits: exact
    c = np.float64(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # Knuth's two-sum: total + error is the exact sum
    odd = np.where(error > 0, np.nextafter(total, np.inf), np.nextafter(total, -np.inf))
    even = (total.view(np.int64) & 1) == 0
    return np.where((error != 0) & even, odd, total).astype(np.float32)


def exp2_minus(g):
    """p: 2^-g by the contract's polynomial, g float32 in [-1/2, 1/2)."""
    p = np.full_like(g, POLY[6])
    for c in POLY[5::-1]:
        p = fma32(g, p, c)
    return p


def weights(dist, T):
    """W int64 of dist = M - S; below 0, where M is not the maximum, it counts as 0."""
    inside = dist < 2**29
    u = (np.where(inside, dist, 0).clip(min=0) * np.int64(1549082005) + 2**29) >> 30
    n = (u + 2**23) >> 24
    g = ((u - (n << 24)).astype(np.float32) * np.float32(2.0**-24)).astype(np.float32)
    w = np.ldexp(exp2_minus(g).astype(np.float64), 31).astype(np.int64)
    s = n + 31 - T
    return np.where(inside & (s <= 33), rhu(w, s.clip(0, 33)), 0)


# -- 5 and 7. Exact sums -----------------------------------------------------------------------------------------


def exact_sums(W, mask, v, ev, b, T):
    """NUM [Sq, D] as Python integers in units of 2^-180, and digit 11 [Sq, D]."""
    total = np.zeros((W.shape[0], v.shape[1]), object)
    special = sum(
        (mask.astype(np.int64) @ (v == V_MARK[name]).astype(np.int64)) * count
        for name, count in (("nan", NAN), ("-inf", NEG_INF), ("+inf", POS_INF))
    )
    v = np.where(np.isin(v, list(V_MARK.values())), 0, v).astype(np.int64)
    for e in np.unique(ev):
        of = ev == e
        high, low = W[:, of] >> 16, W[:, of] & 0xFFFF  # halves of 16 bits: 2^16 * 2^23 * 2^23 keys fit an int64
        terms = ((high @ v[of]).astype(object) << 16) + (low @ v[of]).astype(object)
        total = total + terms * 2 ** int(e - (b - 1) - T + 180)
    return total, special


def to_digits(total, special):
    """Normal digits int64 [..., 12] of Python integers in units of 2^-180."""
    digits = [(total >> (32 * k)) & 0xFFFFFFFF for k in range(10)] + [total >> 320, special]
    return np.stack([d.astype(np.int64) for d in digits], -1)


def from_digits(num):
    """The Python integers, in units of 2^-180, of any digits, normal or not."""
    num = np.asarray(num).astype(object)
    return sum((num[..., k] * 2 ** (32 * k) for k in range(1, 11)), num[..., 0])


# -- 6 and 7. Output ---------------------------------------------------------------------------------------------


def finalize(NUM, DEN, precision="highest", dropout_p=0.0):
    """out float32 [..., D]."""
    T = BITS[precision][1]
    NUM, DEN = np.asarray(NUM), np.asarray(DEN)
    num = np.ldexp(from_digits(NUM).astype(np.float64), -180)  # float(int) rounds once, to even
    den = DEN.astype(np.float64)[..., None] * 2.0**-T
    with np.errstate(over="ignore", under="ignore"):
        out = np.divide(num, den, out=np.zeros_like(num), where=(den != 0) & (num != 0))
        out = (out * np.float64(rescale(dropout_p))).astype(np.float32)
    special = NUM[..., 11]
    nan, neg, pos = special >> 42, (special >> 21) & (2**21 - 1), special & (2**21 - 1)
    out = np.where(pos > 0, np.float32(np.inf), out)
    out = np.where(neg > 0, np.float32(-np.inf), out)
    out = np.where((nan > 0) | ((neg > 0) & (pos > 0)), np.float32(np.nan), out)  # numpy's nan is 0x7fc00000
    return out.astype(np.float32)


# -- 10. Score modifiers -----------------------------------------------------------------------------------------

TANH = [
    0xBFE62E42FEFA39EF, 0x3FCEBFBDFF82C598, 0xBFAC6B08D704A0C2, 0x3F83B2AB6FBA1DDA, 0xBF55D87FE78A5276,
    0x3F2430913096FD9F, 0xBEEFFCBFC670DCD4, 0x3EB62BFD47773353, 0xBE7B524FAE627834, 0x3E3E6063F7217BC6,
    0xBDFE9D3FE3952179,
]  # fmt: skip
TANH = np.array(TANH, np.uint64).view(np.float64)
TWO_LOG2E = np.array([0x40071547652B82FE], np.uint64).view(np.float64)[0]


def two_sum(a, b):
    """a + b rounded, and what that lost (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def halves(x):
    """x as a sum of two numbers of 26 bits (Veltkamp)."""
    high = 134217729.0 * x - (134217729.0 * x - x)
    return high, x - high


def fma64(a, b, c):
    """f64(a * b + c) rounded once, for float64 arrays (Boldo and Melquiond). Nothing may underflow.

    The product is a * b + low exactly; the small parts are added with rounding to odd, so the last sum rounds right.
    """
    (a1, a0), (b1, b0), product = halves(a), halves(b), a * b
    low = a0 * b0 - (((product - a1 * b1) - a0 * b1) - a1 * b0)
    high, rest = two_sum(c, low)
    total, error = two_sum(product, high)
    odd, lost = two_sum(error, rest)
    even = (np.asarray(odd).view(np.int64) & 1) == 0
    return total + np.where((lost != 0) & even, np.nextafter(odd, np.where(lost > 0, np.inf, -np.inf)), odd)


def tanh(x):
    """t of x >= 0."""
    z = np.minimum(x * TWO_LOG2E, 64.0)
    n = np.rint(z)
    f = z - n
    p = np.full_like(f, TANH[10])
    for c in TANH[9::-1]:
        p = fma64(f, p, c)
    power = np.ldexp(1.0, -n.astype(int))
    e = fma64(power, f * p, power - 1.0)
    return -e / (2.0 + e)


def to_score(x):
    """The score of x in true units: an int64 in units of 2^-24, saturated."""
    return np.rint((x * 2.0**24).clip(-(2.0**52), 2.0**52)).astype(np.int64)


def softcap_scores(S, c):
    with np.errstate(over="ignore", under="ignore"):
        return np.sign(S) * to_score(c * tanh(np.abs(S).astype(np.float64) * 2.0**-24 / c))


def softcap_slope(S, c):
    """d float32 of capped scores S."""
    with np.errstate(over="ignore", under="ignore"):
        t = S.astype(np.float64) * 2.0**-24 / c
        return np.maximum(fma64(-t, t, np.float64(1)), 0).astype(np.float32)


def modify(S, mask, place, softcap, slope, bias):
    """(S after the modifiers, the mask without the pairs that the bias masks, the poisoned pairs), and the capped S."""
    capped = S if softcap == 0 else softcap_scores(S, softcap)
    S, poisoned = capped, np.zeros(S.shape, bool)
    if slope is not None:
        poisoned |= not np.isfinite(slope)
        slope = np.float64(slope) if np.isfinite(slope) else 0.0
        distance = np.abs(place - np.arange(S.shape[1])[None, :])
        S = (S + to_score(-(slope * distance.astype(np.float64)))).clip(-(2**52), 2**52)
    if bias is not None:
        mask = mask & ~np.isneginf(bias)
        poisoned = poisoned | ~np.isfinite(bias)
        S = (S + to_score(np.where(np.isfinite(bias), bias, 0).astype(np.float64))).clip(-(2**52), 2**52)
    return S, mask, poisoned & mask, capped


# -- 11. Dropout -------------------------------------------------------------------------------------------------


def philox(counter, seed):
    """Philox4x32-10: four uint32 words for each counter, [..., 4] of Python-sized uint64 holding 32 bits each."""
    x, low = [counter[..., k].astype(np.uint64) for k in range(4)], np.uint64(0xFFFFFFFF)
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> np.uint64(32)) ^ x[1] ^ key[0], b & low, (a >> np.uint64(32)) ^ x[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(x, -1)


def kept(p, seed, rows, head, keys):
    """Which pairs dropout keeps, [Sq, Skv]. rows int64 [Sq] are batch << 32 | query, keys int64 [Skv]."""
    counter = np.zeros((len(rows), len(keys), 4), np.uint64)
    counter[..., 0] = (keys >> 2).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    counter[..., 1] = (rows & 0xFFFFFFFF)[:, None].astype(np.uint64)
    counter[..., 2] = head
    counter[..., 3] = (rows >> 32 & 0xFFFFFFFF)[:, None].astype(np.uint64)
    words = np.take_along_axis(philox(counter, seed), (keys & 3)[None, :, None].repeat(len(rows), 0), -1)[..., 0]
    return words.astype(np.float64) >= np.floor(p * 2.0**32)


def rescale(p):
    """r float32."""
    return np.float32(1 / (1 - p)) if p < 1 else np.float32(0)


class Modifiers(NamedTuple):
    """Section 10 and 11 as numpy arrays; what is None, 0 or (-1, -1) changes nothing."""

    attn_bias: object = None  # bool or float, broadcastable to [B, Hq, Sq, Skv]
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: object = None  # [Hq] or [B, Hq]
    key_ranges: object = None  # [B or 1, Sq, 2 or 3]
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_head: int = 0
    dropout_rows: object = None  # [B, Sq]
    dropout_keys: object = None  # [Skv]

    def bias(self, at, shape):
        if self.attn_bias is None:
            return None
        bias = self.attn_bias
        bias = bias.detach().cpu() if hasattr(bias, "detach") else bias
        bias = np.where(np.asarray(bias), 0.0, -np.inf) if str(bias.dtype).endswith("bool") else to_f32(bias)
        return np.broadcast_to(bias, shape)[at]

    def slope(self, at):
        slopes = None if self.alibi_slopes is None else to_f32(self.alibi_slopes)
        return None if slopes is None else slopes[at[1]] if slopes.ndim == 1 else slopes[at]

    def ranges(self, at):
        return None if self.key_ranges is None else np.asarray(self.key_ranges)[at[0] % len(self.key_ranges)]

    def kept(self, at, q_len, kv_len, q_offset, kv_offset):
        if self.dropout_p == 0:
            return np.ones((q_len, kv_len), bool)
        rows, keys = self.dropout_rows, self.dropout_keys
        start = kv_len - q_len if q_offset is None else q_offset
        rows = (at[0] << 32) + (np.arange(q_len) + start & 0xFFFFFFFF) if rows is None else np.asarray(rows)[at[0]]
        keys = np.arange(kv_len) + kv_offset if keys is None else np.asarray(keys)
        return kept(self.dropout_p, self.dropout_seed, rows, at[1] + self.dropout_head, keys)


# -- The stages over batches and heads ---------------------------------------------------------------------------


class Pairs(NamedTuple):
    """One query head against its key head: everything up to the scores."""

    S: np.ndarray
    mask: np.ndarray
    q_bad: np.ndarray
    pair_bad: np.ndarray  # attended, and the key or a modifier is not finite
    capped: np.ndarray  # S after the softcap alone
    kept: np.ndarray


def _pairs(Q, K, causal, scale, kv_lo, kv_hi, precision, q_offset, kv_offset, modifiers):
    """((batch, query head, key head), Pairs) for every query head."""
    modifiers = Modifiers(**modifiers)
    b = BITS[precision][0]
    q, eq = rows(Q, "query", scale, precision)
    k, ek = rows(K, "key", None, precision)
    q_bad, k_bad = eq == BAD_ROW, ek == BAD_ROW
    eq, ek = np.where(q_bad, 0, eq), np.where(k_bad, 0, ek)
    size = q.shape[2], k.shape[2]
    group = max(q.shape[1] // max(k.shape[1], 1), 1)
    for batch in range(q.shape[0]):
        for h in range(q.shape[1]):
            at, to = (batch, h), (batch, h // group)
            ranges = modifiers.ranges(at)
            mask, place = attended(*size, causal, kv_lo, kv_hi, q_offset, kv_offset, modifiers.window, ranges)
            S = scores(q[at], eq[at], k[to], ek[to], b)
            bias = modifiers.bias(at, (*q.shape[:2], *size))
            S, mask, bad, capped = modify(S, mask, place, modifiers.softcap, modifiers.slope(at), bias)
            kept_pairs = modifiers.kept(at, *size, q_offset, kv_offset)
            yield at, to, Pairs(S, mask, q_bad[at], bad | (mask & k_bad[to]), capped, kept_pairs)


def rowmax(Q, K, causal=False, scale=None, kv_lo=0, kv_hi=None, *, precision="highest", q_offset=None, kv_offset=0,
           **modifiers):
    """float64 [B, Hq, Sq]."""
    out = np.empty(Q.shape[:3], np.float64)
    for at, _, pair in _pairs(Q, K, causal, scale, kv_lo, kv_hi, precision, q_offset, kv_offset, modifiers):
        out[at] = public_rowmax(row_maximum(*pair[:4]))
    return out


def accumulate(Q, K, V, rowmax, causal=False, scale=None, kv_lo=0, kv_hi=None, *, precision="highest", q_offset=None,
               kv_offset=0, **modifiers):
    """(NUM int64 [B, Hq, Sq, D, 12] normalised, DEN int64 [B, Hq, Sq])."""
    b, T = BITS[precision]
    v, ev = rows(V, "value", None, precision)
    M = integer_rowmax(np.asarray(rowmax))
    NUM = np.zeros((*Q.shape, 12), np.int64)
    DEN = np.zeros(Q.shape[:3], np.int64)
    for at, to, pair in _pairs(Q, K, causal, scale, kv_lo, kv_hi, precision, q_offset, kv_offset, modifiers):
        mask = pair.mask & (M[at] != EMPTY)[:, None]
        bad = (M[at] == POISONED) | pair.q_bad | (mask & pair.pair_bad).any(-1)
        mask &= ~bad[:, None]
        W = np.where(mask, weights(np.where(mask, M[at][:, None], 0) - np.where(mask, pair.S, 0), T), 0)
        DEN[at] = W.sum(-1)
        total, special = exact_sums(W * pair.kept, mask, v[to], ev[to], b, T)
        NUM[at] = to_digits(total, special + np.where(bad, NAN, 0)[:, None])
    return NUM, DEN


class Forward(NamedTuple):
    out: np.ndarray
    rowmax: np.ndarray
    NUM: np.ndarray
    DEN: np.ndarray


def det_attn(Q, K, V, causal=False, scale=None, *, precision="highest", q_offset=None, **modifiers):
    """Every boundary of the fused call: Forward(out, rowmax, NUM, DEN)."""
    how = dict(precision=precision, q_offset=q_offset, **modifiers)
    m = rowmax(Q, K, causal, scale, **how)
    NUM, DEN = accumulate(Q, K, V, m, causal, scale, **how)
    return Forward(finalize(NUM, DEN, precision, modifiers.get("dropout_p", 0.0)), m, NUM, DEN)


# -- 8. Gradients ------------------------------------------------------------------------------------------------

G = {"dQ": 23, "dK": 24, "dV": 24}  # a term is an integer of G bits and a sign
NO_TERM = np.iinfo(np.int64).min // 2  # a reference over no nonzero term


def exponent(x):
    """E(x) with 2^(E-1) <= |x| < 2^E; NO_TERM for zero."""
    return np.where(x != 0, np.frexp(x.astype(np.float64))[1].astype(np.int64), NO_TERM)


def f32_product(W, r):
    """f32(W * r) rounded once: W int64 below 2^32, r float32."""
    high = (W >> 16).astype(np.float64) * 65536.0 * r.astype(np.float64)  # 16 + 24 bits: exact
    return fma32((W & 0xFFFF).astype(np.float32), r, high)


def pair_gradients(W, DEN, v, ev, o, eo, delta, b, T, kept, r, slope):
    """p (p~ under dropout) and ds, float32 [Sq, Skv], of one query head. W is 0 where a key is not attended."""
    dot = (o.astype(np.int64) @ v.astype(np.int64).T).astype(np.float32)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        dP = np.ldexp(dot, eo[:, None] + ev[None, :] - 2 * (b - 1))
        rinv = (2.0**T / DEN.astype(np.float64)).astype(np.float32)
        p = np.where(W > 0, np.ldexp(f32_product(W, np.where(DEN > 0, rinv, 0)[:, None]), -T), np.float32(0))
        ds = p * (np.where(kept, dP * r, np.float32(0)) - delta[:, None]) * slope
        return np.where(kept, p * r, np.float32(0)), np.where(W > 0, ds, np.float32(0))


def gradient_sum(terms, exponents, integers, reference, b, G):
    """f64 of sum_s rne(terms[.., s] * 2^(exponents[s] + G - reference)) * integers[s, :], over the last axis of terms.

    terms [R, S], exponents [S], integers [S, D], reference [R]; the sum is an exact integer, rounded once, then scaled.
    """
    empty = reference == NO_TERM
    reference = np.where(empty, 0, reference)
    short = np.rint(np.ldexp(terms.astype(np.float64), exponents[None, :] + G - reference[:, None]))
    total = np.zeros((terms.shape[0], integers.shape[1]), object)
    for part in range(0, terms.shape[1], 2**15):  # 2^15 products of 2^47 fit an int64
        piece = slice(part, part + 2**15)
        total += (short[:, piece].astype(np.int64) @ integers[piece].astype(np.int64)).astype(object)
    scaled = np.ldexp(total.astype(np.float64), (reference - G - (b - 1))[:, None])
    return np.where(empty[:, None], 0.0, scaled)


class Gradients(NamedTuple):
    """float32 dQ, dK, dV; references int64 A [B, Hq, Sq], B and C [B, Hkv, Skv], NO_TERM over nothing but zeros."""

    dQ: np.ndarray
    dK: np.ndarray
    dV: np.ndarray
    A: np.ndarray
    B: np.ndarray
    C: np.ndarray


def gradients(Q, K, V, dO, causal=False, scale=None, *, precision="highest", q_offset=None, **modifiers):
    """Section 8 for the whole call. A row i with a bad pair gives nothing to the sums of others (and is NaN itself)."""
    b, T = BITS[precision]
    out, m, _, DEN = det_attn(Q, K, V, causal, scale, precision=precision, q_offset=q_offset, **modifiers)
    softcap, r = modifiers.get("softcap", 0.0), rescale(modifiers.get("dropout_p", 0.0))
    M = integer_rowmax(m)
    q, eq = rows(Q, "query", scale, precision)
    k, ek = rows(K, "key", None, precision)
    v, ev = rows(V, "value", None, precision)
    o, eo = rows(dO, "key", None, precision)
    scale = default_scale(scale, q.shape[-1])
    v_bad = np.isin(v, list(V_MARK.values())).any(-1)
    v = np.where(v_bad[..., None], 0, v)
    ek, eo, ev = (np.where(e == BAD_ROW, 0, e).astype(np.int64) for e in (ek, eo, ev))
    eq = np.where(eq == BAD_ROW, 0, eq).astype(np.int64)
    o_bad = ~np.isfinite(to_f32(dO)).all(-1)
    delta = row_deltas(to_f32(dO), out)
    shape, keys = q.shape[:3], k.shape[:3]
    dQ, dK, dV = (np.zeros(x.shape, np.float64) for x in (q, k, v))
    A, B, C = np.full(shape, NO_TERM), np.full(keys, NO_TERM), np.full(keys, NO_TERM)
    bad_q, bad_k = np.zeros(shape, bool), np.zeros(keys, bool)
    over_q, over_k = np.zeros(shape, bool), np.zeros(keys, bool)  # a ds beyond float32: dV does not see it
    pairs = {}
    for at, to, pair in _pairs(Q, K, causal, scale, 0, None, precision, q_offset, 0, modifiers):
        bad_pair = pair.pair_bad | (pair.mask & ((pair.q_bad | o_bad[at])[:, None] | v_bad[to][None, :]))
        bad_q[at] = bad_pair.any(-1) | (pair.mask.any(-1) & ~np.isfinite(out[at]).all(-1))
        bad_k[to] |= bad_pair.any(0)
        mask = pair.mask & ~bad_q[at][:, None]
        W = np.where(mask, weights(np.where(mask, M[at][:, None] - pair.S, 0), T), 0)
        slope = np.float32(1) if softcap == 0 else softcap_slope(pair.capped, softcap)
        p, ds = pair_gradients(W, DEN[at], v[to], ev[to], o[at], eo[at], delta[at], b, T, pair.kept, r, slope)
        overflow = ~np.isfinite(ds)
        over_q[at] = overflow.any(-1)
        over_k[to] |= overflow.any(0)
        ds = np.where(overflow, np.float32(0), ds)
        A[at] = (exponent(ds) + ek[to][None, :]).max(-1, initial=NO_TERM)
        A[at] = np.where((ds != 0).any(-1), A[at], NO_TERM)
        total = gradient_sum(ds, ek[to], k[to], A[at], b, G["dQ"])
        dQ[at] = np.where(total == 0, 0, scale * total)
        pairs.setdefault(to, []).append((at, p, ds))
    for to, heads in pairs.items():  # dK and dV sum over every query head of the group
        p, ds = (np.concatenate([head[n] for head in heads]).T for n in (1, 2))  # [Skv, group * Sq]
        qs, os = (np.concatenate([x[head[0]] for head in heads]) for x in (q, o))
        eqs, eos = (np.concatenate([x[head[0]] for head in heads]) for x in (eq, eo))
        B[to] = np.where((ds != 0).any(-1), (exponent(ds) + eqs).max(-1, initial=NO_TERM), NO_TERM)
        C[to] = np.where((p != 0).any(-1), (exponent(p) + eos).max(-1, initial=NO_TERM), NO_TERM)
        dK[to] = gradient_sum(ds, eqs, qs, B[to], b, G["dK"])
        dV[to] = gradient_sum(p, eos, os, C[to], b, G["dV"])
    dQ[bad_q | over_q], dK[bad_k | over_k], dV[bad_k] = np.nan, np.nan, np.nan
    with np.errstate(over="ignore", under="ignore"):
        return Gradients(*(x.astype(np.float32) for x in (dQ, dK, dV)), A, B, C)


def public_reference(reference, gradient):
    """A, B or C as int32: 2^31 - 1 for the rows that are NaN, -2^31 for those without a term."""
    found = np.where(reference == NO_TERM, -(2**31), reference)
    return np.where(np.isnan(gradient).any(-1), 2**31 - 1, found).astype(np.int32)


def row_deltas(dO, out):
    """delta float32: float64 fma, d ascending; the product of two float32 is exact, so a sum is the fma."""
    total = np.zeros(out.shape[:3], np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for d in range(out.shape[3]):
            total = total + dO[..., d].astype(np.float64) * out[..., d].astype(np.float64)
        return total.astype(np.float32)
