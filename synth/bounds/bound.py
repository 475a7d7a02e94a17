"""What a lower bound is: a time, the argument that gives it in words, and the resources it rests on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from taccl.synth.cost import us

# Weights of linear programs are rounded, so equal bounds may differ by this share.
ROUNDING = Fraction(1, 10**6)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A resource that a bound rests on."""

    resource: str  # "node0.nic0.out" or "link 0->1"
    id: int  # resource id as in cost.Costs: link i is i, port p is len(links) + p
    weight: float  # share of the argument, the largest is 1
    latency_us: float  # of the bound's time, what the resource must stand still: head + alpha + tail


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The cut behind a bound: `bytes` must pass from the other ranks to `ranks` over `crossing`."""

    ranks: tuple[
        int, ...
    ]  # the side that data must reach (or leave, when `leaving`); () when spread over all
    leaving: bool
    bytes: float  # 0 for bounds that rest on latency alone
    crossing: tuple[Crossing, ...]  # heaviest first


@dataclass(frozen=True, slots=True)
class Bound:
    """A time that no algorithm beats, in fs and rounded down, with the reason."""

    time_fs: int
    name: str  # a phrase, e.g. "max-flow cut into rank 3 (node1.nic0.in)"
    bottleneck: Bottleneck | None = None
    tried: tuple[tuple[str, int], ...] = ()  # every bound that was computed: (name, time in fs), as computed

    @property
    def time_us(self) -> float:
        """The bound in us, for people and JSON."""
        return us(self.time_fs)


def strongest(bounds: list[Bound]) -> Bound:
    """The bound with the greatest time (the first of equals); `tried` lists them all."""
    if not bounds:
        return Bound(0, "nothing has to be moved")
    best = max(bounds, key=lambda bound: bound.time_fs)
    tried = tuple((bound.name, bound.time_fs) for bound in bounds)
    return Bound(best.time_fs, best.name, best.bottleneck, tried)


def stronger(one: Bound, other: Bound) -> Bound:
    """The greater of two bounds, with the argument of the first where they differ by rounding alone."""
    best = other if other.time_fs > one.time_fs * (1 + ROUNDING) else one
    return replace(best, time_fs=max(one.time_fs, other.time_fs), tried=(*one.tried, *other.tried))


def ranks_text(ranks: tuple[int, ...]) -> str:
    """ "rank 3", "ranks 0-3, 7": runs are shortened."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
