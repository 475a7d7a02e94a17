"""How messages travel: through MPI, or inside one process.

`MpiTransport` holds persistent requests on a communicator of its own, so tags never meet the application's.
`LocalTransport` joins ranks that live in one process: for tests, debugging, and running without MPI. A local
send is done only when its receive is posted, the strictest behaviour that MPI allows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.gpu import Cuda

LARGE_BYTES = 2**31 - 1  # above this, counts do not fit the calls of MPI before version 4


class MpiTransport:
    """Persistent MPI requests on host arrays, or on device arrays when the library takes them."""

    name = "mpi"

    def __init__(
        self, MPI: Any, comm: Any, chunk_bytes: int, cuda: Cuda | None = None, large_bytes: int = LARGE_BYTES
    ) -> None:
        self._comm = comm
        self._cuda = cuda
        self._mpi = MPI
        self.null = MPI.REQUEST_NULL
        self.test_some = MPI.Request.Testsome
        self._large_bytes = large_bytes
        self._chunk_bytes = chunk_bytes
        self._chunk_type: Any = None
        self._largest_tag = int(comm.Get_attr(MPI.TAG_UB))

    def _message(self, array: Any, tag: int) -> list[Any]:
        if tag > self._largest_tag:
            raise EnvironmentProblem(
                f"the program has more messages between two ranks than the MPI library has tags "
                f"({self._largest_tag + 1})"
            )
        # Bytes, because MPI and its Python binding know neither bfloat16 nor float16.
        data = array.view(np.uint8)
        # MPI before 4.0 counts with 32 bits: a long message is counted in chunks instead of bytes.
        if array.nbytes <= self._large_bytes:
            return [data, array.nbytes, self._mpi.BYTE]
        if self._mpi.VERSION >= 4 and self._large_bytes >= LARGE_BYTES:
            return [data, array.nbytes, self._mpi.BYTE]
        if self._chunk_bytes > LARGE_BYTES:
            raise EnvironmentProblem(
                f"a chunk of {self._chunk_bytes} bytes is longer than this MPI library can count; "
                "use MPI 4.0 or later, or a program with more chunks"
            )
        if self._chunk_type is None:
            self._chunk_type = self._mpi.BYTE.Create_contiguous(self._chunk_bytes).Commit()
        return [data, array.nbytes // self._chunk_bytes, self._chunk_type]

    def send(self, array: Any, peer: int, tag: int) -> Any:
        return self._comm.Send_init(self._message(array, tag), peer, tag)

    def recv(self, array: Any, peer: int, tag: int) -> Any:
        return self._comm.Recv_init(self._message(array, tag), peer, tag)

    def flush(self) -> None:
        """MPI does not know of streams: device operations must be finished before it touches their data."""
        if self._cuda is not None:
            self._cuda.synchronize()

    def close(self) -> None:
        """Free what the transport made; its requests must be freed before."""
        if self._chunk_type is not None:
            self._chunk_type.Free()
            self._chunk_type = None


class _StagedRequest:
    """A message between device arrays through pinned host memory."""

    __slots__ = ("cuda", "device", "host", "inner", "sends")

    def __init__(self, cuda: Cuda, device: Any, host: Any, inner: Any, sends: bool) -> None:
        self.cuda, self.device, self.host, self.inner, self.sends = cuda, device, host, inner, sends

    def Start(self) -> None:
        if self.sends:
            self.cuda.download(self.host, self.device)
        self.inner.Start()

    def Free(self) -> None:
        self.inner.Free()


class StagedTransport:
    """Device arrays over an MPI that takes host memory only: each message has a pinned host buffer."""

    name = "staged-mpi"

    def __init__(self, inner: MpiTransport, cuda: Cuda) -> None:
        self._inner, self._cuda = inner, cuda
        self.null = None

    def send(self, array: Any, peer: int, tag: int) -> _StagedRequest:
        host = self._cuda.pinned(array.nbytes)
        return _StagedRequest(self._cuda, array, host, self._inner.send(host, peer, tag), True)

    def recv(self, array: Any, peer: int, tag: int) -> _StagedRequest:
        host = self._cuda.pinned(array.nbytes)
        return _StagedRequest(self._cuda, array, host, self._inner.recv(host, peer, tag), False)

    def test_some(self, requests: list[_StagedRequest | None]) -> list[int]:
        null = self._inner.null
        done = self._inner.test_some([null if r is None else r.inner for r in requests]) or []
        for index in done:
            request = requests[index]
            assert request is not None
            if not request.sends:
                self._cuda.upload(request.device, request.host)
        return list(done)

    def flush(self) -> None:
        """Before a message is started, all that may still write its data must be finished."""
        self._cuda.synchronize()


class _LocalRequest:
    __slots__ = ("array", "finished", "key", "sends", "started", "switch")

    def __init__(self, switch: LocalSwitch, key: tuple[int, int, int], sends: bool, array: Any) -> None:
        self.switch, self.key, self.sends, self.array = switch, key, sends, array
        self.started = self.finished = False

    def Start(self) -> None:
        self.started, self.finished = True, False
        self.switch.offer(self)

    def Free(self) -> None:
        self.started = False


class LocalSwitch:
    """Joins the ends of the ranks of one process."""

    def __init__(self) -> None:
        self._offers: dict[tuple[tuple[int, int, int], bool], _LocalRequest] = {}

    def offer(self, request: _LocalRequest) -> None:
        """Match a started request with its counterpart, or keep it until that comes."""
        other = self._offers.pop((request.key, not request.sends), None)
        if other is None:
            self._offers[request.key, request.sends] = request
            return
        source, target = (request, other) if request.sends else (other, request)
        np.copyto(target.array, source.array)
        source.finished = target.finished = True


class LocalTransport:
    """One rank's end of a `LocalSwitch`."""

    name = "local"
    null = None

    def __init__(self, switch: LocalSwitch, rank: int) -> None:
        self._switch, self._rank = switch, rank

    def send(self, array: Any, peer: int, tag: int) -> _LocalRequest:
        return _LocalRequest(self._switch, (self._rank, peer, tag), True, array)

    def recv(self, array: Any, peer: int, tag: int) -> _LocalRequest:
        return _LocalRequest(self._switch, (peer, self._rank, tag), False, array)

    def test_some(self, requests: list[_LocalRequest | None]) -> list[int]:
        done = [i for i, r in enumerate(requests) if r is not None and r.started and r.finished]
        for i in done:
            request = requests[i]
            assert request is not None
            request.started = False
        return done

    def flush(self) -> None:
        """Host operations are finished when they return."""
