"""Start real jobs on the ranks of an emulated cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CANNOT = 77
LATE_S = 60  # that the cluster may take to come and go


def on_cluster(
    program: Sequence[str], *words: str, code: int = 0, timeout_s: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on every rank, which must end with this code; skip where no cluster can be had.

    words: of `tests.cluster run`, two nodes of one rank if there are none.
    """
    asked = words or ("--nodes=2", "--ranks=1", "--rate=1gbit")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster", "run", *asked, f"--timeout={timeout_s}", "--", *program],
        cwd=ROOT, text=True, capture_output=True, timeout=timeout_s + LATE_S, env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == code, done.stderr
    return done
