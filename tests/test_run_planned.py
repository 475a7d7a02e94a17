"""`taccl run` on native files that plan which messages are coded."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from mpi_jobs import launch, messages, taccl
from native_algorithms import timed, two_nodes, with_plan

from taccl.cli import cli
from taccl.profiles.load import load_topology
from taccl.runtime.codecs import CODECS, most_bytes
from taccl.runtime.dtypes import DTYPES
from taccl.synth.collective import build
from taccl.synth.cost import us
from taccl.synth.native import write_native

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("needs_a_launcher")]
FAST = ("-n", "2", "-w", "1", "--deadline", "20")
NODES = (0, 0, 1, 1)
ODD_FILE = """
import sys
from taccl.cli import main
from taccl.runtime.mpi import launcher
files = sys.argv[1:3]
sys.argv = ["taccl", "run", files[launcher().rank == 1], *sys.argv[3:]]
main()
"""


@pytest.fixture
def planned(tmp_path):
    """A function that writes an algorithm to a file, those of its messages planned as coded that `wanted` takes."""

    def save(algorithm, topology, wanted, codec="q8"):
        numbers = [number for number, message in enumerate(algorithm.messages) if wanted(message)]
        made = with_plan(algorithm, numbers, codec, topology=topology)
        topology = replace(topology, codecs=(made.coding.cost,))
        path = tmp_path / f"{algorithm.name}-{codec}-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(write_native(made, topology), "utf-8")
        chunks = sum(len(made.messages[number].chunks) for number in numbers)
        return str(path), f"{len(numbers)} of {len(made.messages)}", chunks

    return save


def chain():
    """Three chunks down a chain of three ranks."""
    topology = load_topology("ring:3")
    return timed(topology, build("broadcast", 3, 3), "chain"), topology


def outcome(ended):
    """The document, and the first row's mode."""
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    return document, [row["out_of_place"] for row in document["results"]]


def planned_us(path):
    """How long a file's plan says that it takes."""
    return us(json.loads(Path(path).read_text())["coding"]["time_fs"])


def wire_bytes(document):
    """What all links carried in a run, and what they would have carried without a codec."""
    (row,) = document["results"]
    mode = row["out_of_place"]
    return row["wire_bytes"] - mode["coded_value_bytes"] + mode["coded_wire_bytes"], row["wire_bytes"]


def test_the_last_hop_of_a_chain(planned):
    """Fixed lengths: the wire carries less by what the planned messages save, to the byte."""
    made, topology = chain()
    last = ({m.dst for m in made.messages} - {m.src for m in made.messages}).pop()
    path, count, chunks = planned(made, topology, lambda m: m.dst == last)
    size = ("-b", "240000", "-e", "240000", "--out-of-place", *FAST, "--json", "-")
    ended = taccl(3, "run", path, *size)
    document, (mode,) = outcome(ended)
    assert f"# messages as planned in the file are coded: q8, {count}\n" in ended.err
    assert (document["codec"], document["config"]["codec_links"]) == ("q8", "planned")
    plan = document["config"]["coding_plan"]
    assert (
        f"{plan['coded_messages']} of {plan['messages']}" == count and plan["size_bytes"] == made.size_bytes
    )
    assert plan["uncoded_time_us"] == us(made.time_fs) and plan["time_us"] == planned_us(path)
    assert f" us; the best schedule without a codec takes {us(made.time_fs):.6g}\n" in ended.err
    assert document["results"][0]["predicted_time_us"] is None  # the plan is for another size
    assert mode["nwrong"] == 0 and mode["max_error"] > 0
    elements = 240000 // 4 // 3
    saved = chunks * (4 * elements - most_bytes(CODECS["q8"], DTYPES["float32"], elements))
    coded, raw = wire_bytes(document)
    assert chunks == 3 and raw - coded == saved > 0


def test_one_border_of_an_allgather_without_loss(planned, tmp_path):
    """Real values have the bits of their sources; two of four borders carry frames."""
    topology = two_nodes()
    made = timed(topology, build("allgather", 4, 2), "direct")
    path, count, chunks = planned(made, topology, lambda m: (NODES[m.src], NODES[m.dst]) == (0, 1), "xw")
    values = tmp_path / "weights.npy"
    np.save(values, np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * np.float32(0.05))
    size = ("-b", "400K", "-e", "400K", *FAST, "--data", str(values), "--json", "-")
    ended = taccl(4, "run", path, *size, "--codec", "raw,xw,bf16", "--codec-links", "planned")
    document, (raw, xw, bf16) = outcome(ended)
    assert f"coded: raw, xw, bf16, {count}\n" in ended.err
    assert all(
        mode["nwrong"] == 0 for row in document["results"] for mode in (row["in_place"], row["out_of_place"])
    )
    assert [row["predicted_time_us"] is None for row in document["results"]] == [False, True, True]
    assert raw["coded_value_bytes"] == 0 and raw["max_error"] == xw["max_error"] == 0 < bf16["max_error"]
    assert xw["coded_value_bytes"] == bf16["coded_value_bytes"] == chunks * (400 * 1024 // 8)
    assert 1.1 < xw["wire_ratio"] < 1.3 and 1.9 < bf16["wire_ratio"] < 2


def test_results_of_sums_that_some_ranks_get_coded(planned):
    topology = two_nodes()
    made = timed(topology, build("allreduce", 4), "direct", 400 * 1024)
    path, count, chunks = planned(made, topology, lambda m: m.op == "copy" and NODES[m.src] != NODES[m.dst])
    ended = taccl(4, "run", path, "-b", "400K", "-e", "400K", *FAST, "-o", "sum,max", "--json", "-")
    predicted = {row["predicted_time_us"] for row in json.loads(ended.out)["results"]}
    assert predicted == {planned_us(path)}
    _, modes = outcome(ended)
    assert f"coded: q8, {count}\n" in ended.err and count == "8 of 24"
    assert all(mode["nwrong"] == 0 and mode["max_error"] > 0 for mode in modes)
    assert {mode["coded_value_bytes"] for mode in modes} == {chunks * 100 * 1024}


def test_a_rank_with_another_plan_ends_the_job(planned):
    made, topology = chain()
    path, _, _ = planned(made, topology, lambda m: True)
    other, _, _ = planned(made, topology, lambda m: m.chunks == (1,))
    size = ("-b", "4K", "-e", "4K", *FAST)
    ended = launch(3, "-c", ODD_FILE, path, other, *size)
    assert ended.code == 86
    assert messages(ended) == [
        "taccl: rank 1 runs another program or coding plan, or has other options, than the rest; "
        "give every rank the same file and options"
    ]


def test_a_plan_that_would_code_twice_is_refused_by_all_ranks(planned):
    topology = load_topology("ring:4")
    ring = timed(topology, build("broadcast", 4), "chain")
    root = ({m.src for m in ring.messages} - {m.dst for m in ring.messages}).pop()
    second = {m.dst for m in ring.messages if m.src == root}
    path, _, _ = planned(ring, topology, lambda m: m.src not in second)
    ended = taccl(4, "run", path, "-b", "4K", "-e", "4K", *FAST)
    assert ended.code == 1
    (said,) = messages(ended)
    assert "error[A102]: the plan codes message 2 again: what it carries has been through q8" in said
    assert "--codec raw runs the file without its plan" in ended.err


def test_a_plan_that_promises_too_much_is_refused_by_all_ranks(planned):
    made, topology = chain()
    path, _, _ = planned(made, topology, lambda m: True)
    document = json.loads(Path(path).read_text())
    document["coding"]["time_fs"] //= 2
    Path(path).write_text(json.dumps(document))
    size = ("-b", "4K", "-e", "4K", *FAST)
    ended = taccl(3, "run", path, *size)
    assert ended.code == 1 and "error[A102]: the plan says" in ended.err
    assert taccl(3, "run", path, *size, "--codec", "raw").code == 0
    for command in ("explain", "simulate"):
        ended = CliRunner().invoke(cli, [command, path])
        assert ended.exit_code == 1 and "error[A102]: the plan says" in ended.output
