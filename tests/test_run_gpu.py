"""Programs on real device memory, several ranks on one device or on several."""

import json

import pytest
import runtime_programs as programs
from mpi_jobs import needs_mpi, taccl

from taccl.runtime import gpu
from taccl.synth.msccl_xml import write_xml

pytestmark = [
    *needs_mpi,
    pytest.mark.gpu,
    pytest.mark.skipif(gpu.load() is None, reason=f"needs a GPU: {gpu.why_not()}"),
]


def run(tmp_path, name, *options):
    """A program of four ranks: its JSON, which holds no wrong element."""
    path = tmp_path / "program.xml"
    path.write_text(write_xml(programs.ALL[name](4, 2)))
    line = ("run", str(path), "--device", "cuda", "-n", "2", "-w", "1", "--json", "-")
    ended = taccl(4, *line, *options)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    wrong = [row["out_of_place"]["nwrong"] for row in document["results"]]
    assert wrong and not any(wrong)
    return document


@pytest.mark.parametrize(
    ("transport", "buffers"), [("cuda-ipc", "private"), ("cuda-ipc", "shared"), ("staged-mpi", "private")]
)
@pytest.mark.parametrize("name", ["allgather", "allreduce"])
def test_every_type_and_reduction(tmp_path, name, transport, buffers):
    """bfloat16 among them, which CuPy adds by itself."""
    sizes = ("-b", "1000", "-e", "1000000", "-f", "1000", "-d", "all")
    ops = ("-o", "all") if name == "allreduce" else ()
    document = run(tmp_path, name, "--transport", transport, "--buffers", buffers, *sizes, *ops)
    assert document["transport"] == transport


@pytest.mark.parametrize("transport", ["cuda-ipc", "staged-mpi"])
def test_long_messages(tmp_path, transport):
    """Of many segments, where they are staged."""
    run(tmp_path, "allreduce", "--transport", transport, "-b", "64M", "-e", "64M", "-n", "10", "-c", "3")


@pytest.mark.parametrize("name", [name for name in programs.ALL if name not in ("allgather", "allreduce")])
def test_other_collectives(tmp_path, name):
    """Scratch memory and several threadblocks."""
    run(tmp_path, name, "-b", "4000000", "-e", "4000000", "-c", "3")


def test_auto_takes_cuda_ipc(tmp_path):
    assert run(tmp_path, "alltoall", "-b", "1M", "-e", "1M")["transport"] == "cuda-ipc"
