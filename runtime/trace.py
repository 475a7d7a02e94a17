"""One valid order of all the steps of a program, and which send meets which receive.

The steps of all ranks are executed symbolically with connections of unlimited depth: a threadblock runs its
steps in order, a step waits for the step it depends on, a receive waits for its message. The order found
agrees with every order in which the program may really run, so edges drawn along it never contradict the
program. Every rank computes the same trace from the same program.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from taccl.errors import Diagnostic, InvalidInput
from taccl.synth.program import RECEIVES, SENDS, Program, Step

Place = tuple[int, int, int]  # rank, index into its threadblocks, index into its steps


@dataclass(frozen=True, slots=True)
class Trace:
    """`order` holds every step once; the tags number the messages of each ordered pair of ranks from 0."""

    order: tuple[Place, ...]
    send_tag: dict[Place, int]
    recv_tag: dict[Place, int]


def _refuse(program: Program, step: Step | None, code: str, message: str) -> InvalidInput:
    return InvalidInput([Diagnostic(program.name or "<program>", step.line if step else 0, 0, code, message)])


def _where(program: Program, place: Place) -> str:
    rank, tb, step = place
    return f"rank {rank}, threadblock {program.gpus[rank].threadblocks[tb].id}, step {step}"


def _step(program: Program, place: Place) -> Step:
    rank, tb, step = place
    return program.gpus[rank].threadblocks[tb].steps[step]


def trace(program: Program) -> Trace:
    """Execute the program symbolically.

    Raises InvalidInput, naming rank, threadblock and step, when a connection's sends and receives do not
    match in number or length, when two threadblocks share one end of a connection, when a buffer is left or
    a dependency names nothing, and when the program can never finish.
    """
    sends, receives = _ends(program)
    _check_steps(program)
    send_tag, recv_tag = _match(program, sends, receives)
    partner: dict[Place, Place] = {}  # receive -> send
    for connection, places in receives.items():
        partner.update(zip(places, sends[connection], strict=True))

    by_id = [{tb.id: index for index, tb in enumerate(gpu.threadblocks)} for gpu in program.gpus]
    waiting: defaultdict[Place, list[tuple[int, int]]] = defaultdict(list)
    done: set[Place] = set()
    order: list[Place] = []
    position = {(gpu.rank, tb): 0 for gpu in program.gpus for tb in range(len(gpu.threadblocks))}
    work = deque(position)
    while work:
        rank, tb = work.popleft()
        steps = program.gpus[rank].threadblocks[tb].steps
        while position[rank, tb] < len(steps):
            place = (rank, tb, position[rank, tb])
            step = steps[place[2]]
            needs = []
            if step.depends is not None:
                needs.append((rank, by_id[rank][step.depends[0]], step.depends[1]))
            if step.kind in RECEIVES:
                needs.append(partner[place])
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting[missing].append((rank, tb))
                break
            done.add(place)
            order.append(place)
            position[rank, tb] += 1
            work.extend(waiting.pop(place, ()))
    stuck = next(
        ((r, tb, at) for (r, tb), at in position.items() if at < len(program.gpus[r].threadblocks[tb].steps)),
        None,
    )
    if stuck is not None:
        raise _refuse(
            program, _step(program, stuck), "R105",
            f"the program never finishes: {_where(program, stuck)} waits in a cycle",
        )  # fmt: skip
    return Trace(tuple(order), send_tag, recv_tag)


Connection = tuple[int, int, int]  # source, destination, channel


def _ends(program: Program) -> tuple[dict[Connection, list[Place]], dict[Connection, list[Place]]]:
    """The sending and the receiving steps of each connection, in order."""
    sends: defaultdict[Connection, list[Place]] = defaultdict(list)
    receives: defaultdict[Connection, list[Place]] = defaultdict(list)
    for gpu in program.gpus:
        for index, tb in enumerate(gpu.threadblocks):
            for number, step in enumerate(tb.steps):
                place = (gpu.rank, index, number)
                for kinds, peer, ends in ((SENDS, tb.send, sends), (RECEIVES, tb.recv, receives)):
                    if step.kind not in kinds:
                        continue
                    if not 0 <= peer < program.ranks or peer == gpu.rank:
                        raise _refuse(
                            program, step, "R101",
                            f"{_where(program, place)}: {step.kind} needs a peer among ranks 0 to "
                            f"{program.ranks - 1} other than itself, the threadblock has {peer}",
                        )  # fmt: skip
                    key = (gpu.rank, peer, tb.channel) if ends is sends else (peer, gpu.rank, tb.channel)
                    if ends[key] and ends[key][-1][1] != index:
                        raise _refuse(
                            program, step, "R102",
                            f"{_where(program, place)}: two threadblocks share one end of the connection "
                            f"from rank {key[0]} to rank {key[1]} on channel {key[2]}",
                        )  # fmt: skip
                    ends[key].append(place)
    return dict(sends), dict(receives)


def _check_steps(program: Program) -> None:
    for gpu in program.gpus:
        limits = {"i": gpu.input_chunks, "o": gpu.output_chunks, "s": gpu.scratch_chunks}
        lengths = {tb.id: len(tb.steps) for tb in gpu.threadblocks}
        for index, tb in enumerate(gpu.threadblocks):
            for number, step in enumerate(tb.steps):
                place = _where(program, (gpu.rank, index, number))
                if step.depends is not None and not 0 <= step.depends[1] < lengths.get(step.depends[0], 0):
                    raise _refuse(
                        program, step, "R103",
                        f"{place}: depends on threadblock {step.depends[0]}, step {step.depends[1]}, "
                        "which does not exist",
                    )  # fmt: skip
                for buffer, offset in local_operands(step):
                    if offset < 0 or step.count < 1 or offset + step.count > limits[buffer]:
                        raise _refuse(
                            program, step, "R104",
                            f"{place}: chunks {offset} to {offset + step.count - 1} leave buffer "
                            f"{buffer!r}, which has {limits[buffer]}",
                        )  # fmt: skip


def local_operands(step: Step) -> list[tuple[str, int]]:
    """(buffer, offset) of the operands that lie on the step's own rank."""
    src, dst = (step.src_buffer, step.src_offset), (step.dst_buffer, step.dst_offset)
    return {
        "s": [src], "r": [dst], "rcs": [dst], "rrs": [src], "rrc": [src, dst], "rrcs": [src, dst],
        "cpy": [src, dst], "re": [src, dst], "nop": [],
    }[step.kind]  # fmt: skip


def _match(
    program: Program, sends: dict[Connection, list[Place]], receives: dict[Connection, list[Place]]
) -> tuple[dict[Place, int], dict[Place, int]]:
    """Number the messages of each pair of ranks: channel after channel, each in order."""
    used: defaultdict[tuple[int, int], int] = defaultdict(int)
    send_tag: dict[Place, int] = {}
    recv_tag: dict[Place, int] = {}
    for connection in sorted(set(sends) | set(receives)):
        source, destination, channel = connection
        out, into = sends.get(connection, []), receives.get(connection, [])
        if len(out) != len(into):
            raise _refuse(
                program, None, "R106",
                f"rank {source} sends {len(out)} messages to rank {destination} on channel {channel}, "
                f"which receives {len(into)}",
            )  # fmt: skip
        for here, there in zip(out, into, strict=True):
            if _step(program, here).count != _step(program, there).count:
                raise _refuse(
                    program, _step(program, there), "R107",
                    f"{_where(program, here)} sends {_step(program, here).count} chunks, "
                    f"{_where(program, there)} receives {_step(program, there).count}",
                )  # fmt: skip
            send_tag[here] = recv_tag[there] = used[source, destination]
            used[source, destination] += 1
    return send_tag, recv_tag
