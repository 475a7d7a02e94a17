"""Pieces of shared memory are open files: more than a process may have at first, and what is said beyond that."""

import subprocess
import sys

import pytest

MANY = """
import resource, sys
import numpy as np
from taccl.errors import EnvironmentProblem
from taccl.runtime.shared import SharedMemory, attach
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
memory, pieces, seen = SharedMemory(), [], []
try:
    for number in range(100):
        pieces.append(memory.empty(1, np.int64))
        pieces[-1][0] = number
        place = memory.place(pieces[-1])
        seen.append(attach(place.process, place.fd, place.token, 8)[:8].view(np.int64)[0])
except EnvironmentProblem as problem:
    print(problem)
assert seen == list(range(len(seen)))
print(len(seen))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "count", "words"),
    [
        (1000, 1000, 100, ""),
        (64, 1000, 100, ""),
        (64, 80, None, "more than 80 files would be open (ulimit -n)"),
    ],
)
def test_the_own_limit_is_raised_as_far_as_it_may_be(soft, hard, count, words):
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(soft), str(hard)], check=True, capture_output=True, text=True
    )
    *said, pieces = done.stdout.splitlines()
    assert words in " ".join(said) and bool(said) == bool(words)
    assert int(pieces) == count if count else 10 < int(pieces) < 100
