"""Links between devices: simulated machines, and ranks on a stand-in for CuPy that does nothing before it must."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from cluster.simulated import SimulatedProber
from mpi_jobs import Ended, messages, needs_mpi
from test_run_devices import HERE, on_double

from taccl.commands.profile_ways import STAGED, device_path
from taccl.profiles.measure.devices import LARGEST_BYTES, Devices
from taccl.profiles.measure.result import topology
from taccl.profiles.measure.survey import FULL, QUICK, Survey, survey
from taccl.profiles.profile_file import read_topology
from taccl.profiles.topology import Topology

ALPHA_US, BETA = 12.0, 1.0
# Messages of a megabyte at most, so that the stand-in's memory is small.
SMALL = """
from taccl.profiles.measure import devices
devices.LARGEST_BYTES = 1 << 20
from taccl.profiles.measure import device_wire
device_wire.STRETCH_BYTES = 4 << 20
from taccl.entry import main
main()
"""


def machine(names: str, reach: bool = True, **more: object) -> SimulatedProber:
    """Ranks of one host on devices named by a letter each. Those of one share its memory; others are staged, unless
    all devices reach each other."""
    ranks = range(len(names))
    sharing = tuple(tuple(b for b in ranks if reach or names[a] == names[b]) for a in ranks)
    shared = [
        (
            name,
            BETA,
            frozenset((a, b) for a in ranks for b in ranks if a != b and names[a] == names[b] == name),
        )
        for name in sorted(set(names))
    ]
    return SimulatedProber(
        hosts=["host"] * len(names),
        alpha_us=lambda s, d: ALPHA_US if d in sharing[s] else 60.0,
        beta=lambda s, d: BETA if names[s] == names[d] else 2 * BETA if reach else 150.0,
        ports=[*shared, *more.pop("ports", [])],  # type: ignore[misc]
        devices=Devices(tuple(names), sharing),
        **more,  # type: ignore[arg-type]
    )


def ports(found: Survey) -> dict[str, float]:
    return {port.name: port.beta_us_per_mb for port in found.ports}


@pytest.mark.parametrize("effort", [QUICK, FULL])
@pytest.mark.parametrize("names", ["AA", "AAAA"])
def test_ranks_of_one_device_share_its_memory(names: str, effort) -> None:
    found = survey(machine(names, noise=0.1), effort)
    assert ports(found) == {"node0.gpu0.memory": pytest.approx(BETA, rel=0.1)}
    (cls,) = found.classes
    assert cls.fit.beta_us_per_mb == pytest.approx(BETA, rel=0.1)
    assert cls.fit.alpha_us == pytest.approx(ALPHA_US, rel=0.1)


def test_messages_are_long_enough_to_tell_fast_links() -> None:
    """A copy of 4 MiB takes less than its latency."""
    asked = machine("AB")
    survey(asked, QUICK)
    assert (
        max(trial.bytes for probe in asked.probes for row in probe.trials for trial in row) == LARGEST_BYTES
    )


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_copies_of_devices_need_no_cores(cores: int) -> None:
    """Links of ranks on devices of their own that differ stay as they are, and have no ports of cores."""
    prober = machine("ABCD", host_cores=cores)
    prober.beta = lambda s, d: 2.0 if {s, d} in ({0, 1}, {2, 3}) else 4.0
    found = survey(prober, QUICK)
    assert ports(found) == {}
    betas = {link: cls.fit.beta_us_per_mb for cls in found.classes for link in cls.links}
    assert betas[0, 1] == pytest.approx(2, rel=0.05) and betas[1, 2] == pytest.approx(4, rel=0.05)


def test_what_devices_share_is_a_bus() -> None:
    """A switch that copies of all devices go through at once, in both directions."""
    everything = frozenset((a, b) for a in range(4) for b in range(4) if a != b)
    found = survey(machine("ABCD", ports=[("pcie", 2 * BETA, everything)]), QUICK)
    assert ports(found) == {"node0.bus": pytest.approx(2 * BETA, rel=0.1)}


def test_devices_that_do_not_reach_each_other_are_no_nodes() -> None:
    """However much slower it is. Memory of a device is a port of its own ranks' links only."""
    found = survey(machine("ABAB", reach=False), QUICK)
    assert found.nodes == ((0, 1, 2, 3),)
    assert ports(found) == {
        "node0.gpu0.memory": pytest.approx(BETA, rel=0.1),
        "node0.gpu1.memory": pytest.approx(BETA, rel=0.1),
    }
    near = {port.links for port in found.ports}
    assert near == {((0, 2), (2, 0)), ((1, 3), (3, 1))}
    assert [len(cls.links) for cls in found.classes] == [4, 8]
    topology(found, "devices", "a test").check()


def test_flows_of_one_device_are_not_measured_side_by_side() -> None:
    prober = machine("AABB")
    survey(prober, QUICK)
    sides = [probe.flows for probe in prober.probes if not probe.together and len(probe.flows) > 1]
    # Half of the ranks to the other half is what tells the load.
    assert set(sides) <= {((0, 2), (1, 3))}


def test_the_way_is_said() -> None:
    def path(nodes: tuple[int, ...], sharing: tuple[tuple[int, ...], ...]) -> str:
        return device_path(Devices(("A",) * len(nodes), sharing), SimpleNamespace(nodes=nodes))  # type: ignore[arg-type]

    pair = ((0, 1), (0, 1))
    assert path((0, 0), pair) == "CUDA IPC within the node"
    assert path((0, 0, 2), (*pair, (2,))) == (
        "CUDA IPC within nodes, staged through pinned host memory between them"
    )
    assert path((0, 0, 0), (*pair, (2,))) == (
        "CUDA IPC where devices reach each other, else staged through pinned host memory"
    )


class TestOnTheStandIn:
    pytestmark = needs_mpi

    def exchanged(self, **settings: str) -> dict[str, int]:
        ended = on_double(3, str(HERE / "measure_device_worker.py"), **settings)
        assert ended.code == 0, ended.err
        found: dict[str, int] = json.loads(ended.out)
        return found

    def profiled(self, tmp_path: Path, ranks: int, *options: str, **settings: str) -> tuple[Ended, Topology]:
        """A profile of devices, all of whose links have times."""
        path = tmp_path / "profile.yaml"
        line = ("profile", "--device", "cuda", "--quick", "-o", str(path), *options)
        ended = on_double(ranks, "-c", SMALL, *line, **settings)
        assert ended.code == 0, ended.err
        found = read_topology(path.read_text(), str(path))
        assert len(found.links) == ranks * (ranks - 1)
        assert all(0 < link.beta_us_per_mb < 1e6 and 0 < link.alpha_us < 1e6 for link in found.links)
        return ended, found

    def test_data_arrive_whole(self) -> None:
        for seed in "123":
            assert self.exchanged(CUPY_DOUBLE_SEED=seed) == {"wrong": 0, "messages": 576}

    def test_a_copy_that_nobody_waits_for_would_be_found(self) -> None:
        assert self.exchanged(CUPY_DOUBLE_DROP="query")["wrong"] > 20

    @pytest.mark.parametrize("devices", ["1", "3"])
    def test_messages_go_by_cuda_ipc(self, tmp_path: Path, devices: str) -> None:
        ended, found = self.profiled(tmp_path, 3, CUPY_DOUBLE_DEVICES=devices, CUPY_DOUBLE_MPS="1")
        assert "GPU 0 memory (CuPy)" in found.source
        assert found.source.endswith("memory (CuPy), CUDA IPC within the node")
        # A busy machine has more to say.
        assert any(said.endswith("memory (CuPy), CUDA IPC within the node") for said in messages(ended))
        assert STAGED not in ended.err

    def test_ranks_that_take_turns_on_a_device_are_told(self, tmp_path: Path) -> None:
        ended, _ = self.profiled(tmp_path, 2)
        assert "ranks that share a GPU take turns on it" in ended.err

    def test_where_devices_do_not_reach_each_other_messages_are_staged(self, tmp_path: Path) -> None:
        ended, found = self.profiled(tmp_path, 4, CUPY_DOUBLE_DEVICES="2", CUPY_DOUBLE_PEERS="no")
        assert found.nodes == ((0, 1, 2, 3),)
        assert (
            "CUDA IPC where devices reach each other, else staged through pinned host memory" in found.source
        )
        assert (
            "taccl: messages that do not go by CUDA IPC are staged through pinned host memory, over MPI "
            "(rank 0: rank 1: device memory of another process cannot be opened: cudaError217)"
        ) in messages(ended)

    @pytest.mark.parametrize(
        ("options", "settings", "why"),
        [
            (("--transport", "mpi"), {}, ""),
            ((), {"CUPY_DOUBLE_IPC": "no"}, "rank 0: device memory cannot be shared: cudaError801"),
            ((), {"CUPY_DOUBLE_BYTES": "20000000"}, "the measurement needs 10485760 bytes on the device"),
        ],
    )
    def test_without_cuda_ipc_messages_are_staged(
        self, tmp_path: Path, options: tuple[str, ...], settings: dict[str, str], why: str
    ) -> None:
        ended, found = self.profiled(tmp_path, 2, *options, **settings)
        assert found.source.endswith("GPU 0 memory (CuPy), staged through pinned host memory")
        assert why in ended.err and ("messages that do not go by CUDA IPC" in ended.err) is bool(why)

    def test_sizes_may_be_longer_than_those_that_are_chosen(self, tmp_path: Path) -> None:
        _, found = self.profiled(tmp_path, 2, "--sizes", "64K,1M,6M")
        assert "CUDA IPC" in found.source
