"""How much else runs on a host: what computes beside the ranks is measured with the links.

Times are taken as the best of several sweeps, so a busy machine may give a profile whose numbers fit their lines well
and are still those of a slower machine. That is seen beforehand, while all ranks sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

SLEEP_S = 0.25
LEAST_CORES = 0.25  # of what ranks would use, that others keep busy, before there is a warning

Ticks = dict[int, tuple[int, int]]  # of a core: all, and those in which nothing ran


def busy_cores() -> float:
    """How many of the cores that this process may use are kept busy by others; sleeps SLEEP_S.

    All ranks of the host call it at once, right after they met. 0 where the system does not tell.
    """
    allowed, before = os.sched_getaffinity(0), _read()
    time.sleep(SLEEP_S)
    after = _read()
    return busy_between(before, after, allowed)


def busy_between(before: Ticks, after: Ticks, cores: set[int]) -> float:
    """Cores that were busy between two looks at /proc/stat."""
    busy = 0.0
    for core in cores & before.keys() & after.keys():
        every, idle = (now - then for now, then in zip(after[core], before[core], strict=True))
        busy += 1 - min(idle / every, 1.0) if every > 0 else 0.0
    return busy


def parse(text: str) -> Ticks:
    """The ticks of each core in the text of /proc/stat (proc(5): user nice system idle iowait irq softirq steal)."""
    ticks = {}
    for line in text.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name != "cpu":
            numbers = [int(count) for count in counts[:8]]
            ticks[int(name[3:])] = sum(numbers), sum(numbers[3:5])
    return ticks


def warnings(hosts: Sequence[str], cores: Sequence[int], busy: Sequence[float]) -> list[str]:
    """Words on hosts whose ranks do not have the cores that they would use; one value of each rank."""
    found = []
    for host in dict.fromkeys(hosts):
        here = [rank for rank, name in enumerate(hosts) if name == host]
        most, others = max(cores[rank] for rank in here), max(busy[rank] for rank in here)
        if min(len(here), most) + others > most + LEAST_CORES:
            found.append(
                f"warning: other processes keep {others:.1f} of the {most} cores of ranks "
                f"{', '.join(map(str, here))} busy; what runs beside is measured too, so measure again while the "
                "machine does nothing else"
            )
    return found


def _read() -> Ticks:
    try:
        return parse(Path("/proc/stat").read_text())
    except (OSError, ValueError):
        return {}
