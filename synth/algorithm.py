"""The answer of synthesis: timed messages, and a certificate of how good they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from taccl.synth.coding.plan import CodingPlan, Hop
from taccl.synth.collective import Collective
from taccl.synth.gap import gap


@dataclass(frozen=True, slots=True)
class Message:
    """Chunks sent contiguously over one link; alpha is paid once for all of them.

    op "copy": every chunk's value at `src` replaces what `dst` has. op "reduce": the partial reduction that
    `src` holds of each chunk is added to `dst`'s; the sum is ready when dst's reduction task has ended.

    A rank may hold several sums of a chunk, so that it can pass on what it does not keep. Each begins as the rank's own
    contribution. Sum 0 is the one that is wanted in the end; most schedules know no other. A message takes one sum and
    is added to (or replaces) one or more; sums to which the same was added are one value, added to once.
    """

    link: int  # index into Topology.links
    src: int
    dst: int
    chunks: tuple[int, ...]  # chunk ids, ascending, no repeats
    start_fs: int
    end_fs: int  # arrival at dst = start + alpha + count * chunk_fs; a reduction comes after it
    op: str = "copy"  # "copy" | "reduce"
    sum: int = 0  # which of src's sums it carries
    into: tuple[int, ...] = (0,)  # which of dst's sums it enters, ascending


@dataclass(frozen=True, slots=True)
class Certificate:
    """How far the algorithm can be from the best one."""

    lower_bound_us: float  # holds for ANY algorithm on this topology, whatever its chunking
    bound_by: str  # which bound that is, in words, e.g. "max-flow cut into rank 3"
    solver_bound_us: float  # the solver's own bound within sketch, chunking and symmetry
    status: str  # "optimal": time equals a bound; else "feasible"
    proved_by: str = ""  # what the word optimal rests on: "any algorithm" | "within the sketch, ..." | ""

    def gap(self, time_us: float) -> float:
        """(time - lower bound) / time, 0 for an empty schedule."""
        return gap(time_us, self.lower_bound_us)

    def of_any_schedule(self) -> Certificate:
        """What of it is true of every schedule of the collective, whatever its chunking and order."""
        return Certificate(self.lower_bound_us, self.bound_by, self.lower_bound_us, "feasible")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A schedule for a collective on a topology at one size. Messages are sorted by (start, link, chunks)."""

    name: str
    collective: Collective
    topology_name: str
    size_bytes: int
    messages: tuple[Message, ...]
    time_fs: int  # completion of the last arrival or reduction
    certificate: Certificate
    engine: str  # what found it: "cp-sat", "ring", ...
    provenance: dict[str, object] = field(default_factory=dict)  # versions, seed, input hashes; no dates
    coding: CodingPlan | None = None  # which messages travel coded; all times above are without

    def coded_hops(self) -> frozenset[Hop]:
        """What travels coded: (source, destination, chunk, op) of every chunk of every coded message."""
        coded = [self.messages[number] for number in self.coding.messages] if self.coding else []
        return frozenset((m.src, m.dst, chunk, m.op) for m in coded for chunk in m.chunks)

    @property
    def chunk_bytes(self) -> Fraction:
        """Bytes of one chunk."""
        return self.collective.chunk_bytes(self.size_bytes)
