"""Synthesis beyond a few dozen ranks: on the quotient by the machine's symmetry, from seeds to a proven schedule.

The same request as `synthesise` takes, answered without ever naming every message: what is kept grows with the messages
of representative chunks. docs/synthesis.md, "At scale", tells the story.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

from taccl.errors import CheckFailed, Infeasible, Interrupted, NoSolutionInTime, UsageError
from taccl.profiles.link_table import link_table
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds.bound import Bound, strongest
from taccl.synth.bounds.large import EXPLICIT_RANKS, large_bound
from taccl.synth.bounds.scale import FAR, scale_bound
from taccl.synth.candidates import Candidate, best_timing
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.check_table import check_table
from taccl.synth.cluster.compose import Composed, compose, composes
from taccl.synth.collective import build
from taccl.synth.cost import costs, us
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.engines.circulant import cuts
from taccl.synth.engines.one_shot_trees import ENGINE as TREES
from taccl.synth.engines.one_shot_trees import HOPELESS, crowded_fs
from taccl.synth.forest.search import Effort as ForestEffort
from taccl.synth.forest.search import forests, pays
from taccl.synth.message_table import MessageTable, message_table
from taccl.synth.places import NAMED, Places
from taccl.synth.request import SAME, Progress, Request, alpha_dominates, provenance
from taccl.synth.symmetric.algorithm import SymmetricAlgorithm
from taccl.synth.symmetric.group import Group, trivial_group
from taccl.synth.symmetric.quotient import quotient
from taccl.synth.symmetric.search import COLLECTIVES as QUOTIENT_COLLECTIVES
from taccl.synth.symmetric.search import Found, Task, search
from taccl.synth.symmetric.solve import Effort

# The collectives for which there are symmetric schedules and a judge of millions of messages.
COLLECTIVES = tuple(name for name in NAMED if name in QUOTIENT_COLLECTIVES)
# A chunk shorter than this in bytes is not cut further.
LEAST_CHUNK_BYTES = 4096
PARTITIONS = (1, 2, 4, 8, 16)
MOST_CUTS = 500  # where one rank has all data
ENGINES = ("auto", "cp-sat", "greedy")
# Chunks times destinations that are expanded and checked within the memory and time that people have.
MOST_PAIRS = 1 << 24
# Up to so many ranks trees of the fluid optimum are packed: their program looks at all pairs of ranks again and again.
MOST_FOREST_RANKS = 256
# Of a schedule that is packed so; its representatives are what takes time.
MOST_MESSAGES = {True: 1 << 19, False: 1 << 16}  # every rank sends, one does
# With more representatives than this the quotient is hardly smaller than the machine: schedules are composed of nodes.
MOST_REPRESENTATIVES = 32
# With so many on a machine of so many ranks both are tried.
FEWEST_REPRESENTATIVES = 4
MOST_BOTH_RANKS = 512
# Up to so many ranks baselines are timed message by message.
MOST_EXPLICIT_RANKS = 256
MOST_EXPLICIT_MESSAGES = 1 << 15
# A finer cut must pay.
WORTHWHILE = 0.995


def at_scale(request: Request) -> bool:
    """Whether a request is for `synthesise_at_scale`: many ranks, no rules on links, and a collective it knows."""
    return (
        request.topology.ranks > EXPLICIT_RANKS
        and request.collective in COLLECTIVES
        and request.engine in ENGINES
        and not request.restrictions.rules
        and request.restrictions.extra_hops is None
        and not request.groups
    )


def synthesise_at_scale(
    request: Request,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SymmetricAlgorithm | Algorithm:
    """The best schedule found for a request, checked message by message, with its certificate.

    A SymmetricAlgorithm, but for short allreduces in which ranks hold several sums of a chunk: columns know one.
    Raises UsageError for a size that is none and where the search is too small for the machine, Infeasible when a rank
    cannot be reached, NoSolutionInTime, Interrupted.
    """
    _check(request)
    topology = request.topology
    links = link_table(topology)
    began = time.monotonic()
    stop = should_stop or (lambda: False)
    wanted = request.partition or request.restrictions.partition
    try:
        free = _free_bound(request)
    except ValueError as error:
        raise Infeasible(f"{topology.name}: {error}") from error
    bound = free
    best: tuple[int, _Answer] | None = None

    def out_of_time() -> bool:
        return stop() or time.monotonic() - began > request.time_limit_s

    def take(partition: int, found: Found | Composed) -> None:
        nonlocal best
        answer = _answer(found, topology.ranks)
        if best is None or answer.time_fs < best[1].time_fs:
            best = (partition, answer)
            if on_progress:
                elapsed = time.monotonic() - began
                stage = f"{answer.engine}, {partition} per block"
                on_progress(Progress(elapsed, stage, us(answer.time_fs), us(free.time_fs)))

    representatives = _representatives(request)
    composed = representatives > MOST_REPRESENTATIVES
    also = representatives >= FEWEST_REPRESENTATIVES and topology.ranks <= MOST_BOTH_RANKS
    if not wanted and not composed and topology.ranks <= MOST_FOREST_RANKS:
        whole = Fraction(request.size_bytes, _size_chunks(request.collective, topology.ranks, 1))
        task = Task(
            topology, links, request.collective, 1, whole, request.root, (), request.restrictions.symmetry,
            request.batching,
        )  # fmt: skip
        most = max(1, int(whole) // LEAST_CHUNK_BYTES)
        effort = ForestEffort(
            most_messages=MOST_MESSAGES[_all_send(request.collective)],
            most_cuts=PARTITIONS[-1] if _all_send(request.collective) else MOST_CUTS,
        )
        for partition, found in forests(task, most, effort, request.seed, out_of_time) if pays(task) else ():
            take(partition, found)
    if request.engine != "greedy":
        for partition, explicit in _explicit(request, wanted):
            take(partition, explicit)
    now: int | None = None  # the best of a chunking
    for partition in (wanted,) if wanted else PARTITIONS:
        chunk_bytes = Fraction(
            request.size_bytes, _size_chunks(request.collective, topology.ranks, partition)
        )
        if partition > 1 and not wanted and chunk_bytes < LEAST_CHUNK_BYTES:
            break
        target_fs = free.time_fs + int(request.target_gap * free.time_fs)
        floor_fs = target_fs
        if wanted:
            bound = strongest([free, _bound(request, partition)])
            floor_fs = max(target_fs, bound.time_fs)
        task = Task(
            topology, links, request.collective, partition, chunk_bytes, request.root,
            (), request.restrictions.symmetry, request.batching,
        )  # fmt: skip
        before, now = now, None
        tries: Iterator[Found | Composed] = search(
            task, floor_fs, _effort(request), request.seed, out_of_time
        )
        if composed:
            small = topology.ranks <= MOST_BOTH_RANKS
            tries = _first_that_finds(compose(task, floor_fs, out_of_time), tries if small else iter(()))
        elif also:
            tries = chain(tries, compose(task, floor_fs, out_of_time))
        for answer in tries:
            now = min(now or FAR, _answer(answer, topology.ranks).time_fs)
            take(partition, answer)
            if now <= floor_fs:
                break
        if best is None or now is None or best[1].time_fs <= target_fs or out_of_time():
            break
        if before is not None and now > WORTHWHILE * before:
            break
    if best is None:
        if stop():
            raise Interrupted("stopped before a first algorithm was found")
        raise _none_found(request, representatives, out_of_time())
    if not wanted:
        bound = strongest([free, _bound(request, best[0])])
    trees = None if stop() else _trees(request, wanted, best[1].time_fs)
    if trees is not None:
        return _certified(request, trees, free)
    if best[1].time_fs < bound.time_fs:
        raise CheckFailed(f"the bound {bound.name!r} is above the time of a schedule, a fault of taccl")
    made = _made(request, *best, free, bound)
    wrong = check_table(
        topology, links, Places(made.collective, made.ranks, made.partition, made.root),
        made.size_bytes, made.batches(links), made.time_fs,
    )  # fmt: skip
    if wrong:
        raise CheckFailed(f"the schedule found by {made.engine} is wrong, a fault of taccl: {wrong[0]}")
    return made


@dataclass(frozen=True, slots=True)
class _Answer:
    """A schedule: messages, and the group that makes all others of them."""

    engine: str
    time_fs: int
    group: Group
    messages: Callable[[], MessageTable]


def _answer(found: Found | Composed, ranks: int) -> _Answer:
    if isinstance(found, Composed):
        return _Answer(found.engine, found.time_fs, trivial_group(ranks), lambda: found.messages)
    return _Answer(found.engine, found.timing.time_fs, found.inst.quotient.group, found.base)


def _explicit(request: Request, wanted: int | None) -> Iterator[tuple[int, Composed]]:
    """(partition, schedule) of baselines that no quotient finds: allreduces that exchange whole vectors, which are no
    trees, and broadcasts and reductions in which every chunk has a tree of its own."""
    ranks = request.topology.ranks
    if ranks > MOST_EXPLICIT_RANKS:
        return
    names: tuple[str, ...] = ()
    partitions = [wanted or 1]
    if request.collective == "allreduce" and request.batching and wanted in (None, 1):
        names = ("one-shot-levels", "one-shot-doubling")
    elif request.collective in ("broadcast", "reduce"):
        names = ("circulant",)
        priced = costs(request.topology, Fraction(request.size_bytes))
        if not wanted:
            most = MOST_EXPLICIT_MESSAGES // (ranks - 1)
            partitions = cuts(ranks, min(priced.occupancy_fs), max(priced.chunk_fs), most)
    for partition in partitions if names else ():
        collective = build(request.collective, ranks, partition, root=request.root)
        priced = costs(request.topology, collective.chunk_bytes(request.size_bytes))
        for name in names:
            try:
                transfers = BASELINES[name](request.topology, collective)
            except Inapplicable:
                continue
            timed = best_timing(name, request.topology, collective, priced, transfers, request.batching)
            if timed is not None:
                yield partition, Composed(name, timed.time_fs, message_table(timed.messages))


def _trees(request: Request, wanted: int | None, than_fs: int) -> Candidate | None:
    """An allreduce along a tree to every rank, where vectors are short and that is quicker than what is known."""
    if (
        request.collective != "allreduce"
        or request.engine == "greedy"
        or not request.batching
        or wanted not in (None, 1)
    ):
        return None
    collective = build("allreduce", request.topology.ranks)
    if not alpha_dominates(request, collective):
        return None
    whole = costs(request.topology, Fraction(request.size_bytes))
    try:
        if crowded_fs(request.topology, collective, whole) > HOPELESS * than_fs:
            return None
        transfers = BASELINES[TREES](request.topology, collective)
    except Inapplicable:
        return None
    priced = costs(request.topology, collective.chunk_bytes(request.size_bytes))
    timed = best_timing(TREES, request.topology, collective, priced, transfers)
    return timed if timed is not None and timed.time_fs < than_fs else None


def _certified(request: Request, found: Candidate, free: Bound) -> Algorithm:
    made = found.algorithm(request.topology, request.size_bytes)
    bound = strongest([free, _bound(request, 1)])
    if made.time_fs < bound.time_fs:
        raise CheckFailed(f"the bound {bound.name!r} is above the time of a schedule, a fault of taccl")
    wrong = check_algorithm(made, request.topology)
    if wrong:
        raise CheckFailed(f"the schedule found by {made.engine} is wrong, a fault of taccl: {wrong[0]}")
    return replace(
        made,
        certificate=_certificate(request, made.time_fs, free, bound),
        provenance=provenance(request),
    )


def _representatives(request: Request) -> int:
    """How many ranks stand for all, where schedules can be composed of nodes; else 0."""
    if request.engine == "greedy" or not composes(request.topology, request.collective):
        return 0
    links = link_table(request.topology)
    return quotient(request.topology, links, request.restrictions.symmetry).group.orbits


def _check(request: Request) -> None:
    if request.size_bytes < 1:
        raise UsageError("the size must be at least 1 byte")
    if not 0 <= request.root < request.topology.ranks:
        last = request.topology.ranks - 1
        raise UsageError(f"root {request.root}: the topology {request.topology.name} has ranks 0..{last}")
    request.topology.check()
    n, wanted = request.topology.ranks, request.partition or request.restrictions.partition or 1
    blocks = n if _all_send(request.collective) else 1
    if blocks * (n - 1) * wanted > MOST_PAIRS:
        raise UsageError(
            f"{request.collective} on {n} ranks with --partition {wanted}: more than {MOST_PAIRS} (chunk, destination) "
            f"pairs; --partition may be up to {MOST_PAIRS // (blocks * (n - 1))} here"
        )


def _all_send(collective: str) -> bool:
    """Whether every rank has a block of its own, so that a cut multiplies by the ranks."""
    return collective in ("allgather", "reducescatter", "allreduce", "alltoall")


def _effort(request: Request) -> Effort:
    return Effort() if request.engine != "greedy" else Effort(deterministic_s=0)


def _first_that_finds(*searches: Iterator[Found | Composed]) -> Iterator[Found | Composed]:
    for tries in searches:
        nothing = True
        for found in tries:
            nothing = False
            yield found
        if not nothing:
            return


def _none_found(request: Request, representatives: int, late: bool) -> NoSolutionInTime | UsageError:
    """Ways there are, as a bound has shown; it is the search that found none."""
    what = f"{request.topology.name}: no {request.collective} of {request.topology.ranks} ranks was found"
    if late:
        return NoSolutionInTime(f"{what} within {request.time_limit_s:g} s; give it longer (--time-limit)")
    if representatives > MOST_REPRESENTATIVES:
        what += (
            f": {representatives} of them are unlike one another. Beyond {MOST_REPRESENTATIVES} such ranks, and "
            f"{MOST_BOTH_RANKS} in all, schedules are composed of nodes, and these have too many messages, or ranks "
            "that others of their node do not reach. Fewer ranks, or nodes that are alike, can be done"
        )
    return UsageError(what)


def _free_bound(request: Request) -> Bound:
    links = link_table(request.topology)
    return large_bound(request.topology, links, request.collective, request.size_bytes, request.root)


def _bound(request: Request, partition: int) -> Bound:
    return scale_bound(
        request.topology, link_table(request.topology), request.collective, partition, request.size_bytes,
        "whole" if request.batching else "single", request.root,
    )  # fmt: skip


def _size_chunks(collective: str, ranks: int, partition: int) -> int:
    return partition if collective in ("broadcast", "reduce") else ranks * partition


def _made(request: Request, partition: int, found: _Answer, free: Bound, bound: Bound) -> SymmetricAlgorithm:
    return SymmetricAlgorithm(
        name=f"{request.collective}-{request.topology.name}-{found.engine}",
        collective=request.collective,
        ranks=request.topology.ranks,
        partition=partition,
        size_bytes=request.size_bytes,
        topology_name=request.topology.name,
        group=found.group,
        messages=found.messages(),
        time_fs=found.time_fs,
        certificate=_certificate(request, found.time_fs, free, bound),
        engine=found.engine,
        root=request.root,
        provenance=provenance(request),
    )


def _certificate(request: Request, time_fs: int, free: Bound, bound: Bound) -> Certificate:
    """free holds for any algorithm, bound for this chunking."""
    within_fs = min(time_fs, bound.time_fs)
    status, proved_by = "feasible", ""
    if time_fs - free.time_fs <= SAME * time_fs:
        status, proved_by = "optimal", "any algorithm"
    elif time_fs - within_fs <= SAME * time_fs:
        chunks = "whole chunks" if request.batching else "whole chunks, one a message"
        status, proved_by = "optimal", f"any algorithm of {chunks} ({bound.name})"
    return Certificate(us(free.time_fs), free.name, us(within_fs), status, proved_by)
