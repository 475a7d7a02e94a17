"""A directed link between two ranks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a link's alpha and beta were obtained; never a date, so that files stay comparable."""

    samples: int
    residual: float  # relative residual of the fit, 0.03 = 3 %
    alpha_ci_us: float = 0.0  # half width of the 95 % interval
    beta_ci_us_per_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link. A message of b bytes arrives `alpha + beta * b` after it starts.

    beta is the slowest of the link's own and that of every port in `ports`. The message holds the
    link for `occupancy + own beta * b` and each port for `occupancy + port beta * b`, all from its start.
    """

    src: int
    dst: int
    alpha_us: Fraction  # >= 0
    beta_us_per_mb: Fraction  # > 0
    occupancy_us: Fraction  # 0 <= occupancy <= alpha
    ports: tuple[int, ...] = ()  # indices into Topology.ports
    kind: str = "link"  # link class, e.g. "nvlink", "ib"
    measured: Measurement | None = None


def fault_of(link: Link, ranks: int, ports: int) -> str | None:
    """Which rule stated above a link breaks in a topology of so many ranks and ports; None for none."""
    if not (0 <= link.src < ranks and 0 <= link.dst < ranks):
        return f"a rank does not exist (ranks are 0..{ranks - 1})"
    if link.src == link.dst:
        return "a link must join two different ranks"
    if link.beta_us_per_mb <= 0 or link.alpha_us < 0:
        return "beta must be above 0 and alpha not below 0"
    if not 0 <= link.occupancy_us <= link.alpha_us:
        return "occupancy must lie between 0 and alpha"
    if any(not 0 <= port < ports for port in link.ports):
        return "a port does not exist"
    if len(set(link.ports)) != len(link.ports):
        return "a port stands twice"
    return None
