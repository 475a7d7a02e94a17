"""Programs as collectives in one's own MPI program."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runtime_programs as programs
from mpi_jobs import launch
from native_algorithms import timed, two_nodes, with_plan

from taccl.errors import UsageError
from taccl.runtime.bench import Loaded
from taccl.runtime.codecs import ErrorFeedback
from taccl.runtime.collective import check_arrays, fit
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace
from taccl.synth.collective import build
from taccl.synth.native import write_native

mpi = pytest.mark.usefixtures("needs_a_launcher")
WORKER = str(Path(__file__).with_name("run_collective_worker.py"))
PAGE = Path(__file__).parents[1] / "docs" / "running.md"
NODES = (0, 0, 1, 1)


@pytest.fixture
def files(saved):
    made = programs.ring_allgather(3, 2), programs.ring_allreduce(3, 2), programs.chain_broadcast(3, 2)
    return [saved(program) for program in made]


@pytest.mark.mpi
@mpi
def test_collectives_are_called_again_and_again(files):
    ended = launch(3, WORKER, "work", *files)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["wrong"] == [0] * 8
    assert 0 < 3 * found["frames"] < found["values"] == 2 * 5000 * 4


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("lengths", 86, "RunFailed: rank 2 runs another program or arrays, or has other options, than the rest"),
        ("apart", 2, "TacclError: allreduce-3 does not claim to work out of place"),
        (
            "option", 2,
            "TacclError: open_collective has no option 'codecs'; it has op, codec, links, feedback, recode",
        ),
        ("again", 2, "a lossy codec would add an error at every such hop"),
        ("path", 2, "TacclError: file must be the path of a program; it is 3"),
        ("links", 2, "TacclError: links must be one of nodes, all, planned, or be left out; it is 'some'"),
        ("list", 2, "TacclError: input and output must be arrays of numpy or CuPy; one is a list"),
        ("mask", 2, "TacclError: input and output must be arrays of numpy or CuPy; one is a MaskedArray"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_raised_on_the_first_rank_and_ends_the_others(files, what, code, words):
    ended = launch(3, WORKER, what, *files)
    assert ended.code == code and words in ended.err and ended.err.count("Traceback") == 1 and not ended.out


@pytest.mark.mpi
@mpi
def test_a_rank_may_have_no_part_in_a_collective(saved):
    ended = launch(3, WORKER, "pair", saved(programs.pair_allreduce()))
    assert (ended.code, ended.out.split()) == (0, ["0"] * 3), ended.err


@pytest.mark.mpi
@mpi
def test_a_collective_that_has_been_closed_is_not_called(files):
    ended = launch(3, WORKER, "closed", *files)
    assert ended.code == 2 and not ended.out
    assert "this collective has been closed; open it again to call it; the job is ended" in ended.err


@pytest.mark.mpi
@mpi
def test_a_collective_whose_job_has_been_left_is_not_called(files):
    ended = launch(3, WORKER, "left", *files)
    assert ended.code == 0, ended.err
    words = "the job of this collective has been left; call it inside `with Job(...)`"
    assert ended.out.count(words) == 3 and not ended.err


@pytest.mark.mpi
@mpi
def test_the_example_of_the_page(tmp_path, monkeypatch):
    """Its file plans what goes between nodes as q8."""
    (example,) = re.findall(r"```python\n(.*?open_collective.*?)```", PAGE.read_text(), re.DOTALL)
    made = timed(two_nodes(), build("allreduce", 4), "hierarchical")
    made = with_plan(
        made, [n for n, m in enumerate(made.messages) if NODES[m.src] != NODES[m.dst]], topology=two_nodes()
    )
    topology = replace(two_nodes(), codecs=(made.coding.cost,))
    (tmp_path / "allreduce.json").write_text(write_native(made, topology), "utf-8")
    (tmp_path / "train.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    ended = launch(4, "train.py")
    assert ended.code == 0, ended.err
    said = re.fullmatch(r"error (\S+), (\d+) bytes sent as (\d+)\n", ended.out)
    error, values, frames = map(float, said.groups())
    assert error < 0.01 and 2 < values / frames < 4


ARRAY = np.zeros(12, np.float32)
TYPES = "must be a contiguous array of one dimension and one of float32"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"input": np.zeros((3, 4), np.float32)}, rf"the input {TYPES}.*float32 of shape \(3, 4\)"),
        ({"output": np.zeros(24, np.float32)[::2]}, f"the output {TYPES}"),
        ({"input": np.zeros(12, np.complex64)}, "complex64"),
        ({"output": np.zeros(12)}, "the input is float32 and the output float64"),
        ({"output": np.broadcast_to(np.float32(0), 12)[:1]}, "the output cannot be written"),
        ({"op": "max", "feedback": ErrorFeedback(12)}, "sums and averages of float32"),
        ({"feedback": ErrorFeedback(11)}, r"the feedback is for \(11,\) values; the input has \(12,\)"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(more, words):
    asked = {"input": ARRAY, "output": ARRAY, "op": "sum", "feedback": None}
    assert check_arrays(**asked)
    with pytest.raises(UsageError, match=words):
        check_arrays(**(asked | more))


def test_arrays_must_fit_the_program():
    def fitted(program, rank, input, output, inplace=False):
        order = trace(program)
        modes = tuple(
            mode
            for mode, claimed in (("out_of_place", program.outofplace), ("in_place", program.inplace))
            if claimed
        )
        return fit(
            Loaded(program, collective_of(program, order), order, modes), rank, input, output, inplace
        )[1]

    whole = np.zeros(12, np.float32)
    assert fitted(programs.ring_allgather(3, 2), 1, whole[:4], np.zeros_like(whole)).block_elements == 4
    assert fitted(programs.direct_scatter(3), 0, whole, whole[:4].copy()).block_elements == 4
    assert fitted(programs.direct_scatter(3), 1, whole[:0], whole[:4]).block_elements == 4
    gather = programs.ring_allgather(3, 2, inplace=True)
    assert fitted(gather, 1, whole[4:8], whole, True).block_elements == 4
    with pytest.raises(UsageError, match="in place the input begins 4 elements after the output"):
        fitted(gather, 1, whole[:4], whole, True)
    with pytest.raises(UsageError, match="4 elements after the output; another rank's share memory"):
        fitted(gather, 1, whole[4:8].copy(), whole, True)
    with pytest.raises(UsageError, match="does not claim to work out of place"):
        fitted(gather, 1, whole[4:8], whole.copy())
    with pytest.raises(
        UsageError, match="has 4 elements and the output 13; with blocks of 4 allgather wants 4 and 12"
    ):
        fitted(programs.ring_allgather(3, 2), 1, whole[:4], np.zeros(13, np.float32))


UNALIGNED = """
import sys
import numpy as np
from taccl import Job, open_collective

with Job(20) as job:
    values, wrong = np.frombuffer(bytearray(2 * 256 * 4 + 1), np.float32, 512, 1), 0
    places = np.arange(512, dtype=np.float32)
    with open_collective(job, sys.argv[1], values, values) as exchange:
        for turn in range(7):
            values[:] = 1000 * job.rank + places + turn
            exchange()
            mine = places[256 * job.rank : 256 * (job.rank + 1)]
            wrong += int((values != np.concatenate([mine + turn, 1000 + mine + turn])).sum())
    total = job.reduce(np.array([wrong]), "sum")
    if job.rank == 0:
        print(total[0])
"""


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize("native", ["1", "0"])
def test_arrays_at_odd_addresses(saved, native):
    """What arrives while the cell is still to be sent is copied there later, which no loop does for odd addresses."""
    ended = launch(2, "-c", UNALIGNED, saved(programs.inplace_exchange(2)), TACCL_NATIVE=native)
    assert (ended.code, ended.out) == (0, "0\n"), ended.err
