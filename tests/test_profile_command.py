"""`taccl profile` as a command, under mpiexec on this machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from mpi_jobs import launch, messages, needs_mpi, taccl, taccl_but

from taccl.cli import main
from taccl.commands.profile import Sizes, command
from taccl.profiles.measure.buffers import HostBuffers, buffers
from taccl.profiles.profile_file import read_topology

BOUND = """
import os, sys
from taccl.cli import main
from taccl.runtime.mpi import launcher
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[launcher().rank if sys.argv.pop(1) == "1" else 0]})
main()
"""
FAULTY = str(Path(__file__).parent / "cluster" / "fault_profile.py")


class TestUnderMpiexec:
    pytestmark = needs_mpi

    def test_a_profile_is_measured_written_and_summed_up(self, tmp_path: Path) -> None:
        profile = tmp_path / "deep" / "profile.yaml"
        ended = launch(4, "-m", "taccl", "profile", "--quick", "--name", "here", "-o", str(profile))
        assert ended.code == 0, ended.err
        topology = read_topology(profile.read_text(), str(profile))
        assert topology.name == "here"
        assert topology.ranks == 4
        assert sorted((link.src, link.dst) for link in topology.links) == [
            (a, b) for a in range(4) for b in range(4) if a != b
        ]
        assert "host memory" in topology.source and "host memory" in ended.err
        assert all(link.measured is not None and link.measured.samples > 10 for link in topology.links)
        assert ended.out.startswith("1 node") and "intra" in ended.out
        assert "\x1b" not in ended.err  # progress is for terminals

    def test_json_holds_every_pair(self, tmp_path: Path) -> None:
        profile = tmp_path / "p.yaml"
        ended = launch(
            3, "-m", "taccl", "profile", "--quick", "--sizes", "64K,256K,1M", "--json", "-o", str(profile)
        )
        assert ended.code == 0, ended.err
        found = json.loads(ended.out)
        assert found["schema"] == "taccl/measure/v1"
        assert len(found["pairs"]) == 6
        assert all(0 <= pair["occupancy_us"] <= pair["alpha_us"] for pair in found["pairs"])
        assert all(pair["beta_us_per_mb"] > 0 for pair in found["pairs"])

    def test_the_profile_can_go_to_stdout(self) -> None:
        ended = launch(2, "-m", "taccl", "profile", "--quick", "-o", "-")
        assert ended.code == 0, ended.err
        assert read_topology(ended.out, "stdout").ranks == 2

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
    @pytest.mark.parametrize("bound", [True, False])
    def test_ranks_that_are_bound_to_cores_share_none(self, bound: bool, tmp_path: Path) -> None:
        """Two ranks on a core each, and two on one: there a copy has half of it."""
        profile = tmp_path / "profile.yaml"
        ended = launch(2, "-c", BOUND, str(int(bound)), "profile", "--quick", "-o", str(profile))
        assert ended.code == 0, ended.err
        ports = {port.name for port in read_topology(profile.read_text(), "profile.yaml").ports}
        assert ports.isdisjoint({"rank0.switch.in", "rank1.switch.in"}) == bound

    def test_one_rank_is_told_how_to_start(self) -> None:
        ended = launch(1, "-m", "taccl", "profile", "-o", "x.yaml")
        assert ended.code == 2
        assert "mpiexec -n 4 taccl profile" in ended.err

    def test_a_place_that_cannot_be_written_is_named_before_measuring(self, tmp_path: Path) -> None:
        ended = launch(2, "-m", "taccl", "profile", "-o", str(tmp_path))
        assert ended.code == 2
        assert "is a directory" in ended.err and "Traceback" not in ended.err

    def test_cuda_without_a_device_says_why(self) -> None:
        ended = launch(2, "-m", "taccl", "profile", "--device", "cuda", "-o", "x", CUDA_VISIBLE_DEVICES="")
        assert ended.code == 6
        assert "no CUDA device can be used" in ended.err and "Traceback" not in ended.err

    def test_ranks_that_ask_for_different_memory_are_told(self) -> None:
        ended = taccl_but(3, 1, ("--device", "host"), "profile", "-o", "x.yaml", "--quick")
        assert ended.code == 86
        assert messages(ended) == [
            "taccl: rank 1 runs another measurement, or has other options, than the rest; "
            "give every rank the same file and options"
        ]

    @pytest.mark.parametrize("more", [("--sizes", "64K,1M"), ("--name", "other"), ("--codecs", "q8")])
    def test_ranks_with_other_options_are_named(self, more: tuple[str, ...], tmp_path: Path) -> None:
        profile = tmp_path / "p.yaml"
        ended = taccl_but(3, 2, more, "profile", "-o", str(profile), "--quick")
        assert ended.code == 86
        assert len(messages(ended)) == 1 and "rank 2 runs another measurement" in ended.err
        assert not profile.exists()

    def test_a_line_that_one_rank_cannot_read_is_said_by_that_rank(self) -> None:
        ended = taccl_but(3, 2, ("--bogus",), "profile", "-o", "x.yaml", "--quick")
        assert ended.code == 86
        assert messages(ended) == ["taccl: No such option '--bogus'."]

    def test_a_line_that_no_rank_can_read_is_said_once(self) -> None:
        ended = taccl(4, "profile", "-o", "x.yaml", "--sizes", "0,x")
        assert ended.code == 2
        assert len(messages(ended)) == 1 and "'x' is not a size" in ended.err
        assert ended.err.count("Try 'taccl profile --help'") == 1

    def test_who_was_killed_is_named_with_its_last_word(self, tmp_path: Path) -> None:
        ended = launch(3, FAULTY, "--quick", "-o", str(tmp_path / "p.yaml"), TACCL_FAULT="die:2")
        assert re.search(
            r"rank 2 has died .*; its last word, \d\.\d s before: it waits for nobody", ended.err
        )

    @pytest.mark.parametrize("fault", ["stall:2", "stall:1"])
    def test_a_rank_that_stalls_is_named_and_the_job_ends(self, fault: str, tmp_path: Path) -> None:
        profile = tmp_path / "p.yaml"
        ended = launch(3, FAULTY, "--quick", "--deadline", "1", "-o", str(profile), TACCL_FAULT=fault)
        assert ended.code == 86
        assert re.search(f"rank {fault[-1]} (stopped answering|did not answer)", ended.err)
        assert not profile.exists()
        assert ended.seconds < 30

    def test_a_rank_that_dies_ends_the_job(self, tmp_path: Path) -> None:
        profile = tmp_path / "p.yaml"
        ended = launch(3, FAULTY, "--quick", "--deadline", "1", "-o", str(profile), TACCL_FAULT="die:1")
        assert ended.code != 0
        assert not profile.exists()
        assert ended.seconds < 30

    def test_a_silent_rank_zero_does_not_hold_the_others(self, tmp_path: Path) -> None:
        profile = tmp_path / "p.yaml"
        ended = launch(2, FAULTY, "--quick", "--deadline", "1", "-o", str(profile), TACCL_FAULT="silent:0")
        assert ended.code == 86
        assert "heard nothing from rank 0" in ended.err


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ("1M", "two different sizes"),
        ("1M,1M", "two different sizes"),
        ("64K,abc", "is not a size"),
        ("1,64K", "between 1K and 256M"),
        ("64K,1G", "between 1K and 256M"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: str, says: str) -> None:
    result = CliRunner().invoke(command, ["-o", "x.yaml", "--sizes", sizes])
    assert result.exit_code == 2
    assert says in result.output


def test_sizes_are_read_as_nccl_tests_writes_them() -> None:
    assert Sizes().convert("1M, 64K,1MB", None, None) == (65536, 10**6, 1 << 20)


def test_json_and_a_profile_do_not_share_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["taccl", "profile", "--json", "-o", "-"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "both want stdout" in capsys.readouterr().err


def test_host_buffers_give_each_message_its_own_area() -> None:
    host = HostBuffers()
    areas = [host.wire(64, outgoing, slot) for outgoing in (True, False) for slot in (0, 1)]
    for value, area in enumerate(areas):
        area[:] = value
    assert [int(area[0]) for area in areas] == [0, 1, 2, 3]
    assert all(area.nbytes == 64 for area in areas)
    assert host.wire(16, True, 0).base is not None  # a part of the area that is already there


def test_staged_buffers_copy_around_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device path with host arrays in CuPy's place: bytes come from the device and go back to it."""

    class Device:
        def __init__(self, data: np.ndarray) -> None:
            self.data, self.nbytes = data, data.nbytes

        def __getitem__(self, key: slice) -> Device:
            return Device(self.data[key])

        def get(self, stream: object, out: np.ndarray) -> None:
            out[:] = self.data

        def set(self, data: np.ndarray, stream: object) -> None:
            self.data[:] = data

    waits: list[int] = []
    cuda = SimpleNamespace(
        alloc_pinned_memory=bytearray,
        Stream=lambda non_blocking: SimpleNamespace(synchronize=lambda: waits.append(1)),
    )
    cupy = SimpleNamespace(
        cuda=cuda, uint8=np.uint8, full=lambda size, value, dtype: Device(np.full(size, value, dtype))
    )
    monkeypatch.setattr("taccl.runtime.gpu.load", lambda: cupy)
    monkeypatch.setattr("taccl.runtime.gpu.select", lambda local_rank: local_rank)
    staged = buffers("cuda", 1)
    assert "GPU 1" in staged.name
    outgoing, incoming = staged.wire(8, True, 0), staged.wire(8, False, 0)
    outgoing[:] = 0
    staged.before_send(outgoing)
    assert outgoing.tolist() == [1] * 8  # the device's bytes, not what lay in host memory
    incoming[:] = 7
    staged.after_receive(incoming)
    incoming[:] = 0
    staged.before_send(incoming)
    assert incoming.tolist() == [7] * 8  # they had reached the device
    assert len(waits) == 3
    assert staged.wire(4, True, 0).nbytes == 4


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 129])
def test_names_that_a_profile_cannot_hold_are_refused(name: str, tmp_path: Path) -> None:
    target = tmp_path / "p.yaml"
    result = CliRunner().invoke(command, ["--name", name, "-o", str(target)])
    assert result.exit_code == 2 and "a name of 1 to 128 printable characters" in result.stderr
    assert not target.exists()


SLOW = """
import time
from mpi4py import MPI
from taccl.profiles.measure.buffers import HostBuffers
from taccl.profiles.measure.mpi_prober import MpiProber
from taccl.profiles.measure.probe import Probe, Trial

class Slow(HostBuffers):
    def before_send(self, wire):
        time.sleep(0.5)

prober = MpiProber(MPI, MPI.COMM_WORLD, Slow(), 1.5, {}, {})
if MPI.COMM_WORLD.Get_rank():
    prober.serve()
else:
    probe = Probe(((1, 2),), ((Trial(1, 1, 64),),), 10)
    print(bool((prober.run(probe) > 3e5).all()))
    prober.close()
"""


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_a_launcher")
@pytest.mark.timeout(60)
def test_a_probe_may_take_longer_than_the_deadline_of_its_messages():
    """Rank 0 takes no part; the two others are slow and not dead, and say so."""
    ended = launch(3, "-c", SLOW)
    assert (ended.code, ended.out) == (0, "True\n"), ended.err
