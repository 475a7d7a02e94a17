"""What the operations of a plan do: calls that are bound to memory, messages, frames and streams."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from taccl.runtime.copying import copier, past_caches
from taccl.runtime.device_frames import DeviceFrames
from taccl.runtime.frames import FrameMemory
from taccl.runtime.plan import Operation, Plan, Range, staged
from taccl.runtime.streams import CODING, Streams
from taccl.runtime.transport import Message, used_bytes

Action = Callable[[], object]


class Actions:
    """The calls of one rank. memory: of each buffer letter an array; combine reduces two arrays into a third, `out`.
    messages: of the operations that have one, registered by whoever holds this before it asks for calls."""

    def __init__(
        self,
        plan: Plan,
        memory: Mapping[str, Any],
        chunk_elements: int,
        combine: Callable[..., object],
        messages: Mapping[int, Message],
        frames: FrameMemory | DeviceFrames | None,
        streams: Streams | None,
    ) -> None:
        self.plan = plan
        self._memory, self._chunk, self._combine = memory, chunk_elements, combine
        self._messages, self._frames, self._streams = messages, frames, streams
        self._sized = frames is not None and frames.sizes.sized

    @functools.cached_property
    def _past_caches(self) -> bool:
        """Of what is copied in a run, when the ranks are connected."""
        chunks = sum(op.dst[2] for op in self.plan.operations if op.dst is not None and op.dst[0] != "f")
        ranks = max(
            (message.native().ranks for message in self._messages.values() if message.native), default=1
        )
        return past_caches(chunks * self._chunk * next(iter(self._memory.values())).itemsize, ranks)

    def view(self, extent: Range | None) -> Any:
        """The elements of a range, or the bytes of a range of frames."""
        assert extent is not None
        buffer, first, count = extent
        if buffer == "f":
            assert self._frames is not None
            return self._frames.view(extent)
        return self._memory[buffer][first * self._chunk : (first + count) * self._chunk]

    def beginning(self, number: int, op: Operation) -> Action | None:
        """What starts an operation; a local one is finished by it."""
        if number in self._messages:
            return self._messages[number].start
        if op.kind in CODING:
            assert self._streams is not None and isinstance(self._frames, DeviceFrames)
            put = self._frames.work(number, op, self.view, self._combine)
            return self._then(number, self._streams.within(number, put), None)
        received = op.src if op.kind == "copy" else op.received
        lender = self._messages[number - 1] if self.lends(number - 1) else None
        operand = self.view(received) if lender is None else lender.view
        if op.kind == "copy":
            return self._then(number, self._copy(number, self.view(op.dst), operand), lender)
        mine, result = self.view(op.src), self.view(op.dst)
        if self._streams is not None:
            work = self._streams.reduce(number, self._combine, mine, operand, result)
        else:
            work = functools.partial(self._combine, mine, operand, out=result)
        return self._then(number, work, lender)

    def arrival(self, number: int, op: Operation) -> Action | None:
        """What to do with a message that has arrived."""
        message = self._messages[number]
        if op.kind != "recv" or message.view is None or self.lends(number):
            return message.take
        if op.frames and self._sized:
            target, view = self.view(op.dst), message.view
            if self._streams is not None:
                assert message.used is not None
                return self._then(
                    number, self._streams.copy_used(number, target, view, message.used), message
                )

            def copy() -> None:
                used = used_bytes(view)
                target[:used] = view[:used]

            return self._then(number, copy, message)
        return self._then(number, self._copy(number, self.view(op.dst), message.view), message)

    def lends(self, number: int) -> bool:
        """Whether this is a receive after which the next operation reads the sender's memory."""
        return (
            self.plan.direct
            and number >= 0
            and staged(self.plan.operations[number])
            and self._messages[number].view is not None
        )

    def reduces_next(self, number: int) -> bool:
        """Whether this is a receive whose data the next operation can reduce where they lie."""
        if number < 0 or not staged(self.plan.operations[number]):
            return False
        return self.plan.operations[number + 1].kind == "reduce" and self._messages[number].lies is not None

    def reduce_from(self, op: Operation, lies: Callable[[], Any] | None) -> Action:
        """A reduction with data that are where `lies` says when it is done."""
        assert lies is not None
        combine, mine, result = self._combine, self.view(op.src), self.view(op.dst)
        return lambda: combine(mine, lies(), out=result)

    def forget(self) -> None:
        """Let go of the memory, for good."""
        self._memory = {}

    def _then(self, number: int, work: Action, lender: Message | None) -> Action:
        """A local operation's work, and after it the word to the sender that its memory was read."""
        release = None if lender is None else lender.release
        if self._streams is not None:
            return self._streams.work(number, work, release)
        return work if release is None else _both(work, release)

    def _copy(self, number: int, target: Any, source: Any) -> Action:
        if self._streams is not None:
            return self._streams.copy(number, target, source)
        return copier(target, source, self._past_caches)


def _both(work: Action, then: Action) -> Action:
    def both() -> None:
        work()
        then()

    return both
