"""`taccl profile` on a real device."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi_jobs import needs_mpi, taccl

from taccl.profiles.profile_file import read_topology
from taccl.profiles.topology import Topology
from taccl.runtime import gpu

pytestmark = [
    *needs_mpi,
    pytest.mark.gpu,
    pytest.mark.skipif(gpu.load() is None, reason=f"needs a GPU: {gpu.why_not()}"),
]


def profiled(tmp_path: Path, *options: str) -> Topology:
    path = tmp_path / "profile.yaml"
    ended = taccl(2, "profile", "--device", "cuda", "--quick", "-o", str(path), *options)
    assert ended.code == 0, ended.err
    return read_topology(path.read_text(), str(path))


def test_links_within_a_node_are_those_of_cuda_ipc(tmp_path: Path) -> None:
    """A device copies 1 MB in a microsecond or so from its own memory and in some 40 over PCIe from another's; through
    host memory two ranks of one H100 took 147."""
    found = profiled(tmp_path)
    assert "CUDA IPC within the node" in found.source
    one_gpu = gpu.load().cuda.runtime.getDeviceCount() == 1
    assert all(0.1 < link.beta_us_per_mb < (20 if one_gpu else 100) for link in found.links)
    assert all(1 < link.alpha_us < 2000 for link in found.links)
    # All that several ranks copy on one device goes through its memory.
    assert {port.name for port in found.ports} <= {"node0.gpu0.memory", "node0.bus"}


def test_staged_messages_are_measured_when_asked_for(tmp_path: Path) -> None:
    found = profiled(tmp_path, "--transport", "mpi")
    assert "staged through pinned host memory" in found.source and "CUDA IPC" not in found.source


def test_codecs_are_measured_where_kernels_do_the_work(tmp_path: Path) -> None:
    """Where processes take turns on a device, a turn may be in a piece."""
    costs = {cost.codec: cost for cost in profiled(tmp_path, "--codecs", "q8,xw").codecs}
    assert all("in GPU memory" in cost.source for cost in costs.values())
    assert float(costs["q8"].ratio) == pytest.approx(3.938, abs=0.002)
    for cost in costs.values():
        for alpha, beta in (
            (cost.encode_alpha_us, cost.encode_beta_us_per_mb),
            (cost.decode_alpha_us, cost.decode_beta_us_per_mb),
        ):
            assert 1 < alpha + 64 * beta < 10_000
