"""Which ranks of a host exchange device memory through pinned memory of both; each pair tries it first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.job import Job
from taccl.runtime.shared import PAGE_BYTES, attach

TRIAL_WORDS = PAGE_BYTES // 8  # int64, that go from one device to another


@dataclass(frozen=True, slots=True)
class Staging:
    """Of each rank those that it exchanged data with, itself among them; why this one did not with all."""

    sharing: tuple[tuple[int, ...], ...]
    why_not: str


def share_pinned(job: Job, cuda: Cuda, near: Sequence[Sequence[int]], why_not: str) -> Staging:
    """Of the ranks that share host memory those whose devices copy from and to registered pieces of it (collective).

    near: of each rank those to try, itself among them. why_not: what keeps this rank from sharing host memory.
    """
    place, why, piece = np.zeros(3, np.int64), why_not, None
    if not why:
        try:
            piece = job.memory.empty(TRIAL_WORDS, np.int64)  # kept until all have tried to read it
            _copy(cuda, piece, _words(job.rank))
            where = job.memory.place(piece)
            assert where is not None
            place[:] = where.process, where.fd, where.token
        except EnvironmentProblem as problem:
            why = str(problem)
    everyone = job.gather_bytes(place.view(np.uint8), "the trial of pinned memory").view(np.int64)
    reached = np.zeros(job.ranks, np.uint8)
    reached[job.rank] = 1
    for rank in near[job.rank] if not why else ():
        if rank == job.rank:
            continue
        failed = f"rank {rank} cannot pin shared memory"
        if everyone[rank, 0]:
            failed = _try(cuda, everyone[rank].tolist(), rank)
        reached[rank] = not failed
        why = why or failed
    table = job.gather_bytes(reached, "the trial of pinned memory")
    del piece
    both = (table & table.T).astype(bool)
    sharing = tuple(tuple(int(r) for r in np.flatnonzero(row)) for row in both)
    alone = [r for r in near[job.rank] if r not in sharing[job.rank]]
    if alone and not why:
        why = f"rank {alone[0]} cannot read what this rank's device wrote to pinned memory"
    return Staging(sharing, why if alone else "")


def _words(rank: int) -> np.ndarray:
    return np.arange(TRIAL_WORDS, dtype=np.int64) + 1000 * rank


def _copy(cuda: Cuda, piece: np.ndarray, words: np.ndarray) -> None:
    """Let the device copy words to a piece. Raises EnvironmentProblem."""
    here = cuda.xp.empty(TRIAL_WORDS, np.int64)
    cuda.upload(here, words)
    _through(cuda, piece, address(piece), address(here))


def _through(cuda: Cuda, piece: np.ndarray, target: int, source: int) -> None:
    cuda.register(piece)
    try:
        cuda.copy(target, source, 8 * TRIAL_WORDS, cuda.xp.cuda.get_current_stream())()
        cuda.synchronize()
    except cuda.runtime.CUDARuntimeError as error:
        raise EnvironmentProblem(
            f"the device does not copy from or to pinned shared memory: {error}"
        ) from error
    finally:
        cuda.unregister(piece)


def _try(cuda: Cuda, place: list[int], rank: int) -> str:
    """Why a rank's memory cannot be read by the device here; empty when it can."""
    process, fd, token = place
    here, seen = cuda.xp.empty(TRIAL_WORDS, np.int64), np.zeros(TRIAL_WORDS, np.int64)
    try:
        there = attach(process, fd, token, 8 * TRIAL_WORDS, write=True)
        _through(cuda, there, address(here), address(there))
    except EnvironmentProblem as problem:
        return f"rank {rank}: {problem}"
    cuda.download(seen, here)
    right = (seen == _words(rank)).all()
    return "" if right else f"the pinned memory of rank {rank} holds other data than its device wrote"
