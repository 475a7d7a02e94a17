"""The rules of the loaders that run MSCCL XML, checked before a program is executed in the mind.

Sources: RCCL src/misc/msccl/msccl_parser.cc and src/include/msccl/msccl_struct.h, MSCCL src/graph/topo.cc
and src/include/msccl.h, and the interpreter kernel of MSCCL. A rule that some loader enforces and another
does not is a warning on foreign files and an error under `strict`, which synthesis uses on its own programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from taccl.synth.msccl_xml import BUFFERS, REDUCE_OPS
from taccl.synth.program import (
    PROTOCOLS,
    RECEIVES,
    SENDS,
    STEP_KINDS,
    Program,
    RankProgram,
    Step,
    Threadblock,
)
from taccl.synth.verify_finding import Finding

MAX_CHANNELS = 32
MAX_STEPS_DEFAULT, MAX_STEPS_REBUILT = 64, 256
MAX_THREADBLOCKS_SMALLEST_CHIP, MAX_THREADBLOCKS = 80, 132  # resident at once on V100 (80 SMs), H100 (132)
MAX_COUNT = 71
# Reductions in a row that loaders make one of: their kernels add up 16 operands, the target among them.
MOST_FUSED = 15
MAX_DEPID = 127  # an int8 in the loaders' tables
MAX_OFFSET = 32767  # an int16
MAX_PEERS_OF_CHANNEL = 32
# Codes of what is right and too much for a loader or a GPU.
LIMITS = frozenset({"V103", "V111", "V122", "V123", "V124", "V126", "V130", "V131", "V132", "V136"})
MAX_XML_CHILDREN, MAX_XML_ELEMENTS, MAX_XML_VALUE = 1024, 4096, 255


def structure(program: Program) -> list[Finding]:
    """Errors without whose absence a program cannot even be laid out: unknown names, peers, dependencies."""
    found: list[Finding] = []
    if [gpu.rank for gpu in program.gpus] != list(range(program.ranks)):
        found.append(
            Finding("V101", f"the program must describe the ranks 0..{program.ranks - 1}, each once")
        )
    if program.protocol not in PROTOCOLS:
        found.append(Finding("V102", f"unknown protocol {program.protocol!r}; known: {', '.join(PROTOCOLS)}"))
    if not 1 <= program.channels <= MAX_CHANNELS:
        found.append(Finding("V103", f"nchannels={program.channels} must lie between 1 and {MAX_CHANNELS}"))
    if not (program.inplace or program.outofplace):
        found.append(Finding("V104", "the program claims neither in place nor out of place"))
    if program.reduce_op not in REDUCE_OPS:
        found.append(Finding("V105", f"unknown redop {program.reduce_op!r}; known: {', '.join(REDUCE_OPS)}"))
    for gpu in program.gpus:
        ids = [tb.id for tb in gpu.threadblocks]
        if sorted(ids) != list(range(len(ids))):
            found.append(
                Finding("V106", f"rank {gpu.rank}: threadblock ids must be 0..{len(ids) - 1}", rank=gpu.rank)
            )
        lengths = {tb.id: tb for tb in gpu.threadblocks}
        for tb in gpu.threadblocks:
            found += _threadblock_structure(program, gpu, tb)
            for number, step in enumerate(tb.steps):
                found += _step_structure(gpu, tb, number, step, lengths)
    return found


def _threadblock_structure(program: Program, gpu: RankProgram, tb: Threadblock) -> Iterator[Finding]:
    line = tb.steps[0].line if tb.steps else 0
    place = f"rank {gpu.rank}, threadblock {tb.id}"
    if not 0 <= tb.channel < program.channels:
        yield Finding(
            "V107", f"{place}: channel {tb.channel} is outside 0..{program.channels - 1} (nchannels)",
            rank=gpu.rank, threadblock=tb.id, line=line,
        )  # fmt: skip
    for name, peer in (("send", tb.send), ("recv", tb.recv)):
        if peer != -1 and (not 0 <= peer < program.ranks or peer == gpu.rank):
            yield Finding(
                "V108", f"{place}: {name}={peer} must be -1 or another of the ranks 0..{program.ranks - 1}",
                rank=gpu.rank, threadblock=tb.id, line=line,
            )  # fmt: skip


def _step_structure(
    gpu: RankProgram, tb: Threadblock, number: int, step: Step, threadblocks: dict[int, Threadblock]
) -> Iterator[Finding]:
    def finding(code: str, reason: str) -> Finding:
        return _at(code, gpu, tb, number, step, reason)

    if step.kind not in STEP_KINDS or step.src_buffer not in BUFFERS or step.dst_buffer not in BUFFERS:
        yield finding(
            "V109", f"unknown step kind or buffer ({step.kind!r}, {step.src_buffer!r}, {step.dst_buffer!r})"
        )
        return
    if step.kind in SENDS and tb.send < 0:
        yield finding("V110", f"{step.kind} sends, but the threadblock has no send peer")
    if step.kind in RECEIVES and tb.recv < 0:
        yield finding("V110", f"{step.kind} receives, but the threadblock has no recv peer")
    if step.kind != "nop" and not 1 <= step.count <= MAX_COUNT:
        yield finding("V111", f"cnt={step.count} must lie between 1 and {MAX_COUNT}")
    if step.depends is not None:
        depid, deps = step.depends
        if depid not in threadblocks or not 0 <= deps < len(threadblocks[depid].steps):
            yield finding("V112", f"depends on threadblock {depid}, step {deps}, which does not exist")
            return
        wanted = threadblocks[depid].steps[deps]
        if depid == tb.id and deps >= number:
            yield finding("V113", f"depends on step {deps} of its own threadblock, which comes no earlier")
        if wanted.kind == "nop":
            yield finding(
                "V114",
                f"depends on threadblock {depid}, step {deps}, a nop: loaders drop nops, so it never reports",
            )
        elif not wanted.has_dependents:
            yield finding(
                "V115",
                f"depends on threadblock {depid}, step {deps}, which has hasdep=0 and so never reports",
            )


def loader_rules(program: Program, strict: bool) -> list[Finding]:
    """Limits and habits of the loaders, on a program whose `structure` is sound."""
    soft = "error" if strict else "warning"
    found: list[Finding] = []
    if not 0 <= program.min_bytes <= program.max_bytes or program.max_bytes == 0:
        found.append(Finding(
            "V121",
            f"minBytes={program.min_bytes} and maxBytes={program.max_bytes} leave no size: one loader reads "
            "maxBytes=0 as no limit, another never chooses the program", soft,
        ))  # fmt: skip
    if len(program.name) > MAX_XML_VALUE:
        found.append(Finding("V122", f"the name is longer than {MAX_XML_VALUE} characters", soft))
    for gpu in program.gpus:
        found += _rank_rules(program, gpu, strict)
        for tb in gpu.threadblocks:
            found += _threadblock_rules(gpu, tb, soft)
    found += _one_sided_connections(program)
    return found


def _rank_rules(program: Program, gpu: RankProgram, strict: bool) -> Iterator[Finding]:
    soft = "error" if strict else "warning"
    blocks = len(gpu.threadblocks)
    if blocks > MAX_THREADBLOCKS_SMALLEST_CHIP:
        yield Finding(
            "V123",
            f"rank {gpu.rank} has {blocks} threadblocks: all must be resident at once, and GPUs hold 80, 108 "
            f"or {MAX_THREADBLOCKS} by chip",
            soft if blocks > MAX_THREADBLOCKS else "warning",
            rank=gpu.rank,
        )
    # The loader keeps every <gpu> and the threadblocks and steps of its own rank.
    elements = 1 + program.ranks + blocks + sum(len(tb.steps) for tb in gpu.threadblocks)
    children = max([program.ranks, blocks, *(len(tb.steps) for tb in gpu.threadblocks)])
    if elements > MAX_XML_ELEMENTS or children > MAX_XML_CHILDREN:
        yield Finding(
            "V124",
            f"rank {gpu.rank} needs {elements} XML elements, up to {children} in one: loaders hold "
            f"{MAX_XML_ELEMENTS} and {MAX_XML_CHILDREN}",
            soft,
            rank=gpu.rank,
        )
    ends: dict[tuple[str, int, int], int] = {}
    peers: Counter[tuple[str, int]] = Counter()
    for tb in gpu.threadblocks:
        for end, peer in (("send", tb.send), ("recv", tb.recv)):
            if peer < 0:
                continue
            peers[end, tb.channel] += 1
            other = ends.setdefault((end, peer, tb.channel), tb.id)
            if other != tb.id:
                yield Finding(
                    "V125",
                    f"rank {gpu.rank}: threadblocks {other} and {tb.id} both {end} with rank {peer} on "
                    f"channel {tb.channel}; each end of a connection belongs to one threadblock",
                    rank=gpu.rank, threadblock=tb.id, line=tb.steps[0].line if tb.steps else 0,
                )  # fmt: skip
    for (end, channel), count in sorted(peers.items()):
        if count > MAX_PEERS_OF_CHANNEL:
            yield Finding(
                "V126",
                f"rank {gpu.rank}: {count} {end} peers on channel {channel}, loaders take "
                f"{MAX_PEERS_OF_CHANNEL}",
                soft,
                rank=gpu.rank,
            )


def _threadblock_rules(gpu: RankProgram, tb: Threadblock, soft: str) -> Iterator[Finding]:
    if len(tb.steps) > MAX_STEPS_DEFAULT:
        number = min(MAX_STEPS_REBUILT, len(tb.steps) - 1)
        yield _at(
            "V130", gpu, tb, number, tb.steps[number],
            f"the threadblock has {len(tb.steps)} steps; loaders take {MAX_STEPS_DEFAULT}, rebuilt or old "
            f"ones {MAX_STEPS_REBUILT}", "error" if len(tb.steps) > MAX_STEPS_REBUILT else soft,
        )  # fmt: skip
    fused = 0
    last_reporting = max((i for i, step in enumerate(tb.steps) if step.has_dependents), default=-1)
    for number, step in enumerate(tb.steps):
        following = tb.steps[number + 1] if number + 1 < len(tb.steps) else None
        if step.depends is not None and step.depends[0] > MAX_DEPID:
            yield _at("V131", gpu, tb, number, step, f"depid={step.depends[0]} is above {MAX_DEPID}", soft)
        if max(step.src_offset, step.dst_offset) > MAX_OFFSET:
            yield _at("V132", gpu, tb, number, step, f"an offset is above {MAX_OFFSET}", soft)
        if step.kind == "nop" and step.depends is None and number < last_reporting:
            # The interpreter counts a step for each dependency of a nop, so flags after it come out too low.
            yield _at(
                "V133", gpu, tb, number, step,
                "a nop without a dependency is not counted by loaders, so later steps of this threadblock "
                "report under a wrong number",
            )  # fmt: skip
        if (
            step.kind == "nop"
            and step.depends is not None
            and following is not None
            and (following.depends is None)
        ):
            yield _at(
                "V134", gpu, tb, number, step,
                "the dependency of a nop belongs to the next step, which must have a dependency of its own",
            )  # fmt: skip
        if (
            following is not None
            and step.kind == following.kind == "re"
            and following.depends is None
            and not step.has_dependents
            and (step.src_buffer, step.dst_buffer, step.dst_offset)
            == (following.src_buffer, following.dst_buffer, following.dst_offset)
        ):
            fused += 1
            if step.count != following.count:
                yield _at(
                    "V135", gpu, tb, number + 1, following,
                    f"loaders fuse this reduction with the one before, whose cnt={step.count} differs",
                )  # fmt: skip
            elif fused == MOST_FUSED:
                yield _at(
                    "V136", gpu, tb, number + 1, following,
                    f"loaders fuse this reduction with the {fused} before it, and add up {MOST_FUSED} right", soft,
                )  # fmt: skip
        else:
            fused = 0


def _one_sided_connections(program: Program) -> Iterator[Finding]:
    out = {
        (g.rank, tb.send, tb.channel): (g, tb) for g in program.gpus for tb in g.threadblocks if tb.send >= 0
    }
    into = {
        (tb.recv, g.rank, tb.channel): (g, tb) for g in program.gpus for tb in g.threadblocks if tb.recv >= 0
    }
    for connection in sorted(set(out) ^ set(into)):
        source, destination, channel = connection
        gpu, tb = out[connection] if connection in out else into[connection]
        missing = "no threadblock of the receiver" if connection in out else "no threadblock of the sender"
        yield Finding(
            "V127",
            f"rank {gpu.rank}, threadblock {tb.id}: {missing} names the connection from rank {source} to "
            f"rank {destination} on channel {channel}, so setting it up never ends",
            rank=gpu.rank, threadblock=tb.id, line=tb.steps[0].line if tb.steps else 0,
        )  # fmt: skip


def _at(
    code: str,
    gpu: RankProgram,
    tb: Threadblock,
    number: int,
    step: Step,
    reason: str,
    severity: str = "error",
) -> Finding:
    place = f"rank {gpu.rank}, threadblock {tb.id}, step {number}"
    return Finding(
        code, f"{place}: {reason}", severity, rank=gpu.rank, threadblock=tb.id, step=number, line=step.line
    )
