"""A stand-in for CuPy on a machine without a GPU, as hostile as a GPU may be.

With its folder on PYTHONPATH, `import cupy` finds it in every rank of a job. Device memory is host memory, which numpy
and MPI see only through `__cuda_array_interface__`. Nothing that is put on a stream is done at once: streams queue it,
and do it late, in an order that is drawn by chance and that only the order within a stream, events and synchronisation
bound. Fresh memory holds rubbish. So a dependency that is forgotten gives wrong data. Copies outside of memory that is
allocated, pinned or open raise. Memory of `runtime.malloc` can be opened by other processes, once, and not by its own;
at its end a process says on stderr what it has not freed, closed or unregistered.

What can be asked for by environment variables:

- CUPY_DOUBLE_SEED: another order
- CUPY_DOUBLE_DEVICES: how many devices there are (1)
- CUPY_DOUBLE_PEERS=no: a device does not reach the memory of another one
- CUPY_DOUBLE_IPC=no: no memory can be exported
- CUPY_DOUBLE_REGISTER=no: host memory cannot be pinned
- CUPY_DOUBLE_NCCL=no, =hang, =wrong: there is no NCCL; it never begins; it brings wrong data
- CUPY_DOUBLE_BYTES: free memory of a device
- CUPY_DOUBLE_TYPES: what is reduced
- CUPY_DOUBLE_KERNELS: the kernels of `RawModule`, compiled for the host (kernels_on_host.py)
- CUPY_DOUBLE_DROP=wait, =query: streams do not wait for events; events have come as soon as they are asked for
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import random
import struct
import sys
import threading
import time
import types
import weakref
from collections import deque

import numpy as np

from taccl.runtime import shared

__version__ = "14.0.double"
float32, uint8 = np.float32, np.uint8

SETTINGS = os.environ.get
DEVICES = int(SETTINGS("CUPY_DOUBLE_DEVICES", "1"))
DROP = SETTINGS("CUPY_DOUBLE_DROP", "")
TYPES = SETTINGS(
    "CUPY_DOUBLE_TYPES", "bhilBHILefdE"
)  # numpy's letters of those that are reduced; E: bfloat16
RUBBISH = 0xA5
NOT_READY = 600
_chance = random.Random(f"{SETTINGS('CUPY_DOUBLE_SEED', '1')} of {SETTINGS('PMI_RANK', '0')}")


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(f"cudaError{status}")


# Streams and events


class _Mark:
    """A place in a stream that an event was recorded at."""

    def __init__(self, queue):
        self.queue, self.come, self.came_s = queue, False, 0.0


class Kernel:
    """Work that ends only when others do theirs; what is behind it on its stream waits."""

    def go_on(self):
        """Do what can be done; whether it has ended."""
        raise NotImplementedError


_queues: dict[int, deque] = {0: deque()}


def _first_can_be_done(queue):
    return bool(queue) and not (isinstance(queue[0], tuple) and not queue[0][0].come)


def _do_first(queue):
    if isinstance(queue[0], Kernel) and not queue[0].go_on():
        return
    item = queue.popleft()
    if isinstance(item, _Mark):
        item.come, item.came_s = True, time.perf_counter()
    elif not isinstance(item, tuple | Kernel):  # a wait that is over
        with np.errstate(all="ignore"):
            item()


def _go_on():
    """Time passes: some streams do something."""
    for _ in range(_chance.choice((0, 0, 0, 0, 1, 3))):
        able = [queue for queue in _queues.values() if _first_can_be_done(queue)]
        if not able:
            return
        _do_first(_chance.choice(able))


def _finish(queue, until=None):
    while queue and not (until is not None and until.come):
        if isinstance(queue[0], tuple):
            _finish(queue[0][0].queue, queue[0][0])
        if isinstance(queue[0], Kernel):
            time.sleep(20e-6)
        _do_first(queue)


class Stream:
    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        assert null or non_blocking, "a stream that the default one waits for"
        self.ptr = 0 if null else max(_queues) + 1
        self._queue = _queues.setdefault(self.ptr, deque())

    def wait_event(self, event):
        _go_on()
        if event._mark is not None and DROP != "wait":
            self._queue.append((event._mark,))

    def synchronize(self):
        _finish(self._queue)

    def __enter__(self):
        _current.append(self)
        return self

    def __exit__(self, *_):
        _current.pop()


Stream.null = Stream(null=True)
_current = [Stream.null]


def _put(work):
    _current[-1]._queue.append(work)
    _go_on()


_events = weakref.WeakValueDictionary()


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._mark, self._timed = None, not disable_timing
        self.ptr = id(self)
        _events[self.ptr] = self

    def record(self, stream=None):
        queue = (stream or _current[-1])._queue
        self._mark = _Mark(queue)
        queue.append(self._mark)
        _go_on()


def get_elapsed_time(start, end):
    """In ms, of two events with a time that have come; CUDA refuses others."""
    assert start._timed and end._timed and start._mark.come and end._mark.come
    return (end._mark.came_s - start._mark.came_s) * 1e3


def _event_query(event):
    _go_on()
    mark = _events[event]._mark  # one that was never recorded has come
    return 0 if mark is None or mark.come or DROP == "query" else NOT_READY


# Memory

_memory: dict[int, tuple[int, str]] = {}  # first address -> (bytes, kind)


def _register(array, kind):
    first = array.__array_interface__["data"][0]
    _memory[first] = array.nbytes, kind
    return first


def _check(address, nbytes):
    for first, (size, _) in _memory.items():
        if first <= address and address + nbytes <= first + size:
            return
    raise RuntimeError(f"{nbytes} bytes at {address:x} are no memory of the device, or not any more")


def _bytes_at(address, nbytes):
    if nbytes == 0:
        return np.empty(0, np.uint8)
    _check(address, nbytes)
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


class _Pool:
    """Memory that no other process can open."""

    def __init__(self, nbytes):
        self._array = np.full(max(nbytes, 1), RUBBISH, np.uint8)
        self.ptr = _register(self._array, "pool")
        weakref.finalize(self, _memory.pop, self.ptr)


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner = ptr, size, owner


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


def alloc_pinned_memory(nbytes):
    made = np.full(nbytes, RUBBISH, np.uint8)
    first = _register(made, "pinned")
    weakref.finalize(made, _memory.pop, first)
    return made.data


_own = shared.SharedMemory()
_allocated: dict[int, tuple[np.ndarray, int]] = {}
_opened: dict[int, tuple[np.ndarray, bytes]] = {}
_registered: set[int] = set()
_of_thread = threading.local()


def _malloc(size):
    if size > _free_bytes():
        raise CUDARuntimeError(2)
    array = _own.empty(size, np.uint8)
    array[:] = RUBBISH
    first = _register(array, "malloc")
    _allocated[first] = array, _get_device()
    return first


def _free(address):
    del _allocated[address], _memory[address]


def _free_bytes():
    return int(SETTINGS("CUPY_DOUBLE_BYTES", str(2**32)))


def _get_handle(address):
    if SETTINGS("CUPY_DOUBLE_IPC") == "no":
        raise CUDARuntimeError(801)
    for first, (array, device) in _allocated.items():
        if first <= address < first + array.nbytes:  # a handle is of the whole allocation
            place = _own.place(array)
            return struct.pack("<5q24x", place.process, place.fd, place.token, array.nbytes, device)
    raise CUDARuntimeError(1)


def _open_handle(handle, flags=1):
    process, fd, token, size, device = struct.unpack("<5q24x", handle)
    if process == os.getpid():
        raise CUDARuntimeError(201)
    if any(known == handle for _, known in _opened.values()):
        raise CUDARuntimeError(208)
    if device != _get_device() and SETTINGS("CUPY_DOUBLE_PEERS") == "no":
        raise CUDARuntimeError(217)
    array = shared.attach(process, fd, token, size, write=True)[:size]
    first = _register(array, "opened")
    _opened[first] = array, handle
    return first


def _close_handle(address):
    del _opened[address], _memory[address]


def _copy_async(target, source, nbytes, kind, stream):
    assert kind == 4
    _check(target, nbytes)
    _check(source, nbytes)

    def copy():
        _bytes_at(target, nbytes)[:] = _bytes_at(source, nbytes)

    _queues[stream].append(copy)
    _go_on()


def _host_register(address, nbytes, flags):
    """Memory that is not registered, copies refuse: CUDA copies it too, but not asynchronously."""
    if SETTINGS("CUPY_DOUBLE_REGISTER") == "no":
        raise CUDARuntimeError(801)
    if address in _registered:
        raise CUDARuntimeError(712)
    assert flags == 1 and address % mmap.PAGESIZE == 0
    assert nbytes % mmap.PAGESIZE == 0
    _registered.add(address)
    _memory[address] = nbytes, "registered"


def _host_unregister(address):
    _registered.remove(address)
    del _memory[address]


def _get_device():
    """The current device belongs to the thread."""
    return getattr(_of_thread, "device", 0)


def _set_device(ordinal):
    assert 0 <= ordinal < DEVICES
    _of_thread.device = ordinal


class Device:
    def __init__(self, ordinal):
        self._ordinal = ordinal

    def use(self):
        _set_device(self._ordinal)


@atexit.register
def _report():
    left = {"not freed": _allocated, "not closed": _opened, "still registered": _registered}
    if any(left.values()):
        said = ", ".join(f"{len(pieces)} {how}" for how, pieces in left.items())
        print(f"cupy double: pieces of memory: {said}", file=sys.stderr)
    if _nccl.left():
        print("cupy double: a communicator was neither destroyed nor aborted", file=sys.stderr)


runtime = types.SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    getDeviceCount=lambda: DEVICES,
    getDevice=_get_device,
    setDevice=_set_device,
    deviceGetAttribute=lambda attribute, ordinal: int(SETTINGS("CUPY_DOUBLE_MPS") or "0"),
    deviceGetPCIBusId=lambda ordinal: f"0000:{ordinal + 16:02X}:00.0",
    getDeviceProperties=lambda ordinal: {"name": b"Double"},
    memGetInfo=lambda: (_free_bytes(), _free_bytes()),
    malloc=_malloc,
    free=_free,
    hostRegister=_host_register,
    hostUnregister=_host_unregister,
    memcpyAsync=_copy_async,
    eventQuery=_event_query,
    ipcGetMemHandle=_get_handle,
    ipcOpenMemHandle=_open_handle,
    ipcCloseMemHandle=_close_handle,
)
cuda = types.SimpleNamespace(
    Device=Device,
    Event=Event,
    get_elapsed_time=get_elapsed_time,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    UnownedMemory=UnownedMemory,
    alloc_pinned_memory=alloc_pinned_memory,
    get_current_stream=lambda: _current[-1],
    nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
    runtime=runtime,
)


# After all that it uses.
from cupy import _nccl  # noqa: E402

sys.modules["cupy.cuda.nccl"] = _nccl  # no attribute of `cupy.cuda` before somebody has imported it


def get_default_memory_pool():
    return types.SimpleNamespace(free_all_blocks=lambda: None)


get_default_pinned_memory_pool = get_default_memory_pool


# Kernels


class RawModule:
    """Whatever its code, what was compiled for the host. A kernel sees memory as it is when its turn has come."""

    def __init__(self, code, options):
        self._library = ctypes.CDLL(SETTINGS("CUPY_DOUBLE_KERNELS"))

    def get_function(self, name):
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        pointers = (0, 3, 5, 6, 7, 8)

        def start(grid, block, arguments):
            plain = [each.data.ptr if isinstance(each, ndarray) else int(each) for each in arguments]
            converted = [
                (ctypes.c_uint32 if place == 2 else ctypes.c_uint64)(each) for place, each in enumerate(plain)
            ]

            def run():
                for place in pointers:
                    if plain[place]:
                        _check(plain[place], 1)
                self._library.launch(kernel, ctypes.c_uint32(grid[0]), ctypes.c_uint32(block[0]), *converted)

            _put(run)

        return start


# Arrays


class ndarray:
    """One-dimensional, contiguous, no buffer protocol."""

    def __init__(self, shape, dtype=float, memptr=None):
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        (self.size,) = self.shape
        self.ndim, self.flags = 1, types.SimpleNamespace(c_contiguous=True)
        self.device = types.SimpleNamespace(id=_get_device())
        self.dtype = np.dtype(dtype)
        self.nbytes = self.size * self.dtype.itemsize
        self.data = MemoryPointer(_Pool(self.nbytes), 0) if memptr is None else memptr

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "version": 3, "data": (self.data.ptr, False)}

    def _host(self):
        return _bytes_at(self.data.ptr, self.nbytes).view(self.dtype)

    def _now(self):
        _finish(_current[-1]._queue)
        return self._host()

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        if isinstance(key, slice):
            first, last, step = key.indices(self.size)
            assert step == 1
            pointer = MemoryPointer(
                self.data.mem, self.data.ptr - self.data.mem.ptr + first * self.dtype.itemsize
            )
            return ndarray(max(last - first, 0), self.dtype, pointer)
        return asarray(self._now()[key._now()])

    def __setitem__(self, key, value):
        if isinstance(value, ndarray):
            assert isinstance(key, ndarray) or self[key].size == value.size

        def put():
            plain = key._host() if isinstance(key, ndarray) else key
            self._host()[plain] = value._host() if isinstance(value, ndarray) else value

        _put(put)

    def __lt__(self, other):
        return asarray(self._now() < other)

    def __iadd__(self, other):
        _put(lambda: np.add(self._host(), other, out=self._host()))
        return self

    def __itruediv__(self, other):
        _put(lambda: np.true_divide(self._host(), other, out=self._host(), casting="unsafe"))
        return self

    def __ifloordiv__(self, other):
        _put(lambda: np.floor_divide(self._host(), other, out=self._host()))
        return self

    def sum(self):
        return asarray(self._now().sum().reshape(1))

    def view(self, dtype):
        return ndarray(self.nbytes // np.dtype(dtype).itemsize, dtype, self.data)

    def set(self, host, stream=None):
        kept = host.copy()  # pageable memory is copied before the call returns, the device's comes later
        with stream or _current[-1]:
            _put(lambda: self._host().__setitem__(slice(None), kept))

    def get(self, stream=None, out=None):
        out = np.empty(self.size, self.dtype) if out is None else out
        with stream or _current[-1]:
            out[:] = self._now()
        return out


def empty(elements, dtype=float):
    return ndarray(elements, dtype)


def zeros(elements, dtype=float):
    made = ndarray(elements, dtype)
    made[:] = 0
    return made


def full(elements, value, dtype=float):
    made = ndarray(elements, dtype)
    made[:] = value
    return made


def asarray(host):
    made = ndarray(host.size, host.dtype)
    made.set(host)
    return made


def arange(count, dtype=float):
    return asarray(np.arange(count, dtype=dtype))


def copyto(target, source):
    _put(lambda: np.copyto(target._host(), source._host()))


def _operation(function):
    def run(*arrays, out):
        assert all(array.size == out.size and array.dtype == out.dtype for array in arrays)
        _put(lambda: function(*(array._host() for array in arrays), out=out._host()))

    run.types = [f"{2 * char}->{char}" for char in TYPES]
    return run


add, multiply, minimum, maximum = map(_operation, (np.add, np.multiply, np.minimum, np.maximum))
