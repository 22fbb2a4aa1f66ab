"""What several test files need: the kernel's paths on a device, every boundary of a call, hashes of a boundary.

In: tensors and the loaded kernel. Out: dicts of tensors by the contract's names, on the CPU.
"""

import contextlib
import functools
import hashlib

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import generators
import oracle
from conftest import assert_same_bits

# The ops' arguments of the modifiers, where there are none: of the scores, and all.
NO_SCORES = (None, None, None, 0.0, -1, -1)
NO_MODIFIERS = (*NO_SCORES, 0.0, 0, 0, 0, 0, None, None)

ALL_PATHS = {"cpu": ("auto",), "cuda": ("auto", "reference", "mma", "wgmma")}


def path_is_there(kernel, device, path):
    """Whether this GPU has the path. Any other refusal is a failure."""
    x = torch.zeros(1, 1, 1, 64, device=device)
    try:
        kernel.det_attn(x, x, x, path=path)
    except ValueError as error:
        if "compute capability" in str(error):
            return False
        raise
    return True


@functools.lru_cache(maxsize=None)
def paths(kernel, device):
    """The paths to test on a device."""
    return tuple(p for p in ALL_PATHS[device] if p == "auto" or path_is_there(kernel, device, p))


@contextlib.contextmanager
def threads(count):
    """torch's number of CPU threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def syncs_are_errors():
    """Within the block an op that waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class RecordedOp(TorchDispatchMode):
    """Within the block, the arguments of the last call of an op."""

    def __init__(self, op):
        super().__init__()
        self.op, self.arguments = op, None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is self.op:
            self.arguments = args
        return op(*args, **(kwargs or {}))


def every_modifier(Q, K):
    """The ops' arguments with every modifier on: a broadcast bias, and tensors wherever there may be."""
    device, (batch, heads, q_len, _), kv_len = Q.device, Q.shape, K.shape[2]
    bias = torch.zeros(1, 1, 1, kv_len, device=device, dtype=torch.bfloat16).expand(batch, heads, q_len, kv_len)
    slopes = torch.full((heads,), 0.25, device=device)
    ranges = torch.tensor([1, kv_len], device=device, dtype=torch.int32).expand(1, q_len, 2).contiguous()
    rows = torch.arange(q_len, device=device).expand(batch, q_len).contiguous()
    scores = (bias, slopes, ranges, 30.0, 4, 3)
    return (*scores, 0.5, -3, 1, 2, 3, rows, torch.arange(kv_len, device=device) * 7)


def tensor(x):
    return torch.from_numpy(np.ascontiguousarray(x))


def to(device, how):
    """A call's arguments, with its tensors on a device."""
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in how.items()}


def narrow(x, dtype):
    """Section 6's rounding of a float32 tensor: torch's own turns NaN into other bits on some machines."""
    return x.to(dtype).masked_fill(x.isnan(), float("nan"))


def split_heads(**kwargs):
    """Sizes for `generators.inputs` out of a case that says heads=(Hq, Hkv)."""
    kwargs = dict(kwargs)
    kwargs["Hq"], kwargs["Hkv"] = kwargs.pop("heads", (1, 1))
    return kwargs


def of_scores(how):
    """The arguments that rowmax takes too."""
    return {name: x for name, x in how.items() if not name.startswith("dropout")}


def oracle_boundaries(Q, K, V, causal=False, scale=None, precision="highest", q_offset=None, **modifiers):
    """Every named boundary by the oracle."""
    found = {}
    for name, kind, x in (("Q", "query", Q), ("K", "key", K), ("V", "value", V)):
        found[f"rows({name}).integers"], found[f"rows({name}).exponents"] = oracle.rows(
            x, kind, scale if kind == "query" else None, precision
        )
    out, rowmax, num, den = oracle.det_attn(
        Q, K, V, causal, scale, precision=precision, q_offset=q_offset, **modifiers
    )
    found.update(rowmax=rowmax, NUM=num, DEN=den, out=out)
    return {name: tensor(x) for name, x in found.items()}


def kernel_boundaries(
    kernel, Q, K, V, causal=False, scale=None, precision="highest", q_offset=None, path="auto", **modifiers
):
    """Every named boundary by the kernel, stage by stage; `fused` is the one call that does all."""
    found = {}
    for name, kind, x in (("Q", "query", Q), ("K", "key", K), ("V", "value", V)):
        found[f"rows({name}).integers"], found[f"rows({name}).exponents"] = kernel.rows(
            x, kind, scale if kind == "query" else None, precision=precision
        )
    how = dict(precision=precision, q_offset=q_offset, path=path, **modifiers)
    rowmax = kernel.rowmax(Q, K, causal, scale, **of_scores(how))
    num, den = kernel.accumulate(Q, K, V, rowmax, causal, scale, **how)
    out = kernel.finalize(num, den, precision=precision, dropout_p=modifiers.get("dropout_p", 0.0))
    fused, state = kernel.det_attn(Q, K, V, causal, scale, return_state=True, **how)
    found.update(rowmax=rowmax, NUM=num, DEN=den, out=out, fused=fused)
    found.update({"fused rowmax": state.rowmax, "fused DEN": state.den})
    return {name: x.cpu() for name, x in found.items()}


def assert_same_boundaries(found, expected):
    """The same bytes at every boundary; names the first one that differs, in the order of the data flow."""
    twin = {"fused": "out", "fused rowmax": "rowmax", "fused DEN": "DEN"}
    for name, x in found.items():
        assert_same_bits(x, expected[twin.get(name, name)], f"boundary {name}")


def one_nan(x):
    """x with every NaN the same: torch.maximum keeps a NaN, but not its bits."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x)


def check_against_oracle(kernel, device, inputs, causal=False, scale=None, precision="highest", q_offset=None):
    """Kernel on every path of `device` against the oracle; returns the oracle's boundaries."""
    how = dict(causal=causal, scale=scale, precision=precision, q_offset=q_offset)
    expected = oracle_boundaries(*inputs, **how)
    on_device = [x.to(device) for x in inputs]
    for path in paths(kernel, device):
        assert_same_boundaries(kernel_boundaries(kernel, *on_device, path=path, **how), expected)
    return expected


def sha256(x):
    """The contract's canonical hash of a boundary: the bytes, C-contiguous, little endian."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        x = x.view(torch.int16)
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def make(family, device="cpu", **sizes):
    """Q, K, V of a family on a device."""
    return tuple(x.to(device) for x in generators.inputs(family, **split_heads(**sizes)))
