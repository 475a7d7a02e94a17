"""Device memory by NCCL's point-to-point calls, in rounds that all ranks have in common.

NCCL does the operations of a communicator one after another, in the order in which they are issued, and the kernel of a
send or a receive runs until its peer has issued the matching one. So two ranks that issue in different orders wait for
each other for ever. Several communicators are no way out: nothing says that kernels of two of them run at the same time
on one device, and then each may wait for one that cannot begin. Calls in one group, though, are one kernel in which the
messages of different peers do not hold each other up.

There is one communicator of all ranks, and each message of the program has a round (`compile.in_rounds`): an order in
which the program runs to the end where sends wait for their receives, cut into groups. A rank issues the sends and
receives that it has in a round as one group, and its rounds in order. A group is issued

- when all its operations are started and the host has seen the events of what comes before them, so that nothing is
  queued on the stream in front of the kernel;
- when the host has seen the end of the group before, so that a rank has one such kernel at most, and nothing queued
  behind it. No other stream waits for this one: what follows a message is started when the host has seen its end.

That cannot hang. Take the earliest round that does not end: what its messages need is done with earlier rounds, so each
of its ranks issues it, and then its kernels wait for nobody but each other, while what else runs on a device needs no
kernel of NCCL to end. It asks of the device only that copies and reductions go on beside one kernel of NCCL.

Both ends must name one length. That of a sized message travels by MPI when the sender comes to its round and knows it,
and a round is issued when all its lengths are known.

The price: a rank's messages of one round end together, and the next round waits for the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.nccl_ranks import NcclRanks
from taccl.runtime.streams import Lane
from taccl.runtime.transport import Message, Plain, take_done, used_bytes, write_head
from taccl.runtime.transports import MpiTransport

POLLS = 100  # of a group that has not ended, before NCCL is asked for errors again


class NcclTransport(Plain):
    """rounds: of each message (source, target, tag) that goes this way. lengths: where those of sized messages go."""

    name = "nccl"
    idle = None

    def __init__(
        self,
        ranks: NcclRanks,
        cuda: Cuda,
        rank: int,
        rounds: Mapping[tuple[int, int, int], int],
        lengths: MpiTransport,
    ) -> None:
        self._lengths = lengths
        self._ranks, self._cuda, self._rank, self._numbers = ranks, cuda, rank, rounds
        self._stream, self._event = cuda.stream(), cuda.event()
        self._rounds: dict[int, _Round] = {}
        self._left: list[_Round] = []  # of this run, the next one at the end
        self._polls = 0

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        return self._message(self._part(True, array, peer, tag, sized, lane), (self._rank, peer, tag))

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        return self._message(self._part(False, array, peer, tag, sized, lane), (peer, self._rank, tag))

    def _part(self, sends: bool, array: Any, peer: int, tag: int, sized: bool, lane: Lane | None) -> _Part:
        assert lane is not None
        return (_SizedPart if sized else _Part)(sends, array, peer, tag, lane, self._lengths)

    def _message(self, part: _Part, key: tuple[int, int, int]) -> Message:
        found = self._rounds.setdefault(self._numbers[key], _Round())
        found.parts.append(part)

        def start() -> None:
            found.started += 1
            self._go_on()

        return Message(self, part, start)

    def begin(self) -> str:
        for found in self._rounds.values():
            found.started, found.issued = 0, False
        self._left = [self._rounds[number] for number in sorted(self._rounds, reverse=True)]
        return ""

    def _go_on(self) -> None:
        """Issue groups that can be, and see whether they have ended."""
        while self._left:
            found = self._left[-1]
            if not found.issued:
                if not found.ready():
                    return
                self._issue(found)
            if not self._cuda.done(self._event):
                self._polls += 1
                if self._polls % POLLS == 0 and (wrong := self._ranks.failed()):
                    raise RunFailed(wrong)
                return
            ended = [part.end() for part in found.parts]
            if not all(ended):
                return
            for part in found.parts:
                part.done = True
            self._left.pop()

    def _issue(self, found: _Round) -> None:
        # Of one peer messages are matched in the order of the calls, so both ends take the order of tags.
        parts = sorted(found.parts, key=lambda part: (part.peer, part.tag))
        self._ranks.group([(part.sends, part.address, part.used, part.peer) for part in parts], self._stream)
        self._event.record(self._stream)
        found.issued = True

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        self._go_on()
        return take_done(tokens)

    def close(self) -> None:
        """The communicator stays: it is the job's."""
        self._rounds.clear()
        self._lengths.close()


class _Part:
    """A send or receive. used: its bytes in this run."""

    def __init__(
        self, sends: bool, array: Any, peer: int, tag: int, lane: Lane, lengths: MpiTransport
    ) -> None:
        self.sends, self.array, self.peer, self.tag, self.lane = sends, array, peer, tag, lane
        self.address, self.used = address(array), array.nbytes
        self.done = False  # and the executor does not know it yet

    def ready(self) -> bool:
        """Whether all that comes before is done, and the length is known."""
        return self.lane.ready()

    def end(self) -> bool:
        """NCCL is done with it; whether nothing else is left to do."""
        return True


class _SizedPart(_Part):
    """Of a length that the sender tells the receiver in each run."""

    def __init__(
        self, sends: bool, array: Any, peer: int, tag: int, lane: Lane, lengths: MpiTransport
    ) -> None:
        super().__init__(sends, array, peer, tag, lane, lengths)
        self._comm, self._length = lengths.comm, np.zeros(1, np.int64)
        self._data = lengths.data(self._length, tag)
        self._request: Any = None
        self._known = False

    def ready(self) -> bool:
        if self._known or not self.lane.ready():
            return self._known
        if self.sends:
            self._length[0] = self.used = used_bytes(self.lane.head, self.array.nbytes)
            self._request = self._comm.Isend(self._data, self.peer, self.tag)
            self._known = True
        else:
            if self._request is None:
                self._request = self._comm.Irecv(self._data, self.peer, self.tag)
            self._known = self._request.Test()
            if self._known:
                write_head(self.lane.head, int(self._length[0]))
                self.used = used_bytes(self.lane.head, self.array.nbytes)
        return self._known

    def end(self) -> bool:
        if self._request is None or self._request.Test():
            self._request, self._known = None, False
        return self._request is None


class _Round:
    """What this rank does in a round."""

    __slots__ = ("issued", "parts", "started")

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.started = 0
        self.issued = False

    def ready(self) -> bool:
        """Whether it can be issued. All parts are asked: others may wait for the length of one that is ready."""
        if self.started < len(self.parts):
            return False
        ready = [part.ready() for part in self.parts]
        return all(ready)
