"""Promise: the ops are good citizens of torch. Schemas, fake implementations and strides agree with what runs; a
compiled call gives the bytes of the eager one; views are read in place; empty inputs are inputs.

In: the kernel's ops and Python functions. Out: contract sections 5 and 6 in the shapes of csrc/api.h.
"""

import math

import pytest
import torch
import torch._dynamo.testing
from conftest import assert_same_bits
from helpers import NO_MODIFIERS, every_modifier

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape, dtype=torch.float32, device="cpu", seed=1):
    """Integers of a small generator, scaled to [-4, 4): the same values in every dtype, torch release and device."""
    n = torch.arange(math.prod(shape), dtype=torch.int64)
    bits = ((n + 7919 * seed) * 2654435761 >> 7) % 256
    return ((bits - 128).to(torch.float32) / 32).reshape(shape).to(dtype).to(device)


def qkv(device, B=2, Hq=4, Hkv=2, Sq=5, Skv=7, D=16, dtype=torch.float32):
    return (
        numbers(B, Hq, Sq, D, dtype=dtype, device=device, seed=1),
        numbers(B, Hkv, Skv, D, dtype=dtype, device=device, seed=2),
        numbers(B, Hkv, Skv, D, dtype=dtype, device=device, seed=3),
    )


def assert_same_results(found, expected):
    """Bits, and strides, of a tensor or of any nesting of tuples."""
    if isinstance(expected, tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for f, e in zip(found, expected):
            assert_same_results(f, e)
    else:
        assert found.stride() == expected.stride()
        assert_same_bits(found, expected)


# ---- Schemas --------------------------------------------------------------------------------------------------------

SCORES = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? key_ranges, float softcap, SymInt window_left, SymInt window_right, "
)
MODIFIERS = (
    f"{SCORES}float dropout_p, SymInt dropout_seed, SymInt dropout_query, SymInt dropout_key, SymInt dropout_head, "
    "Tensor? dropout_rows, Tensor? dropout_keys, "
)
SCHEMAS = {
    "rows": "(Tensor x, str kind, float scale, str precision) -> (Tensor integers, Tensor exponents)",
    "rowmax": "(Tensor q, Tensor k, bool causal, float scale, str precision, SymInt diagonal, SymInt kv_lo, "
    f"SymInt kv_hi, {SCORES}str path) -> Tensor",
    "accumulate": "(Tensor q, Tensor k, Tensor v, Tensor rowmax, bool causal, float scale, str precision, "
    f"SymInt diagonal, SymInt kv_lo, SymInt kv_hi, {MODIFIERS}str path) -> (Tensor num, Tensor den)",
    "accumulate_last": "(Tensor q, Tensor k, Tensor v, Tensor rowmax, bool causal, float scale, str precision, "
    f"SymInt diagonal, SymInt kv_lo, SymInt kv_hi, {MODIFIERS}str path) -> (Tensor num, Tensor den, Tensor rowmax)",
    "finalize": "(Tensor num, Tensor den, str precision, ScalarType out_dtype, float dropout_p) -> Tensor",
    "forward": "(Tensor q, Tensor k, Tensor v, bool causal, float scale, str precision, SymInt diagonal, "
    f"SymInt kv_lo, SymInt kv_hi, ScalarType out_dtype, {MODIFIERS}str path, SymInt range_reach) -> "
    "(Tensor out, Tensor rowmax, Tensor den)",
}
GRADIENT_INPUTS = "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor rowmax, Tensor den, "
GRADIENT_CALL = "bool causal, float scale, str precision, SymInt diagonal, SymInt kv_lo, SymInt kv_hi, "
GRADIENT_NEED = "bool need_q, bool need_k, bool need_v, "
GRADIENT_SCHEMAS = {
    "grad_reference": f"{GRADIENT_INPUTS}{GRADIENT_CALL}{MODIFIERS}str path) -> (Tensor a, Tensor b, Tensor c)",
    "grad_accumulate": f"{GRADIENT_INPUTS}Tensor a, Tensor b, Tensor c, {GRADIENT_CALL}{GRADIENT_NEED}{MODIFIERS}"
    "str path) -> (Tensor dq, Tensor dk, Tensor dv)",
    "grad_finalize": (
        "(Tensor sums, Tensor reference, str kind, float scale, str precision, ScalarType out_dtype) -> Tensor"
    ),
    "backward": (
        f"{GRADIENT_INPUTS}{GRADIENT_CALL}{GRADIENT_NEED}{MODIFIERS}str path) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
}  # their opcheck is in test_gradients.py


@pytest.mark.parametrize("name", {**SCHEMAS, **GRADIENT_SCHEMAS})
def test_schema(kernel, name):
    schema = str(getattr(kernel.ops, name).default._schema)
    assert schema.split("::")[1].startswith(name + "(")
    assert schema[schema.index("(") :] == {**SCHEMAS, **GRADIENT_SCHEMAS}[name]


# ---- opcheck --------------------------------------------------------------------------------------------------------


def op_arguments(kernel, device):
    """Arguments of every op, over what changes an output's shape, dtype or strides."""
    for Sq, dtype in ((5, torch.float32), (1, torch.bfloat16), (0, torch.float16)):
        Q, K, V = qkv(device, Sq=Sq, dtype=dtype)
        inside = Q.transpose(1, 2).contiguous().transpose(1, 2)
        M = kernel.rowmax(Q, K)
        NUM, DEN = kernel.accumulate(Q, K, V, M)
        for precision in ("highest", "high"):
            yield "rows", (Q, "query", 0.25, precision)
            yield "rows", (V, "value", 1.0, precision)
        for q in (Q, inside):
            mask = (True, 0.25, "highest", 2, 1, 6)
            for modifiers in (NO_MODIFIERS, every_modifier(q, K)):
                yield "rowmax", (q, K, *mask, *modifiers[:6], "auto")
                yield "accumulate", (q, K, V, M, *mask, *modifiers, "auto")
                yield "accumulate_last", (q, K, V, M, *mask, *modifiers, "auto")
                yield "forward", (q, K, V, *mask, torch.float32, *modifiers, "auto", -1)
                yield "forward", (q, K, V, *mask, dtype, *modifiers, "reference", 5)
        yield "finalize", (NUM, DEN, "highest", dtype, 0.0)
        yield "finalize", (NUM[0, 0], DEN[0, 0], "high", torch.float32, 0.5)
        yield "finalize", (NUM.transpose(0, 1), DEN.transpose(0, 1), "high", torch.float32, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(kernel, device, name):
    checked = 0
    for op, arguments in op_arguments(kernel, device):
        if op == name:
            torch.library.opcheck(getattr(kernel.ops, op).default, arguments)
            checked += 1
    assert checked > 0


def test_fake_strides_are_the_real_ones(kernel, device):
    """The layout of `out` follows q's: every order of its dimensions, sizes of 0 and 1, and zero strides."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    layouts = [numbers(*size, 8, device=device) for size in ((2, 3, 4), (2, 1, 4), (2, 3, 1), (2, 3, 0), (1, 3, 4))]
    layouts += [q.transpose(1, 2).contiguous().transpose(1, 2) for q in layouts]
    layouts += [q.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for q in layouts]
    layouts += [numbers(2, 1, length, 8, device=device).expand(2, 3, 4, 8) for length in (1, 4)]
    for q in layouts:
        k = numbers(q.shape[0], 1, 5, 8, device=device)
        with FakeTensorMode() as mode:
            fake = kernel.det_attn(mode.from_tensor(q), mode.from_tensor(k), mode.from_tensor(k), return_state=True)
        real = kernel.det_attn(q, k, k, return_state=True)
        for f, r in ((fake[0], real[0]), *zip(fake[1], real[1])):
            assert (f.shape, f.stride(), f.dtype, f.device) == (r.shape, r.stride(), r.dtype, r.device), q.stride()


# ---- torch.compile --------------------------------------------------------------------------------------------------


def compiled(function, dynamic, backend="aot_eager"):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter), counter


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fused_call_gives_the_same_bytes(kernel, device, dynamic):
    function = lambda Q, K, V: kernel.det_attn(Q * 2, K, V, True, return_state=True, precision="high")  # noqa: E731
    found, counter = compiled(function, dynamic)
    compilations = []
    for Sq, Skv in ((5, 7), (6, 9), (11, 13)):
        arguments = qkv(device, B=3, Sq=Sq, Skv=Skv)
        assert_same_results(found(*arguments), function(*arguments))
        compilations.append(counter.frame_count)
    assert (compilations[-1] == compilations[0]) == dynamic  # the checks add no guard on a length


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_stages_give_the_same_bytes(kernel, device, dynamic):
    def function(Q, K, V, kv_lo):
        kv_hi = K.shape[2] - 1
        maximum = kernel.rowmax(Q, K, False, None, kv_lo, kv_hi)
        num, den = kernel.accumulate(Q, K, V, maximum, False, None, kv_lo, kv_hi)
        return maximum, num, den, kernel.finalize(num, den, Q.shape), kernel.rows(Q, "query")

    found, _ = compiled(function, dynamic)
    for Sq, Skv, kv_lo in ((5, 7, 0), (6, 9, 2), (11, 13, 4)):
        arguments = qkv(device, B=3, Sq=Sq, Skv=Skv)
        assert_same_results(found(*arguments, kv_lo), function(*arguments, kv_lo))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_sharded_call_gives_the_same_bytes(kernel, device, dynamic):
    def function(Q, K, V, scale):
        return kernel.det_attn_sharded(Q, K, V, [2, 0, K.shape[2] - 2], True, scale)

    found, _ = compiled(function, dynamic)
    for Skv, scale in ((7, 0.3), (9, 0.7)):
        arguments = qkv(device, B=3, Skv=Skv)
        assert_same_results(found(*arguments, scale), function(*arguments, scale))


@pytest.mark.parametrize("D", [1, 3, 80, 96, 160, 256])
def test_compiled_default_scale_keeps_its_bits(kernel, device, D):
    """Were 1/sqrt(D) traced with a symbolic D, a compiler could round it differently."""
    found, _ = compiled(kernel.det_attn, dynamic=True)
    arguments = qkv(device, D=D)
    assert_same_results(found(*arguments), kernel.det_attn(*arguments, scale=1 / math.sqrt(D)))


@pytest.mark.slow
def test_inductor_gives_the_same_bytes(kernel, device):
    def function(x, K, V):
        return kernel.det_attn(x.transpose(1, 2), K, V, True).transpose(1, 2) * 2

    found, _ = compiled(function, dynamic=False, backend="inductor")
    _, K, V = qkv(device)
    x = numbers(2, 5, 4, 16, device=device)
    assert_same_results(found(x, K, V), function(x, K, V))


def test_refusals_stay_refusals_under_compile(kernel, device):
    Q, K, V = qkv(device)
    with pytest.raises(ValueError, match=r"^V: got shape \(2, 2, 6, 16\)"):
        torch.compile(kernel.det_attn, backend="eager")(Q, K, V[:, :, :6])


# ---- Views ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interleaved_projection_is_read_in_place(kernel, device, dtype):
    B, S, H, D = 2, 9, 4, 16
    projection = numbers(B, S, 3, H, D, dtype=dtype, device=device)
    before = projection.clone()
    views = [x.transpose(1, 2) for x in projection.unbind(2)]
    copies = [x.contiguous() for x in views]
    assert not any(x.is_contiguous() for x in views)

    out, state = kernel.det_attn(*views, True, return_state=True)
    expected, expected_state = kernel.det_attn(*copies, True, return_state=True)
    assert_same_bits(out, expected)
    assert_same_bits(state.rowmax, expected_state.rowmax)
    assert_same_bits(state.den, expected_state.den)
    assert out.transpose(1, 2).is_contiguous()  # ready for the output projection: [B, S, H * D] without a copy
    assert expected.is_contiguous()
    assert_same_bits(kernel.rowmax(*views[:2], True), expected_state.rowmax)
    for found, wanted in zip(
        kernel.accumulate(*views, state.rowmax, True), kernel.accumulate(*copies, state.rowmax, True)
    ):
        assert_same_bits(found, wanted)
    assert_same_bits(projection, before)


VIEWS = {
    "every other row": lambda x: numbers(*x.shape[:2], 2 * x.shape[2], x.shape[3], device=x.device)[:, :, ::2],
    "inner columns": lambda x: numbers(*x.shape[:3], x.shape[3] + 5, device=x.device)[..., 3:-2],
    "batch innermost": lambda x: numbers(*(x.shape[i] for i in (2, 1, 0, 3)), device=x.device).permute(2, 1, 0, 3),
    "one head for all": lambda x: x[:, :1].expand(x.shape),
    "one row for all": lambda x: x[:, :, :1].expand(x.shape),
    "one batch for all": lambda x: x[:1].expand(x.shape),
    "overlapping rows": lambda x: numbers(64, device=x.device).as_strided(x.shape, (0, 3, 1, 1)),
    "odd storage offset": lambda x: numbers(x.numel() + 1, device=x.device)[1:].reshape(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_view_gives_the_bytes_of_its_copy(kernel, device, view):
    views = [VIEWS[view](x) for x in qkv(device)]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    assert_same_bits(kernel.det_attn(*views, True), kernel.det_attn(*copies, True))
    for x, y, kind in zip(views, copies, ("query", "key", "value")):
        for found, expected in zip(kernel.rows(x, kind), kernel.rows(y, kind)):
            assert_same_bits(found, expected)


def test_views_of_sums_give_the_bytes_of_their_copies(kernel, device):
    Q, K, V = qkv(device)
    M = kernel.rowmax(Q, K)
    NUM, DEN = kernel.accumulate(Q, K, V, M)
    M_view = torch.stack((M, -M), dim=-1)[..., 0]
    for found, expected in zip(kernel.accumulate(Q, K, V, M_view), (NUM, DEN)):
        assert_same_bits(found, expected)
    NUM_view, DEN_view = NUM.movedim(-1, 0).contiguous().movedim(0, -1), torch.stack((DEN, -DEN), dim=-1)[..., 0]
    assert_same_bits(kernel.finalize(NUM_view, DEN_view), kernel.finalize(NUM, DEN))


# ---- Sizes of zero, and the remaining forms of the output ------------------------------------------------------------


@pytest.mark.parametrize("zero", ["B", "Hq", "H", "Sq", "Skv"])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_inputs_are_inputs(kernel, device, zero, causal):
    sizes = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 3, "Skv": 5, "D": 8}
    sizes.update({"Hq": 0, "Hkv": 0} if zero == "H" else {zero: 0})
    Q, K, V = qkv(device, **sizes)
    rows_shape = Q.shape[:3]
    out, state = kernel.det_attn(Q, K, V, causal, return_state=True)
    assert_same_bits(out, torch.zeros(Q.shape, device=device))
    assert_same_bits(state.rowmax, torch.full(rows_shape, -math.inf, dtype=torch.float64, device=device))
    assert_same_bits(state.den, torch.zeros(rows_shape, dtype=torch.int64, device=device))
    assert_same_bits(state.lse, torch.full(rows_shape, -math.inf, device=device))
    assert_same_bits(kernel.rowmax(Q, K, causal), state.rowmax)
    NUM, DEN = kernel.accumulate(Q, K, V, state.rowmax, causal)
    assert_same_bits(NUM, torch.zeros(*Q.shape, 12, dtype=torch.int64, device=device))
    assert_same_bits(DEN, state.den)
    assert_same_bits(kernel.finalize(NUM, DEN, Q.shape), out)
    Skv = sizes["Skv"]
    for kv_splits in ([Skv], [0, Skv, 0], (Skv,)) + (([],) if Skv == 0 else ()):
        assert_same_bits(kernel.det_attn_sharded(Q, K, V, kv_splits, causal), out)
    assert [tuple(x.shape) for x in kernel.rows(K, "key")] == [tuple(K.shape), tuple(K.shape[:3])]


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_out_dtype_is_one_rounding_of_the_float32_output(kernel, device, precision, out_dtype):
    Q, K, V = qkv(device, Sq=33, Skv=40)
    V[:, :, 0] *= 2.0**-30  # some outputs below float16's normal range
    expected = kernel.det_attn(Q, K, V, q_offset=0, causal=True, precision=precision).to(out_dtype)
    options = dict(causal=True, q_offset=0, precision=precision, out_dtype=out_dtype)
    assert_same_bits(kernel.det_attn(Q, K, V, **options), expected)
    assert_same_bits(kernel.det_attn_sharded(Q, K, V, [11, 0, 29], **options), expected)


def test_state_is_what_the_stages_give(kernel, device):
    Q, K, V = qkv(device)
    out, state = kernel.det_attn(Q, K, V, True, return_state=True)
    assert isinstance(state, kernel.State) and state._fields == ("rowmax", "den", "lse")
    assert_same_bits(state.rowmax, kernel.rowmax(Q, K, True))
    NUM, DEN = kernel.accumulate(Q, K, V, state.rowmax, True)
    assert_same_bits(state.den, DEN)
    assert_same_bits(kernel.finalize(NUM, DEN), out)
    scores = Q.double() @ K.double().repeat_interleave(2, 1).transpose(2, 3) / 4
    scores.masked_fill_(torch.ones(5, 7, dtype=torch.bool, device=device).triu(3), -math.inf)
    torch.testing.assert_close(state.lse, scores.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)


def test_positional_arguments_are_those_of_the_documentation(kernel, device):
    Q, K, V = qkv(device)
    M = kernel.rowmax(Q, K, True, 0.5, 1, 6)
    assert_same_bits(M, kernel.rowmax(Q, K, causal=True, scale=0.5, kv_lo=1, kv_hi=6))
    NUM, DEN = kernel.accumulate(Q, K, V, M, True, 0.5, 1, 6)
    assert_same_bits(NUM, kernel.accumulate(Q, K, V, rowmax=M, causal=True, scale=0.5, kv_lo=1, kv_hi=6)[0])
    assert_same_bits(kernel.finalize(NUM, DEN, (2, 4, 5, 16)), kernel.finalize(NUM, DEN))
    assert_same_bits(kernel.det_attn_sharded(Q, K, V, [3, 4], True, 0.5), kernel.det_attn(Q, K, V, True, 0.5))


def test_a_shard_with_its_own_keys_gives_the_bytes_of_a_range(kernel, device):
    """kv_offset: the shard's K is a tensor of its own, elsewhere perhaps, and positions stay global."""
    Q, K, V = qkv(device, Sq=6, Skv=9)
    M = kernel.rowmax(Q, K, True)
    for lo, hi in ((0, 4), (4, 9), (2, 2)):
        k, v = K[:, :, lo:hi].clone(), V[:, :, lo:hi].clone()
        own = dict(causal=True, q_offset=3, kv_offset=lo)
        assert_same_bits(kernel.rowmax(Q, k, **own), kernel.rowmax(Q, K, True, None, lo, hi))
        expected = kernel.accumulate(Q, K, V, M, True, None, lo, hi)
        for found, wanted in zip(kernel.accumulate(Q, k, v, M, **own), expected):
            assert_same_bits(found, wanted)
