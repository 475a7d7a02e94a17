"""Reading other processes' memory."""

import ctypes
import mmap
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from taccl.errors import RunFailed
from taccl.runtime import process_memory


def described(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(5, np.uint8), np.zeros(5, ml_dtypes.bfloat16)[2:], np.zeros((3, 4))[:, 1], np.zeros((3, 4))[1:],
        np.frombuffer(b"abcd", np.uint8), np.zeros(0, np.float32), np.zeros(7, np.uint8)[::-2],
        np.array(3, np.int64), np.zeros(8, bool)[1:],
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)  # fmt: skip
def test_where_arrays_begin(array):
    assert process_memory.address(array) == described(array)


HOLDER = """
import sys, numpy as np
data = np.arange(100000, dtype=np.int64) * 3
print(data.__array_interface__["data"][0], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """A process that holds the multiples of 3, and their address there."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        place = int(process.stdout.readline())
        if why := process_memory.why_not(process.pid, place + 8, 3):
            process.kill()
            pytest.skip(why)
        yield process, place
        process.kill()


@pytest.mark.parametrize("most", [2**30, 4096, 808, 1])
def test_what_another_process_holds(holder, monkeypatch, most):
    """In one call or in many."""
    process, place = holder
    monkeypatch.setattr(process_memory, "MOST_BYTES", most)
    for first, count in ((0, 300), (7, 1), (99000, 1000) if most > 1 else (99990, 10)):
        found = np.full(count + 2, -1)
        process_memory.reader(3, process.pid, place + 8 * first, found[1:-1])()
        assert found.tolist() == [-1, *range(3 * first, 3 * (first + count), 3), -1]


def test_a_process_that_has_ended_is_named(holder):
    process, place = holder
    read = process_memory.reader(3, process.pid, place, np.zeros(1000))
    read()
    process.kill()
    process.wait()
    with pytest.raises(RunFailed, match=r"^rank 3 has died \(killed or crashed\)$"):
        read()


def test_memory_that_is_not_there_is_not_taken_for_data(holder):
    process, place = holder
    for beyond in (2**46, place + 2**40):
        with pytest.raises(RunFailed, match="cannot be read: Bad address"):
            process_memory.reader(3, process.pid, beyond, np.zeros(1000))()
    with pytest.raises(RunFailed, match=r"bytes of rank 3 .* cannot be read: Bad address"):
        process_memory.reader(3, process.pid, place, np.zeros(2**28, np.uint8))()


def test_memory_that_nobody_may_read_is_found_by_its_owner():
    """Arrays there go another way: the kernel would not read them for other ranks either."""
    assert process_memory.readable(np.zeros(100_000)) and process_memory.readable(np.zeros(1, np.uint8))
    pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    array = np.frombuffer(pages, np.uint8)
    assert process_memory.readable(array)
    libc, place = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(process_memory.address(array))
    last = ctypes.c_void_p(place.value + 3 * mmap.PAGESIZE)
    assert libc.mprotect(last, mmap.PAGESIZE, 0) == 0
    assert not process_memory.readable(array) and process_memory.readable(array[: 3 * mmap.PAGESIZE])
    assert libc.mprotect(last, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_why_memory_is_not_read(holder, monkeypatch):
    process, place = holder
    assert (
        process_memory.why_not(process.pid, place + 8, 4) == "other ranks' processes have other numbers here"
    )
    assert process_memory.why_not(process.pid, 8, 3) == "process_vm_readv: Bad address"
    monkeypatch.setattr(process_memory, "_readv", None)
    assert process_memory.why_not(process.pid, place + 8, 3) == "this system has no process_vm_readv"
