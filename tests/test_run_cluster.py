"""A program over two emulated nodes: shared memory within each, MPI between them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_programs as programs
from mpi_jobs import needs_mpi

from taccl.synth.msccl_xml import write_xml

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [*needs_mpi, pytest.mark.cluster, pytest.mark.alone]


def test_nodes_share_memory_inside_and_messages_between(tmp_path):
    path, out = tmp_path / "ring.xml", tmp_path / "out.json"
    path.write_text(write_xml(programs.ring_allreduce(4, 2)))
    sizes = ("-b", "2K", "-e", "512K", "-f", "16", "-n", "2", "-w", "1", "--no-reference")
    line = ("run", str(path), *sizes, "--buffers", "shared", "-v", "--json", str(out))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.cluster", "run", "--nodes=2", "--ranks=2", "--rate=1gbit"),
            *("--timeout=60", "--", sys.executable, "-m", "taccl", *line),
        ],
        cwd=ROOT, text=True, capture_output=True, timeout=100,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["transport"] == "shm+mpi" and document["out_of_bounds"] == {"count": 0, "okay": True}
    said = sorted(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("taccl: rank"))
    assert said == [
        f"taccl: rank {rank}: shared host buffers, transport shm to rank {rank ^ 1}, mpi to the others"
        for rank in range(4)
    ]
