"""Coded messages on real ranks: every transport, a damaged frame, `taccl run --codec`."""

import json
from pathlib import Path

import numpy as np
import pytest
import runtime_programs as programs
from mpi_jobs import launch, messages, taccl
from native_algorithms import timed, with_plan

from taccl.commands.run_codecs import check_codecs, choose_codecs
from taccl.commands.run_data import read_data
from taccl.errors import InvalidInput, UsageError
from taccl.profiles.load import load_topology
from taccl.program_file import ProgramFile
from taccl.runtime.dtypes import DTYPES
from taccl.synth.collective import build
from taccl.synth.lower import lower

mpi = pytest.mark.usefixtures("needs_a_launcher")
WORKER = str(Path(__file__).with_name("run_codec_worker.py"))
FAST = ("-n", "2", "-w", "1", "--deadline", "20")


@pytest.mark.mpi
@mpi
def test_every_transport_carries_frames():
    ended = launch(3, WORKER, "all")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["wrong"], found["cases"]) == (0, 3 * 7 * 5 * 2 * 3)  # long ones by either coder
    assert 0 < found["wire"] < found["values"]


@pytest.mark.mpi
@mpi
def test_a_damaged_frame_ends_the_job_on_all_ranks():
    ended = launch(3, WORKER, "damage", "xw")
    assert ended.code == 1
    (said,) = messages(ended)
    assert "frame from rank 0, chunk 0, tile 0: the data are damaged" in said
    assert said.startswith("taccl: rank ") and said.endswith("; the job is ended")
    assert "Traceback" not in ended.err


@pytest.mark.mpi
@mpi
def test_run_reports_ratio_and_error(saved, tmp_path):
    values = tmp_path / "weights.npy"
    np.save(values, np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * np.float32(0.05))
    ended = taccl(
        3, "run", saved(programs.ring_allgather(3, 2)), "-b", "1200K", "-e", "1200K", *FAST, "--codec-links", "all",
        "--codec", "raw,xw,bf16,q8", "--data", str(values), "--json", "-",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["codec"] == "raw,xw,bf16,q8" and document["config"]["codec_at"] == "collective"
    raw, xw, bf16, q8 = [row["out_of_place"] for row in document["results"]]
    assert [row["codec"] for row in document["results"]] == ["raw", "xw", "bf16", "q8"]
    assert all(row["nwrong"] == row["outside_bytes"] == 0 for row in (raw, xw, bf16, q8))
    assert raw["coded_wire_bytes"] == 0 and raw["wire_ratio"] == 1 and raw["max_error"] == 0
    assert xw["coded_value_bytes"] == 2 * 3 * 1228800 // 3 and xw["max_error"] == 0
    assert 1.1 < xw["wire_ratio"] < 1.3 and 1.99 < bf16["wire_ratio"] <= 2 and 3.9 < q8["wire_ratio"] < 3.95
    assert 0 < bf16["max_error"] < 2e-3 and 0 < q8["max_error"] < 2e-3
    assert (
        xw["largest_value"] is None
        and bf16["largest_value"] == q8["largest_value"] == np.abs(np.load(values)).max()
    )
    (header,) = [line.split() for line in ended.err.splitlines() if line.startswith("#       size")]
    assert header[-9:] == ["codec", "wire", "ratio", "maxerr", "of", "time", "speedup", "time", "speedup"]


@pytest.mark.mpi
@mpi
def test_run_sums_real_values(saved, tmp_path):
    """Lossless as without codec, bit for bit; lossy within the promise; floats are rounded to the type."""
    values = tmp_path / "weights.npy"
    np.save(values, np.random.default_rng(0).standard_normal(50_000).astype(np.float32))
    path = saved(programs.ring_allreduce(3, 2))
    common = ("-b", "60000", "-e", "60000", *FAST, "--codec-links", "all", "--data", str(values))
    ended = taccl(3, "run", path, *common, "--codec", "raw,xw", "-d", "float32,bfloat16", "-o", "sum,max")
    assert ended.code == 0, ended.err
    assert "# Out of bounds values : 0 OK" in ended.out
    again = "partial sums again where they are sent on"
    assert f"# messages everywhere are coded once for all hops, {again}; raw, xw\n" in ended.out
    refused = taccl(3, "run", path, *common, "--codec", "q8")
    assert refused.code == 2
    (said,) = messages(refused)
    assert "--engine direct" in said and "--recode" in said
    assert "size" not in refused.out  # no head of a table that never comes


ASKED = {"file": "x.json", "codecs": None, "codec_links": None, "dtype": None, "device": "host", "calibrate": False,
         "accumulate": "type", "codec_at": "collective", "recode": False}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"names": ("lz77",)}, "--codec 'lz77': unknown; known: raw, xw"),
        ({"names": ("auto",)}, "zstd; synthesis chooses one: taccl synth --codec auto -o FILE.json"),
        ({"dtypes": ("float32", "bfloat16")}, "--codec q8 takes float32; not bfloat16"),
        ({"ops": ("sum", "prod")}, "products of rounded values"),
        ({"calibrate": True}, "leave out --codec"),
        ({"device": "cuda", "names": ("q8", "zstd")}, "zstd, which has no kernel for devices: take xw, bf16"),
    ],
)
def test_what_cannot_be_coded_is_refused(more, words):
    asked = ASKED | {"names": ("raw", "q8"), "dtypes": ("float32",), "ops": ()} | more
    with pytest.raises(UsageError, match=words):
        check_codecs(
            asked, asked["names"], "--codec", tuple(DTYPES[name] for name in asked["dtypes"]), asked["ops"]
        )


def test_16_bit_floats_that_are_summed_in_float32_may_be_coded_as_such():
    check_codecs(ASKED | {"accumulate": "float32"}, ("q8",), "--codec", (DTYPES["bfloat16"],), ("sum",))


def choose(plan=True, ops=(), codec="q8", planned_for="float32", **asked):
    """What is coded of a broadcast down a chain of three ranks, whose last hop is planned as coded, or nothing."""
    topology = load_topology("ring:3")
    chain = timed(topology, build("broadcast", 3), "chain")
    if plan:
        chain = with_plan(chain, [len(chain.messages) - 1], codec, planned_for, topology)
    opened = ProgramFile(lower(chain, topology), chain.collective, chain, topology)
    return choose_codecs(ASKED | asked, opened, chain.collective, ops)


def test_the_plan_of_the_file_counts_unless_codec_says_otherwise():
    followed = choose()
    assert (followed.names, followed.links, [one.name for one in followed.dtypes]) == (
        ("q8",),
        "planned",
        ["float32"],
    )
    assert (followed.plan.messages, followed.plan.of_messages) == (1, 2)
    assert choose(codec="xw", planned_for="bfloat16").dtypes == (DTYPES["bfloat16"],)
    assert choose(codec_links="planned") == followed
    several = choose(codecs="raw,xw", codec_links="planned")
    assert several.names == ("raw", "xw") and several.links == "planned" and several.plan == followed.plan
    for asked, names, links in (
        ({"codecs": "raw"}, ("raw",), "nodes"),
        ({"codecs": "xw"}, ("xw",), "nodes"),
        ({"codecs": "xw,q8", "codec_links": "all"}, ("xw", "q8"), "all"),
        ({"plan": False}, ("raw",), "nodes"),
        ({"plan": False, "codecs": "raw", "codec_links": "all"}, ("raw",), "all"),
    ):
        found = choose(**asked)
        assert (found.names, found.links, found.plan) == (names, links, None)
        assert found.dtypes == (DTYPES["float32"],)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"dtype": "float32,bfloat16"},
            r"plans codec q8 for float32, and -d asks for bfloat16: --codec raw runs",
        ),
        (
            {"planned_for": "bfloat16", "codec": "xw", "ops": ("sum",), "accumulate": "float32"},
            "its messages are float32",
        ),
        ({"planned_for": "int8", "codec": "zstd"}, "x.json plans codec zstd for int8, which cannot be run"),
        ({"codec_links": "all"}, "x.json plans which messages are coded; --codec-links all needs --codec"),
        ({"plan": False, "codec_links": "planned"}, "x.json plans no coded messages"),
        ({"plan": False, "codec_links": "all"}, "--codec-links says how messages are coded, and none are"),
        ({"plan": False, "codec_at": "hop"}, "--codec-at hop says how"),
        ({"plan": False, "recode": True}, "--recode says how"),
        ({"plan": False, "codecs": ""}, "--codec '': unknown"),
        ({"codec": "lz77"}, "x.json plans codec 'lz77': unknown"),
        (
            {"device": "cuda", "codec": "zstd"},
            "x.json plans codec zstd, which has no kernel.*leave out --device cuda",
        ),
        ({"recode": True}, "--recode is for other codecs than the one that x.json plans, q8"),
        ({"calibrate": True}, "give --codec raw where the file plans coded messages"),
        ({"ops": ("prod",)}, "x.json plans codec q8: products of rounded values"),
    ],
)
def test_what_does_not_go_with_a_plan_is_refused(asked, words):
    with pytest.raises(UsageError, match=words):
        choose(**asked)


def test_a_file_without_values_of_the_type_is_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(10))
    found = read_data(str(tmp_path / "ids.npy"), (DTYPES["int64"],))
    assert found.values["int64"].tolist() == list(range(10))
    with pytest.raises(UsageError, match="nothing in it can be run as float32; it holds int64"):
        read_data(str(tmp_path / "ids.npy"), (DTYPES["float32"],))
    with pytest.raises(InvalidInput, match="No such file"):
        read_data(str(tmp_path / "none.npy"), (DTYPES["int64"],))


@pytest.mark.mpi
@mpi
def test_timed_runs_in_place_code_what_was_given(saved):
    """And not the sums of the run before, which are infinities after so many runs."""
    path = saved(programs.ring_allreduce(2, 1, inplace=True))
    size = ("-b", "256K", "-e", "256K", "-d", "float16", "-n", "40", "-w", "1", "--deadline", "20")
    ended = taccl(2, "run", path, "--codec", "xw", "--codec-links", "all", *size, "--json", "-")
    assert ended.code == 0, ended.err
    once = taccl(
        2,
        "run",
        path,
        "--codec",
        "xw",
        "--codec-links",
        "all",
        *size[:6],
        "-n",
        "1",
        "-w",
        "0",
        "--json",
        "-",
    )
    assert once.code == 0, once.err
    many, one = (json.loads(found.out)["results"][0]["in_place"] for found in (ended, once))
    assert many["coded_wire_bytes"] == one["coded_wire_bytes"]
