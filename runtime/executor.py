"""Run one rank's plan: a flat graph of operations, one thread, no callbacks.

Transport and memory are bound once (`bind`); a run resets counters and starts what has no predecessor. One
`advance` starts everything that is ready and collects finished messages. As a rule only the first outstanding
message of each connection is polled, because a poll costs something for each message and messages mostly
finish in order. A later one may finish first, though, and even be what the first one waits for (a receive into
memory that the later send still reads lets the peer go on). So when nothing happens for a few polls, all
outstanding messages are polled.
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from taccl.runtime.compile import Operation, Plan, Range, followers

PATIENCE = 16  # polls without success before all outstanding messages are polled


class Transport(Protocol):
    """Moves arrays between ranks. Requests are persistent: started again in every run."""

    null: Any  # a request that is never finished

    def send(self, array: Any, peer: int, tag: int) -> Any:
        """A request with Start() and Free() that sends this contiguous array."""

    def recv(self, array: Any, peer: int, tag: int) -> Any:
        """A request with Start() and Free() that receives into this contiguous array."""

    def test_some(self, requests: list[Any]) -> list[int] | None:
        """Indices of started requests that are finished; the transport forgets them until the next Start."""

    def flush(self) -> None:
        """Wait for local operations that were started and may still run (device streams)."""


class Executor:
    """A plan bound to memory and a transport. `memory` maps each buffer letter to an array of elements."""

    def __init__(
        self,
        plan: Plan,
        memory: Mapping[str, Any],
        chunk_elements: int,
        ufunc: str,
        transport: Transport,
        xp: Any = np,
    ) -> None:
        self.plan = plan
        self.transport = transport
        self._operations = plan.operations
        self._successors = followers(plan.operations)
        self._counts = [len(op.predecessors) for op in plan.operations]
        self._action: list[Callable[[], Any]] = []
        self._request: list[Any] = []
        self._line: list[int] = []  # connection of each message, -1 for local operations
        lines: dict[tuple[str, int, int], int] = {}

        def view(extent: Range | None) -> Any:
            assert extent is not None
            buffer, first, count = extent
            return memory[buffer][first * chunk_elements : (first + count) * chunk_elements]

        combine = getattr(xp, ufunc)
        for op in plan.operations:
            request = None
            if op.kind == "send":
                request = transport.send(view(op.src), op.peer, op.tag)
                action = request.Start
            elif op.kind == "recv":
                request = transport.recv(view(op.dst), op.peer, op.tag)
                action = request.Start
            elif op.kind == "copy":
                action = functools.partial(xp.copyto, view(op.dst), view(op.src))
            else:
                action = functools.partial(combine, view(op.src), view(op.received), out=view(op.dst))
            self._action.append(action)
            self._request.append(request)
            line = (op.kind, op.peer, op.channel)
            self._line.append(-1 if request is None else lines.setdefault(line, len(lines)))
        self._outstanding: list[list[int]] = [[] for _ in lines]
        self._heads: list[Any] = [transport.null] * len(lines)
        self._ready: deque[int] = deque()
        self._missing: list[int] = []
        self._left = 0
        self._unflushed = False  # local operations were started since the last flush
        self._vain = 0  # polls without success, one after another

    @property
    def done(self) -> bool:
        """Whether the run is finished (also before the first one)."""
        return self._left == 0

    def start(self) -> None:
        """Begin a run."""
        self._missing = self._counts.copy()
        self._left = len(self._counts)
        self._ready.extend(index for index, count in enumerate(self._counts) if count == 0)

    def advance(self) -> bool:
        """Start all that is ready and collect finished messages; whether anything happened."""
        ready, missing, heads, outstanding = self._ready, self._missing, self._heads, self._outstanding
        moved = bool(ready)
        while ready:
            index = ready.popleft()
            line = self._line[index]
            if line < 0:
                self._action[index]()
                self._unflushed = True
                self._left -= 1
                for later in self._successors[index]:
                    missing[later] -= 1
                    if not missing[later]:
                        ready.append(later)
                continue
            if self._unflushed:  # the message may read or overwrite what a local operation still works on
                self.transport.flush()
                self._unflushed = False
            self._action[index]()
            queue = outstanding[line]
            heapq.heappush(queue, index)
            heads[line] = self._request[queue[0]]
        if self._left:
            moved |= self._collect()
        if self._left == 0 and self._unflushed:
            self.transport.flush()
            self._unflushed = False
        return moved

    def _collect(self) -> bool:
        """Complete finished messages; whether there were any."""
        ready, missing = self._ready, self._missing
        finished = self._finished_heads()
        if finished:
            self._vain = 0
        else:
            self._vain += 1
            if self._vain < PATIENCE:
                return False
            self._vain = 0
            finished = self._finished_anywhere()
        for index in finished:
            self._left -= 1
            for later in self._successors[index]:
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
        return bool(finished)

    def _finished_heads(self) -> list[int]:
        """Poll the first message of each connection, and take out those that are finished."""
        heads, outstanding = self._heads, self._outstanding
        finished = []
        for line in self.transport.test_some(heads) or ():
            queue = outstanding[line]
            finished.append(heapq.heappop(queue))
            heads[line] = self._request[queue[0]] if queue else self.transport.null
        return finished

    def _finished_anywhere(self) -> list[int]:
        """Poll all outstanding messages, and take out those that are finished."""
        started = [index for queue in self._outstanding for index in queue]
        found = self.transport.test_some([self._request[index] for index in started]) or ()
        finished = [started[position] for position in found]
        for line in {self._line[index] for index in finished}:
            # A new list, because the watchdog's thread may be reading the old one. Sorted, it is a heap.
            queue = sorted(set(self._outstanding[line]).difference(finished))
            self._outstanding[line] = queue
            self._heads[line] = self._request[queue[0]] if queue else self.transport.null
        return finished

    def waiting(self) -> list[Operation]:
        """The messages that are started and not finished, the first of each connection, in step order."""
        # Copies, because the watchdog's thread asks too, while the run may go on.
        heads = sorted(queue[0] for queue in map(list, self._outstanding) if queue)
        return [self._operations[index] for index in heads]

    def describe(self) -> str:
        """What the run waits for, for the message that ends a job."""
        waiting = self.waiting()
        receives = [op for op in waiting if op.kind == "recv"]
        if not waiting:
            return f"it has {self._left} operations left and waits for no message"
        op = (receives or waiting)[0]
        what = "a message from" if op.kind == "recv" else "its message to be received by"
        more = f" ({len(waiting) - 1} other connections wait too)" if len(waiting) > 1 else ""
        return f"threadblock {op.threadblock}, step {op.step} waits for {what} rank {op.peer}{more}"

    def close(self) -> None:
        """Free the transport's requests."""
        for request in self._request:
            if request is not None:
                request.Free()
        self._request.clear()
        self._action.clear()
