"""The proof that a program does what it claims, whatever the timing: `verify`.

Stages, each of which needs the ones before: structure and loader rules; messages pair up; the program ends
(at the real FIFO depth); then for each claimed mode (in place, out of place) symbolic execution with exact
postcondition, and the absence of races, which makes the one execution speak for all. docs/programs.md lists
the codes and the argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from taccl.errors import CheckFailed
from taccl.synth.collective import Collective
from taccl.synth.fifo_slots import whole_up_to
from taccl.synth.program import FIFO_DEPTH, SENDS, Program
from taccl.synth.program_collective import collective_of
from taccl.synth.program_graph import ProgramGraph, graph_of
from taccl.synth.verify_execution import (
    chunk_by_chunk,
    deadlock,
    execute,
    finding_at,
    message_pieces,
    mislabelled_messages,
    rendezvous_stuck,
    unmatched_messages,
)
from taccl.synth.verify_finding import Finding
from taccl.synth.verify_loader_rules import LIMITS, loader_rules, structure
from taccl.synth.verify_memory import (
    IN_PLACE,
    OUT_OF_PLACE,
    Memory,
    check_places,
    execute_symbolically,
    lay_out,
)
from taccl.synth.verify_races import unordered

MAX_FINDINGS_PER_CODE = 20
UNKNOWN_COLLECTIVE = "V601"


def verify(
    program: Program, *, collective: Collective | None = None, mode: str | None = None, strict: bool = False
) -> list[Finding]:
    """Every rule that the program breaks; correct if no finding has severity "error".

    collective: what the program must achieve, in its own chunks; default: what its attributes name. mode:
    "in place" or "out of place"; default: each that it claims. strict: limits that only some loaders have are
    errors, not warnings. O(steps * count) time but for races, see `verify_races.unordered`.
    """
    found = structure(program)
    if not _fails(found):
        found += loader_rules(program, strict)
        if not any(finding.code == "V125" for finding in found):
            found += _verify_graph(program, graph_of(program), collective, mode, strict)
    return _shorten(found)


def is_correct(findings: Iterable[Finding]) -> bool:
    """Whether findings hold no error."""
    return not _fails(findings)


def is_unjudged(findings: Iterable[Finding]) -> bool:
    """Whether findings hold errors, and all of them say that what the program must achieve is not known."""
    errors = [finding for finding in findings if finding.severity == "error"]
    return bool(errors) and all(finding.code == UNKNOWN_COLLECTIVE for finding in errors)


def is_limit(finding: Finding) -> bool:
    """Whether a finding says that a program is too large, and not that it is wrong."""
    return finding.code in LIMITS


def _fails(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def _verify_graph(
    program: Program, graph: ProgramGraph, collective: Collective | None, mode: str | None, strict: bool
) -> list[Finding]:
    found = unmatched_messages(graph)
    if found:
        return found
    found = mislabelled_messages(graph)
    order, stuck = execute(graph)
    if stuck:
        return [*found, deadlock(graph, order, stuck)]
    found += buffering(program, graph)
    if collective is None:
        try:
            collective = collective_of(
                program.collective, program.ranks, program.chunks_per_loop, program.root
            )
        except CheckFailed as error:
            return [*found, Finding(UNKNOWN_COLLECTIVE, str(error))]
    if collective.ranks != program.ranks:
        return [*found, Finding(
            "V602", f"the collective has {collective.ranks} ranks, the program {program.ranks}"
        )]  # fmt: skip
    found += _buffer_lengths(program, collective, strict)
    claimed = [
        name for name, claim in ((IN_PLACE, program.inplace), (OUT_OF_PLACE, program.outofplace)) if claim
    ]
    for one in claimed if mode is None else [mode]:
        found += _verify_mode(graph, order, collective, one)
    return found


def buffering(program: Program, graph: ProgramGraph) -> list[Finding]:
    """What to know of programs that end only because connections hold messages: of a program that does end."""
    without_buffers = rendezvous_stuck(graph)
    if not without_buffers:
        return []
    depth = FIFO_DEPTH[program.protocol]
    found = [finding_at(
        graph, _first_send(graph, without_buffers), "V302",
        "waits for ever if sends wait for their receives: the program needs the "
        f"{depth} messages that a {program.protocol} connection holds",
        "note",
    )]  # fmt: skip
    pieces = chunk_by_chunk(program)
    limit = whole_up_to(program)
    if pieces is not program and not 0 < program.max_bytes <= limit:
        _, stuck = execute(graph_of(pieces))
        if stuck:
            whole = [i for i, step in enumerate(graph.steps) for _ in range(message_pieces(step))]
            sender = _first_send(graph, [whole[index] for index in stuck])
            found.append(finding_at(
                graph, sender, "V303",
                f"waits for ever once a message of {graph.steps[sender].count} chunks is too large "
                f"for one slot of the FIFO and travels in pieces, of which a connection holds {depth}: "
                f"with NCCL's default buffers maxBytes must be at most {limit}",
                "warning",
            ))  # fmt: skip
    return found


def _first_send(graph: ProgramGraph, stuck: list[int]) -> int:
    """Of stuck steps the first that sends (in any circle of waits without dependencies alone one does)."""
    return next((index for index in stuck if graph.steps[index].kind in SENDS), stuck[0])


def _verify_mode(graph: ProgramGraph, order: list[int], collective: Collective, mode: str) -> list[Finding]:
    if mode == IN_PLACE and collective.ranks > 1 and all(views is None for views in collective.inplace):
        return [Finding("V603", f"there is no in-place form of {collective.title}", mode=mode)]
    memory = lay_out(graph, collective, mode)
    found = list(check_places(graph, memory, mode))
    if _fails(finding for finding in found if finding.code != "V403"):
        return found
    execution = execute_symbolically(graph, order, collective, memory, mode)
    found += execution.findings
    for earlier, later in unordered(graph, order, execution.conflicts):
        found.append(_race(graph, memory, earlier, later, execution.conflicts[earlier, later], mode))
    return found


def _race(
    graph: ProgramGraph, memory: Memory, earlier: int, later: int, conflict: tuple[int, bool, bool], mode: str
) -> Finding:
    cell, earlier_writes, later_writes = conflict
    rank = graph.places[later][0]
    step = graph.steps[later]
    buffer, offset = (
        (step.dst_buffer, step.dst_offset) if later_writes else (step.src_buffer, step.src_offset)
    )
    at = cell - memory.base[rank][buffer]
    if not offset <= at < offset + step.count:  # `re` also reads its destination
        buffer = step.dst_buffer
    chunk = memory.name(cell, rank, buffer)
    verb = "writes" if later_writes else "reads"
    other = "writes" if earlier_writes else "reads"
    return finding_at(
        graph, later, "V502" if earlier_writes and later_writes else "V501",
        f"{verb} {chunk}, which {graph.where(earlier)} {other}; no order of steps, dependency or message "
        "decides which comes first",
        mode=mode,
    )  # fmt: skip


def _buffer_lengths(program: Program, collective: Collective, strict: bool) -> list[Finding]:
    """Declared lengths must be the collective's; length 0 says that the program does not use the buffer."""
    found = []
    for gpu in program.gpus:
        for name, declared, real in (
            ("i_chunks", gpu.input_chunks, collective.input_chunks[gpu.rank]),
            ("o_chunks", gpu.output_chunks, collective.output_chunks[gpu.rank]),
        ):
            if declared not in (0, real):
                found.append(Finding(
                    "V407", f"rank {gpu.rank}: {name}={declared}, but {collective.title} with nchunksperloop="
                    f"{program.chunks_per_loop} has {real}", "error" if strict else "warning", rank=gpu.rank,
                ))  # fmt: skip
    return found


def _shorten(findings: list[Finding]) -> list[Finding]:
    """At most MAX_FINDINGS_PER_CODE of each code, with a last one that counts the rest."""
    total = Counter(finding.code for finding in findings)
    kept: list[Finding] = []
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.code] += 1
        if seen[finding.code] <= MAX_FINDINGS_PER_CODE:
            kept.append(finding)
        elif seen[finding.code] == total[finding.code]:
            more = total[finding.code] - MAX_FINDINGS_PER_CODE
            kept.append(Finding(finding.code, f"and {more} more of {finding.code}", finding.severity))
    return kept
