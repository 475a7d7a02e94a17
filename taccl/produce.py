"""From the words of a command line or a cluster file to a proven product: synthesise, lower, verify, price.

`taccl synth`, `taccl build` and `taccl demo` all make algorithms through `produce`, so nothing leaves any of
them that verification rejects. A program that is slower than its schedule comes with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from taccl.errors import CheckFailed, Diagnostic, Infeasible, InvalidInput, UsageError
from taccl.program_file import LOWERED_RANKS, PROTOCOL

if TYPE_CHECKING:
    from taccl.profiles.topology import Topology
    from taccl.sketches.restrictions import Restrictions
    from taccl.synth.algorithm import Algorithm
    from taccl.synth.lower import LoweringResult
    from taccl.synth.program import Program
    from taccl.synth.request import Progress, Request
    from taccl.synth.symmetric.algorithm import SymmetricAlgorithm

SUFFIXES = (".xml", ".json")
LEAST_CODING = 0.25  # of the time limit is for schedules with a codec, however long those without have taken
WORTHWHILE = 1.002  # what a program must lose or gain before another schedule is lowered, or taken
NO_PLANS = "plans are made for schedules with a program, for --instances 1 and --protocol Simple"
MOST_OTHERS = 8  # schedules that are looked at when the best loses time in lowering
MOST_TRIED = 6_000  # messages in those that are lowered then
MOST_AGAIN = 4  # times that a program is made from what the last one sends


ENDED = {
    "proof": "the bound is reached",
    "target-gap": "the target gap is reached",
    "interrupted": "interrupted",
    "time-limit": "the time limit",
    "stages-done": "every stage did its share, which grows with --time-limit",
    "nothing-left": "nothing is left to try",
}


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made, in the user's words. Specs are names or paths, as on the command line."""

    topology: str
    collective: str
    size_bytes: int | None  # nccl-tests size; None: the sketch's
    sketch: str | None = None
    engine: str = "auto"
    root: int = 0
    partition: int | None = None  # chunks per natural block; None: the sketch's, or chosen
    demand: tuple[tuple[int, ...], ...] | None = None
    pairs: tuple[tuple[int, int], ...] | None = None
    groups: str | None = (
        None  # that do it side by side: listed, a mesh or a file, as `taccl.groups` reads them
    )
    pre_post: str | None = None  # file with a collective of one's own
    instances: int = 1
    protocol: str = "Simple"
    time_limit_s: float | None = None  # None: the sketch's, or 60
    target_gap: float | None = None
    seed: int = 0
    workers: int = 2
    batching: bool = True  # messages may carry several chunks
    size_range: tuple[int, int] | None = (
        None  # bytes for which a loader may choose the program; None: lowering's
    )
    codec: str | None = None  # "auto", "none" or a name; None: the sketch's
    dtype: str = "float32"  # of the values that a codec would code
    alternatives: int = 0  # other schedules that are wanted beside the best


@dataclass(frozen=True, slots=True)
class Product:
    """A synthesised algorithm and the program that was proven to do it."""

    algorithm: Algorithm | SymmetricAlgorithm
    topology: Topology
    program: Program | None  # None beyond MSCCL's limits
    solve_s: float
    simulated_fs: int  # the program on the topology, by discrete events; without one, the schedule's time
    warnings: tuple[str, ...]  # of the sketch and of verification
    no_program: str = ""  # why there is none
    ended: str = ""  # why the search went on no longer: a key of ENDED
    coded: Algorithm | None = None  # what is quicker with a codec, with its plan; XML has no room for it
    not_coded: str = ""  # why there is none, where codecs were considered
    alternatives: tuple[Product, ...] = ()  # other schedules, the quickest first

    def explicit(self) -> Algorithm:
        """The algorithm with every message an object; for up to a few hundred ranks."""
        from taccl.synth.symmetric.algorithm import SymmetricAlgorithm

        made = self.algorithm
        return made.to_algorithm(self.topology) if isinstance(made, SymmetricAlgorithm) else made

    def text(self, suffix: str) -> str:
        """The file: ".json" is the native algorithm (with a coding plan where one pays), ".xml" the MSCCL program.

        Raises Infeasible when the schedule has no program within MSCCL's limits.
        """
        if suffix == ".json":
            from taccl.synth.native import write_native

            made = self.coded or self.algorithm
            if self.program is not None and self.program.protocol != "Simple":
                made = replace(made, provenance={**made.provenance, PROTOCOL: self.program.protocol})
            return write_native(made, self.topology)
        if self.program is None:
            raise Infeasible(f"{self.no_program}; the schedule itself can be written as .json (-o FILE.json)")
        from taccl.synth.msccl_xml import write_xml

        return write_xml(self.program)


def suffix_of(path: str) -> str:
    """The format that a file name asks for; `-` is XML. Raises UsageError for another suffix."""
    if path == "-":
        return ".xml"
    for suffix in SUFFIXES:
        if path.endswith(suffix):
            return suffix
    raise UsageError(f"{path}: the suffix says the format; it must be .xml (program) or .json (algorithm)")


def produce(
    order: Order,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    suffixes: Sequence[str] = (),
) -> Product:
    """Make what is ordered and prove it.

    suffixes: of the files that it is wanted for, so that nothing is searched for that none of them could hold.
    Raises UsageError and InvalidInput for what was ordered, Infeasible, NoSolutionInTime, Interrupted, and CheckFailed
    when verification rejects the program (a fault of taccl). A schedule for which MSCCL has no room is a product
    without a program.
    """
    import time
    from itertools import chain, islice, tee

    from taccl.alternatives import MOST_LOOKED, alternatives
    from taccl.codec_claims import check_claims
    from taccl.profiles.load import load_topology
    from taccl.synth.at_scale import at_scale, synthesise_at_scale
    from taccl.synth.coding.search import MOST_MESSAGES, codecs_for, with_codec
    from taccl.synth.composed import composed_alone, synthesise_composed
    from taccl.synth.synthesise import synthesise_several

    topology = load_topology(order.topology)
    if ".xml" in suffixes and topology.ranks > LOWERED_RANKS:
        raise Infeasible(
            f"{topology.name} has {topology.ranks} ranks, and programs (.xml) are made for up to {LOWERED_RANKS}; the "
            "schedule itself can be written as .json (-o FILE.json)"
        )
    request, warnings = _request(order, topology)
    asked = order.codec or (request.restrictions.codec if request.restrictions.codec_where else "")
    no_plans = ""
    if suffixes and ".json" not in suffixes:
        codec = "none"
        if asked not in ("", "none"):
            no_plans = (
                f"MSCCL XML has no room for compression, and the sketch asks for {asked}; -o FILE.json has"
            )
    else:
        codec = order.codec or _codec_of(request.restrictions, topology, order.dtype)
    codecs = codecs_for(topology, codec, order.dtype)
    if codec == asked == "auto" and not codecs:
        no_plans = (
            f"{topology.name} says nothing of lossless codecs for {order.dtype}; taccl profile --codecs does"
        )
    check_claims(order.topology, codecs)
    if codecs and (order.instances > 1 or order.protocol != "Simple" or topology.ranks > LOWERED_RANKS):
        codecs, no_plans = (), NO_PLANS
    whole = request
    if codecs and order.alternatives:
        raise UsageError("--alternatives makes schedules without a codec; add --codec none")
    if codecs:
        # The other half is for schedules with a codec.
        request = replace(request, time_limit_s=request.time_limit_s / 2)
    began = time.monotonic()
    scaled = at_scale(request) or composed_alone(request)
    algorithm: Algorithm | SymmetricAlgorithm
    others: Iterator[Algorithm] = iter(())
    left: Iterator[Algorithm] = iter(())
    if composed_alone(request):
        algorithm = synthesise_composed(request, on_progress, should_stop)
    elif scaled:
        algorithm = synthesise_at_scale(request, on_progress, should_stop)
    else:
        several = synthesise_several(request, on_progress, should_stop, MOST_LOOKED)
        algorithm = next(several)
        others, left = tee(several)
        others, left = islice(others, MOST_OTHERS), chain((algorithm,), left)
    solve_s = time.monotonic() - began
    if codecs:
        algorithm = replace(
            algorithm, provenance={**algorithm.provenance, "time_limit_s": whole.time_limit_s}
        )
    ended = why_ended(request, algorithm, solve_s, should_stop is not None and should_stop(), scaled)
    product = Product(
        algorithm, topology, None, solve_s, algorithm.time_fs, warnings, "", ended, not_coded=no_plans
    )
    if scaled and topology.ranks > LOWERED_RANKS:
        return replace(product, no_program=f"programs are made for up to {LOWERED_RANKS} ranks")
    product = lowered(order, product, others)
    if order.alternatives:
        product = replace(product, alternatives=alternatives(order, product, left))
    if codecs and product.program is None:
        return replace(product, not_coded=NO_PLANS)
    if codecs:
        left_s = max(whole.time_limit_s - (time.monotonic() - began), LEAST_CODING * whole.time_limit_s)
        by_clock: list[str] = []
        coded = with_codec(
            whole,
            product.explicit(),
            product.algorithm.time_fs,
            codecs,
            should_stop or (lambda: False),
            left_s,
            lambda: by_clock.append("time-limit"),
        )
        names = " and ".join(cost.codec for cost in codecs)
        why = "" if coded else f"no schedule with {names} was found that is quicker than this one without"
        if len(product.explicit().messages) > MOST_MESSAGES:
            why = f"plans are made for schedules of up to {MOST_MESSAGES} messages"
        if coded is not None:
            coded = replace(coded, provenance={**coded.provenance, "codec": codec, "dtype": order.dtype})
        ended = by_clock[0] if by_clock else product.ended
        product = replace(product, coded=coded, not_coded=why, solve_s=time.monotonic() - began, ended=ended)
    return product


def why_ended(
    request: Request, found: Algorithm | SymmetricAlgorithm, solve_s: float, stopped: bool, scaled: bool
) -> str:
    """The key of ENDED for a search that took so long; stopped: by the user; scaled: on the quotient alone."""
    from taccl.synth.cost import us
    from taccl.synth.request import SAME

    if found.certificate.proved_by == "any algorithm":
        return "proof"
    # Where ranks share cores the search may have ended at a quicker schedule than the one that it chose.
    quickest_us = found.provenance.get("quickest_us")
    reached = found.certificate.gap(
        float(quickest_us) if isinstance(quickest_us, float) else us(found.time_fs)
    )
    if quickest_us is not None and reached <= float(SAME):
        return "proof"
    if request.target_gap and reached <= request.target_gap:
        return "target-gap"
    if stopped:
        return "interrupted"
    if solve_s >= request.time_limit_s:
        return "time-limit"
    return "stages-done" if not scaled and request.engine in ("auto", "cp-sat") else "nothing-left"


def lowered(order: Order, product: Product, others: Iterator[Algorithm]) -> Product:
    """The product with its program, or with the reason why there is none.

    others: the next best schedules, the best first. One of them is taken when the best loses time in lowering, because
    a program cannot keep all of its order, and the other's program is quicker, what its messages and local copies add
    included; or when ranks share cores and the program takes much longer with late messages, and the other's takes less
    then.
    """
    from taccl.synth.candidates import late_fs
    from taccl.synth.collective import refined
    from taccl.synth.copying import copies_fs
    from taccl.synth.cost import costs, judged_fs, us
    from taccl.synth.fifo_slots import within_slots
    from taccl.synth.lower import claim, lower_exact
    from taccl.synth.program_collective import collective_of
    from taccl.synth.search import NEAR, STEADY
    from taccl.synth.verify import is_correct, is_limit, verify

    algorithm = product.explicit()
    try:
        lowered = lower_exact(algorithm, product.topology, instances=order.instances, protocol=order.protocol)
    except Infeasible as limit:
        return replace(product, no_program=str(limit))

    def copying(made: Algorithm) -> int:
        return copies_fs(made, product.topology) if product.topology.load_us else 0

    def judged(made: Algorithm, time_fs: int) -> int:
        return judged_fs(product.topology, time_fs, len(made.messages)) + copying(made)

    def when_late(found: LoweringResult) -> int:
        made = found.schedule
        priced = costs(product.topology, made.chunk_bytes)
        return late_fs(product.topology, made.collective, priced, made.messages)

    # Lowering can take a schedule's slack.
    shaky = product.topology.load_us > 0 and when_late(lowered) > STEADY * lowered.simulated_time_fs
    tried = 0
    while (shaky or lowered.simulated_time_fs > WORTHWHILE * algorithm.time_fs) and tried < MOST_TRIED:
        other, now_fs = next(others, None), judged(algorithm, lowered.simulated_time_fs)
        if other is None:
            break
        if not shaky and judged(other, other.time_fs) * WORTHWHILE >= now_fs:
            continue  # where ranks share cores the next one may be quicker
        tried += len(other.messages)
        try:
            found = lower_exact(other, product.topology, instances=order.instances, protocol=order.protocol)
        except Infeasible:
            continue
        other_fs = judged(other, found.simulated_time_fs)
        late_now_fs, late_other_fs = (
            when_late(one) + copying(made) for one, made in ((lowered, algorithm), (found, other))
        )
        steadier = other_fs <= NEAR * now_fs and late_other_fs < late_now_fs
        if steadier if shaky else other_fs * WORTHWHILE < now_fs:
            algorithm, lowered = other, found
            product = replace(product, algorithm=algorithm)
    schedule, lowered = _settled(order, algorithm, lowered, product.topology)
    program = lowered.program
    if order.size_range is not None:
        program = replace(program, min_bytes=order.size_range[0], max_bytes=order.size_range[1])
    wanted = refined(algorithm.collective, order.instances)
    if wanted.size_chunks != program.chunks_per_loop:
        # Chunks that always travel together are one in the program.
        wanted = collective_of(wanted.name, wanted.ranks, program.chunks_per_loop)
    findings = verify(program, collective=wanted, strict=True)
    if not is_correct(findings):
        errors = [f for f in findings if f.severity == "error"]
        reasons = "\n".join(f"{f.code}: {f.message}" for f in errors)
        if all(is_limit(f) for f in errors):
            return replace(product, no_program=f"no program within MSCCL's limits: {reasons}")
        raise CheckFailed(f"the program made for {algorithm.name} is wrong, nothing was written:\n{reasons}")
    program, limits = within_slots(program, findings, algorithm.size_bytes)
    product = replace(
        product,
        program=program,
        simulated_fs=lowered.simulated_time_fs,
        warnings=(*product.warnings, *limits),
    )
    if lowered.simulated_time_fs > algorithm.time_fs:
        late_us = us(lowered.simulated_time_fs - algorithm.time_fs)
        late = f"the program takes {late_us:g} us longer than the schedule it was made from"
        product = replace(product, warnings=(*product.warnings, late))
    if schedule is algorithm:
        return product
    # What is claimed, priced and written is what the program does, in its own order and at its own cut.
    proven = algorithm.certificate
    if schedule.collective != algorithm.collective and proven.proved_by != "any algorithm":
        proven = proven.of_any_schedule()
    return replace(product, algorithm=claim(schedule, proven))


def _settled(
    order: Order, algorithm: Algorithm, lowered: LoweringResult, topology: Topology
) -> tuple[Algorithm, LoweringResult]:
    """(the schedule for the native file, its program): lowered again as long as that makes it quicker.

    The schedule is the messages as the program sends them, where these are lowered to a program that is no slower;
    otherwise what the program was made from.
    """
    from taccl.synth.lower import lower_exact

    source = algorithm
    for _ in range(MOST_AGAIN):
        sent = lowered.schedule
        if sent is source:
            return sent, lowered
        if order.instances != 1:
            return sent, lowered  # it has their cut, which a file of its source would not have
        try:
            again = lower_exact(sent, topology, protocol=order.protocol)
        except Infeasible:
            return source, lowered
        if again.simulated_time_fs > lowered.simulated_time_fs:
            return source, lowered
        if again.simulated_time_fs == lowered.simulated_time_fs:
            return sent, again  # the program that a file of the schedule will be lowered to
        source, lowered = sent, again
    return source, lowered


def _codec_of(restrictions: Restrictions, topology: Topology, dtype: str) -> str:
    """The codec that a sketch names. Raises InvalidInput, at its place, for one that the profile says nothing of."""
    name, where = restrictions.codec, restrictions.codec_where
    measured = {cost.codec for cost in topology.codecs if cost.dtype == dtype}
    if name in ("auto", "none") or name in measured or not where:
        return name
    file, line, column = where.rsplit(":", 2)
    raise InvalidInput([Diagnostic(
        file, int(line), int(column), "S210",
        f"{topology.name} has no codec {name!r} for {dtype}; it has {', '.join(sorted(measured)) or 'none'}",
        f"taccl profile --codecs {name} --dtype {dtype} measures it, if there is such a codec and it takes such "
        "values; --codec none does without",
    )])  # fmt: skip


def _request(order: Order, topology: Topology) -> tuple[Request, tuple[str, ...]]:
    from pathlib import Path

    from taccl.groups import read_groups
    from taccl.profiles.yaml_reader import read_text
    from taccl.synth.collective_file import read_collective
    from taccl.synth.request import Request

    custom = None
    groups = read_groups(order.groups, topology.ranks) or ()
    if (order.collective == "custom") != (order.pre_post is not None):
        raise UsageError("--collective custom and --pre-post FILE go together")
    if order.pre_post is not None:
        custom = read_collective(read_text(Path(order.pre_post)), order.pre_post)
        if custom.ranks != topology.ranks:
            raise UsageError(f"{order.pre_post} has {custom.ranks} ranks, {topology.name} {topology.ranks}")
    restrictions, warnings = restrictions_of(order.sketch, topology)
    size = order.size_bytes or restrictions.size_bytes
    if size is None:
        raise UsageError("--size is needed: neither it nor a sketch says how large the collective is")
    time_limit = order.time_limit_s or restrictions.time_limit_s or 60.0
    gap = order.target_gap if order.target_gap is not None else restrictions.target_gap or 0.0
    return Request(
        topology=topology,
        collective=order.collective,
        size_bytes=size,
        restrictions=restrictions,
        engine=order.engine,
        root=order.root,
        groups=groups,
        partition=order.partition,
        demand=order.demand,
        pairs=order.pairs,
        custom=custom,
        time_limit_s=time_limit,
        target_gap=gap,
        seed=order.seed,
        workers=order.workers,
        batching=order.batching,
    ), warnings


def restrictions_of(sketch: str | None, topology: Topology) -> tuple[Restrictions, tuple[str, ...]]:
    """What a sketch (name or file) asks of synthesis on a topology, and warnings; no rules for None."""
    from taccl.sketches.restrictions import Restrictions

    if sketch is None:
        return Restrictions(), ()
    from taccl.sketches import check_sketch, load_sketch, restrict

    loaded = load_sketch(sketch)
    found = [d for d in check_sketch(loaded, topology) if d.severity != "error"]
    return restrict(loaded, topology), tuple(d.render() for d in found)
