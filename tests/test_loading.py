"""The kernel loads the way a user loads it, in a fresh process, and keeps to its own namespace.

In: build/, through LOCAL_KERNELS. Each test that loads in its own way does so in a process of its own.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO_ID, ROOT
from kernels._rust import Metadata

OFFLINE = {"HF_HUB_OFFLINE": "1"}  # nothing may be asked of the Hub


def python(code, *arguments, **environment):
    """Run code in a fresh interpreter outside the repository; return what it printed."""
    command = [sys.executable, "-c", code, *(str(a) for a in arguments)]
    environment = {**os.environ, **OFFLINE, **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def variants(compute):
    folders = (ROOT / "build").glob(f"torch-stable-abi211-{compute}*")
    return sorted(p for p in folders if (p / "metadata.json").is_file())


GET_KERNEL = f"""
import torch
from kernels import get_kernel
kernel = get_kernel("{REPO_ID}", version=1, trust_remote_code=True)
x = torch.arange(24.0).reshape(1, 2, 3, 4)
print(kernel.__name__, tuple(kernel.det_attn(x, x, x).shape) == (1, 2, 3, 4))
"""


def test_get_kernel_loads_the_local_build_without_the_hub():
    name, works = python(GET_KERNEL)
    assert name.startswith("_det_attn_") and works == "True"


def test_a_variant_folder_itself_is_a_local_kernel_too():
    """As after a download: only the folder, elsewhere."""
    folder = variants("cpu")[0]
    name, works = python(GET_KERNEL, LOCAL_KERNELS=f"{REPO_ID}={folder}")
    assert name == Metadata.read_from_file(folder / "metadata.json").id and works == "True"


def test_without_trust_a_local_build_loads_and_the_hub_is_refused():
    """trust_remote_code is about what is downloaded: a LOCAL_KERNELS override needs none, everything else does."""
    untrusting = GET_KERNEL.replace("trust_remote_code=True", "trust_remote_code=False")
    assert python(untrusting)[1] == "True"
    refused = f"""
from kernels import get_kernel
try:
    get_kernel("{REPO_ID}", version=1)
except Exception as error:
    print("refused")
"""
    assert python(refused, LOCAL_KERNELS=f"someone/else={ROOT}") == ["refused"]


def test_namespace_is_the_id_of_this_build(kernel):
    metadata = Metadata.read_from_file(Path(kernel.__file__).parent / "metadata.json")
    assert kernel.__name__ == metadata.id
    assert kernel._ops.ops is getattr(torch.ops, metadata.id)
    assert kernel._ops.add_op_namespace_prefix("forward") == f"{metadata.id}::forward"
    for op in ("rows", "rowmax", "accumulate", "finalize", "forward"):
        assert getattr(kernel._ops.ops, op).default.name() == f"{metadata.id}::{op}"


def test_every_public_name_is_there_and_documented(kernel):
    assert {"det_attn", "det_attn_sharded", "rowmax", "accumulate", "finalize", "rows"} <= set(kernel.__all__)
    for name in kernel.__all__:
        if callable(getattr(kernel, name)):
            assert getattr(kernel, name).__doc__, f"{name} has no docstring"


def test_loading_twice_gives_the_same_module(kernel):
    from kernels import get_kernel

    assert get_kernel(REPO_ID, version=1, trust_remote_code=True) is kernel


COMPATIBILITY = """
import importlib.util, sys
from pathlib import Path
folder = Path(sys.argv[1])
if sys.argv[2] == "after":
    from kernels import get_local_kernel
    new = get_local_kernel(folder)
spec = importlib.util.spec_from_file_location("det_attn_old", folder / "det_attn" / "__init__.py")
old = importlib.util.module_from_spec(spec)
spec.loader.exec_module(old)
import torch
x = torch.ones(1, 1, 2, 4)
print(sys.argv[2] == "alone" or old.det_attn is new.det_attn, old.det_attn(x, x, x).eq(1).all().item(), *old.__all__)
"""


@pytest.mark.parametrize("when", ["alone", "after"])
def test_older_kernels_find_the_same_module_in_the_compatibility_package(kernel, when):
    same, right, *names = python(COMPATIBILITY, Path(kernel.__file__).parent, when)
    assert (same, right) == ("True", "True")
    assert names == kernel.__all__


# Where torch has no CUDA its calls into libtorch_cuda stay unresolved, so bind lazily and bring the CUDA runtime along.
BOTH_VARIANTS = """
import ctypes, os, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
if sys.argv[3]:
    ctypes.CDLL(sys.argv[3], mode=ctypes.RTLD_GLOBAL)
    sys.setdlopenflags(os.RTLD_LAZY)
kernels = [get_local_kernel(Path(p)) for p in sys.argv[1:3]]
x = torch.arange(2 * 3 * 37 * 33, dtype=torch.float32).mul(0.7).sin().reshape(2, 3, 37, 33)
for precision in ("highest", "high"):
    a, b = (k.det_attn(x, x.flip(2), x.flip(3), causal=True, precision=precision) for k in kernels)
    print(torch.equal(a.view(torch.int32), b.view(torch.int32)))
"""


def find_cuda_runtime():
    """The path of libcudart, or '' where torch brings it, or None where there is none."""
    if torch.version.cuda:
        return ""
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *sorted(map(str, Path("/usr/local").glob("cuda-*")))]
    for path in (p for home in homes for p in sorted(Path(home).glob("lib64/libcudart.so.*"))):
        try:
            ctypes.CDLL(str(path))
            return path
        except OSError:
            continue
    return None


@pytest.mark.skipif(not variants("cu"), reason="no CUDA variant here, for lack of nvcc")
def test_cpu_tensors_give_the_same_bytes_in_the_cuda_variant():
    cuda, runtime = variants("cu")[-1], find_cuda_runtime()
    if runtime is None:
        pytest.skip("no libcudart on this machine")
    assert python(BOTH_VARIANTS, variants("cpu")[0], cuda, runtime) == ["True", "True"]
