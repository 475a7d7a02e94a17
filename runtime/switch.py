"""Messages between ranks that live in one process: for tests, debugging, and running without MPI.

A send is done only when its receive is posted, the strictest behaviour that MPI allows. With `direct`, a receive
reads the sender's memory, and the send is done only when it has, as in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from taccl.runtime.streams import Lane
from taccl.runtime.transport import Message, Plain, used_bytes

Key = tuple[int, int, int]  # source, destination, tag


class _End:
    """One end of a message."""

    __slots__ = ("array", "finished", "key", "sends", "sized", "switch")

    def __init__(self, switch: LocalSwitch, key: Key, sends: bool, array: Any, sized: bool) -> None:
        self.switch, self.key, self.sends, self.array, self.sized = switch, key, sends, array, sized
        self.finished = False

    def start(self) -> None:
        self.finished = False
        self.switch.offer(self)


class LocalSwitch:
    """Joins the ends of the ranks of one process."""

    def __init__(self, direct: bool = False) -> None:
        self.direct = direct
        self.senders: dict[Key, _End] = {}
        self._offers: dict[tuple[Key, bool], _End] = {}

    def offer(self, end: _End) -> None:
        """Match a started end with its counterpart, or keep it until that comes."""
        other = self._offers.pop((end.key, not end.sends), None)
        if other is None:
            self._offers[end.key, end.sends] = end
            return
        source, target = (end, other) if end.sends else (other, end)
        target.finished = True
        if not self.direct:
            length = used_bytes(source.array) if source.sized else len(source.array)
            np.copyto(target.array[:length], source.array[:length])
            source.finished = True


class LocalTransport(Plain):
    """One rank's end of a `LocalSwitch`."""

    name = "local"
    idle = None

    def __init__(self, switch: LocalSwitch, rank: int) -> None:
        self._switch, self._rank = switch, rank

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        end = _End(self._switch, (self._rank, peer, tag), True, array, sized)
        self._switch.senders[end.key] = end
        return Message(self, end, end.start)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        end = _End(self._switch, (peer, self._rank, tag), False, array, sized)
        if not self._switch.direct:
            return Message(self, end, end.start)
        source = self._switch.senders[end.key]

        def release() -> None:
            source.finished = True

        return Message(self, end, end.start, source.array, release)

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        return [place for place, end in enumerate(tokens) if end is not None and end.finished]
