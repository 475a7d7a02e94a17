"""The coding plan of an algorithm, as messages of the program that was made from it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from taccl.errors import CheckFailed
from taccl.runtime.coded import WRONG_PLAN
from taccl.synth.algorithm import Algorithm
from taccl.synth.coding.plan import Hop
from taccl.synth.collective import Collective
from taccl.synth.cost import us


@dataclass(frozen=True, slots=True)
class Planned:
    """What a file plans to be coded."""

    codec: str
    dtype: str  # for which it was planned
    hops: frozenset[Hop]  # as `Coding` takes them
    messages: int  # of the algorithm, that are coded
    of_messages: int
    size_bytes: int  # for which it was planned
    time_us: float  # that it takes then
    uncoded_time_us: float  # of the best schedule without a codec

    def facts(self) -> tuple[object, ...]:
        """What all ranks must have alike."""
        return self.codec, self.dtype, tuple(sorted(self.hops))


def planned(algorithm: Algorithm, collective: Collective) -> Planned | None:
    """The plan of an algorithm, None where it codes nothing. collective: of the program, in its chunks.

    A program may have longer or shorter chunks than its algorithm. Raises CheckFailed when the same ranks exchange a
    chunk in several messages of which some are coded, and op does not tell which.
    """
    plan = algorithm.coding
    if plan is None or not plan.messages:
        return None
    if plan.messages[-1] >= len(algorithm.messages):
        raise CheckFailed(f"{WRONG_PLAN}: there is no message {plan.messages[-1]}")
    chosen = frozenset(plan.messages)
    # source, destination, chunk -> ops of messages
    coded_ops: defaultdict[tuple[int, int, int], set[str]] = defaultdict(set)
    other_ops: defaultdict[tuple[int, int, int], set[str]] = defaultdict(set)
    for number, message in enumerate(algorithm.messages):
        for chunk in message.chunks:
            ops = coded_ops if number in chosen else other_ops
            ops[message.src, message.dst, chunk].add(message.op)
    hops: set[Hop] = set()
    for route, coded in coded_ops.items():
        source, destination, chunk = route
        others = other_ops[route]
        if coded & others:
            raise CheckFailed(
                f"{WRONG_PLAN}: chunk {chunk} goes from rank {source} to rank {destination} in several messages, some "
                "coded and some not, and nothing tells them apart"
            )
        # Where all are coded, op does not matter: a part of a sum can be copied, too.
        for op in coded if others else ("copy", "reduce"):
            for number in _renumbered(algorithm.collective, collective, chunk):
                hops.add((source, destination, number, op))
    return Planned(
        plan.cost.codec, plan.cost.dtype, frozenset(hops), len(chosen), len(algorithm.messages),
        algorithm.size_bytes, us(plan.time_fs), plan.uncoded_time_us,
    )  # fmt: skip


def _renumbered(of: Collective, to: Collective, chunk: int) -> range:
    """A chunk of one collective in the numbers of the same one that is cut finer or less fine."""
    if to.size_chunks % of.size_chunks == 0:
        parts = to.size_chunks // of.size_chunks
        return range(chunk * parts, (chunk + 1) * parts)
    # Chunks become one only where they always travel together (synth/lower.py).
    joined = chunk * to.size_chunks // of.size_chunks
    return range(joined, joined + 1)
