"""How accurate the contract is: the exponential on every fraction it can meet, and whole attentions against float64.

The exponential is checked twice: the oracle's on all 2^24 fractions against 2^-g, and the kernel's against the
oracle's on a run of distances that meets all 2^24 fractions.
"""

import functools

import numpy as np
import pytest
import torch

import generators
import oracle
from helpers import make, paths

BOUND = -23.88  # section 4: log2 of the largest relative error of p, to two decimals
ALL_FRACTIONS = 2**27  # the distances below this one meet every fraction; a test counts them


# -- The exponential -----------------------------------------------------------------------------------------------


def in_blocks(first, last, size=2**18):
    for start in range(first, last, size):
        yield np.arange(start, min(start + size, last), dtype=np.int64)


@functools.lru_cache(maxsize=None)
def table():
    """The oracle's p * 2^31 for the fractions -2^23 .. 2^23 - 1."""
    parts = [oracle.exp2_minus(f.astype(np.float32) * np.float32(2.0**-24)) for f in in_blocks(-(2**23), 2**23)]
    return np.ldexp(np.concatenate(parts).astype(np.float64), 31).astype(np.int64)


def weights_by_table(dist):
    """Section 4 for T = 31, the polynomial looked up."""
    u = (dist * np.int64(1549082005) + 2**29) >> 30
    n = (u + 2**23) >> 24
    return oracle.rhu(table()[u - (n << 24) + 2**23], n), u & (2**24 - 1)


def test_polynomial_bound_on_all_fractions():
    worst = 0.0
    for f in in_blocks(-(2**23), 2**23):
        exact = np.exp2(-np.ldexp(f.astype(np.float64), -24))
        worst = max(worst, np.abs(np.ldexp(table()[f + 2**23].astype(np.float64), -31) / exact - 1).max())
    assert round(float(np.log2(worst)), 2) == BOUND


def test_polynomial_is_monotone_on_all_fractions():
    """Within a power of two, and from the last fraction of one to the first of the next, after every rounding."""
    assert (np.diff(table()) <= 0).all()
    for precision in ("highest", "high"):
        for n in range(0, 33):
            s = n + 31 - oracle.BITS[precision][1]
            if s < 33:
                assert oracle.rhu(table()[:1], np.int64(s + 1)) <= oracle.rhu(table()[-1:], np.int64(s))


def test_table_is_the_oracles_weights():
    dist = generators.integers(1, 0, (200_000,), 0, ALL_FRACTIONS)
    assert (weights_by_table(dist)[0] == oracle.weights(dist, 31)).all()


def kernel_weights(kernel, device, path, i):
    """W of the distances 256 i + j, j = 0..255, int64 [len(i), 256], read off the digits of NUM.

    q_i . k_j = -(256 i + j) * 2^-24 exactly, and the maximum is given as 0. Value j is 2^(32 k - 149) in one column,
    so W_j is digit k of that column: eight keys share each of 32 columns and no two share a digit.
    """
    D, K_PER_COLUMN = 32, 8
    Q = torch.zeros(1, 1, len(i), D)
    Q[0, 0, :, 0], Q[0, 0, :, 1] = 2.0**-8, torch.from_numpy(i).double().mul(2.0**-16).float()
    K, V = torch.zeros(1, 1, 256, D), torch.zeros(1, 1, 256, D)
    K[0, 0, :, 0], K[0, 0, :, 1] = -torch.arange(256) * 2.0**-16, -1.0
    for j in range(256):
        V[0, 0, j, j % D] = 2.0 ** (32 * (1 + j // D) - 149)
    zero = torch.zeros(1, 1, len(i), dtype=torch.float64)
    num, den = kernel.accumulate(*(x.to(device) for x in (Q, K, V, zero)), scale=1.0, path=path)
    W = num[0, 0, :, :, 1 : 1 + K_PER_COLUMN].transpose(1, 2).reshape(len(i), 256).cpu().numpy()
    assert (W.sum(-1) == den[0, 0].cpu().numpy()).all()
    return W


@pytest.mark.slow
def test_kernel_weights_at_every_fraction(kernel, device):
    """The shipped exponential, on consecutive distances that meet all 2^24 fractions: exact and monotone."""
    seen = np.zeros(2**24, bool)
    last = 2**31
    for i in in_blocks(0, ALL_FRACTIONS // 256, 2**12):
        dist = (i[:, None] * 256 + np.arange(256)).ravel()
        expected, fraction = weights_by_table(dist)
        seen[fraction] = True
        for path in paths(kernel, device):
            W = kernel_weights(kernel, device, path, i).ravel()
            wrong = np.flatnonzero(W != expected)
            assert not len(wrong), f"W({dist[wrong[0]]}) is {W[wrong[0]]}, expected {expected[wrong[0]]}, path {path}"
        assert W[0] <= last and (np.diff(W) <= 0).all()
        last = W[-1]
    assert seen.all()


def test_kernel_weights_to_the_end(kernel, device):
    """Distances up to 2^29, where the weight is 0 by definition, and beyond."""
    i = np.unique(np.concatenate([np.arange(2**19, 2**21, 997), np.arange(2**21 - 50, 2**21 + 50)]))
    dist = i[:, None] * 256 + np.arange(256)
    for path in paths(kernel, device):
        W = kernel_weights(kernel, device, path, i)
        assert (W == oracle.weights(dist, 31)).all()
        assert (W[dist >= 2**29] == 0).all() and (W > 0).any() and (np.diff(W.ravel()) <= 0).all()


# -- Attention against float64 -------------------------------------------------------------------------------------

SHAPES = {
    "normal": dict(family="normal", Sq=256, Skv=256, D=64),
    "sharp": dict(family="sharp", Sq=256, Skv=256, D=64),
    "outlier": dict(family="outlier", Sq=256, Skv=256, D=128),
    "long context": dict(family="normal", Sq=16, Skv=8192, D=64),
}


def exact(Q, K, V, causal):
    """Attention in float64 on the CPU."""
    Q, K, V = (x.double() for x in (Q, K, V))
    S = Q @ K.transpose(-1, -2) / Q.shape[-1] ** 0.5
    if causal:
        S = S.masked_fill(~torch.ones(S.shape[-2:], dtype=torch.bool).tril(S.shape[-1] - S.shape[-2]), float("-inf"))
    return S.softmax(-1) @ V


def torch_attention(Q, K, V, causal):
    mask = torch.ones(Q.shape[2], K.shape[2], dtype=torch.bool, device=Q.device).tril(K.shape[2] - Q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=mask if causal else None)


def rms(x, reference):
    """Root of the mean square error over that of the reference."""
    error = (x.cpu().double() - reference).abs()
    return (error.square().mean().sqrt() / reference.square().mean().sqrt()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_highest_is_never_worse_than_twice_float32(kernel, device, name, causal):
    inputs = make(B=1, heads=(2, 2), seed=21, **SHAPES[name])
    reference = exact(*inputs, causal)
    on_device = [x.to(device) for x in inputs]
    ours = kernel.det_attn(*on_device, causal)
    theirs = torch_attention(*on_device, causal)
    assert rms(ours, reference) <= 2 * rms(theirs, reference)
    assert rms(ours, reference) < 2e-5  # torch's own error aside


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_high_is_ten_times_better_than_bfloat16(kernel, device, name, causal):
    inputs = make(B=1, heads=(2, 2), seed=22, dtype="bfloat16", **SHAPES[name])
    reference = exact(*inputs, causal)
    on_device = [x.to(device) for x in inputs]
    ours = kernel.det_attn(*on_device, causal, precision="high")
    theirs = torch_attention(*on_device, causal)
    assert 10 * rms(ours, reference) <= rms(theirs, reference)
