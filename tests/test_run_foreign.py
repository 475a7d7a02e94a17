"""Production MSCCL programs made elsewhere run and give right data on real ranks."""

import json
import re
from pathlib import Path

import pytest
from mpi_jobs import needs_mpi, taccl

FILES = Path(__file__).resolve().parents[2] / "shared" / "msccl-xml"
PROGRAMS = sorted(FILES.glob("*/*.xml"))
pytestmark = [
    *needs_mpi,
    pytest.mark.skipif(
        not PROGRAMS, reason="the collection of production programs is not beside the repository"
    ),
]


@pytest.mark.parametrize(
    "path", PROGRAMS or [None], ids=[f"{p.parent.name}-{p.stem}" for p in PROGRAMS] or ["-"]
)
def test_foreign_programs_give_right_data(path):
    ranks = int(re.search(r'ngpus="(\d+)"', path.read_text()).group(1))
    assert ranks <= 8
    # one size that the chunk count divides, one that it does not
    sizes = ("-b", "65536", "-e", "65899", "-i", "363", "-n", "1", "-w", "0", "--no-reference")
    ended = taccl(ranks, "run", str(path), *sizes, "--json", "-")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert len(document["results"]) == 2
    for row in document["results"]:
        (mode,) = (row[m] for m in ("out_of_place", "in_place") if row[m] is not None)
        assert mode["nwrong"] == 0 and mode["outside_bytes"] == 0
