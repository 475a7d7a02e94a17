"""A program as one flat list of steps, with what each waits for: order, dependency, message, FIFO slot."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from taccl.synth.program import FIFO_DEPTH, RECEIVES, SENDS, Program, Step

Connection = tuple[int, int, int]  # source rank, destination rank, channel


@dataclass(frozen=True, slots=True)
class ProgramGraph:
    """Steps of all ranks and threadblocks, one after another; a step is named by its index, -1 is none."""

    program: Program
    steps: tuple[Step, ...]
    places: tuple[tuple[int, int, int], ...]  # (rank, threadblock id, number in the threadblock)
    threadblocks: tuple[tuple[int, int], ...]  # (first step, one past its last) of each threadblock
    channels: tuple[int, ...]  # of each threadblock
    threadblock_of: tuple[int, ...]  # index into `threadblocks`
    needs: tuple[int, ...]  # the step depended on
    source: tuple[int, ...]  # of a receive: the send it meets
    target: tuple[int, ...]  # of a send: the receive it meets
    slot: tuple[int, ...]  # of a send: the receive that must free a FIFO slot before it
    connections: dict[Connection, tuple[tuple[int, ...], tuple[int, ...]]]  # sends, receives, each in order

    def previous(self, index: int) -> int:
        """The step before this one in its threadblock."""
        return index - 1 if index > self.threadblocks[self.threadblock_of[index]][0] else -1

    def channel_of(self, index: int) -> int:
        """The channel of a step's threadblock."""
        return self.channels[self.threadblock_of[index]]

    def where(self, index: int) -> str:
        """The place of a step in words."""
        rank, threadblock, number = self.places[index]
        line = self.steps[index].line
        return f"rank {rank}, threadblock {threadblock}, step {number}" + (f" (line {line})" if line else "")


def graph_of(program: Program, depth: int | None = None) -> ProgramGraph:
    """Lay the program out flat; the k-th send of a connection meets its k-th receive.

    depth: messages that a connection holds, by default that of the program's protocol. The program must name
    existing peers and dependencies (`verify_loader_rules.structure` says whether it does); sends and receives
    without a partner get -1. O(steps).
    """
    held = FIFO_DEPTH[program.protocol] if depth is None else depth
    steps: list[Step] = []
    places: list[tuple[int, int, int]] = []
    threadblocks: list[tuple[int, int]] = []
    channels: list[int] = []
    threadblock_of: list[int] = []
    first: dict[tuple[int, int], int] = {}
    sends: defaultdict[Connection, list[int]] = defaultdict(list)
    receives: defaultdict[Connection, list[int]] = defaultdict(list)
    for gpu in program.gpus:
        for tb in gpu.threadblocks:
            begin = first[gpu.rank, tb.id] = len(steps)
            for number, step in enumerate(tb.steps):
                if step.kind in SENDS:
                    sends[gpu.rank, tb.send, tb.channel].append(len(steps))
                if step.kind in RECEIVES:
                    receives[tb.recv, gpu.rank, tb.channel].append(len(steps))
                places.append((gpu.rank, tb.id, number))
                threadblock_of.append(len(threadblocks))
                steps.append(step)
            threadblocks.append((begin, len(steps)))
            channels.append(tb.channel)
    needs = [-1] * len(steps)
    for index, step in enumerate(steps):
        if step.depends is not None:
            needs[index] = first[places[index][0], step.depends[0]] + step.depends[1]
    source, target, slot = [-1] * len(steps), [-1] * len(steps), [-1] * len(steps)
    connections = {}
    for connection in sorted(set(sends) | set(receives)):
        out, into = sends[connection], receives[connection]
        connections[connection] = (tuple(out), tuple(into))
        for k, (send, receive) in enumerate(zip_longest(out, into, fillvalue=-1)):
            if receive >= 0:
                source[receive] = send
            if send >= 0:
                target[send] = receive
                # held 0 is rendezvous: no slot, `verify_execution` treats it apart.
                if k >= held > 0:
                    slot[send] = into[k - held] if k - held < len(into) else -1
    return ProgramGraph(
        program, tuple(steps), tuple(places), tuple(threadblocks), tuple(channels), tuple(threadblock_of),
        tuple(needs), tuple(source), tuple(target), tuple(slot), connections,
    )  # fmt: skip
