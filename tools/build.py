#!/usr/bin/env python3
"""Build what kernel-builder would build, without nix: build/<variant>/, ready for `kernels`.

In: build.toml, the only list of sources and flags, and torch-ext/. Out: the CPU variant, and the CUDA variant wherever
nvcc is. Objects are kept under build/.cache and reused while their command, source and headers are unchanged.
"""

import argparse
import concurrent.futures
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from abi import output_of, print_report
from generated import COMPAT_PY, OPS_PY, REGISTRATION_H

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / ".cache"
# ptxas serialises wgmma (C7508, C7510-C7512): correct, but several times slower, so nobody must miss it.
SLOW_WGMMA = re.compile(r"C75(?:08|10|11|12)\b")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class BuildError(Exception):
    pass


# ---- Tools and torch ---------------------------------------------------------------------------------------------


@dataclass
class Toolchain:
    cxx: str
    cxx_version: str
    torch: Path
    nvcc: str = ""
    nvcc_version: str = ""
    cuda: str = ""  # "13.0"


def find_toolchain() -> Toolchain:
    cxx = os.environ.get("CXX", "g++")
    if not shutil.which(cxx):
        raise BuildError(f"no C++ compiler: '{cxx}' was not found; install g++ or set CXX")
    spec = importlib.util.find_spec("torch")  # found, not imported: importing takes seconds
    if spec is None:
        raise BuildError(f"{sys.executable} has no torch; install requirements.txt or pass PYTHON=")
    tools = Toolchain(cxx, output_of(cxx, "--version"), Path(spec.origin).parent)
    default = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    tools.nvcc = shutil.which("nvcc") or (str(default) if default.exists() else "")
    if tools.nvcc:
        tools.nvcc_version = output_of(tools.nvcc, "--version")
        tools.cuda = re.search(r"release (\d+\.\d+)", tools.nvcc_version)[1]
    return tools


# ---- Plan: build.toml -> objects ---------------------------------------------------------------------------------


@dataclass
class Object:
    source: str  # relative to ROOT, so that no build path gets into the binary
    path: Path
    command: list
    key: str = ""  # of the command, the compiler, the source and every header it read

    @property
    def log(self) -> Path:
        return self.path.with_suffix(".log")


@dataclass
class Variant:
    name: str
    id: str
    backend: str
    objects: list
    archs: list = field(default_factory=list)

    @property
    def path(self) -> Path:
        return ROOT / "build" / self.name


def components_of(config: dict, backend: str, cuda: str) -> list:
    def newer(minver: str) -> bool:
        return [int(x) for x in minver.split(".")] > [int(x) for x in cuda.split(".")]

    chosen = [dict(c, name=n) for n, c in config["kernel"].items() if c["backend"] == backend]
    return [c for c in chosen if not (c.get("cuda-minver") and newer(c["cuda-minver"]))]


def capabilities_of(component: dict, only: list) -> list:
    every = component.get("cuda-capabilities")
    if not every:
        raise BuildError(f"[kernel.{component['name']}] in build.toml needs cuda-capabilities")
    # A component that has none of the wanted capabilities keeps its own: its functions are still called.
    return [c for c in every if re.match(r"[\d.]+", c)[0] in only] or every


def gencode(capability: str) -> list:
    base = capability.removesuffix("+PTX").replace(".", "")
    kinds = [f"sm_{base}"] + ([f"compute_{base}"] if capability.endswith("+PTX") else [])
    return [f"-gencode=arch=compute_{base},code={kind}" for kind in kinds]


def package_files(config: dict) -> list:
    package = ROOT / "torch-ext" / config["general"]["name"].replace("-", "_")
    if not (package / "__init__.py").is_file():
        raise BuildError(f"{package.relative_to(ROOT)}/__init__.py is missing")
    extensions = {"." + e for e in ["py", *config["torch"].get("pyext", [])]}
    return [(p, p.relative_to(package)) for p in sorted(package.rglob("*")) if p.suffix in extensions]


def objects_of(variant: Variant, component: dict, torch_abi: int, tools: Toolchain, only_capabilities: list) -> list:
    """The component's objects, with the commands that kernel-builder's CMake files would run."""
    defines = ["-DPy_LIMITED_API=0x03090000", f"-DTORCH_TARGET_VERSION={torch_abi:#018x}"]
    defines += ["-DCPU_KERNEL"] if variant.backend == "cpu" else ["-DCUDA_KERNEL", "-DUSE_CUDA=1"]
    includes = [f"-I{i}" for i in ["csrc", *component.get("include", [])]]
    common = ["-std=c++17", "-O3", "-DNDEBUG", *defines, *includes, "-isystem", str(tools.torch / "include")]
    if component["name"] == "binding":  # only these files may name the extension: its name changes with any file
        common += [f"-DTORCH_EXTENSION_NAME={variant.id}", f"-I{(CACHE / 'include').relative_to(ROOT)}"]
    objects = []
    for source in component["src"]:
        path = CACHE / variant.name / component["name"] / (source + ".o")
        if source.endswith((".cpp", ".cc", ".cxx")):
            command = [tools.cxx, *common, "-fPIC", "-fno-gnu-unique", "-Wall", "-Wextra"]
            command += component.get("cxx-flags", [])
        elif source.endswith(".cu"):
            command = [tools.nvcc, "-ccbin", tools.cxx, *common, "-Xcompiler=-fPIC,-fno-gnu-unique", "-DENABLE_FP8"]
            command += ["--expt-relaxed-constexpr", "-Xptxas=-v", *component.get("cuda-flags", [])]
            command += [f for c in capabilities_of(component, only_capabilities) for f in gencode(c)]
        else:
            continue  # a header: listed because kernel-builder builds from the listed files alone
        command += ["-c", source, "-o", str(path.relative_to(ROOT))]
        command += ["-MD", "-MF", str(path.with_suffix(".d").relative_to(ROOT))]
        objects.append(Object(source, path, command))
    return objects


def plan(config: dict, backend: str, tools: Toolchain, only_capabilities: list) -> Variant:
    general, torch = config["general"], config["torch"]
    abi = torch["stable-abi"][backend]
    major, minor = (int(x) for x in abi.split("."))
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (tools.torch / "version.py").read_text())
    if (int(found[1]), int(found[2])) < (major, minor):
        raise BuildError(f"torch {found[1]}.{found[2]} is older than the stable ABI {abi} that build.toml asks for")
    machine = f"{platform.machine()}-{platform.system().lower()}"
    compute = "cpu" if backend == "cpu" else "cu" + tools.cuda.replace(".", "")
    name = f"torch-stable-abi{major}{minor}-{compute}-{machine}"

    components = components_of(config, backend, tools.cuda)
    sources = [s for c in [torch, *components] for s in c["src"]]
    missing = sorted({s for s in sources if not (ROOT / s).is_file()})
    if missing:
        raise BuildError("build.toml lists files that do not exist: " + ", ".join(missing))

    archs = sorted({a for c in components for a in capabilities_of(c, only_capabilities)} if backend == "cuda" else [])
    state = hashlib.sha256(f"{name} {archs}".encode())
    for path in ["build.toml", "tools/build.py", "tools/generated.py", *sorted(set(sources))]:
        state.update((ROOT / path).read_bytes())
    for path, relative in package_files(config):
        state.update(str(relative).encode() + path.read_bytes())
    id = f"_{general['name'].replace('-', '_')}_{backend}_{state.hexdigest()[:10]}"

    variant = Variant(name, id, backend, [], archs)
    for component in [dict(torch, name="binding"), *components]:
        variant.objects += objects_of(variant, component, (major << 56) | (minor << 48), tools, only_capabilities)
    return variant


# ---- Compile -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def state_of(path: str) -> str:
    """Content for our own files, size and time for the compiler's and torch's, of which there are hundreds."""
    file = ROOT / path
    if not os.path.isabs(path):
        return hashlib.sha256(file.read_bytes()).hexdigest()
    stat = file.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def key_of(obj: Object, tools: Toolchain) -> str:
    """Empty when it cannot be known yet, for lack of a list of headers."""
    try:
        rule = obj.path.with_suffix(".d").read_text().replace("\\\n", " ").split(":", 1)[1]
        files = [re.sub(r"\\(.)", r"\1", f) for f in re.findall(r"(?:\\.|\S)+", rule)]
        states = [(f, state_of(f)) for f in files]
    except (OSError, IndexError):
        return ""
    version = tools.nvcc_version if obj.source.endswith(".cu") else ""
    return hashlib.sha256(repr((obj.command, tools.cxx_version, version, states)).encode()).hexdigest()


def is_fresh(obj: Object, tools: Toolchain) -> bool:
    obj.key, stored = key_of(obj, tools), obj.path.with_suffix(".key")
    return bool(obj.key) and obj.path.exists() and stored.exists() and stored.read_text() == obj.key


def complaints(log: str) -> list:
    """What ptxas says about slow code, with the kernel and architecture it is about."""
    found, kernel = [], ""
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernel = f"{entry[1]} ({entry[2]})"
        if SLOW_WGMMA.search(line) or (s := SPILLS.search(line)) and (int(s[1]) or int(s[2])):
            found.append(f"{kernel}: {line.strip()}")
    return found


def compile_object(obj: Object, tools: Toolchain, nvcc_threads: int) -> tuple:
    """Compile, keep the log, return what of it a person should see, and the seconds it took."""
    start = time.monotonic()
    obj.path.parent.mkdir(parents=True, exist_ok=True)
    obj.path.with_suffix(".key").unlink(missing_ok=True)
    command = obj.command + ([f"--threads={nvcc_threads}"] if obj.source.endswith(".cu") else [])
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    obj.log.write_text(shlex.join(command) + "\n" + done.stdout)
    if done.returncode:
        raise BuildError(f"{obj.source} does not compile\n{shlex.join(command)}\n{done.stdout}")
    obj.key = key_of(obj, tools)
    obj.path.with_suffix(".key").write_text(obj.key)
    quiet = re.compile(r"ptxas info|bytes stack frame|^\s*$|Function properties|tmpxft_")
    return [line for line in done.stdout.splitlines() if not quiet.search(line)], time.monotonic() - start


def compile_all(variant: Variant, tools: Toolchain, jobs: int) -> None:
    stale = [o for o in variant.objects if not is_fresh(o, tools)]
    stale.sort(key=lambda o: not o.source.endswith(".cu"))  # nvcc takes longest: first
    threads = max(1, jobs // max(1, sum(o.source.endswith(".cu") for o in stale)))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(compile_object, o, tools, threads): o for o in stale}
        try:
            for n, job in enumerate(concurrent.futures.as_completed(running), 1):
                said, seconds = job.result()
                print("\n".join([f"  [{n}/{len(stale)}] {running[job].source}  {seconds:.1f} s", *said]), flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def check_speed(variant: Variant, allow_spills: bool) -> None:
    """The logs of all objects, not only of those just compiled: slow code fails every build until it is gone."""
    kernels = [o for o in variant.objects if o.source.endswith(".cu")]
    slow = [f"{o.source}: {c}" for o in kernels for c in complaints(o.log.read_text())]
    if slow and not allow_spills:
        raise BuildError("ptxas spills or serialises (make BUILD=--allow-spills to go on)\n  " + "\n  ".join(slow))
    if slow:
        print("\n  ".join(["  ptxas spills or serialises:", *slow]))


# ---- Link and install --------------------------------------------------------------------------------------------


def link(variant: Variant, tools: Toolchain) -> bool:
    """True when the extension was linked anew."""
    output, stored = variant.path / f"{variant.id}.abi3.so", CACHE / variant.name / "link.key"
    command = [tools.cxx, "-shared"] if variant.backend == "cpu" else [tools.nvcc, "-ccbin", tools.cxx, "-shared"]
    command += [] if variant.backend == "cpu" else ["--cudart=shared"]  # the one that torch has loaded
    # libtorch.so has no symbols of its own, but where torch has CUDA it leads to those of libtorch_cuda.so.
    to_linker = "-Wl," if variant.backend == "cpu" else "-Xlinker="
    command += [str(o.path.relative_to(ROOT)) for o in variant.objects]
    command += [f"-L{tools.torch / 'lib'}", f"{to_linker}--no-as-needed,-ltorch,--as-needed", "-ltorch_cpu", "-lc10"]
    command += ["-o", str(output)]
    key = hashlib.sha256(repr((command, [o.key for o in variant.objects])).encode()).hexdigest()
    if output.exists() and stored.exists() and stored.read_text() == key:
        return False
    variant.path.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # a new file: the old one may be in use
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"{output.name} does not link\n{shlex.join(command)}\n{done.stdout}")
    stored.write_text(key)
    return True


def install(variant: Variant, config: dict) -> bool:
    """Make the folder hold exactly this build's files; True when anything had to change."""
    python_name = config["general"]["name"].replace("-", "_")
    wanted = {str(relative): path.read_bytes() for path, relative in package_files(config)}
    wanted["_ops.py"] = OPS_PY.format(id=variant.id).encode()
    wanted[f"{python_name}/__init__.py"] = COMPAT_PY.format(id=variant.id).encode()
    keep = {*wanted, f"{variant.id}.abi3.so", "metadata.json"}
    present = {str(p.relative_to(variant.path)): p for p in variant.path.rglob("*") if p.is_file()}
    stale = [p for f, p in present.items() if f not in keep and "__pycache__" not in f]
    changed = [f for f, text in wanted.items() if f not in present or present[f].read_bytes() != text]
    for path in stale:
        path.unlink()
    for name in changed:
        (variant.path / name).parent.mkdir(parents=True, exist_ok=True)
        (variant.path / name).write_bytes(wanted[name])
    return bool(stale or changed)


def write_metadata(variant: Variant, config: dict) -> None:
    """All that kernel-builder writes, but for `provenance`, which names the kernel-builder that made the build."""
    general = config["general"]
    backend = {"type": variant.backend} | ({"archs": variant.archs} if variant.archs else {})
    metadata = {"name": general["name"], "id": variant.id, "version": general["version"], "license": general["license"]}
    metadata |= {k: general[k] for k in ("upstream", "source") if k in general}
    metadata |= {"python-depends": general.get("python-depends", []), "kernel-depends": [], "backend": backend}
    try:
        from kernels._rust import Digest, DigestAlgorithm

        digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant.path)
        metadata["digest"] = {"algorithm": str(digest.algorithm), "files": dict(sorted(digest.files.items()))}
    except ImportError:
        print("  no `kernels` package here: metadata.json is written without its digest")
    (variant.path / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


# ---- Command line ------------------------------------------------------------------------------------------------


def build(backend: str, config: dict, tools: Toolchain, args: argparse.Namespace) -> None:
    start = time.monotonic()
    variant = plan(config, backend, tools, args.capabilities)
    print(f"{variant.name}", flush=True)
    compile_all(variant, tools, args.jobs)
    check_speed(variant, args.allow_spills)
    linked = link(variant, tools)
    installed = install(variant, config)
    if linked or installed or not (variant.path / "metadata.json").exists():
        (variant.path / "metadata.json").unlink(missing_ok=True)  # rewritten only once the ABI holds
        if not print_report(variant.path / f"{variant.id}.abi3.so"):
            raise BuildError(f"{variant.name} breaks the rules for kernels listed above")
        write_metadata(variant, config)
        print(f"  {variant.id}, {time.monotonic() - start:.1f} s", flush=True)
    else:
        print(f"  {variant.id}, up to date", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["cpu", "cuda", "all"], default="all", help="all: CUDA only where nvcc is")
    parser.add_argument("--capabilities", nargs="+", default=[], metavar="X.Y", help="only these, for a quick build")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--allow-spills", action="store_true", help="report what ptxas spills, but go on")
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree take turns
        try:
            config = tomllib.loads((ROOT / "build.toml").read_text())
            tools = find_toolchain()
            header = CACHE / "include" / "registration.h"
            if not header.exists() or header.read_text() != REGISTRATION_H:
                header.parent.mkdir(exist_ok=True)
                header.write_text(REGISTRATION_H)
            if args.backend == "cuda" and not tools.nvcc:
                raise BuildError("--backend cuda needs nvcc on PATH or in CUDA_HOME/bin")
            for backend in ["cpu", "cuda"]:
                if args.backend == backend or args.backend == "all" and (backend == "cpu" or tools.nvcc):
                    build(backend, config, tools, args)
                elif args.backend == "all":
                    print("no nvcc here: the CUDA variant is not built")
        except BuildError as error:
            print(f"build failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
