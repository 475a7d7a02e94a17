"""A rank that exchanges messages of a measurement by devices with all others; see test_measure_devices.py."""

import json
import random

import numpy as np

from taccl.profiles.measure import device_wire
from taccl.profiles.measure.boxes import SLOTS
from taccl.runtime import gpu
from taccl.runtime.device_memory import DeviceMemory
from taccl.runtime.device_trial import share_devices
from taccl.runtime.job import Job

STRETCH_BYTES = 4 << 20  # what comes in a round finds room without lying on itself
TAGS = (3, 4)
MESSAGES = 3 * SLOTS  # to each peer: more than have room
ROUNDS = 2
device_wire.STRETCH_BYTES, device_wire.LARGEST_BYTES = STRETCH_BYTES, 1


def content(rank):
    return np.random.default_rng(rank).integers(0, 256, STRETCH_BYTES, np.uint8)


def sent_to(source, target):
    """Tag and bytes of each message from one rank to another."""
    chance = random.Random(f"{source} {target}")
    return [(chance.choice(TAGS), chance.choice((1, 8, 300, 4096, 20_000))) for _ in range(MESSAGES)]


def exchange(job, cuda, wires):
    """How many messages hold what their sender's memory holds nowhere, and how many there are."""
    into = {
        peer: [wire.receiver(np.zeros(nbytes, np.uint8), tag) for tag, nbytes in sent_to(peer, job.rank)]
        for peer, wire in wires.items()
    }
    out = [
        wire.sender(np.zeros(nbytes, np.uint8), tag)
        for peer, wire in wires.items()
        for tag, nbytes in sent_to(job.rank, peer)
    ]
    theirs = {peer: content(peer).tobytes() for peer in wires}
    wrong = total = 0
    for _ in range(ROUNDS):
        left = [(peer, one) for peer, several in into.items() for one in several]
        for _, request in left:
            request.Start()
        for request in out:
            request.Start()
        leaving = out
        while left or leaving:
            leaving = [request for request in leaving if not request.Test()]
            for peer, request in left[:]:
                if request.Test():
                    left.remove((peer, request))
                    data = np.zeros(len(request.data), np.uint8)
                    seen = cuda.array(request.fetch.place, len(data), np.uint8, request)
                    cuda.download(data, seen)
                    wrong += data.tobytes() not in theirs[peer]
                    total += 1
            job.control.Iprobe()
        job.barrier()
    return wrong, total


with Job(20) as job:
    gpu.select(job.board.node_slot)
    cuda = gpu.Cuda(gpu.load())
    devices = DeviceMemory(cuda)
    found = share_devices(job, cuda, devices, job.share_memory())
    opened = device_wire.DeviceWires(job, cuda, devices, found, TAGS)
    cuda.upload(opened.stretches[0].memory, content(job.rank))
    job.barrier()
    counts = exchange(job, cuda, opened.wires)
    opened.close()
    wrong, total = job.reduce(np.array(counts), "sum").tolist()
    if job.rank == 0:
        print(json.dumps({"wrong": wrong, "messages": total}))
