"""A size is refused where the ranks of a machine, or those of a container, need more than is free there."""

from types import SimpleNamespace

import pytest

from taccl.errors import EnvironmentProblem
from taccl.runtime import control_group, free_memory
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.layout import layout
from taccl.runtime.machine import Machine
from taccl.synth.collective import build

MB = 1_000_000


@pytest.mark.parametrize(
    ("machine_kb", "group_mb", "wanted"),
    [
        (13_100, None, ""),  # 12.0 MB of 12.07
        (13_000, None, "on each of 8 ranks here, and 13312000 bytes are free"),
        (14_000, 4, ""),  # a container for every two ranks: 3 MB of 3.6
        (14_000, 3, "on each of 2 ranks here, and 3000000 bytes are free"),
    ],
)
def test_containers_of_a_machine_share_its_memory(tmp_path, monkeypatch, machine_kb, group_mb, wanted):
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {machine_kb} kB\n")
    (tmp_path / "memory.current").write_text(f"{MB}\n")
    (tmp_path / "memory.max").write_text("max\n" if group_mb is None else f"{(group_mb + 1) * MB}\n")
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_group, "GROUPS", tmp_path)
    monkeypatch.setattr(control_group, "SELF", tmp_path / "self")
    (tmp_path / "self").write_text("0::/\n")
    collective = build("allgather", 2)
    job = SimpleNamespace(rank=0, machine=Machine(8, 64), board=SimpleNamespace(node_ranks=2))
    asked = (
        *(job, SimpleNamespace(collective=collective), layout(collective, MB // 4), DTYPES["float32"]),
        *(SimpleNamespace(transport="tcp", buffers="private"), None, 0, 0, 0, None),
    )
    if not wanted:
        free_memory.check_memory(*asked)
        return
    with pytest.raises(EnvironmentProblem) as refused:
        free_memory.check_memory(*asked)
    assert f"needs 1500000 bytes {wanted}" in str(refused.value)
