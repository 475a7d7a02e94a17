"""Whether an MSCCL++ plan waits for itself: its semaphores and channels counted, step by step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Op = dict[str, Any]


def waits_forever(gpus: list[dict[str, Any]]) -> int | None:
    """A rank that would; None if there is none. Every counter has one waiter, so one order decides for all."""
    count: dict[tuple[Any, ...], int] = defaultdict(int)
    at = {(gpu["id"], tb["id"]): 0 for gpu in gpus for tb in gpu["threadblocks"]}
    progress = True
    while progress:
        progress = False
        for gpu in gpus:
            for tb in gpu["threadblocks"]:
                here = (gpu["id"], tb["id"])
                while at[here] < len(tb["ops"]) and _can(tb["ops"][at[here]], gpu, tb, count):
                    at[here] += 1
                    progress = True
    waiting = [
        gpu["id"] for gpu in gpus for tb in gpu["threadblocks"] if at[gpu["id"], tb["id"]] < len(tb["ops"])
    ]
    return min(waiting, default=None)


def _can(op: Op, gpu: dict[str, Any], tb: dict[str, Any], count: dict[tuple[Any, ...], int]) -> bool:
    """Whether an operation can be done now; if so its effect on the counters happens."""
    if op["name"] in ("sem_acquire", "sem_release"):
        semaphore = (gpu["id"], op["semaphore_ids"][0])
        if op["name"] == "sem_acquire" and not count[semaphore]:
            return False
        count[semaphore] += 1 if op["name"] == "sem_release" else -1
        return True
    if op["name"] not in ("signal", "wait", "pws"):
        return True
    kind = op["channel_type"]
    own = next(c["channel_ids"] for c in tb["channels"] if c["channel_type"] == kind)[op["channel_ids"][0]]
    peers = next(c["connected_to"] for c in gpu["channels"] if c["channel_type"] == kind)
    peer = peers[own]
    ordinal = peers[:own].count(peer)  # the k-th channel of two ranks meets the other's k-th
    if op["name"] == "wait":
        inbound = (kind, peer, gpu["id"], ordinal)
        if not count[inbound]:
            return False
        count[inbound] -= 1
        return True
    count[kind, gpu["id"], peer, ordinal] += 1
    return True
