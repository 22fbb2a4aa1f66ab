"""Inputs by integer arithmetic alone, so that every machine and every library version makes the same bytes.

In: a family's name, sizes, dtype and seed. Out: Q [B, Hq, Sq, D], K and V [B, Hkv, Skv, D] on the CPU.

Element n of stream s of seed z is a function of the 64-bit hash
    h(z, s, n) = splitmix64(splitmix64(splitmix64(z) + s) + n)      all modulo 2^64
with splitmix64 the finaliser of Steele, Lea and Flood (after its increment). A "normal" number is the sum of twelve
20-bit fields of four such hashes, centred, times 2^-20: an integer below 2^23 times a power of two, so exact in
float32. Rounding to bfloat16 or float16 is IEEE round to nearest even.
"""

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAMILIES = ("normal", "sharp", "outlier", "mixed", "ties", "denormals", "saturating", "special")


def splitmix64(x):
    x = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashes(seed, stream, count):
    """uint64 [count]."""
    with np.errstate(over="ignore"):
        start = splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(stream))
        return splitmix64(start + np.arange(count, dtype=np.uint64))


def integers(seed, stream, shape, low, high):
    """int64 in [low, high)."""
    h = hashes(seed, stream, int(np.prod(shape)))
    return (h % np.uint64(high - low)).astype(np.int64).reshape(shape) + low


def normal(seed, stream, shape):
    """float32, close to a standard normal; |x| < 6."""
    count = int(np.prod(shape))
    total = np.zeros(count, np.int64)
    for part in range(4):
        h = hashes(seed, stream * 4 + part, count)
        for field in range(3):
            total += ((h >> np.uint64(20 * field)) & np.uint64(0xFFFFF)).astype(np.int64)
    return np.ldexp((total - 6 * 0xFFFFF).astype(np.float64), -20).astype(np.float32).reshape(shape)


def scaled(x, exponent):
    """x * 2^exponent, rounded once to float32; saturates at the largest float32 instead of overflowing."""
    y = np.ldexp(x.astype(np.float64), exponent)
    limit = float(np.finfo(np.float32).max)
    return y.clip(-limit, limit).astype(np.float32)


def row_exponents(seed, stream, shape, low, high):
    return integers(seed, stream, (*shape[:-1], 1), low, high)


def sprinkle(seed, stream, x, values, one_in):
    """Overwrites about one element in `one_in` of the rows' elements by one of `values`."""
    where = integers(seed, stream, x.shape, 0, one_in) == 0
    which = integers(seed, stream + 1, x.shape, 0, len(values))
    return np.where(where, np.array(values, np.float32)[which], x)


def _family(family, small, seed, shapes):
    """Q, K, V float32. `small`: float16 has five exponent bits only."""
    q, k, v = (normal(seed, 100 + n, s) for n, s in enumerate(shapes))
    if family == "normal":
        pass
    elif family == "sharp":  # scores of size 16 * sqrt(D): the softmax is nearly one-hot
        q = scaled(q, 4)
    elif family == "outlier":  # one element in 64 is 8 times larger
        q, k, v = (scaled(x, 3 * (integers(seed, 200 + n, x.shape, 0, 64) == 0)) for n, x in enumerate((q, k, v)))
    elif family == "mixed":  # huge and tiny rows side by side; scores stay moderate, or the maximum is a lone key
        wide = 8 if small else 60
        q = scaled(q, row_exponents(seed, 300, q.shape, -wide, wide))
        k = scaled(k, row_exponents(seed, 301, k.shape, -wide, wide // 4))
        v = scaled(v, row_exponents(seed, 302, v.shape, -20 if small else -150, 12 if small else 125))
    elif family == "ties":  # few values: equal scores, equal maxima, halves that round to even
        q, k = (integers(seed, 400 + n, x.shape, -2, 3).astype(np.float32) for n, x in enumerate((q, k)))
        v = scaled(integers(seed, 402, v.shape, -5, 6).astype(np.float32), -1)
    elif family == "denormals":  # every element is a denormal of its dtype, or next to one
        q, k, v = (scaled(x, -16 if small else -128) for x in (q, k, v))
    elif family == "saturating":  # scores on both sides of +-2^28, where S saturates
        q = scaled(q, 12 if small else 24)
        k = scaled(k, 12 if small else row_exponents(seed, 500, k.shape, -10, 30))
    elif family == "special":  # NaN, both infinities, both zeros and the largest numbers, in some rows
        largest = 65504.0 if small else 3.3895314e38
        q = sprinkle(seed, 600, q, [np.nan, np.inf, -np.inf, 0.0, -0.0, largest, -largest], 16 * q.shape[-1])
        k = sprinkle(seed, 610, k, [np.nan, np.inf, -np.inf, 0.0, -0.0, largest, -largest], 128 * k.shape[-1])
        v = sprinkle(seed, 620, v, [np.nan, np.inf, -np.inf, 0.0, -0.0, largest, -largest], 40)
    else:
        raise ValueError(f"family is {family!r}, expected one of {FAMILIES}")
    return q, k, v


def inputs(family, *, B=1, Hq=1, Hkv=None, Sq=16, Skv=None, D=16, dtype="float32", seed=0):
    """Q, K, V as torch tensors on the CPU. Hkv defaults to Hq, Skv to Sq."""
    Hkv, Skv = Hq if Hkv is None else Hkv, Sq if Skv is None else Skv
    shapes = (B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, D)
    return tuple(torch.from_numpy(x).to(DTYPES[dtype]) for x in _family(family, dtype == "float16", seed, shapes))


def torch_scale(family):
    """The scale a family is meant for; None is 1/sqrt(D)."""
    return 1.0 if family == "ties" else None
