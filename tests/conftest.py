"""What every test shares: the kernel, loaded the way a user loads it, the devices, and equality to the last bit.

In: build/ as tools/build.py leaves it. LOCAL_KERNELS points `kernels` at it, so nothing is fetched from the Hub; with
DET_ATTN_PUBLISHED=1 the Hub's build is tested instead.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "phanerozoic/det-attn"
if os.environ.get("DET_ATTN_PUBLISHED"):  # test what the Hub serves (docs/releasing.md)
    os.environ.pop("LOCAL_KERNELS", None)
else:
    os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={ROOT}"
HAS_CUDA = torch.cuda.is_available()

# Bits of each dtype as an integer of its size: the only equality under which -0 is not 0 and NaN is itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, and said so at the end, where there is none")
    config.addinivalue_line("markers", "full: the whole matrix; hours on a CPU, so it runs with --full only")
    config.addinivalue_line("markers", "slow: takes more than a few seconds; leave out with -m 'not slow'")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the whole matrices too (meant for a GPU)")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if not HAS_CUDA:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter):
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "no CUDA device" in str(r.longrepr)]
    few = [r for r in terminalreporter.stats.get("skipped", []) if "too few GPUs" in str(r.longrepr)]
    if few:
        line = f"TOO FEW GPUS, {torch.cuda.device_count()}: {len(few)} tests with more ranks did not run"
        terminalreporter.write_sep("=", line, yellow=True, bold=True)
    unpublished = [r for r in terminalreporter.stats.get("skipped", []) if "CANNOT PUBLISH" in str(r.longrepr)]
    if unpublished:
        terminalreporter.write_sep("=", f"{len(unpublished)} tests did not run", yellow=True, bold=True)
        terminalreporter.write_line(unpublished[0].longrepr[2], yellow=True, bold=True)
    if skipped:
        terminalreporter.write_sep("=", f"NO CUDA DEVICE: {len(skipped)} tests did not run", yellow=True, bold=True)


@pytest.fixture(scope="session")
def kernel():
    """The module that get_kernel returns."""
    from kernels import get_kernel

    try:
        return get_kernel(REPO_ID, version=1, trust_remote_code=True)
    except FileNotFoundError as error:
        pytest.exit(f"no build that fits this torch; run make build first\n{error}", returncode=1)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def assert_same_bits(a, b, what=""):
    """Same dtype, shape and bytes, whatever the device; otherwise fail with the first place that differs."""
    a, b = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (a, b))
    what = f"{what}: " if what else ""
    assert a.dtype == b.dtype, f"{what}dtype {a.dtype} against {b.dtype}"
    assert a.shape == b.shape, f"{what}shape {tuple(a.shape)} against {tuple(b.shape)}"
    bits = BITS[a.element_size()]
    a_bits, b_bits = (x.detach().contiguous().view(bits) for x in (a, b))
    if a.device != b.device:
        a_bits, b_bits = a_bits.cpu(), b_bits.cpu()
    if torch.equal(a_bits, b_bits):
        return
    differing = (a_bits != b_bits).nonzero()
    at = tuple(differing[0].tolist())
    digits, mask = 2 * a.element_size(), (1 << 8 * a.element_size()) - 1
    pytest.fail(
        f"{what}{len(differing)} of {a.numel()} elements differ, first at {list(at)}: "
        f"{a[at].item()!r} (0x{a_bits[at].item() & mask:0{digits}x}) against "
        f"{b[at].item()!r} (0x{b_bits[at].item() & mask:0{digits}x})"
    )
