"""Messages of a measurement between ranks whose devices reach each other's memory, which go as those of programs do
there (`runtime/cuda_ipc.py`): the sender sets a flag in shared memory, the receiver's device copies from the sender's,
on a stream, an event says when that is done, and the receiver sets a flag.

Short messages go so too, and answers, as programs have no other way. As in host memory (`shm_wire.py`) messages lie one
behind the other in a stretch of memory that is longer than the device's cache (50 MB on an H100).

A stretch is open in other processes. So all ranks close their wires before any rank's memory goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from taccl.profiles.measure.boxes import (
    InBox,
    OutBox,
    Part,
    Receive,
    Send,
    boxes,
    part_bytes,
    share_parts,
)
from taccl.profiles.measure.devices import LARGEST_BYTES
from taccl.runtime.device_memory import HANDLE_BYTES, PIECE_BYTES
from taccl.runtime.gpu import address

if TYPE_CHECKING:
    from taccl.profiles.measure.wires import Request
    from taccl.runtime.device_memory import DeviceMemory
    from taccl.runtime.gpu import Cuda
    from taccl.runtime.job import Job, Neighbours

ROOMS = (0, 0)  # nothing is copied to a slot
STRETCH_BYTES = 256 * 2**20
ALIGNED_BYTES = 256  # messages begin at multiples of it, as memory of a device does


def needed_bytes(largest_bytes: int = 0) -> int:
    """Device memory that a rank's messages take. largest_bytes: of the longest one, where that is known."""
    return 2 * _stretch_bytes(largest_bytes) + PIECE_BYTES


def _stretch_bytes(largest_bytes: int) -> int:
    return max(STRETCH_BYTES, LARGEST_BYTES, largest_bytes)


class DeviceWires:
    """To each rank whose device this one's reaches. Made by all ranks of the job together, and closed by all.

    found: who reaches whom, as `share_devices` says. tags: of messages, and of answers. largest_bytes: as in
    `needed_bytes`.
    """

    def __init__(
        self,
        job: Job,
        cuda: Cuda,
        devices: DeviceMemory,
        found: Neighbours,
        tags: tuple[int, int],
        largest_bytes: int = 0,
    ) -> None:
        self._job, self._devices = job, devices
        self._opened: list[int] = []  # tokens
        self.wires: dict[int, DeviceWire] = {}
        nbytes = _stretch_bytes(largest_bytes)
        # Its device has no other memory that a program's messages come from or go to.
        self.stretches = job.together(
            "the sharing of device memory",
            lambda: (_Stretch(devices.empty(nbytes, np.uint8)), _Stretch(cuda.xp.empty(nbytes, np.uint8))),
        )
        place = job.together("the sharing of device memory", lambda: devices.place(self.stretches[0].memory))
        assert place is not None
        record = np.frombuffer(
            np.array([place.token, self.stretches[0].first - place.offset], np.int64).tobytes()
            + place.handle,
            np.uint8,
        )
        offers = job.gather_bytes(record, "the sharing of device memory")
        parts = share_parts(job, found.sharing, part_bytes(ROOMS))
        job.together("the sharing of device memory", lambda: self._open(cuda, parts, offers, tags))

    def _open(self, cuda: Cuda, parts: Mapping[int, Part], offers: Any, tags: tuple[int, int]) -> None:
        for peer, part in parts.items():
            token, first = offers[peer, :-HANDLE_BYTES].view(np.int64).tolist()
            here = self._devices.attach(token, offers[peer, -HANDLE_BYTES:].tobytes())
            self._opened.append(token)
            self.wires[peer] = DeviceWire(cuda, peer, part, self.stretches, here - first, tags)

    def close(self) -> None:
        """Let go of all memory, when nothing is under way; waits for the other ranks."""
        self.wires.clear()
        for token in self._opened:
            self._devices.detach(token)
        self._opened.clear()
        self._job.barrier()
        del self.stretches


class DeviceWire:
    """Messages to and from one peer. stretches: of what leaves, and of what comes. shift: from an address of the peer
    to this rank's of the same memory."""

    def __init__(
        self,
        cuda: Cuda,
        peer: int,
        part: Part,
        stretches: tuple[_Stretch, _Stretch],
        shift: int,
        tags: tuple[int, int],
    ) -> None:
        self._cuda, self._shift, self._into = cuda, shift, stretches[1]
        outgoing, incoming = boxes(part.mine, ROOMS), boxes(part.theirs, ROOMS)
        self._out = dict(zip(tags, (OutBox(box, stretches[0].lay) for box in outgoing), strict=True))
        # As the threadblocks of a program, what comes has a stream for each kind.
        self._in = {tag: (InBox(peer, box), cuda.stream()) for tag, box in zip(tags, incoming, strict=True)}

    def sender(self, data: Any, tag: int) -> Request:
        return Send(self._out[tag], data)

    def receiver(self, data: Any, tag: int) -> Request:
        box, stream = self._in[tag]
        return Receive(box, data, Copy(self._cuda, stream, len(data), self._shift, self._into))


class Copy:
    """Copies a message of one length to this rank's device."""

    def __init__(self, cuda: Cuda, stream: Any, nbytes: int, shift: int, into: _Stretch) -> None:
        self._cuda, self._stream, self._nbytes, self._shift, self._into = cuda, stream, nbytes, shift, into
        self._event = cuda.event()
        self.place = 0  # the address of what came last

    def start(self, where: int) -> bool:
        self.place = self._into.lay(self._nbytes)
        self._cuda.copy(self.place, where + self._shift, self._nbytes, self._stream)()
        self._event.record(self._stream)
        return False

    def done(self) -> bool:
        return self._cuda.done(self._event)


class _Stretch:
    """Device memory in which messages lie one behind the other."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.first = memory, address(memory)
        self._next = 0

    def lay(self, nbytes: int) -> int:
        """The address of the next message."""
        if self._next + nbytes > self.memory.nbytes:
            self._next = 0
        first = self._next
        self._next += -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return self.first + first
