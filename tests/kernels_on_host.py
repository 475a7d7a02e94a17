"""The kernels of codecs, compiled as C++ for the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "runtime" / "codecs" / name for name in ("kernels.cu", "parts.cu", "frames.cu")]


def compiler() -> str | None:
    """The command of a C++ compiler."""
    return shutil.which("g++") or shutil.which("clang++")


def compile_kernels(folder: Path) -> Path:
    """A library of the kernels, and of `launch`."""
    unit, library = folder / "kernels.cpp", folder / "kernels.so"
    unit.write_text(
        "".join(f'#include "{path}"\n' for path in [ROOT / "tests" / "cuda_on_host.hpp", *SOURCES])
    )
    done = subprocess.run(
        [compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w",
         "-fno-strict-aliasing", "-o", str(library), str(unit)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return library
