"""The order of steps, the matching of messages, and the programs that cannot run."""

import dataclasses

import pytest
import runtime_programs as programs

from taccl.errors import InvalidInput
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace


def replace_step(program, rank, tb, number, **changes):
    """The program with one step changed."""
    gpu = program.gpus[rank]
    block = gpu.threadblocks[tb]
    steps = list(block.steps)
    steps[number] = dataclasses.replace(steps[number], **changes)
    return replace_block(program, rank, tb, steps=tuple(steps))


def replace_block(program, rank, tb, **changes):
    gpu = program.gpus[rank]
    blocks = list(gpu.threadblocks)
    blocks[tb] = dataclasses.replace(blocks[tb], **changes)
    gpus = list(program.gpus)
    gpus[rank] = dataclasses.replace(gpu, threadblocks=tuple(blocks))
    return dataclasses.replace(program, gpus=tuple(gpus))


@pytest.mark.parametrize("name", sorted(programs.ALL))
def test_order_holds_every_step_once_and_respects_program_order(name):
    program = programs.ALL[name](4, 2)
    found = trace(program)
    places = [
        (gpu.rank, index, number)
        for gpu in program.gpus
        for index, tb in enumerate(gpu.threadblocks)
        for number in range(len(tb.steps))
    ]
    assert sorted(found.order) == places
    position = {place: at for at, place in enumerate(found.order)}
    for rank, tb, number in places:
        if number:
            assert position[rank, tb, number - 1] < position[rank, tb, number]


def test_tags_number_the_messages_of_each_pair_without_gaps():
    found = trace(programs.direct_alltoall(3))
    for rank in range(3):
        tags = [tag for place, tag in found.send_tag.items() if place[0] == rank]
        assert tags == [0, 0]  # one message to each of two peers
    chain = trace(programs.chain_broadcast(3, 5))
    assert sorted(tag for place, tag in chain.send_tag.items() if place[0] == 0) == [0, 1, 2, 3, 4]


def test_messages_arrive_after_they_are_sent():
    found = trace(programs.ring_allgather(4))
    position = {place: at for at, place in enumerate(found.order)}
    # step 1 of each rank sends its own chunk, step 2 of the next rank receives it
    for rank in range(4):
        assert position[rank, 0, 1] < position[(rank + 1) % 4, 0, 2]


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda p: replace_step(p, 1, 0, 4, kind="nop", count=0), "R106", "sends 3 messages to rank 1"),
        (lambda p: replace_step(p, 1, 0, 1, count=2, src_offset=0), "R107", "sends 2 chunks"),
        (lambda p: replace_step(p, 2, 0, 2, dst_offset=9), "R104", "rank 2, threadblock 0, step 2"),
        (lambda p: replace_step(p, 2, 0, 0, depends=(7, 0)), "R103", "threadblock 7, step 0"),
        (lambda p: replace_block(p, 3, 0, send=3), "R101", "other than itself"),
        (lambda p: replace_step(p, 0, 0, 0, depends=(0, 4)), "R105", "never finishes"),
    ],
)
def test_programs_that_cannot_run_are_refused_with_the_place(damage, code, words):
    with pytest.raises(InvalidInput) as caught:
        trace(damage(programs.ring_allgather(4)))
    assert caught.value.diagnostics[0].code == code
    assert words in str(caught.value)


def test_two_threadblocks_on_one_end_of_a_connection_are_refused():
    program = programs.ring_allgather(2)
    gpu = program.gpus[0]
    twin = dataclasses.replace(gpu.threadblocks[0], id=1)
    gpus = (dataclasses.replace(gpu, threadblocks=(*gpu.threadblocks, twin)), program.gpus[1])
    with pytest.raises(InvalidInput, match="two threadblocks share one end"):
        trace(dataclasses.replace(program, gpus=gpus))


def test_receive_cycle_is_named():
    steps = [("r", "i", 0, "o", 0, 1), ("s", "i", 0, "o", 0, 1)]
    gpus = [(1, 1, 0, [(1 - r, 1 - r, 0, steps)]) for r in (0, 1)]
    waiting = programs.program("sendrecv", 2, 1, gpus)
    with pytest.raises(InvalidInput, match="rank 0, threadblock 0, step 0 waits in a cycle"):
        trace(waiting)


def test_demand_of_an_alltoallv_follows_from_its_moves():
    demand = [[1, 2, 0], [0, 0, 3], [2, 2, 2]]
    program = programs.direct_alltoallv(demand)
    found = collective_of(program, trace(program))
    counted = [[0] * 3 for _ in range(3)]
    for chunk in found.chunks:
        counted[chunk.sources[0][0]][chunk.destinations[0][0]] += 1
    assert counted == demand


def test_alltoallv_out_of_order_is_refused():
    program = programs.direct_alltoallv([[0, 2], [2, 0]])
    swapped = replace_block(
        program, 1, 0,
        steps=(
            dataclasses.replace(program.gpus[1].threadblocks[0].steps[0], count=1, src_offset=1),
            dataclasses.replace(program.gpus[1].threadblocks[0].steps[0], count=1, src_offset=0),
            program.gpus[1].threadblocks[0].steps[1],
        ),
    )  # fmt: skip
    receiver = program.gpus[0].threadblocks[0].steps[1]
    swapped = replace_block(
        swapped, 0, 0,
        steps=(
            program.gpus[0].threadblocks[0].steps[0],
            dataclasses.replace(receiver, count=1),
            dataclasses.replace(receiver, count=1, dst_offset=receiver.dst_offset + 1),
        ),
    )  # fmt: skip
    with pytest.raises(InvalidInput, match="rank 1 does not hold its data in the order of the destinations"):
        collective_of(swapped, trace(swapped))


def test_pairs_of_a_sendrecv_follow_from_its_moves():
    program = programs.shift(3)
    found = collective_of(program, trace(program))
    assert {(c.sources[0][0], c.destinations[0][0]) for c in found.chunks} == {(0, 1), (1, 2), (2, 0)}


def test_custom_collectives_need_the_native_file():
    program = dataclasses.replace(programs.shift(2), collective="custom")
    with pytest.raises(InvalidInput, match=r"run the native \.json file"):
        collective_of(program, trace(program))


def test_buffers_longer_than_the_collective_are_refused():
    program = dataclasses.replace(programs.ring_allgather(4), chunks_per_loop=8)
    collective_of(program, trace(program))  # shorter is fine
    with pytest.raises(InvalidInput, match="rank 0 has 2 input chunks"):
        bad = dataclasses.replace(programs.ring_allgather(4, 2), chunks_per_loop=4)
        collective_of(bad, trace(bad))
