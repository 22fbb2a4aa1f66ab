"""Golden hashes: SHA-256 of every named boundary of fixed inputs, which CPU and CUDA must both meet.

In: tests/golden.json, inputs by generators.py (integer arithmetic, no library's random numbers) and tests/vectors/.
The file is written from the oracle, never from the kernel:  python tests/test_golden.py --write
"""

import json
import pathlib
import sys

import numpy as np
import pytest
import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import generators  # noqa: E402
import oracle  # noqa: E402
from helpers import kernel_boundaries, narrow, oracle_boundaries, paths, sha256, split_heads, tensor  # noqa: E402

GOLDEN = HERE / "golden.json"
GRADIENTS = ("dQ", "dK", "dV")
SMALL = dict(B=2, heads=(4, 2), Sq=33, Skv=65, D=40)


def fixtures():
    """name -> (source, settings). The source is arguments of generators.inputs, or a worked example's name."""
    found = {}
    for family in generators.FAMILIES:
        for precision in ("highest", "high"):
            scale = generators.torch_scale(family)
            found[f"{family}-{precision}"] = (
                dict(family=family, seed=31, **SMALL),
                dict(causal=True, precision=precision, scale=scale),
            )
    for dtype in ("bfloat16", "float16"):
        for family in ("normal", "special", "mixed"):
            found[f"{family}-{dtype}"] = (
                dict(family=family, seed=32, dtype=dtype, **SMALL),
                dict(causal=False, precision="high" if dtype == "bfloat16" else "highest", scale=None),
            )
    found["many keys"] = (
        dict(family="normal", seed=33, heads=(1, 1), Sq=3, Skv=5000, D=64),
        dict(causal=False, precision="highest", scale=None),
    )
    found["decode"] = (
        dict(family="normal", seed=34, B=3, heads=(8, 1), Sq=1, Skv=300, D=128, dtype="bfloat16"),
        dict(causal=True, precision="highest", scale=None),
    )
    found["masked rows"] = (
        dict(family="special", seed=35, heads=(2, 2), Sq=50, Skv=20, D=16),
        dict(causal=True, precision="highest", scale=0.25, q_offset=-10),
    )
    found["widest"] = (
        dict(family="outlier", seed=36, heads=(2, 1), Sq=17, Skv=129, D=256),
        dict(causal=True, precision="highest", scale=None, q_offset=100),
    )
    for name, modifiers in golden_modifiers().items():
        found[f"modifiers: {name}"] = (
            dict(family="special" if "special" in name else "normal", seed=37, **SMALL),
            dict(causal="causal" in name, precision="high" if "high" in name else "highest", scale=None, **modifiers),
        )
    for name, settings in json.loads((HERE / "vectors" / "index.json").read_text()).items():
        found[f"vector {name}"] = (name, {k: settings[k] for k in ("causal", "precision", "scale")})
    return found


def golden_modifiers():
    """name -> modifiers of inputs of SMALL sizes, by integer arithmetic as the inputs."""
    bias = tensor(generators.normal(38, 0, (2, 1, 33, 65)))
    masked = bias.masked_fill(tensor(generators.integers(38, 1, bias.shape, 0, 4) == 0), -float("inf"))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    ranges = tensor(generators.integers(38, 2, (2, 33, 2), -3, 70).astype(np.int32))
    return {
        "bias": dict(attn_bias=masked),
        "bool, special": dict(attn_bias=masked[:1] > 0),
        "window, causal": dict(window=(9, 2)),
        "softcap": dict(softcap=1.5),
        "softcap 50, high": dict(softcap=50.0),
        "alibi, causal": dict(alibi_slopes=slopes),
        "ranges": dict(key_ranges=ranges),
        "dropout": dict(dropout_p=0.3, dropout_seed=2**40 + 5),
        "all, high": dict(
            attn_bias=masked.bfloat16(), window=(40, 20), softcap=2.0, alibi_slopes=slopes, key_ranges=ranges,
            dropout_p=0.5, dropout_seed=-1,
        ),
    }  # fmt: skip


def inputs_of(source):
    if isinstance(source, dict):
        return generators.inputs(**split_heads(**source))
    x = np.load(HERE / "vectors" / f"{source}.npz")
    return tensor(x["Q"][None]), tensor(x["K"][None, None]), tensor(x["V"][None, None])


def output_gradient_of(source, Q):
    if isinstance(source, dict):
        return tensor(generators.normal(source["seed"], 90, Q.shape))
    return tensor(np.load(HERE / "vectors" / f"{source}.npz")["dO"][None])


def oracle_hashes(name):
    source, settings = fixtures()[name]
    inputs = inputs_of(source)
    found = {n: sha256(x) for n, x in zip(("Q", "K", "V"), (x.view(torch.uint8) for x in inputs))}
    found.update({n: sha256(x) for n, x in oracle_boundaries(*inputs, **settings).items()})
    gradients = oracle.gradients(*inputs, output_gradient_of(source, inputs[0]), **settings)
    found.update({n: sha256(narrow(tensor(x), inputs[0].dtype)) for n, x in zip(GRADIENTS, gradients)})
    return found


def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", fixtures())
def test_kernel_meets_the_golden_hashes(kernel, device, name):
    source, settings = fixtures()[name]
    expected = golden()[name]
    inputs = inputs_of(source)
    assert {n: sha256(x.view(torch.uint8)) for n, x in zip("QKV", inputs)} == {n: expected[n] for n in "QKV"}
    on_device = [x.to(device) for x in inputs]
    settings = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in settings.items()}
    twin = {"fused": "out", "fused rowmax": "rowmax", "fused DEN": "DEN"}
    for path in paths(kernel, device):
        found = {n: sha256(x) for n, x in kernel_boundaries(kernel, *on_device, path=path, **settings).items()}
        assert found == {n: expected[twin.get(n, n)] for n in found}, f"path {path}"
        leaves = [x.clone().requires_grad_() for x in on_device]
        kernel.det_attn(*leaves, path=path, **settings).backward(output_gradient_of(source, inputs[0]).to(device))
        assert {n: sha256(x.grad.cpu()) for n, x in zip(GRADIENTS, leaves)} == {n: expected[n] for n in GRADIENTS}, path


@pytest.mark.parametrize("name", fixtures())
def test_oracle_meets_the_golden_hashes(name):
    assert oracle_hashes(name) == golden()[name]


def test_golden_file_has_every_fixture_and_no_other():
    assert list(golden()) == list(fixtures())


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_golden.py --write    rewrites golden.json from the oracle")
    GOLDEN.write_text(json.dumps({name: oracle_hashes(name) for name in fixtures()}, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
