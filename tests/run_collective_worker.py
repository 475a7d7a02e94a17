"""A rank that opens programs as collectives and calls them several times. See test_running.py.

sys.argv: what to do, then the files of an allgather, an allreduce in place and a broadcast of three ranks.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from taccl import ErrorFeedback, Job, open_collective
from taccl.errors import UsageError

TURNS = 3


def turns(job, call, fill, expected, output, tolerance=0.0):
    """Elements that are wrong, over some turns with other values each."""
    wrong = 0
    for turn in range(TURNS):
        fill(job.rank, turn)
        call()
        wrong += int((np.abs(output - expected(turn)) > tolerance).sum())
    return wrong


def work(job, allgather, allreduce, broadcast):
    """Wrong elements of each, and the bytes of (values, frames) that this rank sent in the broadcast."""
    ranks, found = range(job.ranks), []

    def block(rank, turn):
        return np.arange(501, dtype=np.int32) * (rank + 1) + turn

    mine, all_blocks = np.zeros(501, np.int32), np.zeros(3 * 501, np.int32)
    with open_collective(job, allgather, mine, all_blocks) as gather:
        fill = lambda rank, turn: np.copyto(mine, block(rank, turn))  # noqa: E731
        found.append(
            turns(job, gather, fill, lambda t: np.concatenate([block(r, t) for r in ranks]), all_blocks)
        )
    total = np.zeros(1000)
    with open_collective(job, allreduce, total, total, op="avg") as average:
        fill = lambda rank, turn: total.fill(rank * 10.0 + turn)  # noqa: E731
        found.append(turns(job, average, fill, lambda turn: 10.0 + turn, total))
        # Two of them may be open; calls take turns.
        with open_collective(job, allreduce, total, total, op="max") as most:
            found.append(turns(job, most, fill, lambda turn: 20.0 + turn, total))
        found.append(turns(job, average, fill, lambda turn: 10.0 + turn, total))
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    given, got = np.zeros_like(values), np.zeros_like(values)
    with open_collective(job, Path(broadcast), given, got, codec="q8", links="all") as spread:
        fill = lambda rank, turn: np.multiply(values, turn if rank == 0 else 0, out=given)  # noqa: E731
        found.append(turns(job, spread, fill, lambda turn: values * turn, got, 0.05))
        found.append(int(np.array_equal(got, 2 * values) != (job.rank == 0)))
    spread.close()  # it is closed
    sent = spread.coded_bytes
    # A ring adds up what has been coded before: with feedback nothing gets lost for good.
    owed, ones = ErrorFeedback(5000), np.zeros_like(values)
    with open_collective(
        job, allreduce, ones, ones, codec="q8", links="all", feedback=owed, recode=True
    ) as again:
        everything = np.zeros(len(values))
        for _ in range(20):
            ones[:] = values
            again()
            everything += ones
    still = job.reduce(owed.residual, "sum")
    found.append(int((np.abs(everything + still - 60 * values) > 1e-3).sum()))
    # Nothing of one that is never called was coded; of no elements nothing is to do.
    with open_collective(job, Path(broadcast), given, got, codec="xw", links="all") as never:
        pass
    none = np.zeros(0, np.float32)
    with open_collective(job, allreduce, none, none, codec="q8", links="all", recode=True) as nothing:
        nothing()
    found.append(int(never.coded_bytes + nothing.coded_bytes != (0, 0, 0, 0)))
    return found, sent


def pair(job, file):
    """Wrong elements of an allreduce of two ranks in which the third one has no part."""
    array = np.full(1000 if job.rank < 2 else 0, job.rank + 1.0)
    with open_collective(job, file, array, array, collective="allreduce", groups="0,1") as summed:
        summed()
    return int((array != 3.0).sum())


with Job(20.0) as job:
    what, *files = sys.argv[1:]
    if what == "lengths":
        array = np.zeros(10 + job.rank // 2)
        open_collective(job, files[1], array, array)
    if what == "option":
        open_collective(job, files[1], np.zeros(10), np.zeros(10), codecs="q8")
    if what == "again":
        array = np.zeros(12, np.float32)
        open_collective(job, files[1], array, array, codec="q8", links="all")
    if what == "path":
        open_collective(job, 3, np.zeros(10), np.zeros(10))
    if what == "links":
        open_collective(job, files[1], np.zeros(10), np.zeros(10), codec="xw", links="some")
    if what == "list":
        open_collective(job, files[1], [0.0] * 10, np.zeros(10))
    if what == "mask":
        open_collective(job, files[1], np.ma.zeros(10), np.zeros(10))
    if what == "closed":
        array = np.zeros(12, np.float32)
        with open_collective(job, files[1], array, array) as summed:
            summed()
        summed()
    if what == "apart":
        open_collective(job, files[1], np.zeros(10), np.zeros(10))
    if what == "left":
        array = np.zeros(12, np.float32)
        summed = open_collective(job, files[1], array, array)
    elif what == "pair":
        os.write(1, f"{pair(job, files[0])}\n".encode())  # in one piece
    else:
        found, sent = work(job, *files)
        wrong = job.reduce(np.array(found), "sum").tolist()
        values, frames = job.reduce(np.array(sent), "sum").tolist()
        if job.rank == 0:
            print(json.dumps({"wrong": wrong, "values": values, "frames": frames}))
if what == "left":
    try:
        summed()
    except UsageError as error:
        print(error)
    summed.close()
