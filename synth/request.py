"""What is asked of synthesis, and what follows from it alone: faults, collectives, symmetry, chunkings worth trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.metadata import version

from taccl import __version__
from taccl.errors import UsageError
from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Permutation, Restrictions
from taccl.sketches.symmetry import find_symmetry
from taccl.synth.collective import GROUPED, NAMES, ROOTED, Collective, Groups, build, check_groups
from taccl.synth.cost import costs
from taccl.synth.engines import BASELINES
from taccl.synth.pairs import Pairs

ENGINES = ("auto", "cp-sat", "greedy", *BASELINES)
# Chunks times destinations beyond which seeds alone take minutes.
MOST_PAIRS = 50_000
# Groups are stated message by message, and every stage looks at all of them.
MOST_GROUPED_RANKS = 64
# Times within this relative distance of a bound are called optimal: durations are whole femtoseconds, bounds
# of models with very long horizons are rounded down to coarser units.
SAME = Fraction(1, 10**6)


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides the answer; equal requests give byte-identical algorithms."""

    topology: Topology
    collective: str  # one of collective.NAMES
    size_bytes: int  # nccl-tests size
    restrictions: Restrictions = field(default_factory=Restrictions)
    engine: str = "auto"
    root: int = 0  # with groups the place in each group
    groups: Groups = ()  # that do the collective side by side; (): all ranks are one
    partition: int | None = None  # overrides the sketch's
    demand: tuple[tuple[int, ...], ...] | None = None  # alltoallv
    pairs: tuple[tuple[int, int], ...] | None = None  # sendrecv
    custom: Collective | None = None  # collective == "custom"
    time_limit_s: float = 60.0
    target_gap: float = 0.0
    seed: int = 0
    workers: int = 2
    batching: bool = True  # messages may carry several chunks


@dataclass(frozen=True, slots=True)
class Progress:
    """One line for a person who waits."""

    elapsed_s: float
    stage: str  # e.g. "cp-sat, 2 chunks per rank"
    time_us: float | None  # best so far
    lower_bound_us: float


def check_request(request: Request) -> None:
    """Raise UsageError where a request is none."""
    if request.collective not in NAMES:
        raise UsageError(f"unknown collective {request.collective!r}; known: {', '.join(NAMES)}")
    if request.engine not in ENGINES:
        raise UsageError(f"unknown engine {request.engine!r}; known: {', '.join(ENGINES)}")
    if request.size_bytes < 1:
        raise UsageError("the size must be at least 1 byte")
    if request.groups:
        _check_groups(request)
    elif not 0 <= request.root < request.topology.ranks:
        last = request.topology.ranks - 1
        raise UsageError(f"root {request.root}: the topology {request.topology.name} has ranks 0..{last}")
    if request.collective == "custom" and request.custom is None:
        raise UsageError("a custom collective needs its pre- and postconditions")
    if request.time_limit_s <= 0:
        raise UsageError("the time limit must be above 0 seconds")
    request.topology.check()


def _check_groups(request: Request) -> None:
    if request.collective not in GROUPED:
        known = ", ".join(name for name in NAMES if name in GROUPED)
        raise UsageError(f"groups are for {known}; {request.collective} says itself who sends to whom")
    try:
        check_groups(request.groups, request.topology.ranks)
    except ValueError as error:
        raise UsageError(f"groups of ranks: {error}") from error
    if request.topology.ranks > MOST_GROUPED_RANKS:
        raise UsageError(
            f"groups are synthesised on up to {MOST_GROUPED_RANKS} ranks, {request.topology.name} has "
            f"{request.topology.ranks}"
        )


def check_pairs(request: Request, collective: Collective) -> None:
    """Raise UsageError where chunks are so many that nobody could wait for their messages."""
    pairs = sum(len(chunk.destinations) for chunk in collective.chunks)
    if pairs <= MOST_PAIRS:
        return
    message = (
        f"{request.collective} of {pairs} (chunk, destination) pairs: at most {MOST_PAIRS} are synthesised"
    )
    if request.topology.ranks > 128 and (
        request.restrictions.rules or request.restrictions.extra_hops is not None
    ):
        message += "; the rules and extra_hops of a sketch are kept message by message: try without them"
    if request.custom is None and request.collective != "alltoallv":
        most = collective.partition * MOST_PAIRS // pairs
        message += f"; on {request.topology.ranks} ranks --partition may be up to {most}" if most else ""
        if len({len(group) for group in request.groups}) > 1:
            message += "; groups of unequal size need chunks that fit all of them"
    elif request.collective == "alltoallv":
        message += "; scale the demand down, only its proportions matter"
    raise UsageError(message)


def builder(request: Request) -> Callable[[int], Collective]:
    if request.custom is not None:
        custom = request.custom
        return lambda partition: custom

    def make(partition: int) -> Collective:
        try:
            return build(
                request.collective,
                request.topology.ranks,
                partition,
                root=request.root,
                demand=request.demand,
                pairs=request.pairs,
                groups=request.groups or None,
            )
        except ValueError as error:
            raise UsageError(f"{request.collective}: {error}") from error

    return make


def generators(request: Request) -> tuple[tuple[int, ...], ...]:
    if request.restrictions.symmetry is not None:
        return request.restrictions.symmetry
    if not request.groups:
        return tuple(find_symmetry(request.topology))
    groups = {frozenset(group) for group in request.groups}
    roots = {group[request.root] for group in request.groups} if request.collective in ROOTED else set()

    def keeps(permutation: Permutation) -> bool:
        return (
            all(frozenset(permutation[rank] for rank in group) in groups for group in request.groups)
            and {permutation[root] for root in roots} == roots
        )

    return tuple(find_symmetry(request.topology, keeps))


def alpha_dominates(request: Request, collective: Collective) -> bool:
    """Whether sending one chunk costs more for being a message than for its bytes."""
    priced = costs(request.topology, collective.chunk_bytes(request.size_bytes))
    alphas = sorted(priced.alpha_fs)
    return bool(alphas) and max(priced.chunk_fs) <= alphas[len(alphas) // 2]


def ladder_of(request: Request, make: Callable[[int], Collective]) -> list[int]:
    """Chunkings worth trying: one chunk a block where alpha dominates, more where bandwidth does."""
    if request.custom is not None or alpha_dominates(request, make(1)):
        return [1]
    priced = costs(request.topology, make(1).chunk_bytes(request.size_bytes))
    alphas = sorted(priced.alpha_fs) or [0]
    transit = max(priced.chunk_fs, default=0)
    few_blocks = request.collective in ("broadcast", "reduce", "sendrecv")
    together = max((len(group) for group in request.groups), default=request.topology.ranks)
    most = 16 if few_blocks else 8 if together <= 8 else 4
    ladder = [k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k <= most]
    # A chunk much shorter than alpha cannot pay for its own message.
    return [k for k in ladder if k == 1 or 4 * transit >= alphas[len(alphas) // 2] * k]


def pairs_of_request(request: Request) -> Pairs:
    """Who sends to whom, and how many blocks where the request has a demand."""
    n = request.topology.ranks
    if request.demand is not None:
        blocks = {(s, d): request.demand[s][d] for s in range(n) for d in range(n) if request.demand[s][d]}
        return Pairs(tuple(blocks), tuple(blocks.values()))
    return Pairs(request.pairs or tuple((rank, (rank + 1) % n) for rank in range(n)))


def provenance(request: Request) -> dict[str, object]:
    """What an algorithm says of how it was made: the versions and options that decide the answer."""
    return {
        "taccl": __version__,
        "ortools": version("ortools"),
        "seed": request.seed,
        "time_limit_s": request.time_limit_s,
        "target_gap": request.target_gap,
        "engine_asked": request.engine,
        "sketch": request.restrictions.sketch_name,
        "batching": request.batching,
    }
