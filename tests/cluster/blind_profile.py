"""`taccl profile` on ranks that all claim one host name: the node boundary must come from the measurement."""

from __future__ import annotations

from typing import Any

from taccl.commands.profile import command
from taccl.profiles.measure import mpi_prober


class _Blind(mpi_prober.MpiProber):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hosts = ["one"] * len(self.hosts)


if __name__ == "__main__":
    mpi_prober.MpiProber = _Blind  # type: ignore[misc]
    command()
