"""Which ranks of a host reach each other's device memory; each pair tries it before the first message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.device_memory import HANDLE_BYTES, DeviceMemory
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.job import Job, Neighbours

TRIAL_WORDS = 8  # int64, that are copied from one rank to another
BUS_BYTES = 16


def share_devices(job: Job, cuda: Cuda, devices: DeviceMemory, found: Neighbours) -> Neighbours:
    """Of the ranks that share host memory, those that open each other's device memory (collective).

    found: what `Job.share_memory` found. Two ranks reach each other where both have opened and copied what the other
    exported. Gives the device of each rank too.
    """
    bus = cuda.bus_id()
    words = np.arange(TRIAL_WORDS, dtype=np.int64) + 1000 * job.rank
    mine = np.zeros(1 + BUS_BYTES + 8 + HANDLE_BYTES, np.uint8)
    mine[1 : 1 + BUS_BYTES] = _bytes(bus)
    why, trial = found.why_not, None  # the memory lives until all have tried to open it
    if not why:
        try:
            trial = devices.empty(TRIAL_WORDS, np.int64)
            cuda.upload(trial, words)
            place = devices.place(trial)
            assert place is not None
            mine[0] = 1
            mine[1 + BUS_BYTES :] = np.frombuffer(place.token.to_bytes(8, "little") + place.handle, np.uint8)
        except EnvironmentProblem as problem:
            why = str(problem)
    everyone = job.gather_bytes(mine, "the trial of device memory")
    reached = np.zeros(job.ranks, np.uint8)
    reached[job.rank] = 1
    for rank in found.sharing[job.rank] if not why else ():
        if rank == job.rank:
            continue
        failed = f"rank {rank} cannot export device memory"
        if everyone[rank, 0]:
            failed = _try(cuda, devices, everyone[rank, 1 + BUS_BYTES :].tobytes(), rank)
        reached[rank] = not failed
        why = why or failed
    # All have closed what they opened when this is known.
    table = job.gather_bytes(reached, "the trial of device memory")
    del trial
    both = (table & table.T).astype(bool)
    sharing = tuple(tuple(int(r) for r in np.flatnonzero(row)) for row in both)
    alone = [r for r in found.sharing[job.rank] if r not in sharing[job.rank]]
    if alone and not why:
        why = f"rank {alone[0]} does not reach this rank's device"
    names = tuple(row[1 : 1 + BUS_BYTES].tobytes().rstrip(b"\0").decode() for row in everyone)
    return replace(found, sharing=sharing, why_not=why, devices=names)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:BUS_BYTES].ljust(BUS_BYTES, b"\0"), np.uint8)


def _try(cuda: Cuda, devices: DeviceMemory, offered: bytes, rank: int) -> str:
    """Why a rank's memory cannot be read here; empty when it can."""
    token, handle = int.from_bytes(offered[:8], "little"), offered[8:]
    seen = np.zeros(TRIAL_WORDS, np.int64)
    here = cuda.xp.empty(TRIAL_WORDS, np.int64)
    try:
        there = devices.attach(token, handle)
    except EnvironmentProblem as problem:
        return f"rank {rank}: {problem}"
    try:
        stream = cuda.xp.cuda.get_current_stream()
        cuda.copy(address(here), there, here.nbytes, stream)()
        cuda.download(seen, here)
    except cuda.runtime.CUDARuntimeError as error:
        return f"the device memory of rank {rank} cannot be read: {error}"
    finally:
        devices.detach(token)
    right = np.arange(TRIAL_WORDS, dtype=np.int64) + 1000 * rank
    return "" if (seen == right).all() else f"the device memory of rank {rank} holds other data than it wrote"
