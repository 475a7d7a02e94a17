"""`taccl profile --codecs` in device memory, on a stand-in for CuPy that does nothing before it must (cupy_double)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi_jobs import Ended, launch, messages, needs_mpi

from taccl.commands.profile_codecs import request
from taccl.errors import EnvironmentProblem, UsageError
from taccl.profiles.profile_file import read_topology
from taccl.runtime import gpu
from taccl.runtime.codec_trial import _means_on_device_us
from taccl.runtime.streams import Streams

HERE = Path(__file__).parent
# Chunks that the stand-in codes in milliseconds. The transport of a trial is said.
SMALL = """
import sys
from taccl.commands import profile_codecs
from taccl.runtime import codec_trial
real = codec_trial.device_transport
def device_transport(*arguments):
    found = real(*arguments)
    print(f"over {type(found[0]).__name__}", file=sys.stderr)
    return found
codec_trial.device_transport = device_transport
profile_codecs.DEVICE_QUICK = profile_codecs.Effort((8 << 10, 32 << 10), 64 << 10, 1)
from taccl.entry import main
main()
"""


class TestOnTheStandIn:
    pytestmark = needs_mpi

    @pytest.fixture
    def profiled(self, host_kernels: Path, tmp_path: Path):
        def run(ranks: int, *options: str, **settings: str) -> tuple[Ended, Path]:
            path = os.pathsep.join([str(HERE / "cupy_double"), os.environ.get("PYTHONPATH", "")])
            profile = tmp_path / "p.yaml"
            ended = launch(
                ranks, "-c", SMALL, "profile", "-o", str(profile), "--quick", *options,
                PYTHONPATH=path, CUPY_DOUBLE_KERNELS=str(host_kernels), **settings,
            )  # fmt: skip
            assert ended.code or "cupy double:" not in ended.err
            return ended, profile

        return run

    @pytest.mark.parametrize(
        ("ranks", "codecs", "way", "settings"),
        [
            (2, "q8,xw,bf16", "CudaIpc", {}),
            (4, "q8,xw,bf16", "CudaIpc", {"CUPY_DOUBLE_DEVICES": "2"}),
            (2, "q8,xw,bf16", "StagedShared", {"CUPY_DOUBLE_IPC": "no"}),
            (
                3, "q8,xw,bf16", "Nccl",
                {"CUPY_DOUBLE_DEVICES": "3", "CUPY_DOUBLE_IPC": "no", "CUPY_DOUBLE_REGISTER": "no"},
            ),
            (2, "q8,xw,bf16", "MpiCuda", {"CUPY_DOUBLE_IPC": "no", "CUPY_DOUBLE_REGISTER": "no"}),
        ],
    )  # fmt: skip
    def test_codecs_are_put_into_a_profile(
        self, profiled, ranks: int, codecs: str, way: str, settings: dict[str, str]
    ) -> None:
        """`frame + bytes / ratio` is the format's, whatever the way."""
        ended, profile = profiled(
            ranks, "--device", "cuda", "-t", f"ring:{ranks}", "--codecs", codecs, "--json", **settings
        )
        assert ended.code == 0, ended.err
        assert set(re.findall(r"over (\w+)Transport\b", ended.err)) == {way}
        assert ended.err.count("codecs are measured in GPU memory (--device host") == 1
        costs = {cost.codec: cost for cost in read_topology(profile.read_text(), "p.yaml").codecs}
        assert sorted(costs) == sorted(codecs.split(","))
        for cost in costs.values():
            assert cost.source == f"normal values in GPU memory, {ranks} ranks on 1 node"
            assert cost.encode_alpha_us + cost.encode_beta_us_per_mb > 0
            assert cost.decode_alpha_us + cost.decode_beta_us_per_mb > 0
        assert float(costs["q8"].ratio) == pytest.approx(3.938, abs=0.002)
        assert 1.1 < costs["xw"].ratio < 1.3
        found = json.loads(ended.out)["codecs"]
        assert [[one["rank"] for one in codec["ranks"]] for codec in found] == [list(range(ranks))] * len(
            costs
        )

    def test_links_and_codecs_are_measured_in_one_memory(self, profiled) -> None:
        """auto takes the GPU that every rank has, for both."""
        ended, profile = profiled(2, "--codecs", "bf16,bf16-xw", "--transport", "mpi", "--sizes", "1K,64K")
        assert ended.code == 0, ended.err
        topology = read_topology(profile.read_text(), "p.yaml")
        assert "staged through pinned host memory" in topology.source
        assert [cost.codec for cost in topology.codecs] == ["bf16", "bf16-xw"]
        assert all("in GPU memory" in cost.source for cost in topology.codecs)

    def test_what_has_no_kernel_is_measured_on_the_host_or_refused(self, profiled) -> None:
        pytest.importorskip("zstandard")
        ended, profile = profiled(2, "--codecs", "zstd", "-t", "ring:2")
        assert ended.code == 0, ended.err
        (cost,) = read_topology(profile.read_text(), "p.yaml").codecs
        assert cost.source == "normal values, 2 ranks on 1 node"
        ended, _ = profiled(2, "--codecs", "q8,zstd", "-t", "ring:2", "--device", "cuda")
        assert ended.code == 2
        (said,) = messages(ended)
        assert "zstd has no kernel; leave it out, or give --device host" in said

    def test_a_small_device_is_said_before_memory_is_taken(self, profiled) -> None:
        ended, profile = profiled(
            2, "--device", "cuda", "-t", "ring:2", "--codecs", "q8", CUPY_DOUBLE_BYTES=str(1 << 20)
        )
        assert ended.code == 6 and not profile.exists()
        *_, said = messages(ended)  # after that two ranks take turns
        assert "bytes on the device from each of its 2 ranks" in said and "--quick" in said

    def test_without_a_device_it_is_said(self, tmp_path: Path) -> None:
        if gpu.load() is not None:
            pytest.skip("there is a device")
        ended = launch(
            2,
            "-m",
            "taccl",
            "profile",
            "-t",
            "ring:2",
            "-o",
            str(tmp_path / "p"),
            "--codecs",
            "q8",
            "--device",
            "cuda",
        )
        assert ended.code == 6
        (said,) = messages(ended)
        assert "no CUDA device can be used" in said


def test_all_codecs_leave_out_what_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    adds = SimpleNamespace(types=["ff->f"])
    monkeypatch.setattr(gpu, "load", lambda: SimpleNamespace(add=adds, __version__="13"))
    asked = request("all", "float32", None, on_device=True)
    assert "zstd" not in [codec.name for codec, _ in asked.pairs]
    assert "zstd has no kernel: left out" in asked.left_out
    with pytest.raises(UsageError, match="has no kernel"):
        request("zstd", None, None, on_device=True)
    with pytest.raises(EnvironmentProblem, match="bfloat16; leave it out of --dtype, or install CuPy 14"):
        request("xw", "bfloat16", None, on_device=True)


def test_pieces_that_overlap_count_once() -> None:
    """A decode under which two encodes are done, and one that outlasts the decode before it."""
    operations = [
        SimpleNamespace(kind=kind) for kind in ("encode", "send", "encode", "decode", "decode", "accumulate")
    ]
    notes = [(0, 0.5, 1.5), (2, 2.0, 3.0), (3, 0.0, 4.0), (4, 3.5, 5.0), (5, 7.0, 9.0)]
    assert _means_on_device_us(operations, notes) == pytest.approx([1e6, 1.5e6, 2e6])


class _Clock:
    """Events and streams of a device whose time is said."""

    def __init__(self) -> None:
        self.now = 0.0

    def stream(self, priority: int | None = None) -> object:
        return SimpleNamespace(wait_event=lambda event: None)

    def event(self) -> SimpleNamespace:
        found = SimpleNamespace(at=None)

        def record(stream: object = None) -> None:
            found.at = self.now

        found.record = record
        return found

    clock = event

    def done(self, event: object) -> bool:
        return True

    @staticmethod
    def between_s(first: SimpleNamespace, last: SimpleNamespace) -> float:
        return last.at - first.at


def test_notes_of_a_run_are_in_the_order_in_which_pieces_end() -> None:
    device, notes = _Clock(), []
    operations = [
        SimpleNamespace(kind=kind, threadblock=0, predecessors=()) for kind in ("encode", "copy", "decode")
    ]
    streams = Streams(device, operations, {0: 0, 2: 1}, None, notes)  # type: ignore[arg-type]
    streams.connect([(), (), ()], ["work"] * 3, set())

    def takes(seconds: float) -> object:
        def put() -> None:
            device.now += seconds

        return put

    starts = [streams.work(number, takes(1.0 + number)) for number in range(3)]
    for turn in range(2):
        notes.clear()
        device.now = 100.0 * turn
        streams.begin()
        for start in reversed(starts):
            start()
        assert streams.poll([object()])
        assert notes == [(2, 0.0, 3.0), (0, 5.0, 6.0)]
