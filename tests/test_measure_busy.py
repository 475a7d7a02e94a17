"""What computes beside the ranks: seen before a measurement, and said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taccl.profiles.measure.busy import busy_between, busy_cores, parse, warnings

STAT = """cpu  300 0 100 500 100 0 0 0 0 0
cpu0 200 0 100 100 0 0 0 0 0 0
cpu1 100 0 0 400 100 0 0 0 0 0
intr 12345 0 0
ctxt 99
"""


def test_ticks_of_each_core_are_read() -> None:
    assert parse(STAT) == {0: (400, 100), 1: (600, 500)}


def test_only_cores_that_the_ranks_may_use_count() -> None:
    before, after = parse(STAT), {0: (425, 100), 1: (625, 520), 2: (100, 0)}
    assert busy_between(before, after, {0}) == pytest.approx(1.0)
    assert busy_between(before, after, {1}) == pytest.approx(0.2)
    assert busy_between(before, after, {0, 1, 2, 3}) == pytest.approx(1.2)
    assert busy_between(before, before, {0, 1}) == 0.0  # no tick went by
    assert busy_between({}, {}, {0}) == 0.0  # the system does not tell


@pytest.mark.parametrize(
    ("hosts", "cores", "busy", "named"),
    [
        ("aa", (2, 2), (0.0, 0.04), []),
        ("aa", (2, 2), (1.0, 0.96), ["1.0 of the 2 cores of ranks 0, 1 "]),
        ("aaaa", (2,) * 4, (0.2,) * 4, []),
        ("aaaa", (2,) * 4, (0.3,) * 4, ["0.3 of the 2 cores of ranks 0, 1, 2, 3 "]),
        ("aa", (16, 16), (12.0, 12.0), []),  # there is room for two ranks
        ("abab", (2, 1, 2, 1), (0.0, 0.9, 0.0, 1.0), ["1.0 of the 1 cores of ranks 1, 3 "]),
        ("ab", (1, 1), (0.9, 0.8), ["0.9 of the 1 cores of ranks 0 ", "0.8 of the 1 cores of ranks 1 "]),
    ],
)
def test_hosts_whose_cores_are_taken_are_named(
    hosts: str, cores: tuple[int, ...], busy: tuple[float, ...], named: list[str]
) -> None:
    found = warnings(tuple(hosts), cores, busy)
    assert len(found) == len(named)
    assert all(words in line for words, line in zip(named, found, strict=True))


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat")
def test_a_process_beside_is_seen() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as beside:
        try:
            assert beside.stdout is not None and beside.stdout.readline()
            end = time.monotonic() + 20
            while (most := busy_cores()) < 0.3 and time.monotonic() < end:
                pass
        finally:
            beside.kill()
    assert most >= 0.3
