"""Where the measured bytes lie: host memory, or GPU memory with the copies that a message needs there."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from taccl.runtime import gpu


class Buffers(Protocol):
    """Memory that messages start from and end in."""

    name: str  # for people: which memory

    def wire(self, nbytes: int, outgoing: bool, slot: int) -> Any:
        """What MPI is given to send from or to receive into: `nbytes` bytes, one area per slot."""
        ...

    def before_send(self, wire: Any) -> None:
        """Make the bytes of a message ready for MPI."""
        ...

    def after_receive(self, wire: Any) -> None:
        """Bring the bytes that MPI delivered to where they are wanted."""
        ...


class HostBuffers:
    """numpy memory; nothing to do around a message."""

    name = "host memory"

    def __init__(self) -> None:
        self._areas: dict[tuple[bool, int], Any] = {}

    def wire(self, nbytes: int, outgoing: bool, slot: int) -> Any:
        area = self._areas.get((outgoing, slot))
        if area is None or area.nbytes < nbytes:
            # Written once, so that no page is touched for the first time while the clock runs.
            area = self._areas[outgoing, slot] = np.full(max(nbytes, 1), 1, dtype=np.uint8)
        return area[:nbytes]

    def before_send(self, wire: Any) -> None:
        return

    def after_receive(self, wire: Any) -> None:
        return


class Lengths:
    """For wires that have places of their own and want to know how long a message is."""

    name = "no memory"

    def wire(self, nbytes: int, outgoing: bool, slot: int) -> Any:
        return np.broadcast_to(np.zeros(1, np.uint8), nbytes)

    def before_send(self, wire: Any) -> None:
        return

    def after_receive(self, wire: Any) -> None:
        return


class StagedBuffers:
    """CuPy memory; each message is copied to pinned host memory, sent by MPI, and copied back.

    This path works with every MPI library. The copies belong to the measured time, as they belong to every
    message of a collective that runs on this path.
    """

    def __init__(self, ordinal: int) -> None:
        self._cupy = gpu.load()
        self._areas: dict[tuple[bool, int], tuple[Any, Any]] = {}
        self._device_of: dict[int, tuple[Any, Any]] = {}  # wire address -> (device area, host area)
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self.name = f"GPU {ordinal} memory (CuPy)"

    def wire(self, nbytes: int, outgoing: bool, slot: int) -> Any:
        areas = self._areas.get((outgoing, slot))
        if areas is None or areas[0].nbytes < nbytes:
            size = max(nbytes, 1)
            pinned = self._cupy.cuda.alloc_pinned_memory(size)
            host = np.frombuffer(pinned, dtype=np.uint8, count=size)
            host[:] = 1
            areas = self._areas[outgoing, slot] = (self._cupy.full(size, 1, dtype=np.uint8), host)
            self._device_of[host.ctypes.data] = areas
        return areas[1][:nbytes]

    def before_send(self, wire: Any) -> None:
        device, _ = self._device_of[wire.ctypes.data]
        device[: wire.nbytes].get(stream=self._stream, out=wire)
        self._stream.synchronize()

    def after_receive(self, wire: Any) -> None:
        device, _ = self._device_of[wire.ctypes.data]
        device[: wire.nbytes].set(wire, stream=self._stream)
        self._stream.synchronize()


def buffers(device: str, local_rank: int) -> Buffers:
    """The buffers for "host" or "cuda". Raises EnvironmentProblem when cuda is impossible."""
    if device == "host":
        return HostBuffers()
    return StagedBuffers(gpu.select(local_rank))
