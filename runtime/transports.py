"""Messages through MPI: from host memory, or from device memory that the library takes.

Persistent requests on a communicator of its own, so tags never meet the application's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.streams import Lane
from taccl.runtime.transport import Message, Plain, used_bytes, write_head

LARGE_BYTES = 2**31 - 1  # above this, counts do not fit the calls of MPI before version 4
FIRST = (0,)


class MpiTransport(Plain):
    """Persistent MPI requests on host arrays."""

    name = "mpi"

    def __init__(self, MPI: Any, comm: Any, chunk_bytes: int, large_bytes: int = LARGE_BYTES) -> None:
        self.comm = comm
        self.MPI = MPI
        self.idle = MPI.REQUEST_NULL
        self._test_some = MPI.Request.Testsome
        self._large_bytes = large_bytes
        self._chunk_bytes = chunk_bytes
        self._chunk_type: Any = None
        self._largest_tag = int(comm.Get_attr(MPI.TAG_UB))
        self._sized = SizedSends()

    def data(self, array: Any, tag: int) -> list[Any]:
        """The array as the calls of MPI take it. Raises EnvironmentProblem for what they cannot name or count."""
        if tag > self._largest_tag:
            raise EnvironmentProblem(
                f"the program has more messages between two ranks than the MPI library has tags "
                f"({self._largest_tag + 1})"
            )
        # Bytes, because MPI and its Python binding know neither bfloat16 nor float16.
        data = array.view(np.uint8)
        # MPI before 4.0 counts with 32 bits: a long message is counted in chunks instead of bytes.
        if array.nbytes <= self._large_bytes:
            return [data, array.nbytes, self.MPI.BYTE]
        if self.MPI.VERSION >= 4 and self._large_bytes >= LARGE_BYTES:
            return [data, array.nbytes, self.MPI.BYTE]
        if self._chunk_bytes > LARGE_BYTES:
            raise EnvironmentProblem(
                f"a chunk of {self._chunk_bytes} bytes is longer than this MPI library can count; "
                "use MPI 4.0 or later, or a program with more chunks"
            )
        if array.nbytes % self._chunk_bytes:  # frames have lengths of their own
            raise EnvironmentProblem(
                f"a coded message of {array.nbytes} bytes is longer than this MPI library can count; "
                "use MPI 4.0 or later, or a program with more chunks"
            )
        if self._chunk_type is None:
            self._chunk_type = self.MPI.BYTE.Create_contiguous(self._chunk_bytes).Commit()
        return [data, array.nbytes // self._chunk_bytes, self._chunk_type]

    def _message(self, request: Any) -> Message:
        return Message(self, request, request.Start, free=request.Free)

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if not sized:
            return self._message(self.comm.Send_init(self.data(array, tag), peer, tag))
        self.data(array, tag)  # refuses what cannot be sent at its longest
        token = SizedSend(lambda length: self.comm.Isend(self.data(array[:length], tag), peer, tag), array)
        return Message(self._sized, token, token.start)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        # A receive may be longer than its message.
        return self._message(self.comm.Recv_init(self.data(array, tag), peer, tag))

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        if len(tokens) == 1:
            return FIRST if tokens[0] is not self.idle and tokens[0].Test() else None
        found: Sequence[int] | None = self._test_some(tokens)
        return found

    def close(self) -> None:
        """Free what the transport made; its requests must be freed before."""
        if self._chunk_type is not None:
            self._chunk_type.Free()
            self._chunk_type = None


class SizedSend:
    """A send whose length is known when it starts: a persistent request has one length."""

    __slots__ = ("_array", "_send", "request")

    def __init__(self, send: Callable[[int], Any], array: Any) -> None:
        self._send, self._array = send, array
        self.request: Any = None

    def start(self) -> None:
        """Send as much as the message says."""
        self.request = self._send(used_bytes(self._array))


class SizedSends:
    """The port of sized sends."""

    idle = None

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        """Places of those that are finished."""
        return [place for place, token in enumerate(tokens) if token is not None and token.request.Test()]


class MpiCudaTransport(Plain):
    """Device arrays over an MPI that takes them. It knows of no streams: the device must be done with what a message
    reads or overwrites before the message is started. Sized messages have requests of one run: MPI says how long those
    are that have come, and those that go are as long as their lane's head says."""

    name = "mpi-cuda"
    idle = None

    def __init__(self, inner: MpiTransport) -> None:
        self._inner = inner
        self._early: list[_Gated] = []  # started by the executor, and the device is not ready
        self._sized = _SizedPort()

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if sized:
            return self._sized.message(_Sized(self._inner, array, peer, tag, lane, True))
        return self._message(self._inner.send(array, peer, tag), lane)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if sized:
            return self._sized.message(_Sized(self._inner, array, peer, tag, lane, False))
        return self._message(self._inner.recv(array, peer, tag), lane)

    def _message(self, inner: Message, lane: Lane | None) -> Message:
        assert lane is not None
        message = _Gated(inner, lane, self._inner.idle)

        def start() -> None:
            if not message.begin():
                self._early.append(message)

        return Message(self, message, start, free=inner.free)

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        if self._early:
            self._early = [message for message in self._early if not message.begin()]
        idle = self._inner.idle
        done = self._inner.poll([idle if token is None else token.request for token in tokens])
        for place in done or ():
            tokens[place].request = idle
        return done

    def close(self) -> None:
        self._inner.close()


class _Gated:
    """A message that is started once the device is ready for it."""

    __slots__ = ("_inner", "_lane", "request")

    def __init__(self, inner: Message, lane: Lane, idle: Any) -> None:
        self._inner, self._lane = inner, lane
        self.request = idle

    def begin(self) -> bool:
        """Start it if the device is ready; whether it is."""
        if not self._lane.ready():
            return False
        assert self._inner.start is not None
        self._inner.start()
        self.request = self._inner.token
        return True


class _Sized:
    """A sized message in device memory. A receive may be longer than its message."""

    def __init__(
        self, inner: MpiTransport, array: Any, peer: int, tag: int, lane: Lane | None, sends: bool
    ) -> None:
        assert lane is not None
        self._inner, self._array, self._lane, self._sends = inner, array, lane, sends
        self._where = (peer, tag)
        self._whole = inner.data(array, tag)  # refuses what cannot be sent at its longest
        self._status = inner.MPI.Status()
        self.request: Any = None

    def begin(self) -> bool:
        """Start it if the device is ready; whether it is."""
        lane, (peer, tag) = self._lane, self._where
        if not lane.ready():
            return False
        if self._sends:
            part = self._array[: used_bytes(lane.head, self._array.nbytes)]
            self.request = self._inner.comm.Isend(self._inner.data(part, tag), peer, tag)
        else:
            self.request = self._inner.comm.Irecv(self._whole, peer, tag)
        return True

    def done(self) -> bool:
        """Whether MPI is done with it; then the lane's head says how long it is."""
        if self.request is None or not self.request.Test(self._status):
            return False
        self.request = None
        if not self._sends:
            write_head(self._lane.head, self._status.Get_count(self._inner.MPI.BYTE))
        return True


class _SizedPort:
    """The port of sized messages in device memory."""

    idle = None

    def __init__(self) -> None:
        self._early: list[_Sized] = []

    def message(self, sized: _Sized) -> Message:
        def start() -> None:
            if not sized.begin():
                self._early.append(sized)

        return Message(self, sized, start)

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        """Places of those that are finished."""
        if self._early:
            self._early = [sized for sized in self._early if not sized.begin()]
        return [place for place, token in enumerate(tokens) if token is not None and token.done()]
