"""What a process's control groups leave it, from the files of both versions."""

import pytest

from taccl.runtime import control_group
from taccl.runtime.control_group import NO_LIMIT

OWN = "0::/batch/job"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Lay out the process's groups, and the files under the folder of all groups."""

    def lay(own, files):
        for name, text in files.items():
            path = tmp_path / "all" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        (tmp_path / "self").write_text(own + "\n")
        monkeypatch.setattr(control_group, "GROUPS", tmp_path / "all")
        monkeypatch.setattr(control_group, "SELF", tmp_path / "self")

    return lay


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/", {}, NO_LIMIT),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, NO_LIMIT),
        ("0::/", {"memory.max": "100", "memory.current": "70"}, 30),
        # The kernel drops what it keeps of files.
        (
            "0::/",
            {
                "memory.max": "100",
                "memory.current": "70",
                "memory.stat": "anon 9\nactive_file 20\ninactive_file 30",
            },
            80,
        ),
        ("0::/", {"memory.max": "100", "memory.current": "70", "memory.stat": "active_file 90"}, 100),
        # A group above has the least.
        (
            OWN,
            {
                "batch/job/memory.max": "100",
                "batch/job/memory.current": "10",
                "batch/memory.max": "120",
                "batch/memory.current": "80",
            },
            40,
        ),
        (OWN, {"batch/job/memory.max": "100", "batch/job/memory.current": "10"}, 90),
        # Version 1, of which parts are told apart by name, and a container that sees the top alone.
        ("4:memory:/", {"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "60"}, 40),
        (
            "9:name=systemd:/\n5:cpu,memory:/docker/abc",
            {
                "memory/memory.limit_in_bytes": "100",
                "memory/memory.usage_in_bytes": "60",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 5",
            },
            65,
        ),
        (
            "4:memory:/",
            {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "6"},
            NO_LIMIT,
        ),
        ("4:cpu:/", {"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "60"}, NO_LIMIT),
    ],
)
def test_memory(groups, own, files, free):
    groups(own, files)
    assert control_group.free_bytes() == free


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {}, 0),
        ("0::/", {"cpu.max": "max 100000"}, 0),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        (OWN, {"batch/job/cpu.max": "400000 100000", "batch/cpu.max": "300000 100000"}, 3),
        ("3:cpu,cpuacct:/x", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cores(groups, own, files, cores):
    groups(own, files)
    assert control_group.cores() == cores


def test_without_control_groups_nothing_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(control_group, "SELF", tmp_path / "none")
    assert (control_group.free_bytes(), control_group.cores()) == (NO_LIMIT, 0)
