"""All ranks of a job as one NCCL communicator: who may have one, the trial before it is taken, how it ends.

NCCL's calls may block the host: the making of a communicator until all ranks have called, and the first exchange of two
ranks until both have, because they connect then. The first is done in a thread that is given up after a while. The
second is done for all pairs of a program before it runs, under the watchdog; in a run no call blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.job import Job
from taccl.runtime.machine import identity

LEAST_VERSION = 2700  # with ncclSend and ncclRecv
ID_BYTES = 128
TRIAL_WORDS = 1024  # int64, that each rank sends to the next one
TRIAL_S = 20.0
TEXT_BYTES = 512


def library(cuda: Cuda) -> Any:
    """CuPy's module of NCCL, which is there only when it is imported by its name; None without the library."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):  # it warns where the library is missing
        warnings.simplefilter("ignore")
        return importlib.import_module(f"{cuda.xp.__name__}.cuda.nccl")
    return None


Call = tuple[bool, int, int, int]  # whether it sends, address, bytes, peer


class NcclRanks:
    """A communicator of all ranks. Where nobody has closed it, it is aborted at the end of the process: to destroy it
    would wait for what others may never do."""

    def __init__(self, cuda: Cuda, unique_id: tuple[int, ...], rank: int, ranks: int) -> None:
        self._cuda, self._nccl, self.rank = cuda, library(cuda), rank
        self._error = self._nccl.NcclError
        self.version = int(self._nccl.get_version())  # 22703: 2.27.3
        self._comm = self._nccl.NcclCommunicator(ranks, unique_id, rank)
        self._abort = weakref.finalize(self, self._comm.abort)
        self._connected: set[tuple[int, int]] = set()

    def group(self, calls: Iterable[Call], stream: Any) -> None:
        """Put sends and receives on a stream, as one operation. Raises RunFailed, and gives up the communicator."""
        nccl, comm = self._nccl, self._comm
        try:
            nccl.groupStart()
            for sends, first, nbytes, peer in calls:
                (comm.send if sends else comm.recv)(first, nbytes, nccl.NCCL_UINT8, peer, stream.ptr)
            nccl.groupEnd()
        except self._error as error:
            self._abort()
            raise RunFailed(f"NCCL failed: {error}") from error

    def failed(self) -> str:
        """What NCCL says of an operation that has not ended, having given it up; empty when it goes on."""
        try:
            self._comm.check_async_error()
        except self._error as error:
            self._abort()
            return f"NCCL failed: {error}"
        return ""

    def connect(self, job: Job, pairs: Iterable[tuple[int, int]]) -> None:
        """Let pairs of ranks (source, target) exchange a byte each, for the first time (collective)."""
        new = sorted(set(pairs) - self._connected)
        self._connected.update(new)
        mine = [pair for pair in new if self.rank in pair]
        if not mine:
            return
        with job.waiting("it waits for NCCL to connect it with other ranks"):
            room = self._cuda.xp.empty(len(mine), np.uint8)
            stream, event = self._cuda.stream(), self._cuda.event()
            first = address(room)
            self.group(
                [
                    (source == self.rank, first + place, 1, target if source == self.rank else source)
                    for place, (source, target) in enumerate(mine)
                ],
                stream,
            )
            event.record(stream)
            while not self._cuda.done(event):
                if wrong := self.failed():
                    raise RunFailed(wrong)
                time.sleep(100e-6)

    def exchange(self, ranks: int, deadline: float) -> str:
        """Why numbers that each rank sends to the next do not come; empty when they do."""
        cuda = self._cuda
        there, here = cuda.xp.empty(TRIAL_WORDS, np.int64), cuda.xp.empty(TRIAL_WORDS, np.int64)
        cuda.upload(there, _words(self.rank))
        stream, event = cuda.stream(), cuda.event()
        after, before = (self.rank + 1) % ranks, (self.rank - 1) % ranks
        self.group(
            [(True, address(there), there.nbytes, after), (False, address(here), here.nbytes, before)], stream
        )
        event.record(stream)
        while not cuda.done(event):
            if wrong := self.failed():
                return wrong
            if time.monotonic() > deadline:
                self._abort()
                return f"numbers from rank {before} did not come within {TRIAL_S:g} s"
            time.sleep(100e-6)
        seen = np.zeros(TRIAL_WORDS, np.int64)
        cuda.download(seen, here)
        return "" if (seen == _words(before)).all() else f"NCCL brought other numbers than rank {before} sent"

    def abort(self) -> None:
        """Give it up, whatever is under way."""
        self._abort()

    def close(self, job: Job) -> None:
        """Give it up when all ranks are done with it (collective)."""
        with job.waiting("it waits for NCCL to end"):
            if self._abort.detach() is not None:
                self._comm.destroy()


def _words(rank: int) -> np.ndarray[Any, Any]:
    return np.arange(TRIAL_WORDS, dtype=np.int64) + 1000 * rank


def open_nccl(job: Job, cuda: Cuda) -> tuple[NcclRanks | None, str]:
    """A communicator of all ranks that has moved data, or why there is none (collective; all get the same)."""
    why = _agreed(job, why_no_library(cuda)) or _shared_device(job, cuda)
    if why:
        return None, why
    offered = np.zeros(1 + ID_BYTES, np.int8)
    if job.rank == 0:
        try:
            offered[1:] = library(cuda).get_unique_id()
            offered[0] = 1
        except library(cuda).NcclError as error:
            why = f"NCCL cannot begin: {error}"
    unique_id = job.gather_bytes(offered.view(np.uint8), "the beginning of NCCL")[0].view(np.int8)
    if why := _agreed(job, why):
        return None, why
    # Shorter than the watchdog's patience: ranks that are done wait for the others.
    limit_s = min(TRIAL_S, job.watchdog.deadline_s / 2)
    found, why = _within(limit_s, lambda: _begin(job, cuda, tuple(unique_id[1:].tolist()), limit_s), cuda)
    why = _agreed(job, why)
    if why and found is not None:
        found.abort()
    return (None, why) if why else (found, "")


def _begin(job: Job, cuda: Cuda, unique_id: tuple[int, ...], limit_s: float) -> tuple[NcclRanks | None, str]:
    deadline = time.monotonic() + limit_s
    try:
        found = NcclRanks(cuda, unique_id, job.rank, job.ranks)
    except library(cuda).NcclError as error:
        return None, f"NCCL cannot begin: {error}"
    try:
        return found, found.exchange(job.ranks, deadline) if job.ranks > 1 else ""
    except (RunFailed, cuda.runtime.CUDARuntimeError) as error:
        return found, str(error)


def _within(
    limit_s: float, work: Callable[[], tuple[NcclRanks | None, str]], cuda: Cuda
) -> tuple[NcclRanks | None, str]:
    """What work gives, in a thread of its own that is left behind when it does not end: nothing can interrupt it."""
    device = cuda.runtime.getDevice()  # each thread has its own current device
    result: list[tuple[NcclRanks | None, str]] = []

    def do() -> None:
        cuda.xp.cuda.Device(device).use()
        try:
            result.append(work())
        except Exception as error:  # a message for all ranks, instead of one that dies in a thread
            result.append((None, f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=do, name="taccl-nccl", daemon=True)
    thread.start()
    thread.join(limit_s + 1.0)
    return result[0] if result else (None, f"NCCL gave no answer within {limit_s:g} s")


def _agreed(job: Job, why: str) -> str:
    """The first rank's reason, on all ranks; empty when none has any."""
    mine = np.frombuffer(why.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"), np.uint8)
    everyone = job.gather_bytes(mine, "the trial of NCCL")
    reasons = [
        (rank, row.tobytes().rstrip(b"\0").decode(errors="replace")) for rank, row in enumerate(everyone)
    ]
    said = [(rank, text) for rank, text in reasons if text]
    if not said:
        return ""
    alike = len(said) == job.ranks and len({text for _, text in said}) == 1
    return said[0][1] if alike else f"rank {said[0][0]}: {said[0][1]}"


def why_no_library(cuda: Cuda) -> str:
    """Why NCCL's point-to-point calls cannot be called; empty when they can."""
    nccl = library(cuda)
    if nccl is None or not getattr(nccl, "available", False):
        return "CuPy finds no NCCL library (pip install nvidia-nccl-cu13, or -cu12 for CUDA 12)"
    version = nccl.get_version()
    return "" if version >= LEAST_VERSION else f"NCCL {version} has no point-to-point calls; use 2.7 or later"


def _shared_device(job: Job, cuda: Cuda) -> str:
    """Which ranks are on one GPU, which NCCL refuses; empty when none are. A host is known by its kernel's start, so
    that containers on one host are seen to be on it."""
    host = identity(job.board.node)
    bus = cuda.bus_id()
    mine = hashlib.sha256(f"{host} {bus.lower()}".encode()).digest()
    rows = [row.tobytes() for row in job.gather_bytes(np.frombuffer(mine, np.uint8), "the look at devices")]
    for place in rows:
        ranks = [str(rank) for rank, other in enumerate(rows) if other == place]
        if len(ranks) > 1:
            names = f"{', '.join(ranks[:-1])} and {ranks[-1]}"
            return f"ranks {names} are on one GPU, and NCCL wants one for each rank"
    return ""
