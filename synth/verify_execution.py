"""Do messages pair up, and does the program always reach its end?

Threadblocks run their steps in order; each connection has one sender, one receiver and a FIFO of fixed depth.
Such a network is confluent (Kahn, "The semantics of a simple language for parallel programming", 1974; with
bounded FIFOs a full one only adds one more wait on a single other process): if one order of execution ends,
every order ends, and if one gets stuck, every order gets stuck in the same state. So one greedy execution
decides. A step that receives and sends waits for the message and for the free slot before it does either, as
the kernels do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import accumulate

from taccl.synth.program import RECEIVES, SENDS, Program, Step
from taccl.synth.program_graph import ProgramGraph
from taccl.synth.verify_finding import Finding


def unmatched_messages(graph: ProgramGraph) -> list[Finding]:
    """Sends without a receive, receives without a send, and pairs that differ in their number of chunks."""
    found = []
    for (source, destination, channel), (sends, receives) in graph.connections.items():
        connection = f"rank {source} to rank {destination} on channel {channel}"
        for k, (send, receive) in enumerate(zip(sends, receives, strict=False)):
            out, into = graph.steps[send].count, graph.steps[receive].count
            if out != into:
                found.append(finding_at(
                    graph, receive, "V202",
                    f"message {k} from {connection} is sent with {out} chunks at {graph.where(send)} but "
                    f"received with {into}",
                ))  # fmt: skip
        if len(sends) != len(receives):
            more = sends if len(sends) > len(receives) else receives
            extra = more[min(len(sends), len(receives))]
            verb = "received" if more is sends else "sent"
            found.append(finding_at(
                graph, extra, "V201",
                f"{len(sends)} messages are sent and {len(receives)} received from {connection}: from here "
                f"on they are never {verb}",
            ))  # fmt: skip
    return found


def mislabelled_messages(graph: ProgramGraph) -> list[Finding]:
    """Operands that name a place at the other end and name the wrong one.

    dst of s and rrs is where the receiver writes (kernels that write straight into the peer's memory use
    it); src of r and rcs is where the sender has the data.
    """
    found = []
    for sends, receives in graph.connections.values():
        for send, receive in zip(sends, receives, strict=True):
            out, into = graph.steps[send], graph.steps[receive]
            target, written = (out.dst_buffer, out.dst_offset), (into.dst_buffer, into.dst_offset)
            if out.kind in ("s", "rrs") and into.kind != "rrs" and target != written:
                found.append(finding_at(
                    graph, send, "V203",
                    f"names {target[0]}[{target[1]}] as the place at the receiver, but {graph.where(receive)} "
                    f"writes {written[0]}[{written[1]}]",
                ))  # fmt: skip
            if into.kind not in ("r", "rcs") or out.kind == "rrs":
                continue
            origin = (into.src_buffer, into.src_offset)
            has = (out.src_buffer, out.src_offset) if out.kind == "s" else (out.dst_buffer, out.dst_offset)
            if origin != has:
                found.append(finding_at(
                    graph, receive, "V204",
                    f"names {origin[0]}[{origin[1]}] as the place at the sender, but {graph.where(send)} sends "
                    f"{has[0]}[{has[1]}]",
                ))  # fmt: skip
    return found


def execute(graph: ProgramGraph) -> tuple[list[int], list[int]]:
    """Run as far as possible: steps in a possible order of completion, first stuck step of each threadblock.

    Needs matched messages. O(steps).
    """
    position = [first for first, _ in graph.threadblocks]
    done = bytearray(len(graph.steps))
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    work = deque(range(len(graph.threadblocks)))
    while work:
        block = work.popleft()
        end = graph.threadblocks[block][1]
        while position[block] < end:
            index = position[block]
            blocker = next((b for b in blockers(graph, index) if not done[b]), None)
            if blocker is not None:
                waiting.setdefault(blocker, []).append(block)
                break
            done[index] = 1
            order.append(index)
            position[block] += 1
            work.extend(waiting.pop(index, ()))
    stuck = [at for at, (_, end) in zip(position, graph.threadblocks, strict=True) if at < end]
    return order, stuck


def blockers(graph: ProgramGraph, index: int) -> tuple[int, ...]:
    """Steps of other threadblocks that must be complete before this one can be."""
    return tuple(b for b in (graph.needs[index], graph.source[index], graph.slot[index]) if b >= 0)


def deadlock(graph: ProgramGraph, order: list[int], stuck: list[int]) -> Finding:
    """The finding for an execution that got stuck: follow who waits for whom until the circle closes."""
    done = bytearray(len(graph.steps))
    for index in order:
        done[index] = 1
    first_stuck = {graph.threadblock_of[index]: index for index in stuck}
    path: list[tuple[int, str]] = []
    seen: dict[int, int] = {}
    index = stuck[0]
    while index not in seen:
        seen[index] = len(path)
        blocker = next(b for b in blockers(graph, index) if not done[b])
        if blocker == graph.needs[index]:
            reason = "waits for its dependency on"
        elif blocker == graph.source[index]:
            reason = "waits for a message from"
        else:
            reason = "waits for a free FIFO slot, which needs the receive at"
        path.append((index, f"{graph.where(index)} {reason} {graph.where(blocker)}"))
        index = first_stuck[graph.threadblock_of[blocker]]
    cycle = path[seen[index] :]
    shown = "; ".join(text for _, text in cycle[:8]) + ("; ..." if len(cycle) > 8 else "")
    rank, threadblock, number = graph.places[cycle[0][0]]
    return Finding(
        "V301", f"deadlock: {shown}", rank=rank, threadblock=threadblock, step=number,
        line=graph.steps[cycle[0][0]].line,
    )  # fmt: skip


def rendezvous_stuck(graph: ProgramGraph) -> list[int]:
    """First stuck step of each threadblock when a send completes only together with its receive.

    A step that receives and sends does one after the other. Empty if the program needs no buffering.
    """
    position = [first for first, _ in graph.threadblocks]
    received = bytearray(len(graph.steps))  # the receive half is complete
    announced = bytearray(len(graph.steps))  # the send half has told the receiver
    done = bytearray(len(graph.steps))
    waiting: dict[int, list[int]] = {}
    work = deque(range(len(graph.threadblocks)))

    def at(index: int) -> bool:
        """Whether the threadblock stands at this step with its dependency met."""
        need = graph.needs[index]
        return position[graph.threadblock_of[index]] == index and (need < 0 or bool(done[need]))

    while work:
        block = work.popleft()
        while position[block] < graph.threadblocks[block][1]:
            index = position[block]
            kind = graph.steps[index].kind
            need = graph.needs[index]
            if need >= 0 and not done[need]:
                waiting.setdefault(need, []).append(block)
                break
            if kind in RECEIVES and not received[index]:
                send = graph.source[index]
                ready = at(send) and (graph.steps[send].kind not in RECEIVES or received[send])
                if not ready:
                    break  # the sender wakes this threadblock when it arrives
                received[index] = 1
                work.append(graph.threadblock_of[send])
            if kind in SENDS and not received[graph.target[index]]:
                # The receiver takes the message when it stands at its step, and wakes this threadblock.
                if not announced[index]:
                    announced[index] = 1
                    work.append(graph.threadblock_of[graph.target[index]])
                break
            done[index] = 1
            position[block] += 1
            work.extend(waiting.pop(index, ()))
    return [at_ for at_, (_, end) in zip(position, graph.threadblocks, strict=True) if at_ < end]


def message_pieces(step: Step) -> int:
    """How many messages of one chunk a step's message makes; 1 for local steps."""
    return step.count if step.kind in SENDS or step.kind in RECEIVES else 1


def chunk_by_chunk(program: Program) -> Program:
    """The program with every message cut into messages of one chunk; itself if they are.

    So kernels send when a message does not fit one slot of the FIFO: the larger the buffer, the fewer chunks
    fit, down to one.
    """
    if all(message_pieces(s) == 1 for g in program.gpus for tb in g.threadblocks for s in tb.steps):
        return program
    gpus = []
    for gpu in program.gpus:
        ends = {tb.id: list(accumulate(map(message_pieces, tb.steps))) for tb in gpu.threadblocks}
        threadblocks = []
        for tb in gpu.threadblocks:
            steps = []
            for step in tb.steps:
                needs = step.depends
                if needs is not None:
                    needs = (needs[0], ends[needs[0]][needs[1]] - 1)
                pieces = message_pieces(step)
                for k in range(pieces):
                    steps.append(replace(
                        step, src_offset=step.src_offset + k, dst_offset=step.dst_offset + k,
                        count=step.count // pieces, depends=needs,
                    ))  # fmt: skip
            threadblocks.append(replace(tb, steps=tuple(steps)))
        gpus.append(replace(gpu, threadblocks=tuple(threadblocks)))
    return replace(program, gpus=tuple(gpus))


def finding_at(
    graph: ProgramGraph, index: int, code: str, reason: str, severity: str = "error", mode: str = ""
) -> Finding:
    """A finding at a step; the message starts with the step's place."""
    rank, threadblock, number = graph.places[index]
    return Finding(
        code,
        f"{graph.where(index)}: {reason}",
        severity,
        rank,
        threadblock,
        number,
        graph.steps[index].line,
        mode,
    )
