"""`taccl synth --codec` from the command line to the file, and what verify and explain say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from taccl.cli import cli

PROFILE = """\
schema: taccl/profile/v1
name: hosts
nodes: 2
node:
  ranks: 2
  links: [{class: shm, from: all, to: all}]
  nics:
    - {name: eth, ranks: 0-1}
network: {class: net}
classes:
  shm: {alpha: 5us, beta: 5GB/s}
  net: {alpha: 100us, beta: 200Mbit/s, occupancy: 50us}
codecs:
  - {codec: q8, dtype: float32, lossless: false, ratio: 3.94, frame: 112B, encode: {alpha: 60us, beta: 500us/MB},
     decode: {alpha: 40us, beta: 300us/MB}}
  - {codec: xw, dtype: bfloat16, lossless: true, ratio: 1.42, frame: 112B, encode: {alpha: 60us, beta: 1.5ms/MB},
     decode: {alpha: 40us, beta: 1.5ms/MB}}
"""


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "hosts.yaml"
    path.write_text(PROFILE)
    return str(path)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), catch_exceptions=False)


def synth(profile: str, *words: str) -> Result:
    return run(
        "synth",
        "-t",
        profile,
        "-c",
        "allgather",
        "--size",
        "4MB",
        "--engine",
        "ring",
        "--time-limit",
        "2",
        *words,
    )


def test_a_codec_by_name_is_used_where_it_pays(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "ag.json"
    result = synth(profile, "--codec", "q8", "-o", str(path), "--json")
    assert result.exit_code == 0, result.output
    coding = json.loads(result.stdout)["coding"]
    assert coding["codec"] == "q8"
    assert coding["lossless"] is False
    assert 0 < coding["coded_messages"] <= coding["messages"]
    assert coding["lower_bound_us"] <= coding["time_us"] < 0.3 * coding["uncoded_time_us"]
    written = json.loads(path.read_text())
    assert written["coding"]["codec"] == "q8"
    assert written["engine"] == "ring"  # as it was asked for
    assert written["provenance"]["time_limit_s"] == 2.0
    assert written["provenance"]["codec"] == "q8"
    proved = run("verify", str(path))
    assert proved.exit_code == 0
    assert f", {coding['coded_messages']} messages coded by q8\n" in proved.stdout
    priced = json.loads(run("simulate", str(path), "--json").stdout)
    assert priced["coding"] == {name: coding[name] for name in ("codec", "coded_messages", "time_us")}
    assert priced["time_us"] > 2 * coding["time_us"]  # without a codec
    said = run("simulate", str(path)).stdout
    assert (
        f"  coding plan  {coding['coded_messages']} messages coded by q8, predicted {coding['time_us']:.3f} us;"
        in said
    )
    again = tmp_path / "again.json"
    assert run("convert", str(path), "--to", "json", "-o", str(again)).exit_code == 0
    assert again.read_bytes() == path.read_bytes()
    xml = run("convert", str(path), "--to", "msccl-xml", "-o", str(tmp_path / "ag.xml"))
    assert xml.exit_code == 0
    assert "the plan to code messages with q8 is left out" in xml.output
    trace = run("convert", str(path), "--to", "perfetto")
    assert "left out" not in trace.output
    events = [event for event in json.loads(trace.stdout)["traceEvents"] if event["ph"] == "X"]
    assert sum(event["args"].get("coded", False) for event in events) == coding["coded_messages"]
    work = [event for event in events if event["cat"] in ("encode", "decode")]
    assert {event["cat"] for event in work} == {"encode", "decode"}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(coding["time_us"])
    page = run("convert", str(path), "--to", "html").stdout
    assert "Time line with q8" in page and "codec on 0" in page
    told = run("explain", str(path))
    assert "Coding (times above are without): q8 on float32" in told.output
    assert "between nodes, 40000 us/MB" in told.output
    assert json.loads(run("explain", str(path), "--json").stdout)["coding"]["kinds"]


def test_a_search_for_codings_that_the_clock_ends_says_so(profile: str) -> None:
    made = synth(profile, "--codec", "q8", "--json", "--time-limit", "0.1")
    assert json.loads(made.stdout)["ended"] == "time-limit"


def test_what_is_printed_says_which_schedule_is_written(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "ag.json"
    said = synth(profile, "--codec", "q8", "-o", str(path)).stdout
    written = json.loads(path.read_text())
    (codec,) = [line for line in said.splitlines() if line.startswith("codec ")]
    assert f" messages of a schedule by {written['engine']}, " in codec
    assert said.endswith(f"{path}, as coded; lines above `codec` are of the best schedule without\n")
    plain = synth(profile, "--codec", "none", "-o", str(path)).stdout
    assert plain.endswith(f"{path}\n")


def test_the_same_request_writes_the_same_bytes(profile: str, tmp_path: Path) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        made = synth(profile, "--codec", "q8", "-o", str(tmp_path / name), "--json")
        if json.loads(made.stdout)["ended"] == "time-limit":
            pytest.skip("the machine is too busy for the search to end by what it has counted")
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]


def test_what_is_asked_for_and_cannot_be_coded_is_said(profile: str, tmp_path: Path) -> None:
    said = synth(profile, "--codec", "auto").stdout
    assert "codec        none: " in said and "says nothing of lossless codecs for float32" in said
    assert "codec" not in synth(profile).stdout
    sketch = tmp_path / "sketch.yaml"
    sketch.write_text("schema: taccl/sketch/v1\ncodec: q8\n")
    xml = synth(profile, "-s", str(sketch), "-o", str(tmp_path / "ag.xml")).stdout
    assert "codec        none: MSCCL XML has no room for compression, and the sketch asks for q8" in xml
    sketch.write_text("schema: taccl/sketch/v1\ncodec: none\n")
    assert "codec" not in synth(profile, "-s", str(sketch), "-o", str(tmp_path / "ag.xml")).stdout


def test_a_gain_is_that_over_the_best_schedule_that_is_known(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "ar.json"
    line = ("synth", "-t", profile, "-c", "allreduce", "--size", "4MB", "--time-limit", "2", "--codec", "q8")
    made = run(*line, "-o", str(path), "--json")
    coding = json.loads(made.stdout)["coding"]
    without = json.loads(run("simulate", str(path), "--json").stdout)["time_us"]
    assert coding["time_us"] < coding["uncoded_time_us"] <= without + 1e-6


def test_auto_takes_only_what_changes_no_bit(profile: str) -> None:
    plain = synth(profile, "--json")
    assert json.loads(plain.stdout)["coding"] is None  # for float32 the profile has a lossy codec only
    dear = Path(profile)
    dear.write_text(PROFILE.replace("beta: 1.5ms/MB", "beta: 900ms/MB"))
    found = json.loads(synth(profile, "--dtype", "bfloat16", "--json").stdout)
    assert found["coding"] is None
    assert found["provenance"]["time_limit_s"] == 2.0  # what was asked for, not the share of one search
    assert found["not_coded"] == "no schedule with xw was found that is quicker than this one without"
    dear.write_text(PROFILE)
    exact = synth(profile, "--dtype", "bfloat16", "--json")
    assert json.loads(exact.stdout)["coding"]["codec"] == "xw"
    assert (
        json.loads(synth(profile, "--dtype", "bfloat16", "--codec", "none", "--json").stdout)["coding"]
        is None
    )


def test_a_sketch_says_where(profile: str, tmp_path: Path) -> None:
    sketch, path = tmp_path / "s.yaml", tmp_path / "ag.json"
    sketch.write_text("schema: taccl/sketch/v1\ncodec: {name: q8, links: [{from: [0], scope: inter}]}\n")
    assert synth(profile, "-s", str(sketch), "-o", str(path)).exit_code == 0
    written = json.loads(path.read_text())
    if "coding" in written:
        numbers = [
            n
            for run in written["coding"]["messages"]
            for n in (range(run[0], run[1] + 1) if isinstance(run, list) else [run])
        ]
        assert {written["messages"][n][1] for n in numbers} == {0}


def test_no_file_is_believed_that_a_codec_is_lossless_which_is_not(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "ag.json"
    assert synth(profile, "--codec", "q8", "-o", str(path)).exit_code == 0
    said = "it calls codec q8 lossless, which is lossy"
    path.write_text(path.read_text().replace('"lossless": false', '"lossless": true'))
    result = run("verify", str(path))
    assert (result.exit_code, said in result.output) == (3, True), result.output
    Path(profile).write_text(PROFILE.replace("lossless: false", "lossless: true"))
    result = synth(profile)  # auto, which takes what changes no bit
    assert (result.exit_code, said in result.output) == (3, True), result.output


def test_what_cannot_be_is_refused(profile: str, tmp_path: Path) -> None:
    xml = synth(profile, "--codec", "q8", "-o", str(tmp_path / "ag.xml"))
    assert xml.exit_code == 2
    assert "XML has no room" in xml.output
    unknown = synth(profile, "--codec", "zstd", "--json")
    assert unknown.exit_code == 2
    assert "says nothing of what it costs" in unknown.output
    path = tmp_path / "ag.json"
    assert synth(profile, "--codec", "q8", "-o", str(path)).exit_code == 0
    written = json.loads(path.read_text())
    for change, said in (
        ({"codec": "fp8"}, "says nothing of codec"),
        ({"messages": [0, 0]}, "ascend"),
        ({"messages": [10**6]}, "expected a whole number"),
        ({"time_fs": -1}, "expected a whole number"),
        ({"speed": 1}, "is not known here"),
    ):
        path.write_text(json.dumps({**written, "coding": {**written["coding"], **change}}))
        result = run("verify", str(path))
        assert result.exit_code == 3
        assert said in result.output
    path.write_text(json.dumps({**written, "coding": {**written["coding"], "time_fs": 7}}))
    wrong = run("verify", str(path))
    assert wrong.exit_code == 1
    assert "A102" in wrong.output


@pytest.mark.parametrize("codec", ["qq8", "xw"])
def test_a_codec_of_a_sketch_that_was_not_measured_is_named_with_its_place(
    codec: str, profile: str, tmp_path: Path
) -> None:
    """`xw` was measured, but for another type."""
    sketch = tmp_path / "mine.yaml"
    sketch.write_text(f"schema: taccl/sketch/v1\ncodec: {codec}\n")
    line = (
        "synth",
        "-t",
        profile,
        "-s",
        str(sketch),
        "-c",
        "broadcast",
        "--size",
        "1MB",
        "--time-limit",
        "2",
    )
    refused = CliRunner().invoke(cli, [*line, "-o", str(tmp_path / "a.json")])
    assert refused.exit_code == 3
    assert f"{sketch}:2:8: error[S210]: hosts has no codec '{codec}' for float32; it has q8" in refused.stderr
    assert CliRunner().invoke(cli, [*line, "--codec", "none", "-o", str(tmp_path / "a.json")]).exit_code == 0
    program = CliRunner().invoke(cli, [*line, "-o", str(tmp_path / "a.xml")])
    assert program.exit_code == 0
    checked = CliRunner().invoke(cli, ["sketch", "check", str(sketch), "--topology", profile])
    assert checked.exit_code == 0
    assert ("did you mean 'q8'?" in checked.output) == (codec == "qq8")


def test_where_nothing_can_be_coded_the_search_has_its_whole_time(profile: str, tmp_path: Path) -> None:
    """In XML, which `taccl build` writes by default, and with several instances: the bytes are those of no codec."""
    sketch, cluster = tmp_path / "mine.yaml", tmp_path / "cluster.yaml"
    sketch.write_text("schema: taccl/sketch/v1\ncodec: q8\n")
    cluster.write_text(
        f"schema: taccl/cluster/v1\ntopology: {profile}\nsketch: mine.yaml\noutput: out\nengine: greedy\n"
        "collectives: [{collective: allgather, sizes: [1MB]}]\n"
    )
    built = CliRunner().invoke(cli, ["build", str(cluster)])
    assert built.exit_code == 0, built.stderr
    line = f"synth -t {profile} -c allgather --size 1MB --engine greedy --time-limit 8 --json".split()
    several = CliRunner().invoke(
        cli, [*line, "-s", str(sketch), "--instances", "2", "-o", str(tmp_path / "a.json")]
    )
    plain = CliRunner().invoke(
        cli, [*line, "--codec", "none", "--instances", "2", "-o", str(tmp_path / "b.json")]
    )
    found = json.loads(several.stdout)
    assert found["coding"] is None and "--instances 1" in found["not_coded"]
    assert json.loads(plain.stdout)["not_coded"] == ""
    made = [json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json")]
    assert made[0]["messages"] == made[1]["messages"]
    assert made[0]["provenance"]["time_limit_s"] == made[1]["provenance"]["time_limit_s"] == 8
