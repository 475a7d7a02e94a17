"""The one entry to synthesis: a request in, an algorithm with its certificate out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Restrictions
from taccl.synth.algorithm import Algorithm
from taccl.synth.collective import Collective

ENGINES = (
    "auto", "cp-sat", "greedy",
    "ring", "recursive-doubling", "direct", "hierarchical", "double-binary-tree",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides the answer; equal requests give byte-identical algorithms."""

    topology: Topology
    collective: str  # one of collective.NAMES
    size_bytes: int  # nccl-tests size
    restrictions: Restrictions = field(default_factory=Restrictions)
    engine: str = "auto"
    root: int = 0
    partition: int | None = None  # overrides the sketch's
    demand: tuple[tuple[int, ...], ...] | None = None  # alltoallv
    pairs: tuple[tuple[int, int], ...] | None = None  # sendrecv
    custom: Collective | None = None  # collective == "custom"
    time_limit_s: float = 60.0
    target_gap: float = 0.0
    seed: int = 0
    workers: int = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """One line for a person who waits."""

    elapsed_s: float
    stage: str  # e.g. "cp-sat, 2 chunks per rank"
    time_us: float | None  # best so far
    lower_bound_us: float


def synthesise(
    request: Request,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Algorithm:
    """The best algorithm found for a request, with its certificate.

    should_stop is polled; when it turns true the best so far is returned (Interrupted if there is none).
    Raises UsageError, Infeasible (with the sketch's conflicting rules), NoSolutionInTime, Interrupted.
    """
    raise NotImplementedError
