"""Every CUDA path gives the CPU's bytes, where GPUs go wrong: ragged tiles, full accumulators, chunks and splits,
strides, shards.

The CPU kernel is held to the oracle by the other files, so it is the expectation here: larger sizes are quick. Memory,
streams, graphs and devices are in test_cuda_runs.py.
"""

import pytest
import torch

import generators
from conftest import assert_same_bits
from helpers import make, paths, split_heads, tensor
from test_contract import lay_out
from test_digits import PATTERNS, compare_scores, extremes

pytestmark = pytest.mark.gpu

PRECISIONS = ["highest", "high"]


def results(kernel, inputs, causal=False, scale=None, part=None, **how):
    """The fused call's output and state, and rowmax, NUM and DEN of the keys [lo, hi) under the whole maximum."""
    lo, hi = part or (0, inputs[1].shape[2])
    out, state = kernel.det_attn(*inputs, causal, scale, return_state=True, **how)
    rowmax = kernel.rowmax(*inputs[:2], causal, scale, lo, hi, **how)
    num, den = kernel.accumulate(*inputs, state.rowmax, causal, scale, lo, hi, **how)
    return {"rowmax": state.rowmax, "DEN": state.den, "out": out, "rowmax of a part": rowmax, "NUM of a part": num,
            "DEN of a part": den}  # fmt: skip


def compare(found, expected, what):
    for name, x in found.items():
        assert_same_bits(x, expected[name], f"{what}, {name}")


def check(kernel, inputs, what="", layout="dense", **how):
    """Every path against the CPU on the same numbers in the same layout; `inputs` are on the CPU."""
    expected = results(kernel, [lay_out(x, layout) for x in inputs], **how)
    on_device = [lay_out(x.cuda(), layout) for x in inputs]
    for path in paths(kernel, "cuda"):
        compare(results(kernel, on_device, path=path, **how), expected, f"{what} {path}")


# ---- Shapes ----------------------------------------------------------------------------------------------------------

EDGES = (1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200, 257)
LONG = (511, 512, 513, 1023, 1024, 1025, 1500, 2049)
DIMS = (1, 2, 3, 8, 16, 31, 32, 33, 40, 63, 64, 65, 72, 80, 96, 100, 127, 128, 129, 160, 192, 200, 255, 256)
LAYOUTS = ("dense", "transposed", "interleaved", "expanded")


def ragged_case(seed):
    """(arguments of `make`, arguments of `check`): sizes at and around the edges of tiles, few enough to be quick."""
    pick = iter(generators.integers(seed, 9100, (20,), 0, 2**31).tolist())

    def choose(values):
        return values[next(pick) % len(values)]

    batch, heads, dim = choose((1, 1, 2)), choose(((1, 1), (2, 2), (4, 2), (6, 1), (3, 3))), choose(DIMS)
    queries, keys = choose(EDGES), choose(choose((EDGES, EDGES, LONG)))
    while batch * heads[0] * queries * dim > 60_000 or batch * heads[0] * queries * keys * dim > 30_000_000:
        queries = (queries + 1) // 2 if queries > 1 else 1
        if queries == 1:
            break
    lo = next(pick) % (keys + 1)
    part = (lo, lo + next(pick) % (keys - lo + 1))
    sizes = dict(family=choose(generators.FAMILIES), B=batch, heads=heads, Sq=queries, Skv=keys, D=dim,
                 dtype=choose(list(generators.DTYPES)), seed=seed)  # fmt: skip
    how = dict(causal=choose((False, True)), precision=choose(PRECISIONS), layout=choose(LAYOUTS), part=part,
               q_offset=choose((None, None, 0, 5, -3, keys // 2, 10**9)))  # fmt: skip
    return sizes, how


@pytest.mark.parametrize("block", range(12))
def test_ragged_shapes(kernel, block):
    """600 of them."""
    for seed in range(50 * block, 50 * block + 50):
        sizes, how = ragged_case(seed)
        check(kernel, make(**sizes), f"seed {seed}: {sizes} {how}:", **how)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "B,heads,Sq,Skv,D",
    [(3, (90, 30), 50, 260, 64), (5, (20, 20), 130, 200, 128), (1, (80, 80), 20, 300, 256), (70, (1, 1), 3, 6000, 64)],
)
def test_more_rows_than_a_chunk(kernel, B, heads, Sq, Skv, D, precision):
    """Rows go in chunks that reuse one workspace: by their number, and by the length of the keys."""
    inputs = make("normal", B=B, heads=heads, Sq=Sq, Skv=Skv, D=D, seed=21)
    check(kernel, inputs, precision=precision, part=(70, 190))
    check(kernel, inputs, precision=precision, causal=True, part=(0, 1))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["normal", "special"])
@pytest.mark.parametrize("Sq,heads", [(1, (16, 4)), (16, (4, 1)), (3, (2, 2))])
def test_decode_splits_the_keys(kernel, Sq, heads, family, precision):
    """Few rows over many keys, which then go to the whole device in parts."""
    inputs = make(family, heads=heads, Sq=Sq, Skv=10007, D=128, dtype="bfloat16", seed=22)
    check(kernel, inputs, precision=precision, part=(513, 9000))
    check(kernel, inputs, precision=precision, causal=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("block", range(4))
def test_few_queries_read_keys_and_values_in_place(kernel, block, dtype):
    """Head dims and strides that whole 16-byte pieces allow, and some that they do not."""
    for seed in range(50 * block, 50 * block + 50):
        pick = iter(generators.integers(seed, 9101, (12,), 0, 2**31).tolist())

        def choose(values):
            return values[next(pick) % len(values)]

        keys = choose(EDGES + LONG + (5000,))
        Sq, heads = choose(((1, (8, 2)), (16, (1, 1)), (5, (6, 2)), (2, (2, 2))))
        sizes = dict(family=choose(generators.FAMILIES), B=choose((1, 2)), heads=heads, Sq=Sq, Skv=keys, seed=seed,
                     D=choose((8, 16, 40, 64, 72, 96, 120, 128, 44)), dtype=dtype)  # fmt: skip
        lo = next(pick) % (keys + 1)
        how = dict(causal=choose((False, True)), precision=choose(PRECISIONS), layout=choose(LAYOUTS),
                   part=(lo, lo + next(pick) % (keys - lo + 1)),
                   q_offset=choose((None, None, 0, keys // 2)))  # fmt: skip
        check(kernel, make(**sizes), f"seed {seed}: {sizes} {how}:", **how)


# ---- Full accumulators -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "Skv,D,copies", [(8200, 64, 16), (8300, 128, 8), (20000, 64, 16), (40000, 64, 16), (40000, 256, 4)]
)
def test_int32_positions_are_flushed_in_time(kernel, Skv, D, copies, precision):
    """Long keys, every digit extreme, weights near 2^T. One pattern of values a head. Copies of the batch fill the
    device, so that keys are not split where a chunk holds enough of them; the last two lengths are split and still
    outlast an accumulator at D 256.
    """
    values = [extremes(p, (1, 1, Skv, D)) for p in PATTERNS]
    for shift in (1, 8):  # key 0 has the least exponent; the others' weights are shifted up, to 0xffffff00 and the like
        raised = extremes("all plus", (1, 1, Skv, D)) * 2.0**shift
        raised[:, :, 0] *= 2.0**-shift
        values.append(raised)
    V = torch.cat(values, 1)
    heads = V.shape[1]
    Q, K = torch.zeros(1, heads, 4, D), torch.zeros(1, heads, Skv, D)
    Q[..., 0] = torch.arange(4.0)  # query 0 weighs every key 2^T, the others a little less
    K[..., 0] = -(2.0**-24) * (torch.arange(Skv) % 8)
    on_device = [x.cuda().expand(copies, *x.shape[1:]) for x in (Q, K, V)]
    for mask in (dict(), dict(causal=True, q_offset=Skv - 3)):  # causal: the first query misses two keys
        how = dict(scale=1.0, precision=precision, **mask)
        expected = results(kernel, (Q, K, V), **how)
        expected = {name: x.expand(copies, *x.shape[1:]) for name, x in expected.items()}
        for path in paths(kernel, "cuda"):
            compare(results(kernel, on_device, path=path, **how), expected, path)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("D", [64, 96, 128, 160, 256])
def test_scores_of_extreme_digits(kernel, D, precision):
    """Every pattern against every pattern, and one-hot rows: digit groups at their int32 bounds, D 128 the tightest."""
    patterns = torch.cat([extremes(p, (1, 1, 2, D)) for p in PATTERNS], 2)
    one_hot = extremes("all plus", (1, 1, D, D)) * torch.eye(D)
    one_hot = torch.cat([one_hot[:, :, :3], -one_hot[:, :, 1:2], one_hot[:, :, D - 1 :]], 2)
    rows = torch.cat([patterns, one_hot], 2)
    for scale in (2.0**-8, 1.0, 2.0**20):
        compare_scores(kernel, "cuda", rows, rows, scale, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "Sq,Skv,D,dtype",
    [(40, 777, 72, "float32"), (3, 9001, 64, "float32"), (20, 300, 256, "float32"), (3, 9001, 64, "bfloat16"),
     (4, 20001, 128, "bfloat16")],
)  # fmt: skip
def test_values_of_every_exponent(kernel, Sq, Skv, D, dtype, precision):
    """Value rows from denormals to the largest float32 in one head, and rows of zeros: every bucket of exponents."""
    Q, K, V = (x.float() for x in make("normal", heads=(4, 2), Sq=Sq, Skv=Skv, D=D, dtype=dtype, seed=23))
    exponent = torch.arange(Skv) * 37 % 278 - 150
    V = tensor(generators.scaled(V.numpy(), exponent.reshape(-1, 1).numpy()))
    V[:, :, ::11] = 0
    Q, K, V = (x.to(getattr(torch, dtype)) for x in (Q, K, V))
    check(kernel, (Q, K, V), precision=precision, part=(1, Skv - 1))
    check(kernel, (Q, K, V), precision=precision, causal=True)
    V[:, 1] = 0  # a head without any value, beside one with all
    check(kernel, (Q, K, V), precision=precision)


# ---- Views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pad", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("D", [128, 72, 5])
def test_interleaved_projection(kernel, D, pad, dtype):
    """Q, K, V inside one projection whose rows start anywhere; the output is [B, S, H, D] without a copy."""
    B, H, S = 2, 3, 150
    inputs = make("normal", B=B, heads=(H, H), Sq=S, D=D, dtype=dtype, seed=25)
    wide = torch.full((B, S, 3 * H * D + pad), float("nan"), dtype=inputs[0].dtype, device="cuda")
    views = wide[:, :, pad:].unflatten(2, (3, H, D)).unbind(2)
    views = [x.transpose(1, 2) for x in views]
    for view, x in zip(views, inputs):
        view.copy_(x)
    for precision in PRECISIONS:
        expected = results(kernel, inputs, precision=precision)
        for path in paths(kernel, "cuda"):
            found = results(kernel, views, precision=precision, path=path)
            compare(found, expected, f"{path} {precision}")
            assert found["out"].transpose(1, 2).is_contiguous()
            out = kernel.det_attn(*views, precision=precision, path=path, out_dtype=inputs[0].dtype)
            assert out.transpose(1, 2).is_contiguous()
            assert_same_bits(out, expected["out"].to(inputs[0].dtype))


def test_strides_of_zero(kernel):
    """One query for all rows and heads, one key for all keys, one value for all heads."""
    Q, K, V = make("normal", B=2, heads=(4, 4), Sq=70, Skv=90, D=64, seed=26)
    views = [Q[:, :1, :1], K[:, :, :1], V[:1, :1]]
    shapes = [Q.shape, K.shape, V.shape]
    expected = results(kernel, [x.expand(s).contiguous() for x, s in zip(views, shapes)], causal=True)
    on_device = [x.cuda().expand(s) for x, s in zip(views, shapes)]
    for path in paths(kernel, "cuda"):
        compare(results(kernel, on_device, causal=True, path=path), expected, path)


def test_strides_beyond_32_bits(kernel):
    stride, rows, D = 2**31 + 8, 3, 64
    elements = (rows - 1) * stride + 2**14
    if torch.cuda.mem_get_info()[0] < 2 * elements + 2**30:
        pytest.skip(f"needs {2 * elements >> 30} GiB of GPU memory")
    wide = torch.empty(elements, dtype=torch.bfloat16, device="cuda")
    far_rows = make("normal", heads=(2, 1), Sq=rows, Skv=rows, D=D, dtype="bfloat16", seed=27)
    far_heads = make("normal", heads=(3, 3), Sq=4, Skv=5, D=D, dtype="bfloat16", seed=28)
    for strides, tensors in (((0, 1000, stride, 1), far_rows), ((0, stride, 200, 1), far_heads)):
        views = [wide.as_strided(x.shape, strides, 4096 * n) for n, x in enumerate(tensors)]
        for view, x in zip(views, tensors):
            view.copy_(x)
        expected = results(kernel, tensors)
        for path in paths(kernel, "cuda"):
            compare(results(kernel, views, path=path), expected, f"{path} {strides}")


# ---- Shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("q_offset", [0, 7, -50, 900, 10**12, -(10**12)])
def test_many_shards_and_offsets(kernel, q_offset, precision):
    """Shards with their own K and V, some of one key and some empty: each by itself, and their sum."""
    Q, K, V = make("mixed", heads=(4, 2), Sq=70, Skv=1100, D=48, seed=29)
    cuts = [0, 0, 1, 2, 33, 64, 64, 200, 329, 330, 700, 991, 1099, 1100]
    how = dict(causal=True, precision=precision, q_offset=q_offset)
    whole, state = kernel.det_attn(Q, K, V, return_state=True, **how)
    shards = [(K[:, :, a:b], V[:, :, a:b], a) for a, b in zip(cuts, cuts[1:])]
    expected = [kernel.rowmax(Q, k, kv_offset=a, **how) for k, _, a in shards]
    sums = [kernel.accumulate(Q, k, v, state.rowmax, kv_offset=a, **how) for k, v, a in shards]
    q, rowmax = Q.cuda(), state.rowmax.cuda()
    on_device = [(k.cuda(), v.cuda(), a) for k, v, a in shards]
    for path in paths(kernel, "cuda"):
        total = [0, 0]
        for (k, v, a), maximum, (num, den) in zip(on_device, expected, sums):
            assert_same_bits(kernel.rowmax(q, k, kv_offset=a, path=path, **how), maximum, f"{path} from key {a}")
            found = kernel.accumulate(q, k, v, rowmax, kv_offset=a, path=path, **how)
            assert_same_bits(found[0], num, f"{path} NUM from key {a}")
            assert_same_bits(found[1], den, f"{path} DEN from key {a}")
            total = [t + f for t, f in zip(total, found)]
        assert_same_bits(total[1], state.den, path)
        assert_same_bits(kernel.finalize(*total, precision=precision), whole, path)
        sizes = [b - a for a, b in zip(cuts, cuts[1:])]
        assert_same_bits(kernel.det_attn_sharded(q, K.cuda(), V.cuda(), sizes, path=path, **how), whole, path)


UNIT = 2.0**-24
GIVEN = [float("nan"), -float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e300, -1e300, 2.0**28, -(2.0**28),
         2.0**29, -(2.0**29), 3.3 * UNIT, -3.3 * UNIT, 5000.9 * UNIT, -5000.9 * UNIT, 5e-324, 31.5, -31.5,
         1.0]  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["normal", "special"])
@pytest.mark.parametrize("scale", [None, 2.0**-14, 2.0**20])
@pytest.mark.parametrize("causal", [False, True])
def test_a_rowmax_that_is_not_the_maximum(kernel, causal, scale, family, precision):
    """Section 4: NaN, -inf, infinite, huge, fractional, lower than the scores; rows that attend nothing among them."""
    Q, K, V = make(family, heads=(2, 1), Sq=len(GIVEN) + 6, Skv=300, D=40, seed=30)
    how = dict(causal=causal, scale=scale, precision=precision, q_offset=-3 if causal else None)
    true = kernel.rowmax(Q, K, **how)
    given = true.clone()
    given[:, 0, : len(GIVEN)] = torch.tensor(GIVEN, dtype=torch.float64)
    given[:, 1, 6:] = torch.tensor(GIVEN, dtype=torch.float64)
    for row, step in enumerate((1.0, -1.0, UNIT, -UNIT, 20.0, -20.0)):
        given[:, 1, row] = true[:, 1, row] + step
    sums = kernel.accumulate(Q, K, V, given, **how)
    on_device = [x.cuda() for x in (Q, K, V, given)]
    for path in paths(kernel, "cuda"):
        found = kernel.accumulate(*on_device, path=path, **how)
        assert_same_bits(found[0], sums[0], f"{path} NUM")
        assert_same_bits(found[1], sums[1], f"{path} DEN")


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_twenty_runs_same_bytes(kernel):
    """Atomic additions arrive in another order every time."""
    inputs = make("mixed", heads=(8, 2), Sq=4, Skv=9000, D=96, seed=37)
    for path in paths(kernel, "cuda"):
        on_device = [x.cuda() for x in inputs]
        first = results(kernel, on_device, path=path)
        for _ in range(19):
            compare(results(kernel, on_device, path=path), first, path)
