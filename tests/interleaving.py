"""A second opinion on programs: run them step by step in orders chosen at random, and look at the outputs.

Shares nothing with `taccl.synth.verify` but the definition of the collective. A step first reads its operands
and later writes its result, with other threadblocks in between, so lost updates show. A reader of memory that
another has not written yet gets poison.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque

from taccl.synth.program import FIFO_DEPTH

POISON = frozenset({("poison", 1)})


def outcome(program, collective, inplace, rng):
    """None when the program ends with the right outputs in one random order, else what is wrong."""
    memory = {}

    def cell(rank, buffer, offset):
        views = collective.inplace[rank] if inplace else None
        if buffer in "io" and views is not None:
            return rank, "io", offset + views["io".index(buffer)]
        return rank, buffer, offset

    for chunk in collective.chunks:
        for rank, offset in chunk.sources:
            memory[cell(rank, "i", offset)] = frozenset({((rank, offset), 1)})
    inputs = dict(memory)
    depth = FIFO_DEPTH[program.protocol]
    fifo = defaultdict(deque)
    blocks = [(gpu.rank, tb) for gpu in program.gpus for tb in gpu.threadblocks]
    threads = [_thread(rank, tb, memory, cell) for rank, tb in blocks]
    done = set()
    state = [next(thread, None) for thread in threads]  # what each thread waits for; None: it has ended
    waiting = defaultdict(list)
    # All at random; or some threadblocks run ahead of all others, and one lags behind as long as it can.
    fair = rng.random() < 0.4
    priority = [rng.random() for _ in threads]
    ready = []

    def look(number):
        """Make a thread ready, or note what it waits for."""
        if state[number] is None:
            return
        rank, tb = blocks[number]
        what, detail = state[number]
        missing = None
        if what == "need" and (rank, *detail) not in done:
            missing = ("done", rank, *detail)
        if what in ("slot", "both") and len(fifo[rank, tb.send, tb.channel]) >= depth:
            missing = ("slot", rank, tb.send, tb.channel)
        # A kernel that receives and sends takes the message when it can pass it on.
        if what in ("message", "both") and not fifo[tb.recv, rank, tb.channel]:
            missing = ("message", tb.recv, rank, tb.channel)
        if missing is not None:
            waiting[missing].append(number)
        else:
            key = rng.random() if fair or rng.random() < 0.05 else 1 + priority[number]
            heapq.heappush(ready, (key, number))

    for number in range(len(threads)):
        look(number)
    while ready:
        number = heapq.heappop(ready)[1]
        rank, tb = blocks[number]
        (what, detail), answer, news = state[number], None, None
        if what in ("message", "both"):
            answer = fifo[tb.recv, rank, tb.channel].popleft()
            news = ("slot", tb.recv, rank, tb.channel)
        elif what == "emit":
            fifo[rank, tb.send, tb.channel].append(detail)
            news = ("message", rank, tb.send, tb.channel)
        elif what == "done":
            done.add((rank, tb.id, detail))
            news = ("done", rank, tb.id, detail)
        try:
            state[number] = threads[number].send(answer)
        except StopIteration:
            state[number] = None
        look(number)
        for other in waiting.pop(news, ()):
            look(other)
    if any(wait is not None for wait in state):
        return "deadlock"
    if any(fifo.values()):
        return "messages left over"
    for chunk in collective.chunks:
        wanted = [frozenset({(source, 1)}) for source in chunk.sources]
        if collective.combining:
            wanted = [frozenset((source, 1) for source in chunk.sources)]
        for rank, offset in chunk.destinations:
            held = memory.get(cell(rank, "o", offset))
            if held not in wanted:
                return f"rank {rank} output {offset} holds {held}"
    if not inplace:
        for place, value in inputs.items():
            if memory[place] != value:
                return f"input {place} changed"
    return None


def always_right(program, collective, inplace, seeds):
    """What is wrong in the first of `seeds` random orders that ends wrong; None if all end right."""
    for seed in range(seeds):
        wrong = outcome(program, collective, inplace, random.Random(seed))
        if wrong is not None:
            return wrong
    return None


def _thread(rank, tb, memory, cell):
    """A threadblock as a generator of waits; ("read",) lets others run between a read and the next write."""

    def read(buffer, offset, count):
        return [memory.get(cell(rank, buffer, offset + x), POISON) for x in range(count)]

    for number, step in enumerate(tb.steps):
        kind = step.kind
        if step.depends is not None:
            yield "need", step.depends
        src = (step.src_buffer, step.src_offset, step.count)
        dst = (step.dst_buffer, step.dst_offset, step.count)
        values = None
        if kind in ("r", "rrc"):
            values = yield "message", None
        elif kind in ("rcs", "rrs", "rrcs"):
            values = yield "both", None
        elif kind == "s":
            yield "slot", None
        if values is not None and len(values) != step.count:
            values = [POISON] * step.count
        if kind in ("s", "cpy"):
            values = read(*src)
        elif kind in ("rrs", "rrc", "rrcs"):
            values = [_sum(a, b) for a, b in zip(values, read(*src), strict=True)]
        elif kind == "re":
            values = [_sum(a, b) for a, b in zip(read(*src), read(*dst), strict=True)]
        yield "read", None
        if kind in ("r", "rcs", "rrc", "rrcs", "cpy", "re"):
            for x, value in enumerate(values):
                memory[cell(rank, step.dst_buffer, step.dst_offset + x)] = value
                yield "read", None
        if kind in ("s", "rcs", "rrs", "rrcs"):
            yield "emit", values
        yield "done", number


def _sum(a, b):
    total = Counter(dict(a))
    total.update(dict(b))
    return frozenset(total.items())
