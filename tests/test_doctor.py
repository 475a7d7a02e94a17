"""`taccl doctor` and the probes behind it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from mpi_jobs import needs_mpi

from taccl.commands.doctor import command
from taccl.errors import EnvironmentProblem, UsageError
from taccl.runtime import doctor, gpu, mpi, shared

NAMES = {
    "python", "numpy", "ml_dtypes", "lxml", "pyyaml", "networkx", "ortools", "mpi library", "mpi wheels",
    "mpiexec", "two ranks", "shared memory", "compiled code", "gpu", "mps", "cuda ipc", "pinned shared memory", "nccl",
    "cuda-aware mpi", "solver", "codec zstd", "codec nvcomp-ans", "namespaces",
}  # fmt: skip


@pytest.mark.mpi
@needs_mpi[1]
def test_here_the_host_path_works():
    done = subprocess.run(
        [sys.executable, "-m", "taccl", "doctor", "--json"], capture_output=True, text=True, timeout=120
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["schema"] == "taccl/doctor/v1" and document["host_path_works"]
    assert {check["name"] for check in document["checks"]} == NAMES
    for check in document["checks"]:
        assert check["detail"]
        assert bool(check["advice"]) != check["ok"]
        assert check["ok"] or not check["needed"]


def test_without_mpi_it_says_what_to_install_and_exits_with_6(monkeypatch):
    def child(command, timeout_s=0.0):
        return None, "cannot load MPI library"

    monkeypatch.setattr(doctor, "child", child)
    monkeypatch.setattr(mpi, "mpiexec", lambda: None)
    outcome = CliRunner().invoke(command, [])
    assert outcome.exit_code == 6
    assert "FAIL mpi library      cannot load MPI library" in outcome.output
    assert "pip install 'taccl[mpi]'" in outcome.output
    assert outcome.output.splitlines()[-1].startswith("The host path does not work")
    parsed = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert not parsed["host_path_works"]
    assert [c["name"] for c in parsed["checks"] if c["needed"] and not c["ok"]] == [
        "mpi library", "mpiexec", "two ranks"
    ]  # fmt: skip


def test_it_says_why_memory_cannot_be_shared(monkeypatch):
    assert doctor._shared_memory().ok
    monkeypatch.setattr(doctor, "child", lambda command, *_: ({"why_not": "it is forbidden"}, ""))
    check = doctor._shared_memory()
    assert (check.ok, check.needed, check.detail) == (False, False, "it is forbidden")
    monkeypatch.setattr(shared.platform, "machine", lambda: "aarch64")
    assert "aarch64 processors does not keep the order of stores" in shared.try_out()


def test_wrong_data_between_two_ranks_is_a_failure(monkeypatch):
    monkeypatch.setattr(mpi, "mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(doctor, "child", lambda command, *_: ({"right": False, "ranks": 1}, ""))
    (pair,) = [doctor._pair()]
    assert not pair.ok and pair.needed and "mpiexec must belong to the MPI library" in pair.advice


def test_a_gpu_with_a_library_that_crashes_on_device_memory(monkeypatch):
    answers = {
        "gpu": ({"devices": ["Some GPU"], "why_not": "", "cupy": "14.2", "alternates": True}, ""),
        "library": ({"cuda_query": True}, ""),
        "ipc": ({"why_not": "", "ranks": 2, "devices": ["0000:10:00.0"]}, ""),
        "pinned": ({"why_not": "", "ranks": 2}, ""),
        "nccl": ({"why_not": "there is one GPU", "ranks": 2, "version": 0}, ""),
        "cuda": (None, "it ended with exit code 139 and said nothing"),
    }
    monkeypatch.setattr(mpi, "mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(doctor, "child", lambda command, *_: answers[command[-1]])
    device, mps, ipc, pinned, nccl, aware = doctor._gpu()
    assert device.ok and "Some GPU" in device.detail
    assert not mps.ok and "take turns" in mps.detail
    assert ipc.ok and "on 0000:10:00.0" in ipc.detail
    assert pinned.ok and (nccl.ok, nccl.detail) == (False, "there is one GPU")
    answers["ipc"] = ({"why_not": "it is forbidden", "ranks": 2, "devices": []}, "")
    assert (doctor._ipc().ok, doctor._ipc().detail) == (False, "it is forbidden")
    assert not aware.ok and "the library says yes" in aware.detail and "139" in aware.detail


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.abort()", "exit code -6"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("raise SystemExit('told you')", "told you"),
        ("print('{broken')", "said nothing"),
    ],
)
def test_children_that_fail_are_an_answer(code, why):
    document, reason = doctor.child([sys.executable, "-c", code], 1.0)
    assert document is None and why in reason


def test_a_program_that_is_not_there_is_an_answer():
    assert doctor.child(["/no/such/program"]) == (
        None, "/no/such/program cannot be started: No such file or directory"
    )  # fmt: skip


def test_device_choice(monkeypatch):
    monkeypatch.setattr(gpu, "_probe", lambda: (None, "no driver"))
    assert gpu.choose("auto") == gpu.choose("host") == "host"
    with pytest.raises(EnvironmentProblem, match="no driver"):
        gpu.choose("cuda")
    with pytest.raises(EnvironmentProblem, match="no driver"):
        gpu.select(0)
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        gpu.choose("tpu")
    monkeypatch.setattr(gpu, "_probe", lambda: (object(), ""))
    assert gpu.choose("auto") == gpu.choose("cuda") == "cuda"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, mpi.Launcher("mpich", 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, mpi.Launcher("openmpi", 0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, mpi.Launcher("slurm", 3, 8)),
        ({"PMI_RANK": "x", "PMI_SIZE": "4"}, mpi.Launcher("none", 0, 1)),
        ({}, mpi.Launcher("none", 0, 1)),
    ],
)
def test_launcher_is_known_from_the_environment(monkeypatch, variables, expected):
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert mpi.launcher() == expected


def test_environment_for_a_launcher(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("OMPI_MCA_osc", "rdma")
    found = mpi.launch_environment()
    assert "PMI_RANK" not in found
    assert found["OMPI_MCA_osc"] == "rdma" and found["OMPI_MCA_mpi_yield_when_idle"] == "1"


ALONE = """
import os
from taccl.runtime import mpi
mpi.load()
print(*mpi.segments(os.getpid()))
"""


@pytest.mark.mpi
@needs_mpi[1]
def test_a_process_without_a_launcher_leaves_nothing_in_shared_memory():
    """Open MPI by itself leaves a segment; others have none to begin with."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=mpi.launch_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert [path for path in done.stdout.split() if Path(path).exists()] == []


@pytest.mark.parametrize(
    ("blocked", "words"),
    [("mpi4py", "mpi4py cannot be imported"), ("library", "mpi4py finds no MPI library")],
)
def test_missing_mpi_says_what_to_install(blocked, words):
    """In a child: this process may have loaded MPI already."""
    block = (
        "sys.modules['mpi4py'] = None"
        if blocked == "mpi4py"
        else "os.environ['MPI4PY_LIBMPI'] = '/no/libmpi.so'"
    )
    code = f"""
import os, sys
{block}
from taccl.errors import EnvironmentProblem
from taccl.runtime import mpi
try:
    mpi.load()
except EnvironmentProblem as error:
    print(error)
    sys.exit(error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 6, done.stderr
    assert words in done.stdout and "pip install 'taccl[mpi]'" in done.stdout
