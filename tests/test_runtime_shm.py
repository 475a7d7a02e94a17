"""Shared memory with all ranks in this process, so that any order in which they go on can be tried.

Ranks are not held together between runs: one may begin its next run while others are in this one, as far as the
transport lets it.
"""

import random

import numpy as np
import pytest
import runtime_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import twin  # noqa: F401 - a fixture

from taccl.errors import EnvironmentProblem
from taccl.runtime import shm
from taccl.runtime.bind import Bound, Buffers, buffer_elements
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.layout import layout
from taccl.runtime.local import compile_all
from taccl.runtime.shared import SharedMemory
from taccl.runtime.switch import LocalSwitch, LocalTransport

TYPE = DTYPES["int64"]
STEPS = 200_000  # more than any of these runs takes


def values(rank, turn, elements):
    """A rank's input, another in every run."""
    return (np.arange(elements) + 1) * (rank + 3) + 1000 * turn


def expected(name, ranks, rank, turn, elements):
    inputs = [values(r, turn, elements) for r in range(ranks)]
    if name == "allgather":
        return np.concatenate(inputs)
    if name == "allreduce":
        return np.sum(inputs, 0)
    if name == "broadcast":
        return inputs[0]
    block = elements // ranks
    return np.concatenate([one[rank * block : (rank + 1) * block] for one in inputs])


def bind(program, elements, *, where, nodes, reads=False):
    """All ranks of a program, connected. where: of each rank, whether its buffers lie in shared memory. reads: whether
    private ones are read."""
    compiled = compile_all(program, False)
    collective = compiled.collective
    shape = layout(collective, elements)
    switch, bounds = LocalSwitch(), []
    op = "sum" if collective.combining else None
    for rank in range(program.ranks):
        memory = SharedMemory()
        node = next(node for node in nodes if rank in node)
        others = LocalTransport(switch, rank)
        transport = shm.SharedMemoryTransport(memory, rank, node, compiled.messages, others, reads)
        make = memory.empty if where[rank] else np.zeros
        buffers = Buffers(*(make(n, np.int64) for n in buffer_elements(collective, shape, rank)))
        bounds.append(Bound(compiled, rank, shape, buffers, TYPE, op, transport, np, memory.empty))
    offers = np.stack([bound.transport.offer() for bound in bounds])
    for bound in bounds:
        bound.connect(offers)
    return bounds


def drive(name, bounds, turns, seed):
    """Every rank runs `turns` times, in any order of small steps; the greatest lead of one rank over another."""
    chance, ranks = random.Random(seed), len(bounds)
    done, running, lead = [0] * ranks, [False] * ranks, 0
    for _ in range(STEPS):
        busy = [rank for rank in range(ranks) if done[rank] < turns]
        if not busy:
            return lead
        # Some ranks are slow for a while.
        rank = min(chance.sample(busy, min(len(busy), 2))) if chance.random() < 0.7 else chance.choice(busy)
        bound = bounds[rank]
        if not running[rank]:
            bound.user.input[:] = values(rank, done[rank], len(bound.user.input))
            bound.user.output[:] = -1
            bound.start()
            running[rank] = True
        if bound.executor.advance(chance.randint(1, 20)):
            bound.finish()
            elements = len(bound.user.input)
            right = expected(name, ranks, rank, done[rank], elements)
            np.testing.assert_array_equal(bound.user.output, right)
            running[rank] = False
            done[rank] += 1
            lead = max(lead, max(done) - min(done))
    pytest.fail(f"no end: {[bound.executor.describe() for bound in bounds]}")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["allgather", "allreduce", "broadcast", "alltoall"]),
    ranks=st.integers(2, 5),
    partition=st.integers(1, 3),
    blocks=st.integers(0, 60),
    split=st.integers(0, 4),
    lengths=st.tuples(st.sampled_from([0, 64, 10**6]), st.sampled_from([0, 256, 10**6])),
    reads=st.sampled_from([None, 0, 64, 256]),
    room=st.sampled_from([0, 4096, 10**8]),
    where=st.lists(st.booleans(), min_size=5, max_size=5),
    seed=st.integers(0, 10**6),
)
def test_every_way_in_every_order(name, ranks, partition, blocks, split, lengths, reads, room, where, seed):
    """Lent, as parcels, read, elsewhere; one node or two; buffers of some ranks shared: each run has its own data."""
    nodes = [tuple(range(min(split, ranks))), tuple(range(min(split, ranks), ranks))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "SHORT_BYTES", lengths[0])
        patch.setattr(shm, "PARCEL_BYTES", lengths[1])
        patch.setattr(shm, "READ_BYTES", reads)
        patch.setattr(shm, "ROOM_BYTES", room)
        program = programs.ALL[name](ranks, partition)
        bounds = bind(program, blocks * ranks, where=where, nodes=nodes, reads=reads is not None)
        lead = drive(name, bounds, 5, seed)
    for bound in bounds:
        bound.close()
        bound.transport.close()
    assert lead <= shm.ROOMS * (ranks - 1)


def test_a_sender_of_parcels_is_at_most_a_run_ahead_of_their_receiver():
    bounds = bind(programs.chain_broadcast(2), 8, where=[False, False], nodes=[(0, 1)])
    root = bounds[0]
    for _ in range(shm.ROOMS):
        root.start()
        assert root.executor.advance(5)
    root.start()
    assert not root.executor.advance(5)
    assert root.executor.describe() == "it waits for rank 1 to finish the run before the last one"
    bounds[1].start()
    assert bounds[1].executor.advance(5)
    assert root.executor.advance(5)


def test_short_messages_of_one_node_go_in_the_order_of_the_trace():
    everyone, apart = [(0, 1, 2)], [(0, 1), (2,)]
    program = programs.ring_allgather(3)
    long = 3 * (shm.ORDERED_BYTES // 8 + 1)
    for elements, nodes, buffered in ((12, everyone, True), (long, everyone, False), (12, apart, False)):
        bounds = bind(program, elements, where=[False] * 3, nodes=nodes)
        assert [bound.transport.buffered for bound in bounds] == [buffered] * 3
    bounds = bind(program, 12, where=[False] * 3, nodes=everyone)
    bounds[1].start()
    assert not bounds[1].executor.advance(5)
    words = "threadblock 0, step 2 waits for a message from rank 0, chunk 0 of its output"
    assert bounds[1].executor.describe() == words


def test_a_lender_waits_for_its_reader():
    bounds = bind(programs.chain_broadcast(2), 8192, where=[True, True], nodes=[(0, 1)])
    bounds[0].user.input[:] = 5
    bounds[0].start()
    assert not bounds[0].executor.advance(50)
    assert "step 0 waits for its message to be received by rank 1" in bounds[0].executor.describe()
    bounds[1].start()
    assert bounds[1].executor.advance(5) and (bounds[1].user.output == 5).all()
    assert bounds[0].executor.advance(5)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda control: control.__setitem__(slice(None), 0), "does not hold the memory"),
        (lambda control: control.__setitem__(-6, 2**40), "sends from outside of the memory"),
        (lambda control: control.__setitem__(-6, -8), "sends from outside of the memory"),
    ],
)
def test_what_a_sender_says_of_its_memory_is_checked(damage, words):
    compiled = compile_all(programs.chain_broadcast(2), False)
    memory, others = SharedMemory(), LocalTransport(LocalSwitch(), 0)
    sender = shm.SharedMemoryTransport(memory, 0, (0, 1), compiled.messages, others)
    array = memory.empty(10**5, np.uint8)  # lives until all is done
    sender.send(array, 1, 0)
    receiver = shm.SharedMemoryTransport(SharedMemory(), 1, (0, 1), compiled.messages, others)
    receiver.connect(np.stack([sender.offer(), receiver.offer()]))
    assert receiver.recv(np.zeros(10**5, np.uint8), 0, 0).view is not None
    damage(np.asarray(sender._control.cells))
    with pytest.raises(EnvironmentProblem, match=words):
        receiver.recv(np.zeros(10**5, np.uint8), 0, 0)


def test_a_control_memory_of_another_size_is_refused():
    others = LocalTransport(LocalSwitch(), 0)
    few, many = (shm.SharedMemoryTransport(SharedMemory(), r, (0, 1), [[0, n], [n, 0]], others)
                 for r, n in ((0, 1), (1, 100)))  # fmt: skip
    with pytest.raises(EnvironmentProblem, match="rank 1 shares a control memory of another size"):
        few.connect(np.stack([few.offer(), many.offer()]))
