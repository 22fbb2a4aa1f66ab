#!/usr/bin/env python3
"""The Hub's rules for a kernel's shared library: Python's limited API, torch's stable ABI, manylinux, its libraries.

In: the path of a .abi3.so. Out: what breaks the rules, and apart from it what only this machine's toolchain brings in.
"""

import re
import subprocess
import sys
from pathlib import Path

PYTHON_ABI, MANYLINUX = "3.9", "manylinux_2_28"
LIBRARIES = re.compile(r"(lib(torch\w*|c10\w*|cudart|stdc\+\+|gcc_s|m|c|pthread|dl|rt)\.so|ld-linux)")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def report(library: Path) -> tuple:
    """(errors, notes). A note is a symbol version that an older toolchain, as kernel-builder's, would not ask for."""
    undefined = [line.strip().removeprefix("U ") for line in output_of("nm", "-DCu", str(library)).splitlines()]
    errors = [f"not in torch's stable ABI: {n}" for n in undefined if re.match(r"(c10|at|torch)::(?!stable::)", n)]
    errors += [f"defined by no source of build.toml: {n}" for n in undefined if "det_attn::" in n]
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d", str(library)))
    errors += [f"a library that no kernel may need: {n}" for n in needed if not LIBRARIES.match(n)]
    try:
        from kernel_abi_check import IncompatibleAbi3Symbol, ObjectFile
    except ImportError:
        return errors, ["the package kernel-abi-check is not here: Python's and manylinux's rules were not checked"]
    for v in ObjectFile(library).check_python_abi(PYTHON_ABI):
        since = f", added in Python {v.version_added}" if isinstance(v, IncompatibleAbi3Symbol) else ""
        errors.append(f"not in Python's {PYTHON_ABI} ABI: {v.name}{since}")
    notes = [f"{v.dep}_{v.version:<8} {v.name}" for v in ObjectFile(library).check_manylinux(MANYLINUX)]
    return errors, sorted(notes)


def print_report(library: Path) -> bool:
    """True when no rule is broken."""
    errors, notes = report(library)
    if notes:
        print(f"  abi: newer than {MANYLINUX} allows, brought in by this machine's toolchain, not by the sources:")
        print("\n".join(f"    {note}" for note in notes))
    if errors:
        print("  abi: BROKEN\n" + "\n".join(f"    {error}" for error in errors), flush=True)
    else:
        print(f"  abi: Python {PYTHON_ABI}, torch's stable ABI and needed libraries are as the Hub asks", flush=True)
    return not errors


if __name__ == "__main__":
    sys.exit(not all([print_report(Path(argument)) for argument in sys.argv[1:]]))
