"""Programs on real device memory."""

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


@pytest.mark.parametrize("name", ["allgather", "allreduce"])
def test_staged_through_pinned_memory(tmp_path, name):
    path = tmp_path / "program.xml"
    path.write_text(write_xml(programs.ALL[name](4, 2)))
    ended = taccl(
        4, "run", str(path), "--device", "cuda", "--transport", "staged-mpi", "-b", "1000", "-e", "1000000",
        "-f", "1000", "-d", "all", "-o", "all", "-n", "2", "-w", "1", "--json", "-",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["transport"] == "staged-mpi"
    assert [row["out_of_place"]["nwrong"] for row in document["results"]] == [0] * len(document["results"])
