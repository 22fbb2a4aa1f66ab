#!/usr/bin/env python3
"""Assemble the Hub repository from the variants built here, and with --upload publish it.

In: build/<variant>/ as tools/build.py or kernel-builder leave it, CARD.md, benchmarks/. Out: build/hub/, laid out as
`kernel-builder upload` lays out a kernel repository: README.md belongs on branch main, the rest on branch v<version>.
"""

import argparse
import importlib.metadata
import json
import shutil
import sys
import tomllib
from pathlib import Path

from abi import report

ROOT = Path(__file__).resolve().parent.parent
HUB = ROOT / "build" / "hub"
CLIENT = (2, 3)  # the first huggingface_hub that uploads to repositories of type "kernel": older ones only create them


class PackageError(Exception):
    pass


# ---- What may be published ---------------------------------------------------------------------------------------


def variants_of(build: Path) -> list:
    return sorted(p for p in build.iterdir() if (p / "metadata.json").is_file()) if build.is_dir() else []


def capabilities_of(config: dict, backend: str) -> set:
    return {a for c in config["kernel"].values() if c["backend"] == backend for a in c.get("cuda-capabilities", [])}


def check(variant: Path, config: dict) -> list:
    """What makes the variant unfit for other machines; PackageError where its files are not those that were built."""
    from kernels._rust import Digest, DigestValidationError, Metadata

    metadata = Metadata.read_from_file(variant / "metadata.json")
    if metadata.version != config["general"]["version"]:
        raise PackageError(
            f"{variant.name}: version {metadata.version}, build.toml says {config['general']['version']}"
        )
    if metadata.digest is None:
        raise PackageError(f"{variant.name}: metadata.json has no digest: build where the package `kernels` is")
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    except DigestValidationError as error:
        raise PackageError(f"{variant.name}: not the files that were built: {error}") from None

    unfit = []
    raw = json.loads((variant / "metadata.json").read_text())
    missing = capabilities_of(config, raw["backend"]["type"]) - set(raw["backend"].get("archs", []))
    if missing:
        unfit.append(f"built without the capabilities {', '.join(sorted(missing))}")
    for library in variant.glob("*.abi3.so"):
        errors, notes = report(library)
        unfit += errors + [f"a symbol newer than the Hub's manylinux: {note}" for note in notes]
    return unfit


# ---- Assemble ----------------------------------------------------------------------------------------------------


def card(config: dict, root: Path) -> str:
    """CARD.md with its names filled in, by the rules of `kernel-builder fill-card`."""
    import jinja2  # torch depends on it

    general = config["general"]
    template = (root / "CARD.md").read_text(encoding="utf-8")
    return jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined).from_string(template).render(
        repo_id=general["hub"]["repo-id"],
        version=general["version"],
        has_benchmark=(root / "benchmarks" / "benchmark.py").is_file(),
        source=general.get("source"),
        license=general["license"].lower(),
    )  # fmt: skip


def assemble(config: dict, root: Path, target: Path) -> dict:
    """Write the repository to target; {variant name: why it is unfit for other machines}."""
    variants = variants_of(root / "build")
    if not variants:
        raise PackageError(f"{root / 'build'} holds no variant: run make build")
    unfit = {v.name: check(v, config) for v in variants}
    shutil.rmtree(target, ignore_errors=True)
    (target / "benchmarks").mkdir(parents=True)
    for variant in variants:
        shutil.copytree(variant, target / "build" / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted((root / "benchmarks").glob("benchmark*.py")):  # what `kernels benchmark` looks for
        shutil.copy(path, target / "benchmarks")
    (target / "README.md").write_text(card(config, root), encoding="utf-8")
    return unfit


# ---- Upload ------------------------------------------------------------------------------------------------------


def check_client() -> None:
    """PackageError where the installed huggingface_hub cannot publish."""
    try:
        installed = importlib.metadata.version("huggingface_hub")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is None or tuple(int(n) for n in installed.split(".")[:2]) < CLIENT:
        raise PackageError(
            f"huggingface_hub: {installed or 'none'} is installed, publishing a kernel needs "
            f"{'.'.join(map(str, CLIENT))} or newer: install the one of requirements.txt"
        )


def upload(config: dict, target: Path, repo_id: str, private: bool) -> str:
    """Card to main, builds and benchmarks to v<version>; the commit of the latter. Old files there are replaced."""
    from huggingface_hub import HfApi

    api, branch = HfApi(), f"v{config['general']['version']}"
    repo = dict(repo_id=repo_id, repo_type="kernel")
    api.create_repo(**repo, private=private, exist_ok=True)
    api.create_branch(**repo, branch=branch, exist_ok=True)
    message = f"det-attn {branch}: " + ", ".join(v.name for v in variants_of(target / "build"))
    api.upload_folder(
        **repo, folder_path=target, revision="main", allow_patterns="README.md", commit_message=message
    )
    done = api.upload_folder(
        **repo,
        folder_path=target,
        revision=branch,
        allow_patterns=["build/**", "benchmarks/**"],
        delete_patterns=["build/**", "benchmarks/**"],
        commit_message=message,
    )
    return done.oid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upload", action="store_true", help="publish; needs HF_TOKEN or `hf auth login`")
    parser.add_argument("--repo-id", help="instead of the one in build.toml, e.g. to rehearse")
    parser.add_argument("--private", action="store_true", help="where the repository is created")
    parser.add_argument("--any-machine", action="store_true", help="upload though a variant is unfit for some machines")
    args = parser.parse_args()
    config = tomllib.loads((ROOT / "build.toml").read_text())
    repo_id = args.repo_id or config["general"]["hub"]["repo-id"]
    config["general"]["hub"]["repo-id"] = repo_id
    try:
        if args.upload:
            check_client()
        unfit = assemble(config, ROOT, HUB)
        for name, reasons in unfit.items():
            size = sum(f.stat().st_size for f in (HUB / "build" / name).rglob("*") if f.is_file())
            print("\n    ".join([f"  {name}  {size / 2**20:.1f} MiB", *reasons]))
        print(f"{HUB.relative_to(ROOT)}: {repo_id}, version {config['general']['version']}")
        if args.upload:
            if any(unfit.values()) and not args.any_machine:
                raise PackageError("a variant is unfit for some machines (above); --any-machine uploads all the same")
            print(f"published {repo_id} as {upload(config, HUB, repo_id, args.private)}")
    except PackageError as error:
        print(f"packaging failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
