"""A judge of certificates that come from a file: what of them is proved again here, what rests on the file's word.

A lower bound that is claimed must not exceed what this package proves for the same collective, topology and size. The
word optimal needs a time that equals a bound. The solver's own bound holds within a sketch that the file does not
hold: what bounds of whole chunks do not reach of it cannot be proved again, and is only claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from taccl.profiles.link_table import link_table
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds import Bound, lower_bound
from taccl.synth.bounds.bound import stronger
from taccl.synth.bounds.compose import bounds_on, counting_bound, linear_bound
from taccl.synth.bounds.large import EXPLICIT_RANKS, large_bound
from taccl.synth.bounds.network import whole
from taccl.synth.bounds.scale import scale_bound
from taccl.synth.bounds.wants import wanted
from taccl.synth.cost import FS_PER_US, us
from taccl.synth.gap import gap_text
from taccl.synth.symmetric.algorithm import SymmetricAlgorithm

# Bounds are proved by linear programs whose weights are rounded, and files hold whole picoseconds: equal times may
# differ by this share and this much.
SAME = Fraction(1, 10**6)
ROUNDED_FS = 1000
ANY_ALGORITHM = "any algorithm"
WHOLE_CHUNKS = "any algorithm that keeps these chunks whole"
CLAIMED = "claimed by the file, not checked here"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a certificate is worth."""

    problems: tuple[str, ...]  # claims that are untrue, a sentence each
    certificate: Certificate  # with the bound that was proved here; `proved_by` says where it is only claimed
    checked: bool  # False: the solver's bound, and a proof that rests on it, are only claimed
    time_us: float  # of the schedule
    bound: Bound  # for any algorithm, as proved here

    def document(self) -> dict[str, object]:
        """The JSON form."""
        certificate = self.certificate
        return {
            "lower_bound_us": certificate.lower_bound_us,
            "bound_by": certificate.bound_by,
            "gap": certificate.gap(self.time_us),
            "solver_bound_us": certificate.solver_bound_us,
            "status": certificate.status,
            "proved_by": certificate.proved_by,
            "checked": self.checked,
        }

    def text(self) -> str:
        """One line for people."""
        certificate = self.certificate
        proof = f" ({certificate.proved_by})" if certificate.proved_by else ""
        return (
            f"no algorithm below {certificate.lower_bound_us:.3f} us ({certificate.bound_by}), "
            f"gap {gap_text(certificate.gap(self.time_us))}, {certificate.status}{proof}"
        )


def judge_certificate(algorithm: Algorithm | SymmetricAlgorithm, topology: Topology) -> Judgement:
    """Prove an algorithm's certificate again, as far as that can be done. `time_fs` is taken as it is.

    Raises ValueError when some data cannot reach its destination on this topology.
    """
    given, time, time_us = algorithm.certificate, algorithm.time_fs, us(algorithm.time_fs)
    lower, within = _fs(given.lower_bound_us), _fs(given.solver_bound_us)
    proved = _lower_bound(algorithm, topology, given)
    problems = []
    if not _within(lower, proved.time_fs):
        problems.append(
            f"the certificate says that no algorithm takes less than {given.lower_bound_us:.6g} us; only "
            f"{proved.time_us:.6g} us can be proved ({proved.name})"
        )
    if not _within(within, time):
        problems.append(
            f"the certificate's solver bound, {given.solver_bound_us:.6g} us, is above the schedule's own time, "
            f"{time_us:.6g} us"
        )
    if given.status == "optimal" and not _within(time, max(lower, within)):
        problems.append(
            f"the certificate says optimal, but the schedule takes {time_us:.6g} us and the bounds are "
            f"{given.lower_bound_us:.6g} and {given.solver_bound_us:.6g} us"
        )
    if given.proved_by == ANY_ALGORITHM and not _within(time, lower):
        problems.append(
            f"the certificate says optimal among all algorithms, but the schedule takes {time_us:.6g} us and the "
            f"bound is {given.lower_bound_us:.6g} us"
        )
    if given.status != "optimal" and given.proved_by:
        problems.append(f"the certificate names a proof, but its status is {given.status}")
    if problems:
        return Judgement(tuple(problems), given, False, time_us, proved)
    shown = replace(given, lower_bound_us=proved.time_us, bound_by=proved.name)
    if _within(time, proved.time_fs) and given.status == "optimal":
        return Judgement((), replace(shown, proved_by=ANY_ALGORITHM), True, time_us, proved)
    for words, bound in _bounds_of_chunks(algorithm, topology, proved):
        if _within(within, bound.time_fs):
            proof = words if given.status == "optimal" else ""
            return Judgement((), replace(shown, proved_by=proof), True, time_us, proved)
    claim = f"{given.proved_by}; {CLAIMED}" if given.proved_by else CLAIMED
    shown = replace(shown, proved_by=claim if given.status == "optimal" else "")
    return Judgement((), shown, False, time_us, proved)


def _fs(time_us: float) -> Fraction:
    return Fraction(time_us) * FS_PER_US


def _within(time_fs: Fraction | int, limit_fs: Fraction | int) -> bool:
    """Whether a time is at most a limit, but for rounding."""
    return time_fs <= limit_fs * (1 + SAME) + ROUNDED_FS


def _at_scale(algorithm: Algorithm | SymmetricAlgorithm, topology: Topology, grain: str) -> Bound | None:
    """The bound at scale, where the collective is what its name says."""
    if isinstance(algorithm, SymmetricAlgorithm):
        links, name, size = link_table(topology), algorithm.collective, algorithm.size_bytes
        if grain == "messages":
            return large_bound(topology, links, name, size, algorithm.root)
        return scale_bound(topology, links, name, algorithm.partition, size, grain, algorithm.root)
    return counting_bound(topology, algorithm.collective, algorithm.size_bytes, grain)


def _lower_bound(algorithm: Algorithm | SymmetricAlgorithm, topology: Topology, given: Certificate) -> Bound:
    """The strongest bound for any algorithm; no linear programs where counting proves all that is claimed."""
    counted = _at_scale(algorithm, topology, "messages")
    if counted is not None and (
        isinstance(algorithm, SymmetricAlgorithm)
        or (given.bound_by == counted.name and _within(_fs(given.lower_bound_us), counted.time_fs))
    ):
        return counted
    assert isinstance(algorithm, Algorithm)
    collective, size = algorithm.collective, algorithm.size_bytes
    proved = lower_bound(topology, collective, size)
    if topology.ranks <= EXPLICIT_RANKS or _within(_fs(given.lower_bound_us), proved.time_fs):
        return proved
    return stronger(proved, linear_bound(topology, collective, size))


def _bounds_of_chunks(
    algorithm: Algorithm | SymmetricAlgorithm, topology: Topology, free: Bound
) -> Iterator[tuple[str, Bound]]:
    """Bounds for ever fewer algorithms, the quick ones first: (those that it holds for, bound)."""
    yield ANY_ALGORITHM, free
    bound = _at_scale(algorithm, topology, "whole")
    if bound is not None:
        yield WHOLE_CHUNKS, bound
    bound = _at_scale(algorithm, topology, "single") if _one_chunk_each(algorithm) else None
    if bound is not None:
        yield f"{WHOLE_CHUNKS}, one a message", bound
    if topology.ranks <= EXPLICIT_RANKS and isinstance(algorithm, Algorithm):
        collective = algorithm.collective
        network = whole(topology, algorithm.chunk_bytes)
        yield WHOLE_CHUNKS, bounds_on(network, collective, wanted(collective), free.time_fs)


def _one_chunk_each(algorithm: Algorithm | SymmetricAlgorithm) -> bool:
    if isinstance(algorithm, SymmetricAlgorithm):
        return len(algorithm.messages.chunks) == len(algorithm.messages)
    return all(len(message.chunks) == 1 for message in algorithm.messages)
