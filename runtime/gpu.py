"""The one door to CuPy: which device to use, and why there is none.

Nothing else in the package imports cupy. CuPy imports without a driver and fails only at the first call, so
"usable" is asked once, here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem, RunFailed, UsageError

Array = np.ndarray[Any, Any]

DEVICES = ("auto", "host", "cuda")


@functools.lru_cache(maxsize=1)
def _probe() -> tuple[Any, str]:
    """(cupy or None, why there is none)."""
    try:
        with warnings.catch_warnings():  # CuPy warns at import about optional libraries that it misses
            warnings.simplefilter("ignore")
            import cupy
    except ImportError as error:
        return (
            None,
            f"CuPy cannot be imported ({error}); pip install 'taccl[gpu-cuda13]' (or -cuda12)",
        )
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"CuPy finds no usable NVIDIA driver ({error})"
    if count == 0:
        return None, "the NVIDIA driver lists no device (see CUDA_VISIBLE_DEVICES)"
    try:
        # Every operation on arrays is compiled first.
        if (compiler := getattr(cupy.cuda, "nvrtc", None)) is not None:
            compiler.getVersion()
    except (ImportError, RuntimeError) as error:
        return (
            None,
            f"CuPy cannot compile ({error}); pip install 'taccl[gpu-cuda13]' (or -cuda12) brings what it needs",
        )
    return cupy, ""


def load() -> Any:
    """The module cupy when it can be imported and sees a device, else None."""
    return _probe()[0]


def why_not() -> str:
    """Why `load` gives None, and what to do; empty when it does not."""
    return _probe()[1]


def choose(device: str) -> str:
    """Resolve `auto | host | cuda` to "host" or "cuda".

    Raises UsageError for another word and EnvironmentProblem when cuda is asked for and impossible.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}; known: {', '.join(DEVICES)}")
    if device == "cuda" and load() is None:
        raise EnvironmentProblem(f"no CUDA device can be used: {why_not()}")
    if device == "auto":
        return "host" if load() is None else "cuda"
    return device


def check_reductions(types: Iterable[np.dtype[Any]], instead: str = "give --accumulate float32") -> None:
    """Raise EnvironmentProblem for a type that CuPy cannot reduce: bfloat16, without ml_dtypes or before CuPy 14.
    instead: what a person can do without another CuPy."""
    cupy = load()
    for dtype in types:
        if f"{dtype.char * 2}->{dtype.char}" not in cupy.add.types:
            raise EnvironmentProblem(
                f"CuPy {cupy.__version__} does not reduce {dtype.name}; {instead}, or install CuPy 14 or later and "
                "ml_dtypes"
            )


def select(local_rank: int) -> int:
    """Make the device of this rank current (ranks of a node share the devices evenly); gives its ordinal.

    Raises EnvironmentProblem without CuPy or a device.
    """
    cupy = load()
    if cupy is None:
        raise EnvironmentProblem(f"no CUDA device can be used: {why_not()}")
    ordinal = local_rank % int(cupy.cuda.runtime.getDeviceCount())
    cupy.cuda.Device(ordinal).use()
    return ordinal


NOT_READY = 600  # cudaErrorNotReady
ANY_WAY = 4  # cudaMemcpyDefault: the addresses say which way
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
MPS_ENABLED = 133  # cudaDevAttrMpsEnabled


class Cuda:
    """The device operations that the runtime needs, on the current device.

    `xp` is cupy (or a module like it: everything here goes through it, so a double in host memory can stand
    in for a GPU).
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    @property
    def runtime(self) -> Any:
        """CUDA's runtime, call by call."""
        return self.xp.cuda.runtime

    def stream(self, priority: int | None = None) -> Any:
        """A stream that waits for no other one unless it is told to. priority: the device takes up lower ones first."""
        if priority is None:
            return self.xp.cuda.Stream(non_blocking=True)
        return self.xp.cuda.Stream(non_blocking=True, priority=priority)

    def event(self) -> Any:
        """An event without a time."""
        return self.xp.cuda.Event(disable_timing=True)

    def clock(self) -> Any:
        """An event with a time."""
        return self.xp.cuda.Event()

    def between_s(self, first: Any, last: Any) -> float:
        """The time between two events of `clock` that have come."""
        return float(self.xp.cuda.get_elapsed_time(first, last)) / 1e3

    def done(self, event: Any) -> bool:
        """Whether the event, as it was last recorded, has come. Raises RunFailed when work on the device failed."""
        status = self.runtime.eventQuery(event.ptr)
        if status == 0:
            return True
        if status == NOT_READY:
            return False
        raise RunFailed(f"work on the device failed: {self.runtime.CUDARuntimeError(status)}")

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> Callable[[], object]:
        """What puts a copy between two addresses, of the device or of pinned host memory, on a stream."""
        return functools.partial(self.runtime.memcpyAsync, target, source, nbytes, ANY_WAY, stream.ptr)

    def within(self, stream: Any, work: Callable[[], object]) -> Callable[[], object]:
        """What puts array operations on a stream."""

        def put() -> None:
            with stream:
                work()

        return put

    def array(self, address: int, elements: int, dtype: Any, owner: object) -> Any:
        """(elements,) of device memory that lives as long as the owner, which the array keeps."""
        nbytes = elements * np.dtype(dtype).itemsize
        memory = self.xp.cuda.UnownedMemory(address, nbytes, owner, self.runtime.getDevice())
        return self.xp.ndarray((elements,), dtype, self.xp.cuda.MemoryPointer(memory, 0))

    def pinned(self, nbytes: int) -> Array:
        """(nbytes,) uint8 host memory that the device copies from and to at full speed. Raises EnvironmentProblem."""
        try:
            memory = self.xp.cuda.alloc_pinned_memory(max(nbytes, 1))
        except self.runtime.CUDARuntimeError as error:
            raise EnvironmentProblem(f"{nbytes} bytes of host memory cannot be pinned: {error}") from error
        return np.frombuffer(memory, np.uint8, nbytes)

    def register(self, array: Array) -> None:
        """Pin host memory that exists already, whole pages of it, as `pinned` memory is. Raises EnvironmentProblem
        where the device or the limit of locked memory does not allow it."""
        try:
            self.runtime.hostRegister(address(array), array.nbytes, PORTABLE)
        except self.runtime.CUDARuntimeError as error:
            raise EnvironmentProblem(
                f"{array.nbytes} bytes of shared memory cannot be pinned: {error}"
            ) from error

    def unregister(self, array: Array) -> None:
        """Give up what `register` did, when no copy from or to the memory is under way."""
        self.runtime.hostUnregister(address(array))

    def upload(self, target: Any, source: Array) -> None:
        """Copy host bytes to the device; done when it returns."""
        target.view(np.uint8).set(source.view(np.uint8))
        self.synchronize()

    def download(self, target: Array, source: Any) -> None:
        """Copy device bytes to the host, after all that was started before; done when it returns."""
        source.view(np.uint8).get(out=target.view(np.uint8))
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for everything that was started on the current stream."""
        self.xp.cuda.get_current_stream().synchronize()

    def give_back(self) -> None:
        """Free what CuPy keeps for later."""
        self.xp.get_default_memory_pool().free_all_blocks()
        self.xp.get_default_pinned_memory_pool().free_all_blocks()

    def free_bytes(self) -> int:
        """Free memory of the device."""
        return int(self.runtime.memGetInfo()[0])

    def alternates(self) -> bool:
        """Whether processes that use the device take turns there: without CUDA's MPS. False where CUDA does not say."""
        try:
            return not self.runtime.deviceGetAttribute(MPS_ENABLED, self.runtime.getDevice())
        except self.runtime.CUDARuntimeError:  # a CUDA that knows no such attribute
            return False

    def bus_id(self) -> str:
        """What names the device on its host, whatever CUDA_VISIBLE_DEVICES says."""
        return str(self.runtime.deviceGetPCIBusId(self.runtime.getDevice()))


def address(array: Any) -> int:
    """Where an array begins, of the device or of the host."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)
