"""What the control groups of this process leave it: of memory, and of the time of cores.

A container, a job of a batch system or a service may have less than its machine. It is the least that its own group and
those above it say, as far as they are seen from here: version 2, or the controllers of version 1 (cgroups(7)).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

NO_LIMIT = 2**62
SELF, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# The files of the limit and of what is used, and what begins the names of a group's parts with all groups below it.
MEMORY = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
FILES = ("active_file", "inactive_file")  # pages of files, which the kernel drops where memory is short


def free_bytes() -> int:
    """Memory that the process's groups can still give."""
    return min((_free(folder, *names) for folder in _folders("memory") for names in MEMORY), default=NO_LIMIT)


def _free(folder: Path, limit: str, used: str, whole: str) -> int:
    with contextlib.suppress(OSError, ValueError):  # there is none, or none of this version, or it says "max"
        most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
        kept = 0
        with contextlib.suppress(OSError, ValueError):
            parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            kept = sum(int(parts.get(whole + name, 0)) for name in FILES)
        return min(NO_LIMIT, most - max(0, taken - kept))
    return NO_LIMIT


def cores() -> int:
    """Cores' worth of time that the process's groups have together; 0 where nothing limits it."""
    return min((found for folder in _folders("cpu") if (found := _cores(folder))), default=0)


def _cores(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0, math.ceil(int(quota) / int(period)))  # -1 is none
    return 0


def _folders(controller: str) -> Iterator[Path]:
    """Of the process's group and of all above it. In a container the names may be those that the machine has, and only
    the top be seen."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        lines = SELF.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        own = PurePosixPath(path.lstrip("/"))
        yield from (GROUPS / (controller if controllers else "") / part for part in (own, *own.parents))
