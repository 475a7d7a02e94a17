"""A program over two emulated nodes: shared memory within each, MPI or TCP connections of our own between them."""

import json
import sys
from dataclasses import replace

import pytest
import runtime_programs as programs
from cluster_jobs import on_cluster
from mpi_jobs import needs_mpi
from native_algorithms import timed

from taccl.profiles.load import load_topology
from taccl.synth.collective import build
from taccl.synth.msccl_xml import write_xml
from taccl.synth.native import read_native, write_native

pytestmark = [*needs_mpi, pytest.mark.cluster, pytest.mark.alone]


def on_two_nodes(ranks_per_node, rate, *line):
    """What a command of taccl says on the ranks of two emulated nodes; skip where there can be none."""
    words = ("--nodes=2", f"--ranks={ranks_per_node}", f"--rate={rate}")
    return on_cluster((sys.executable, "-m", "taccl", *line), *words)


@pytest.mark.parametrize(("asked", "others"), [("auto", "tcp"), ("shm+tcp", "tcp"), ("shm+mpi", "mpi")])
def test_nodes_share_memory_inside_and_messages_between(tmp_path, asked, others):
    path, out = tmp_path / "ring.xml", tmp_path / "out.json"
    path.write_text(write_xml(programs.ring_allreduce(4, 2)))
    sizes = ("-b", "2K", "-e", "512K", "-f", "16", "-n", "2", "-w", "1", "--no-reference")
    model = ("--topology", "fat-tree:2x2", "--calibrate")
    line = (
        "run",
        str(path),
        *sizes,
        "--transport",
        asked,
        "--buffers",
        "shared",
        "-v",
        "--json",
        str(out),
        *model,
    )
    done = on_two_nodes(2, "1gbit", *line)
    document = json.loads(out.read_text())
    assert document["transport"] == f"shm+{others}" and document["out_of_bounds"] == {
        "count": 0,
        "okay": True,
    }
    hosts = [device["host"] for device in document["devices"]]
    assert len(set(hosts[:2])) == len(set(hosts[2:])) == 1 and len(set(hosts)) == 2
    for row in document["results"]:  # a ring: half of its messages cross between the nodes
        classes = {part["name"]: part for part in row["calibration"]["classes"]}
        assert {name: part["messages"] for name, part in classes.items()} == {"leaf": 12, "spine": 12}
        assert sum(part["bytes"] for part in classes.values()) == row["wire_bytes"]
        # Clocks are compared by messages that wait for a core: what is short may seem to arrive before it leaves.
        if row["size"] == 512 * 1024:
            assert all(part["measured_transit_us"] > 0 for part in classes.values())
        ports = {part["name"]: part for part in row["calibration"]["ports"]}
        assert ports["leaf0.up"]["bytes"] == classes["spine"]["bytes"] / 2
    assert "leaf0.up" in done.stdout
    said = sorted(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("taccl: rank"))
    assert said == [
        f"taccl: rank {rank}: shared host buffers, transport shm to rank {rank ^ 1}, {others} to the others"
        for rank in range(4)
    ]


def test_a_long_message_on_a_slow_link_is_no_stall(tmp_path):
    """4 MB at 8 Mbit/s: each message, and MPI's own collective, takes twice the deadline and says nothing meanwhile."""
    path = tmp_path / "ring.xml"
    path.write_text(write_xml(programs.ring_allgather(2, 1)))
    sizes = ("-b", "4M", "-e", "4M", "-n", "1", "-w", "0", "-c", "0", "--out-of-place", "--no-pace")
    done = on_two_nodes(1, "8mbit", "run", str(path), *sizes, "--deadline=2")
    assert "4194304" in done.stdout


SLOW_UPLINKS = """
schema: taccl/profile/v1
name: slow-uplinks
nodes: [0-1, 2-3]
classes:
  near: {alpha: 1, beta: 10}
  far: {alpha: 1, beta: 400000}
ports:
  up0: {beta: 400000, kind: nic}
  up1: {beta: 400000, kind: nic}
links:
  - [0, 1, near]
  - [1, 0, near]
  - [2, 3, near]
  - [3, 2, near]
  - [0, 2, far, [up0]]
  - [0, 3, far, [up0]]
  - [1, 2, far, [up0]]
  - [1, 3, far, [up0]]
  - [2, 0, far, [up1]]
  - [2, 1, far, [up1]]
  - [3, 0, far, [up1]]
  - [3, 1, far, [up1]]
"""


@pytest.mark.parametrize("asked", ["auto", "shm+mpi"])
def test_a_run_says_which_sizes_take_turns(tmp_path, asked):
    """Of the four messages that share an uplink all but the first wait, in both programs; short ones do not."""
    path, out, profile = tmp_path / "alltoall.xml", tmp_path / "out.json", tmp_path / "slow.yaml"
    path.write_text(write_xml(programs.ALL["alltoall"](4, 1)))
    profile.write_text(SLOW_UPLINKS)
    sizes = ("-b", "16K", "-e", "1M", "-f", "64", "-n", "1", "-w", "0", "--out-of-place")
    more = ("-v", "--transport", asked, "--profile", str(profile), "--against", str(path), "--json", str(out))
    done = on_two_nodes(2, "1gbit", "run", str(path), *sizes, *more)
    short, long = (row["out_of_place"] for row in json.loads(out.read_text())["results"])
    assert (short["messages_with_turns"], long["messages_with_turns"]) == (0, 6)
    assert "no long message" in short["no_turns"] and long["no_turns"] is None
    said = [line for line in (done.stdout + done.stderr).splitlines() if "turns" in line]
    assert said == [
        f"taccl: 16384 bytes, out of place: no turns: {short['no_turns']}",
        "taccl: 1048576 bytes, out of place: 6 messages wait for their turns",
    ]


def test_what_is_quicker_without_turns_is_chosen_and_run_without(tmp_path):
    """A program with turns is timed both ways; the file that is written says which, and a run does as it says."""
    profile, path, best = tmp_path / "slow.yaml", tmp_path / "alltoall.json", tmp_path / "best.json"
    profile.write_text(SLOW_UPLINKS)
    topology = load_topology(str(profile))
    algorithm = timed(topology, build("alltoall", 4), "direct", 2**20)
    path.write_text(write_native(algorithm, topology))
    once = ("-n", "1", "-w", "0", "--deadline", "20")
    done = on_two_nodes(2, "1gbit", "choose", str(path), *once, "--rounds", "2", "-o", str(best), "--json")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    with_turns, without = found["programs"]
    assert (with_turns["turns"], without["turns"], len(without["times_us"])) == (True, False, 2)
    quicker = all(1.01 * b < a for a, b in zip(with_turns["times_us"], without["times_us"], strict=True))
    assert found["turns"] is not quicker
    if not quicker:
        assert best.read_bytes() == path.read_bytes()
    chosen, _ = read_native(best.read_text())
    assert chosen.provenance == algorithm.provenance | ({"turns": False} if quicker else {})
    # Whatever this machine found, what such a file says is done.
    path.write_text(write_native(replace(algorithm, provenance={"turns": False}), topology))
    for asked, waits in (((), None), (("--turns",), 6)):
        out = tmp_path / "out.json"
        sizes = ("-b", "1M", "-e", "1M", "--out-of-place", "--no-reference", *once, *asked)
        on_two_nodes(2, "1gbit", "run", str(path), *sizes, "--json", str(out))
        (row,) = json.loads(out.read_text())["results"]
        assert row["out_of_place"]["messages_with_turns"] == waits
    asked = ("choose", str(path), *once, "--rounds", "1", "--turns", "--json")
    done = on_two_nodes(2, "1gbit", *asked)
    (only,) = json.loads(done.stdout[done.stdout.index("{") :])["programs"]
    assert only["turns"] is True


APART = ("env", "TACCL_INTERFACES=lo", sys.executable, "-m", "taccl")
WITH_A_CARD = (
    "from taccl.runtime import networks\nfrom taccl.runtime.mpi import launcher\n"
    "if launcher().rank == 1:\n    networks.direct = lambda: 'mlx5_0 (RDMA)'\n"
    "from taccl.cli import main; main()\n"
)


def on_two_single_ranks(tmp_path, code, taccl, *more):
    """A run of one rank on each of two nodes, which ends with this code; taccl: the words that start it."""
    path = tmp_path / "ring.xml"
    path.write_text(write_xml(programs.ring_allgather(2, 1)))
    return on_cluster((*taccl, "run", str(path), "-b", "1K", "-e", "1K", *more), code=code)


def test_nodes_that_cannot_reach_each_other_by_tcp_say_so(tmp_path):
    """Each knows its own loopback only, at which the other one's ranks do not answer."""
    done = on_two_single_ranks(tmp_path, 6, APART, "--transport", "shm+tcp")
    said = [line for line in done.stderr.splitlines() if line.startswith("taccl:")]
    assert len(said) == 1 and "rank 0 has no TCP connection to rank 1: " in said[0]
    assert "TACCL_INTERFACES" in said[0]


@pytest.mark.parametrize(
    ("taccl", "why"),
    [
        (APART, "rank 0 has no TCP connection to rank 1: "),
        ((sys.executable, "-c", WITH_A_CARD), "the node of rank 1 has mlx5_0 (RDMA), which is left to MPI"),
    ],
)
def test_where_tcp_is_not_to_be_taken_messages_go_over_mpi(tmp_path, taccl, why):
    done = on_two_single_ranks(tmp_path, 0, taccl, "-v")
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("taccl:")]
    assert len(said) == 2
    assert all(f"transport mpi to every peer (no tcp: {why}" in line for line in said)


STOPS = (
    "import os, signal, threading\nfrom taccl.runtime.mpi import launcher\n"
    "if launcher().rank == 2:\n"
    "    threading.Timer(4, os.kill, (os.getpid(), signal.SIGSTOP)).start()\n"
    "from taccl.cli import main; main()\n"
)


def test_a_rank_that_is_stopped_is_named_once(tmp_path):
    """By its node, though the ranks of the other one have waited as long."""
    path = tmp_path / "ring.xml"
    path.write_text(write_xml(programs.ring_allgather(4, 1)))
    line = ("-c", STOPS, "run", str(path), "-b", "1K", "-e", "1K", "-n", "500000", "--deadline=2")
    done = on_cluster((sys.executable, *line), "--nodes=2", "--ranks=2", "--rate=1gbit", code=86)
    said = [line for line in done.stderr.splitlines() if line.startswith("taccl:")]
    assert len(said) == 1
    assert said[0].startswith("taccl: rank 3 made no progress for 2 s: ")
    assert "rank 2 has shown no sign of life for" in said[0]
