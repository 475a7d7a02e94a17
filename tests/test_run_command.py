"""`taccl run` on real ranks: data, table, JSON, messages, exit codes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runtime_programs as programs
from click.testing import CliRunner
from mpi_jobs import launch, messages, taccl, taccl_but
from native_algorithms import timed

from taccl.commands.run import Size, command
from taccl.profiles.load import load_topology
from taccl.runtime import table
from taccl.runtime.bench import Measurement, Row, Timing, patience_s
from taccl.runtime.dtypes import DTYPES
from taccl.synth.collective import build
from taccl.synth.native import write_native

mpi = pytest.mark.usefixtures("needs_a_launcher")
FAST = ("-n", "2", "-w", "1", "--deadline", "20")


def rows(text):
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.mpi
@mpi
def test_ring_allgather_on_four_ranks(saved):
    ended = taccl(4, "run", saved(programs.ring_allgather(4, 2)), "-b", "1K", "-e", "64K", *FAST)
    assert ended.code == 0, ended.err
    found = rows(ended.out)
    assert [row[0] for row in found] == ["1024", "4096", "16384", "65536"]
    assert [row[1] for row in found] == ["64", "256", "1024", "4096"]  # count: elements of a rank's block
    for row in found:
        assert row[2:5] == ["float", "none", "-1"]
        time_us, alg, bus, wrong = row[5:9]
        assert float(time_us) > 0 and float(bus) <= float(alg) and wrong == "0"
        assert row[9:13] == ["n/a"] * 4  # not claimed: in place
        assert float(row[13]) > 0 and row[15:17] == ["n/a", "n/a"]
    assert "# Out of bounds values : 0 OK" in ended.out
    assert ended.err == ""


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize("name", sorted(programs.ALL))
def test_every_collective_beside_mpi(saved, name):
    program = programs.ALL[name](4, 2)
    reduces = name in ("allreduce", "reduce", "reducescatter")
    ended = taccl(
        4, "run", saved(program), "-b", "100", "-e", "10000", "-f", "100", "-d", "all", *FAST, "--json", "-",
        *(("-o", "all") if reduces else ()),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert len(document["results"]) == 2 * 7 * (5 if reduces else 1)
    for row in document["results"]:
        mode = row["out_of_place"]
        assert row["in_place"] is None and mode["nwrong"] == 0 and mode["outside_bytes"] == 0
        assert mode["max_error"] == 0.0
        assert mode["reference_time_us"] > 0 and mode["min_time"] <= mode["median_time"]
        assert row["wire_bytes"] > 0
    assert document["out_of_bounds"] == {"count": 0, "okay": True}
    assert (document["schema"], document["transport"], document["codec"]) == ("taccl/run/v1", "shm", "none")
    assert rows(ended.err)  # the table goes to stderr


@pytest.mark.mpi
@mpi
def test_one_program_against_another(saved, tmp_path):
    """Other chunks, other modes, other messages, on the same buffers."""
    both = dataclasses.replace(programs.ring_allgather(4, 2, inplace=True), name="both")
    path, other = saved(programs.ring_allgather(4)), saved(both)
    sizes = ("-b", "1000", "-e", "100000", "-f", "10", *FAST)
    ended = taccl(4, "run", path, "--against", path, *sizes, "--json", "-")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["config"]["against"] == path
    assert all(row["out_of_place"]["reference_time_us"] > 0 for row in document["results"])
    assert (
        f"# the last columns: {path}: allgather-4, 4 chunks, Simple" in ended.err
        and "MPI out" not in ended.err
    )
    ended = taccl(4, "run", path, "--against", other, *sizes)
    assert ended.code == 0, ended.err
    assert all(row[13:17] == ["n/a"] * 4 for row in rows(ended.out))  # it claims in place only
    refused = taccl(4, "run", path, "--against", saved(programs.direct_alltoall(4)), *sizes)
    assert refused.code == 2
    assert "they must do the same" in refused.err


@pytest.mark.mpi
@mpi
def test_a_wrong_program_to_run_against_is_named(saved):
    program, path = programs.direct_alltoall(3), saved(programs.wrong_alltoall(3))
    ended = taccl(3, "run", saved(program), "--against", path, "-b", "3000", "-e", "3000", *FAST)
    assert ended.code == 1 and messages(ended) == ["taccl: --against: bad gives wrong data"]


@pytest.mark.mpi
@mpi
def test_predictions_are_of_what_moves(tmp_path):
    """Sums of float16 in float32 move twice the bytes, in the model as in the run."""
    topology = load_topology("ring:3")
    path = tmp_path / "allreduce.json"
    path.write_text(write_native(timed(topology, build("allreduce", 3), "ring", 600_000), topology))
    found = {}
    for type_, size, more in (("float16", 300_000, ("--accumulate", "float32")), ("float32", 600_000, ())):
        sizes = ("-b", str(size), "-e", str(size), "-d", type_, *more)
        ended = taccl(3, "run", str(path), *sizes, "--calibrate", "--json", "-", *FAST)
        assert ended.code == 0, ended.err
        (row,) = json.loads(ended.out)["results"]
        classes = row["calibration"]["classes"]
        found[type_] = row["predicted_time_us"], row["wire_bytes"], [part["bytes"] for part in classes]
        assert sum(part["bytes"] for part in classes) == row["wire_bytes"]
    assert found["float16"] == found["float32"]


@pytest.mark.mpi
@mpi
def test_sums_in_float32(saved):
    """Twice the bytes on the wire for 16-bit floats, nothing else changes."""
    path, more = (
        saved(programs.ring_allreduce(4, 2, inplace=False)),
        ("--accumulate", "float32", "--json", "-"),
    )
    sizes = ("-b", "4K", "-e", "4K", "-d", "float16,bfloat16,float32", "-o", "avg", *FAST)
    found = []
    for extra in (more, more[2:]):
        ended = taccl(4, "run", path, *sizes, *extra)
        assert ended.code == 0, ended.err
        results = json.loads(ended.out)["results"]
        assert all(row["out_of_place"]["nwrong"] == 0 for row in results)
        found.append([row["wire_bytes"] for row in results])
    wide, own = found
    assert wide == [2 * own[0], 2 * own[1], own[2]]


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize(
    "program",
    [
        programs.ring_allgather(4, 3, inplace=True),
        programs.ring_allreduce(4, 2),
        programs.inplace_exchange(4),
    ],
    ids=["allgather", "allreduce", "alltoall"],
)
def test_in_place(saved, program):
    op = ("-o", "avg") if program.collective == "allreduce" else ()
    ended = taccl(4, "run", saved(program), "-b", "36", "-e", "40000", "-f", "9", *op, "-c", "2", *FAST)
    assert ended.code == 0, ended.err
    for row in rows(ended.out):
        assert row[5:9] == ["n/a"] * 4 and row[12] == "0"


@pytest.mark.mpi
@mpi
def test_alltoallv_and_both_modes_and_json_file(saved, tmp_path):
    program = programs.direct_alltoallv([[1, 2, 0], [0, 0, 3], [2, 2, 2]])
    path = tmp_path / "out.json"
    ended = taccl(3, "run", saved(program), "-b", "4K", "-e", "4K", *FAST, "--json", str(path))
    assert ended.code == 0, ended.err
    (row,) = json.loads(path.read_text())["results"]
    assert row["out_of_place"]["nwrong"] == 0 and row["out_of_place"]["reference_time_us"] > 0
    both = dataclasses.replace(programs.ring_allreduce(3), outofplace=True)
    ended = taccl(3, "run", saved(both), "-b", "4K", "-e", "4K", *FAST)
    assert ended.code == 1  # in-place steps leave the output of the out-of-place mode unwritten
    (found,) = rows(ended.out)
    assert int(found[8]) > 0 and found[12] == "0"


@pytest.mark.mpi
@mpi
def test_wrong_data_fails_with_code_1_on_every_rank(saved):
    path = saved(programs.wrong_alltoall(3))
    ended = taccl(3, "run", path, "-b", "3000", "-e", "3000", *FAST)
    assert ended.code == 1
    assert rows(ended.out)[0][8] == "250" and "250 FAILED" in ended.out


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize(
    ("ranks", "arguments", "code", "words"),
    [
        (3, ("GOOD",), 2, "is a program for 2 ranks and this job has 3; start it with: mpiexec -n 2"),
        (2, ("GOOD", "-d", "float8"), 2, "unknown data type 'float8'"),
        (2, ("GOOD", "-o", "xor"), 2, "unknown reduction 'xor'"),
        (2, ("GOOD", "-o", "sum"), 2, "--op sum: allgather copies data"),
        (2, ("GOOD", "-r", "7"), 2, "the ranks of"),
        (2, ("GOOD", "-r", "1"), 2, "is a program for allgather, which has no root"),
        (2, ("STEP",), 3, "step.xml:"),
        (2, ("GOOD", "--in-place"), 2, "does not claim to work in place"),
        (2, ("GOOD", "-b", "2M", "-e", "1M"), 2, "-b 2097152 is larger than -e 1048576"),
        (2, ("GOOD", "-b", "0"), 2, "-b 0: sizes and steps must be at least one byte"),
        (2, ("GOOD", "-i", "0"), 2, "-i 0: sizes and steps must be at least one byte"),
        (2, ("GOOD", "-b", "lots"), 2, "'lots' is not a size"),
        (2, ("GOOD", "--calibrate"), 2, "give --profile, or a native file"),
        (2, ("GOOD", "-n", "0"), 2, "Invalid value for '-n'"),
        (2, ("GOOD", "--transport", "staged-mpi"), 2, "give --device cuda"),
        (2, ("GOOD", "--transport", "mpi", "--buffers", "shared"), 2, "host memory of the transport shm"),
        (2, ("GOOD", "--json", "/dev/null/x.json"), 2, "/dev/null is no directory"),
        (2, ("GOOD", "--json", "/dev"), 2, "/dev is a directory; name a file in it"),
        (2, ("GOOD", "--bogus"), 2, "No such option '--bogus'"),
        (2, ("MISSING",), 3, "No such file"),
        (2, ("BROKEN",), 3, ""),
        (2, ("PIPE",), 3, "pipe.xml: error[R100]: a pipe, which only one rank could read"),
        (2, ("GOOD", "--profile", "PIPE"), 3, "a pipe, which only one rank could read"),
        (2, ("GOOD", "-b", "64G", "-e", "900G"), 6, "use a smaller -e"),
    ],
)
def test_bad_requests_are_said_once_with_the_documented_code(saved, tmp_path, ranks, arguments, code, words):
    broken = tmp_path / "broken.xml"
    broken.write_text("<algo name='x'><gpu")
    step = tmp_path / "step.xml"  # one of its steps waits for one that is not there
    good = Path(saved(programs.ring_allgather(2))).read_text()
    step.write_text(good.replace('depid="-1" deps="-1"', 'depid="0" deps="99"', 1))
    pipe = tmp_path / "pipe.xml"
    os.mkfifo(pipe)
    names = {
        "GOOD": saved(programs.ring_allgather(2)), "MISSING": str(tmp_path / "no.xml"), "BROKEN": str(broken),
        "STEP": str(step), "PIPE": str(pipe),
    }  # fmt: skip
    ended = taccl(ranks, "run", *(names.get(a, a) for a in arguments))
    assert ended.code == code, ended.err
    assert words in ended.err
    assert "Traceback" not in ended.err
    said = [line for line in ended.err.splitlines() if line.startswith(("taccl:", "Error:", "Usage:"))]
    assert len(said) == len(set(said)) > 0


WITH_LIMIT = """
import resource, sys
from pathlib import Path
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (most, most))
from taccl.cli import main
main()
"""


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize("codec", ["raw", "q8", "xw"])
def test_address_space_is_looked_at_before_it_is_taken(saved, codec):
    """What remains beside code and libraries differs from machine to machine, so limits grow until one is enough."""
    path = saved(programs.ring_allgather(2))
    how = ("run", path, "-b", "256M", "-e", "256M", "-n", "1", "-w", "0", "--no-reference", "--codec", codec)
    codes = []
    for limit in range(2**29, 2**32, 2**28):
        ended = launch(2, "-c", WITH_LIMIT, str(limit), *how, "--codec-links", "all", "--deadline", "20")
        codes.append(ended.code)
        if ended.code == 0:
            break
        assert ended.code == 6 and ("ulimit -v" in ended.err or "memory" in ended.err), ended.err
    assert codes[-1] == 0 and 6 in codes


@pytest.mark.mpi
@mpi
def test_without_mpiexec_the_message_says_how(saved):
    path = saved(programs.ring_allgather(2))
    done = subprocess.run(
        [sys.executable, "-m", "taccl", "run", path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"mpiexec -n 2 taccl run {path}" in done.stderr


@pytest.mark.mpi
@mpi
def test_prediction_stands_beside_the_measurement(saved):
    path = saved(programs.ring_allgather(4))
    ended = taccl(4, "run", path, "--topology", "ring:4", "-b", "1M", "-e", "1M", *FAST, "--json", "-")
    assert ended.code == 0, ended.err
    (row,) = json.loads(ended.out)["results"]
    assert row["predicted_time_us"] > 0
    assert rows(ended.err)[0][-1] == f"{row['predicted_time_us']:.2f}"
    wrong = taccl(4, "run", path, "--topology", "ring:8")
    assert wrong.code == 2 and "all three must agree" in wrong.err and len(messages(wrong)) == 1


@pytest.mark.mpi
@mpi
def test_the_native_file_brings_the_topology_of_the_prediction(tmp_path):
    path = tmp_path / "x.json"
    ring = load_topology("ring:3")
    path.write_text(write_native(timed(ring, build("allgather", 3), "ring"), ring))
    sizes = ("-b", "1M", "-e", "1M", *FAST, "--json", "-")
    found = []
    for more in ((), ("--topology", "ring:3")):
        ended = taccl(3, "run", str(path), *more, *sizes)
        assert ended.code == 0, ended.err
        assert "predicted" in ended.err
        found.append(json.loads(ended.out)["results"][0]["predicted_time_us"])
    assert found[0] == found[1] > 0


@pytest.mark.mpi
@mpi
def test_another_root_than_the_program_has_is_refused(saved):
    path = Path(saved(programs.chain_broadcast(3, 2, root=2)))
    sizes = ("-b", "4K", "-e", "4K", *FAST)
    right = taccl(3, "run", str(path), *sizes)
    assert right.code == 0, right.err
    assert rows(right.out)[0][4] == "2"
    wrong = taccl(3, "run", str(path), "-r", "1", *sizes)
    assert wrong.code == 2 and "is a broadcast of root 2, not 1: give --root 2" in wrong.err and not wrong.out
    twice = taccl(3, "run", str(path), "-r", "2", "--root", "1", *sizes)
    assert twice.code == 2 and "-r 2 and --root 1" in twice.err and not twice.out
    # Other tools leave the root out, which means 0.
    path.write_text(path.read_text().replace(' root="2"', ""))
    wrong = taccl(3, "run", str(path), *sizes)
    assert wrong.code == 2 and "give --root 2" in wrong.err
    assert taccl(3, "run", str(path), "-r", "2", *sizes).code == 0


@pytest.mark.mpi
@mpi
def test_custom_collective_from_a_file(saved, tmp_path):
    program = dataclasses.replace(programs.shift(3), collective="custom")
    places = [f"  - sources: [[{r}, 0]]\n    destinations: [[{(r + 1) % 3}, 0]]" for r in range(3)]
    head = ["schema: taccl/collective/v1", "ranks: 3", "combining: false", "chunks:"]
    (tmp_path / "own.yaml").write_text("\n".join([*head, *places, ""]))
    sizes = ("-b", "4K", "-e", "4K", *FAST)
    ended = taccl(3, "run", saved(program), "--pre-post", str(tmp_path / "own.yaml"), *sizes)
    assert ended.code == 0, ended.err
    (row,) = rows(ended.out)
    assert row[8] == "0" and row[13] == "n/a"  # MPI has no such collective
    places = (tmp_path / "own.yaml").read_text()
    (tmp_path / "other.yaml").write_text(places.replace("ranks: 3", "ranks: 4"))
    other = taccl(3, "run", saved(program), "--pre-post", str(tmp_path / "other.yaml"), *sizes)
    assert other.code == 2 and "other.yaml has 4 ranks, and the program 3" in other.err
    unknown = taccl(3, "run", saved(program), *sizes)
    assert unknown.code == 3 and len(messages(unknown)) == 1


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize("size", ["1K", "4M"])
def test_a_message_may_wait_for_a_later_one_of_its_connection(saved, tmp_path, size):
    """At 4 MB no MPI library buffers: a send is done when its receive is posted."""
    (tmp_path / "crossed.yaml").write_text(programs.CROSSED)
    path = saved(programs.crossed())
    ended = taccl(2, "run", path, "--pre-post", str(tmp_path / "crossed.yaml"), "-b", size, "-e", size, *FAST)
    assert ended.code == 0, ended.err
    assert rows(ended.out)[0][8] == "0"


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize(
    "more", [("-v",), ("--buffers", "shared"), ("--json", "/dev/null"), ("-n", "3"), ("--deadline", "19")]
)
def test_a_rank_with_other_options_is_named(saved, more):
    """Also when the options only make ranks speak or write, for which they meet."""
    path = saved(programs.ring_allgather(4))
    ended = taccl_but(4, 2, more, "run", path, "-b", "1K", "-e", "1K", *FAST)
    assert ended.code == 86
    assert messages(ended) == [
        "taccl: rank 2 runs another program or coding plan, or has other options, than the rest; "
        "give every rank the same file and options"
    ]
    assert rows(ended.out) == []


@pytest.mark.mpi
@mpi
def test_sizes_below_one_element_a_block_count_as_that(saved):
    """Never a row in which nothing was moved and all was right."""
    ended = taccl(4, "run", saved(programs.ring_allgather(4, 2)), "-b", "1", "-e", "35", "-i", "1", *FAST)
    assert ended.code == 0, ended.err
    assert [row[:2] for row in rows(ended.out)] == [["16", "1"], ["32", "2"]]
    assert all(float(row[5]) > 0 and row[8] == "0" for row in rows(ended.out))


@pytest.mark.mpi
@mpi
def test_help_is_printed_once():
    ended = taccl(3, "run", "--help")
    assert ended.code == 0 and ended.out.count("Execute a program on real ranks") == 1


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "private host buffers, transport shm to every peer"),
        (("--buffers", "shared"), "shared host buffers, transport shm to every peer"),
        (("--transport", "mpi"), "private host buffers, transport mpi to every peer"),
    ],
)
def test_verbose_names_the_transport_of_every_rank(saved, more, words):
    path = saved(programs.ring_allgather(2))
    ended = taccl(2, "run", path, "-b", "1K", "-e", "1K", *FAST, "-v", "-c", "0", *more)
    assert ended.code == 0
    assert messages(ended) == [f"taccl: rank {r}: {words}" for r in (0, 1)]
    assert rows(ended.out)[0][8] == "N/A"  # not checked


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize(
    ("damage", "own", "theirs"),
    [
        # as in containers that hide each other's processes
        ("shared._name = lambda token: f'other-{token}'", "does not hold the memory", "does not hold the memory"),
        ("shared.why_not = lambda: 'it is forbidden'", "it is forbidden", "another rank of this node cannot"),
        ("def refuse(name): raise OSError(1, 'not permitted')\nos.memfd_create = refuse",
         "no shared memory of 4096 bytes: not permitted", "another rank of this node cannot"),
    ],
)  # fmt: skip
def test_a_node_that_cannot_share_memory_goes_through_mpi(saved, damage, own, theirs):
    code = (
        "import os\nfrom taccl.runtime import shared\nfrom taccl.runtime.mpi import launcher\n"
        f"if launcher().rank == 1:\n    exec({damage!r})\n"
        "from taccl.cli import main; main()\n"
    )
    arguments = ("run", saved(programs.ring_allgather(3)), "-b", "1K", "-e", "1K", *FAST)
    ended = launch(3, "-c", code, *arguments, "-v")
    assert ended.code == 0, ended.err
    for rank, line in enumerate(messages(ended)):
        assert f"rank {rank}: private host buffers, transport mpi to every peer (" in line
        assert (own if rank == 1 else theirs) in line
    assert len(messages(ended)) == 3
    if damage.startswith("def"):
        return  # the rest is alike for all
    for asked in ("shm", "shm+mpi"):
        forced = launch(3, "-c", code, *arguments, "--transport", asked)
        assert forced.code == 6 and "memory cannot be shared" in forced.err and len(messages(forced)) == 1


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_that_goes_away_ends_the_job_quietly(saved, unbuffered):
    code = (
        "import os, sys\n"
        "if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '0':\n"
        "    r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
        f"sys.argv = ['taccl', 'run', {saved(programs.ring_allgather(2))!r}, '-e', '4K']\n"
        "from taccl.cli import main; main()\n"
    )
    ended = launch(2, "-c", code, PYTHONUNBUFFERED=unbuffered)
    assert ended.code not in (0, 86) and "Traceback" not in ended.err and messages(ended) == []


@pytest.mark.mpi
@mpi
def test_a_rank_that_hangs_in_mpi_abort_ends_all_the_same():
    code = (
        "import time\nfrom taccl import Job\nfrom taccl.runtime import mpi\n"
        "mpi.abort = lambda MPI, code: time.sleep(1000)\n"
        "with Job(40) as job:\n"
        "    if job.rank == 0:\n"
        "        raise BrokenPipeError\n"
        "    job.barrier()\n"
    )
    ended = launch(2, "-c", code)
    assert ended.code == 141 and messages(ended) == [] and ended.seconds < 20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("65536", 65536),
        ("64K", 65536),
        ("1m", 2**20),
        ("1MB", 10**6),
        ("1MiB", 2**20),
        ("2G", 2**31),
        ("7B", 7),
    ],
)
def test_sizes(text, value):
    assert Size().convert(text, None, None) == value


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-4", "1KK", "99999999999G", "٣"])
def test_sizes_that_are_none(text):
    outcome = CliRunner().invoke(command, ["x.xml", "-b", text])
    assert outcome.exit_code == 2


def test_table_has_the_columns_of_nccl_tests():
    lines = table.header(None, predicted=False)
    assert lines[1].split()[1:] == [
        "size", "count", "type", "redop", "root", *["time", "algbw", "busbw", "#wrong"] * 2
    ]  # fmt: skip
    found = Measurement(Timing(12.341, 12.0, 12.3), 0, 0, 0.0, 0.0, None)
    row = Row(1048576, 262144, DTYPES["float32"], "sum", -1, 7, {"out_of_place": found, "in_place": found})
    text = table.line(row, "allreduce", 8, False, None)
    alg = 1048576 / 12.341 / 1e3
    assert text.split() == [
        "1048576", "262144", "float", "sum", "-1",
        *["12.34", f"{alg:.2f}", f"{alg * 2 * 7 / 8:.2f}", "0"] * 2,
    ]  # fmt: skip
    assert text.index("float") == lines[1].index("type") - 1
    wide = table.header("MPI", predicted=True)
    long = table.line(row, "allreduce", 8, True, 5.0)
    assert len(long) == max(map(len, wide)) and long.endswith("5.00")


def test_patience_grows_with_the_size():
    assert [patience_s(size) for size in (1, 150 * 10**6, 10**9)] == [30.0, 30.0, 200.0]


def test_microseconds_keep_seven_columns():
    assert [table.microseconds(x) for x in (1.234, 99.99, 100.06, 9999.94, 10000.4, 1234567.0)] == [
        "   1.23", "  99.99", "  100.1", " 9999.9", "  10000", "1234567"
    ]  # fmt: skip
    assert table.finite(np.inf) == "inf"
