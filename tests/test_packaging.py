"""build.toml, tools/build.py and what they leave: layout, names, digests and symbols as `kernels` and the Hub ask.

Builds under test: those in build/, and for the build script itself a kernel of ten lines in a temporary folder.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from kernels._rust import Backend, Build, Digest, DigestValidationError, Metadata
from kernels.resolver import resolve_local_kernel
from kernels.variants import parse_variant

sys.path.insert(0, str(ROOT / "tools"))
import abi  # noqa: E402
import build as builder  # noqa: E402

CONFIG = tomllib.loads((ROOT / "build.toml").read_text())
VARIANTS = sorted(p for p in (ROOT / "build").glob("torch-stable-abi*") if (p / "metadata.json").is_file())
PACKAGE = ROOT / "torch-ext" / "det_attn"


@pytest.fixture(params=VARIANTS, ids=lambda p: p.name)
def variant(request):
    return request.param


# ---- build.toml --------------------------------------------------------------------------------------------------


def test_kernels_parses_build_toml():
    assert Build.open(ROOT).general.backends == [Backend.CPU, Backend.CUDA]


def test_every_source_is_listed_and_every_listed_source_exists():
    listed = {s for c in [CONFIG["torch"], *CONFIG["kernel"].values()] for s in c["src"]}
    folders = [ROOT / "csrc", ROOT / "torch-ext"]
    suffixes = {".h", ".cuh", ".cpp", ".cu"}
    present = {p.relative_to(ROOT).as_posix() for f in folders for p in f.rglob("*") if p.suffix in suffixes}
    assert sorted(listed - present) == [], "listed but missing"
    assert sorted(present - listed) == [], "present but not listed: kernel-builder would not compile them"


def test_no_source_is_listed_twice_for_one_backend():
    for backend in ("cpu", "cuda"):
        sources = [s for c in CONFIG["kernel"].values() if c["backend"] == backend for s in c["src"]]
        assert len(sources) == len(set(sources))


def test_cuda_build_holds_the_whole_cpu_implementation():
    assert CONFIG["kernel"]["cpu_in_cuda"]["src"] == CONFIG["kernel"]["cpu"]["src"]


def test_cpu_code_is_never_contracted_nor_fast_math():
    flags = [f for c in CONFIG["kernel"].values() for f in c.get("cxx-flags", []) + c.get("cuda-flags", [])]
    assert not [f for f in flags if "fast" in f]
    for name in ("cpu", "cpu_in_cuda"):
        assert "-ffp-contract=off" in CONFIG["kernel"][name]["cxx-flags"]


def test_every_cuda_component_names_its_capabilities_from_8_0_up():
    for name, component in CONFIG["kernel"].items():
        if component["backend"] == "cuda":
            assert component["cuda-capabilities"], f"[kernel.{name}] would get kernel-builder's own list, 7.x included"
            assert min(int(c.split(".")[0]) for c in component["cuda-capabilities"]) >= 8


def test_only_the_binding_names_the_extension():
    """So that an edit of a Python file, which changes the name, compiles one file."""
    sources = [ROOT / s for c in CONFIG["kernel"].values() for s in c["src"]]
    assert not [p.name for p in sources if "TORCH_EXTENSION_NAME" in p.read_text()]


# ---- The Python package, as kernel-builder's checks want it ------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_python_is_3_9_and_imports_only_itself_torch_and_the_standard_library(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in {"torch", *sys.stdlib_module_names}, f"{path.name} imports {name}"


def test_ops_are_registered_under_this_builds_namespace_only():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith(("register_", "custom_op")):
                assert not (node.args and isinstance(node.args[0], ast.Constant)), f"{path.name}:{node.lineno}"


def test_package_leaves_room_for_the_compatibility_package():
    assert (PACKAGE / "__init__.py").is_file() and not (PACKAGE / "det_attn").exists()


# ---- Variants ----------------------------------------------------------------------------------------------------


def test_cpu_variant_is_the_one_kernels_resolves():
    assert VARIANTS, "nothing is built: run make build"
    found = resolve_local_kernel(ROOT, backend="cpu")
    assert found.variant_str.startswith("torch-stable-abi211-cpu-")


def test_variant_name_is_one_kernels_parses(variant):
    parsed = parse_variant(variant.name)
    assert parsed.variant_str == variant.name
    assert parsed.framework.variant_str == "torch-stable-abi211"


def test_metadata_says_what_build_toml_says(variant):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    general = CONFIG["general"]
    assert (str(metadata.name), metadata.version, metadata.license) == ("det-attn", general["version"], "Apache-2.0")
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    is_cuda = "-cu" in variant.name
    assert metadata.backend.backend_type == (Backend.CUDA if is_cuda else Backend.CPU)
    assert bool(metadata.backend.archs) == is_cuda
    assert metadata.id.startswith("_det_attn_cuda_" if is_cuda else "_det_attn_cpu_")
    assert metadata.id.isidentifier()


def test_variant_holds_exactly_the_files_kernel_builder_leaves(variant):
    id = Metadata.read_from_file(variant / "metadata.json").id
    expected = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")}
    expected |= {"_ops.py", "det_attn/__init__.py", "metadata.json", f"{id}.abi3.so"}
    files = {p.relative_to(variant).as_posix() for p in variant.rglob("*") if p.is_file()}
    assert {f for f in files if "__pycache__" not in f} == expected


def test_digest_is_that_of_the_files_and_notices_a_change(variant, tmp_path):
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(digest.algorithm, variant))
    copy = tmp_path / variant.name
    shutil.copytree(variant, copy)
    with open(copy / "__init__.py", "a") as file:
        file.write("\n")
    with pytest.raises(DigestValidationError, match="__init__.py"):
        digest.validate(Digest.hash_variant(digest.algorithm, copy))


def test_library_keeps_the_rules_of_the_hub(variant):
    """Python 3.9's limited API, torch's stable ABI, no foreign library. Newer symbols of glibc are only shown."""
    errors, notes = abi.report(next(variant.glob("*.abi3.so")))
    print("\n".join(notes))
    assert errors == []


# ---- The build script --------------------------------------------------------------------------------------------

TINY = {
    "build.toml": """
[general]
name = "tiny"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu"]
[torch]
src = ["torch-ext/binding.cpp"]
[torch.stable-abi]
cpu = "2.11"
[kernel.cpu]
backend = "cpu"
depends = ["torch"]
src = ["csrc/answer.h", "csrc/answer.cpp"]
""",
    "csrc/answer.h": "#pragma once\n#define ANSWER 42\nlong answer();\n",
    "csrc/answer.cpp": '#include "answer.h"\nlong answer() { return ANSWER; }\n',
    "torch-ext/binding.cpp": """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include "registration.h"
long answer();
int64_t answered(torch::stable::Tensor) { return answer(); }
STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("answer(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("answer", TORCH_BOX(&answered)); }
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
""",
    "torch-ext/tiny/__init__.py": """
import torch
from ._ops import ops


def answer():
    return ops.answer(torch.ones(1))
""",
}


class Tiny:
    def __init__(self, root):
        self.root = root
        for name, text in TINY.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))

    def build(self, fails=False):
        """The sources that were compiled, or what the script said when it failed."""
        command = [sys.executable, str(self.root / "tools/build.py"), "--backend", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr if fails else [w for w in done.stdout.split() if w.endswith(".cpp")]

    @property
    def variant(self):
        return next((self.root / "build").glob("torch-stable-abi211-cpu-*"))

    @property
    def id(self):
        return json.loads((self.variant / "metadata.json").read_text())["id"]

    def files(self):
        return {p: p.stat().st_mtime_ns for p in (self.root / "build").rglob("*") if p.is_file() and p.name != "lock"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    tiny = Tiny(tmp_path_factory.mktemp("tiny kernel"))  # with a space: a checkout may be anywhere
    assert sorted(tiny.build()) == ["csrc/answer.cpp", "torch-ext/binding.cpp"]
    return tiny


def test_an_unchanged_tree_rebuilds_nothing(tiny):
    before = tiny.files()
    os.utime(tiny.root / "csrc/answer.h")  # a new time, as after a checkout, is no change
    assert tiny.build() == []
    assert tiny.files() == before


def test_a_changed_header_rebuilds_what_includes_it_under_a_new_name(tiny):
    before = tiny.id
    (tiny.root / "csrc/answer.h").write_text(TINY["csrc/answer.h"].replace("42", "43"))
    assert sorted(tiny.build()) == ["csrc/answer.cpp", "torch-ext/binding.cpp"]  # the binding holds the name
    assert tiny.id != before
    assert [p.name for p in tiny.variant.glob("*.so")] == [f"{tiny.id}.abi3.so"]


def test_a_changed_python_file_rebuilds_only_the_binding(tiny):
    before = tiny.id
    with open(tiny.root / "torch-ext/tiny/__init__.py", "a") as file:
        file.write("# changed\n")
    assert tiny.build() == ["torch-ext/binding.cpp"]
    assert tiny.id != before


def test_a_damaged_variant_is_repaired(tiny):
    (tiny.variant / "__init__.py").write_text("damaged")
    (tiny.variant / "left_over.py").write_text("")
    assert tiny.build() == []
    metadata = Metadata.read_from_file(tiny.variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, tiny.variant))
    assert "damaged" not in (tiny.variant / "__init__.py").read_text()
    assert not (tiny.variant / "left_over.py").exists()


def test_two_states_of_the_source_live_in_one_process(tiny, tmp_path):
    other = Tiny(tmp_path)
    (other.root / "csrc/answer.h").write_text(TINY["csrc/answer.h"].replace("42", "7"))
    other.build()
    answers = """
import sys
from pathlib import Path
from kernels import get_local_kernel
a, b = (get_local_kernel(Path(p)) for p in sys.argv[1:])
print(a.answer(), b.answer(), a.__name__ != b.__name__)
"""
    expected = (tiny.root / "csrc/answer.h").read_text().split("ANSWER ")[1].split()[0]
    command = [sys.executable, "-c", answers, str(tiny.variant), str(other.variant)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [expected, "7", "True"]


def test_a_listed_file_that_is_missing_is_named(tmp_path):
    tiny = Tiny(tmp_path)
    (tmp_path / "csrc/answer.cpp").unlink()
    assert "csrc/answer.cpp" in tiny.build(fails=True)


def test_a_source_that_is_not_listed_is_missed_at_build_time(tmp_path):
    tiny = Tiny(tmp_path)
    (tmp_path / "csrc/answer.h").write_text("namespace det_attn { long answer(); }\n")
    (tmp_path / "csrc/answer.cpp").write_text('#include "answer.h"\nlong answer() { return det_attn::answer(); }\n')
    tiny.build(fails=True)
    assert not (tiny.variant / "metadata.json").exists()


def test_a_compile_error_is_shown_and_not_cached(tmp_path):
    tiny = Tiny(tmp_path)
    (tmp_path / "csrc/answer.cpp").write_text("long answer() { return oops; }\n")
    assert "oops" in tiny.build(fails=True)
    assert "oops" in tiny.build(fails=True)


PTXAS = """\
ptxas info    : Compiling entry function 'kernel_a' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'kernel_b' for 'sm_80'
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
"""


def test_spills_and_serialised_wgmma_are_noticed_and_named():
    assert builder.complaints(PTXAS.format(stores=0, loads=0)) == []
    assert "kernel_b (sm_80)" in builder.complaints(PTXAS.format(stores=4, loads=0))[0]
    assert "kernel_b (sm_80)" in builder.complaints(PTXAS.format(stores=0, loads=4))[0]
    for code in ("C7508", "C7510", "C7511", "C7512"):
        line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        assert len(builder.complaints(PTXAS.format(stores=0, loads=0) + line)) == 1
    assert builder.complaints("ptxas info    : (C7509) something else\n") == []


def test_capabilities_become_gencode_flags():
    assert builder.gencode("9.0a") == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert builder.gencode("10.0") == ["-gencode=arch=compute_100,code=sm_100"]
    assert len(builder.gencode("12.0+PTX")) == 2 and builder.gencode("12.0+PTX")[1].endswith("code=compute_120")


def test_a_quick_build_keeps_the_matching_capabilities_of_each_component():
    several = {"name": "x", "cuda-capabilities": ["8.0", "9.0", "12.0+PTX"]}
    only_90a = {"name": "y", "cuda-capabilities": ["9.0a"]}
    assert builder.capabilities_of(several, []) == ["8.0", "9.0", "12.0+PTX"]
    assert builder.capabilities_of(several, ["9.0"]) == ["9.0"]
    assert builder.capabilities_of(several, ["12.0"]) == ["12.0+PTX"]
    assert builder.capabilities_of(only_90a, ["9.0"]) == ["9.0a"]
    assert builder.capabilities_of(only_90a, ["8.0"]) == ["9.0a"]
