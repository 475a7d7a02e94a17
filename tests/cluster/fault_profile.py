"""`taccl profile` with one rank that stops in the middle: TACCL_FAULT = "stall:2", "die:1" or "silent:0"."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from taccl.commands.profile import command
from taccl.profiles.measure import mpi_prober
from taccl.profiles.measure.probe import Trial

kind, victim = os.environ["TACCL_FAULT"].split(":")


class _Faulty(mpi_prober.MpiProber):
    def _receive(self, src: int, trial: Trial, repeats: int) -> None:
        if kind != "silent" and self._rank == int(victim) and trial.messages > 1:
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        super()._receive(src, trial, repeats)

    def reduce_times(self, sizes: Any) -> Any:
        if kind == "silent":
            time.sleep(1000)
        return super().reduce_times(sizes)


if __name__ == "__main__":
    mpi_prober.MpiProber = _Faulty  # type: ignore[misc]
    from taccl.cli import main

    sys.argv = ["taccl", "profile", *sys.argv[1:]]
    assert command.name == "profile"
    main()
