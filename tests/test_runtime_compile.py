"""The graph of operations: hazards, staging, freedom from deadlock."""

import pytest
import runtime_programs as programs

from taccl.runtime.compile import compile_ranks
from taccl.runtime.plan import Operation, Plan
from taccl.runtime.rendezvous import finishes, held_for_ever, in_rounds
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace


def plans(program, *, inplace=False, **more):
    order = trace(program)
    collective = collective_of(program, order)
    views = {r: pair for r, pair in enumerate(collective.inplace) if pair is not None} if inplace else {}
    return compile_ranks(program, order, views, range(program.ranks), **more)


def test_receives_into_fresh_memory_go_there_directly_and_wait_for_nothing():
    for plan in plans(programs.ring_allgather(4)):
        receives = [op for op in plan.operations if op.kind == "recv"]
        assert len(receives) == 3
        assert all(op.predecessors == () and op.dst[0] == "o" for op in receives)
        assert plan.staging_chunks == 0


def test_reducing_receives_use_as_many_slots_as_the_fifo_has():
    plan = plans(programs.ring_allreduce(6), inplace=True)[0]
    receives = [op for op in plan.operations if op.kind == "recv" and op.dst[0] == "t"]
    assert len(receives) == 5
    assert plan.staging_chunks == 2  # Simple: depth 2
    reduces = {op.received: index for index, op in enumerate(plan.operations) if op.kind == "reduce"}
    assert set(reduces) == {("t", 0, 1), ("t", 1, 1)}
    # a slot is received into again only when what was in it has been used
    again = [op for op in receives if op.predecessors]
    assert len(again) == 3
    for op in again:
        assert all(plan.operations[p].kind in ("send", "reduce") for p in op.predecessors)


def direct_reduce(ranks, chunks):
    """All send rank 0 their chunks, each a message, and it adds them up, those of one rank after those of another."""
    lines = [
        (
            -1, peer, 0,
            [
                ("rrc", "i", c, "o", c, 1) if peer == 1 else ("rrc", "o", c, "o", c, 1, (peer - 2, c))
                for c in range(chunks)
            ],
        )
        for peer in range(1, ranks)
    ]  # fmt: skip
    send = (chunks, 0, 0, [(0, -1, 0, [("s", "i", c, "i", c, 1) for c in range(chunks)])])
    return programs.program("reduce", ranks, chunks, [(chunks, chunks, 0, lines), *(ranks - 1) * [send]])


@pytest.mark.parametrize(
    ("ranks", "chunks", "slots"), [(2, 8, 8), (3, 8, 4), (5, 8, 2), (6, 8, 2), (3, 1, 1), (4, 14, 4)]
)
def test_reducing_receives_from_other_nodes_are_ready_ahead(ranks, chunks, slots):
    """With slots for as many chunks as a buffer has, which the connections share."""
    program, apart = direct_reduce(ranks, chunks), [0, *(ranks - 1) * [1]]
    usual, within = plans(program, nodes=apart), plans(program, nodes=ranks * [0], ahead=True)
    assert usual[0] == within[0] and usual[0].staging_chunks == (ranks - 1) * min(2, chunks)
    ahead = plans(program, nodes=apart, ahead=True)
    assert ahead[0].staging_chunks == (ranks - 1) * slots
    receives = [op for op in ahead[0].operations if op.kind == "recv"]
    assert sum(not op.predecessors for op in receives) == (ranks - 1) * slots
    assert finishes(ahead)


def test_memory_that_is_being_sent_is_overwritten_only_afterwards():
    # in place, the allgather half of the ring writes over what the reduce-scatter half has sent
    for plan in plans(programs.ring_allreduce(4), inplace=True):
        first = next(index for index, op in enumerate(plan.operations) if op.kind == "send")
        sent = plan.operations[first].src
        over = next(op for op in plan.operations if op.dst == sent)
        assert first in over.predecessors


def test_views_of_one_memory_are_one_memory():
    # the send reads "i", the last receive writes "o": the same cell in place, two cells out of place
    steps = [[("s", "i", r, "i", r, 1), ("r", "i", 0, "o", r, 1)] for r in (0, 1)]
    gpus = [(2, 2, 0, [(1 - r, 1 - r, 0, steps[r])]) for r in (0, 1)]
    program = programs.program("allreduce", 2, 2, gpus, inplace=True)
    apart, together = plans(program), plans(program, inplace=True)
    assert [op.predecessors for op in apart[0].operations] == [(), ()]
    assert any(0 in op.predecessors for op in together[0].operations[1:])


def test_exchange_in_place_gets_staging_because_sends_may_wait_for_receives():
    program = programs.inplace_exchange(3)
    found = plans(program, inplace=True)
    for plan in found:
        receives = [op for op in plan.operations if op.kind == "recv"]
        assert all(op.dst[0] == "t" and op.predecessors == () for op in receives)
        assert plan.staging_chunks == 2
    assert finishes(found)


def message(kind, peer, before=()):
    return Operation(kind, ("o", 0, 1), ("i", 0, 1), None, peer, 0, 0, 0, 0, before)


def test_trial_sees_that_two_sends_before_two_receives_hang():
    hanging = [Plan(r, (message("send", 1 - r), message("recv", 1 - r, (0,))), 0) for r in (0, 1)]
    assert not finishes(hanging)
    free = [Plan(r, (message("send", 1 - r), message("recv", 1 - r)), 0) for r in (0, 1)]
    assert finishes(free)


@pytest.mark.parametrize("name", sorted(programs.ALL))
def test_no_receive_waits_for_a_send_for_ever(name):
    assert finishes(plans(programs.ALL[name](5, 2)))


@pytest.mark.parametrize("name", sorted(programs.ALL))
def test_what_a_message_of_a_round_needs_is_done_with_earlier_rounds(name):
    """So a rank that does its rounds in order waits for nobody who waits for it; a connection has one message each."""
    found = plans(programs.ALL[name](5, 2))
    rounds = in_rounds(found, found[0].direct, lambda source, target: (source + target) % 3 > 0)
    ends = {}  # both ends of each message
    for plan in found:
        for number, op in enumerate(plan.operations):
            if op.peer >= 0:
                key = (plan.rank, op.peer, op.tag) if op.kind == "send" else (op.peer, plan.rank, op.tag)
                ends.setdefault(key, []).append((plan.rank, number))
    together = {end: both for both in ends.values() for end in both}
    turn_of = {end: turn for key, turn in rounds.items() for end in ends[key]}
    begun = {end: -1 for plan in found for end in ((plan.rank, n) for n in range(len(plan.operations)))}
    changed = True
    while changed:  # begun: the last round that must be over before an operation can end
        changed = False
        for rank, number in begun:
            for before in found[rank].operations[number].predecessors:
                need = max(begun[rank, before], turn_of.get((rank, before), -1))
                for end in together.get((rank, number), [(rank, number)]):
                    if begun[end] < need:
                        begun[end], changed = need, True
    assert rounds and all(begun[end] < turn for end, turn in turn_of.items())
    lines = {
        (*key[:2], found[rank].operations[number].channel, turn_of[rank, number])
        for key, ((rank, number), _) in ends.items() if key in rounds
    }  # fmt: skip
    assert len(lines) == len(rounds)


def test_messages_that_wait_for_each_other_have_no_rounds():
    hanging = [
        Plan(0, (message("send", 1), message("recv", 1, (0,))), 0),
        Plan(1, (message("send", 0), message("recv", 0, (0,))), 0),
    ]
    assert in_rounds(hanging, False, lambda source, target: True) is None


def test_predecessors_come_before():
    for plan in plans(programs.ring_allreduce(5, 3), inplace=True):
        for index, op in enumerate(plan.operations):
            assert all(before < index for before in op.predecessors)


def orderly(*, slot=False):
    """Rank 0 sends "i" 0 to rank 1 and then, for order only, "i" 1 on another channel. slot: rank 1 has one cell for
    both, and takes the second message first."""
    cell = 0 if slot else 1
    sender = [
        (1, -1, 0, [("s", "i", 0, "o", 0, 1)]),
        (1, -1, 1, [("nop", "i", 0, "i", 0, 0, (0, 0)), ("s", "i", 1, "o", cell, 1)]),
    ]
    late = ("r", "i", 0, "o", 0, 1, (1, 0)) if slot else ("r", "i", 0, "o", 0, 1)
    receiver = [(-1, 0, 0, [late]), (-1, 0, 1, [("r", "i", 1, "o", cell, 1)])]
    return programs.program("custom", 2, 2, [(2, 2, 0, sender), (2, 2, 0, receiver)])


def sends_of(program, nodes):
    plan = compile_ranks(program, trace(program), {}, [0], nodes)[0]
    return [op.predecessors for op in plan.operations if op.kind == "send"]


def test_between_nodes_sends_keep_the_order_of_the_program():
    assert sends_of(orderly(), None) == sends_of(orderly(), (7, 7)) == [(), ()]
    assert sends_of(orderly(), (0, 1)) == [(), (0,)]


def hinted(*, forwards=False):
    """Rank 0 sends "i" 0 to rank 1, receives from rank 2, and then, for order only, sends "i" 1 to rank 3. forwards: it
    is what came from rank 2 that it sends to rank 1."""
    first = ("s", "o", 0, "o", 0, 1, (1, 0)) if forwards else ("s", "i", 0, "o", 0, 1)
    sender = [
        (1, -1, 0, [first]),
        (-1, 2, 0, [("r", "i", 0, "o", 0, 1)]),
        (3, -1, 0, [("nop", "i", 0, "i", 0, 0, (1, 0)), ("s", "i", 1, "o", 0, 1)]),
    ]
    from_rank_0 = [(-1, 0, 0, [("r", "i", 0, "o", 0, 1)])]
    to_rank_0 = [(0, -1, 0, [("s", "i", 0, "o", 0, 1)])]
    rows = (sender, from_rank_0, to_rank_0, from_rank_0)
    return programs.program("custom", 4, 2, [(2, 2, 0, row) for row in rows])


@pytest.mark.parametrize("forwards", [False, True])
def test_without_the_schedules_times_sends_wait_for_sends_that_need_no_more_than_they_do(forwards):
    program = hinted(forwards=forwards)

    def waits(timed, sorts=False):
        plan = compile_ranks(program, trace(program), {}, [0], range(4), timed=timed, sorts=sorts)[0]
        operations = plan.operations
        (last,) = (op for op in operations if op.kind == "send" and op.peer == 3)
        return [(operations[number].kind, operations[number].peer) for number in last.predecessors]

    assert waits(True) == [("recv", 2)]
    # A send that cannot go before rank 2 has sent keeps nothing waiting which can.
    assert waits(False) == ([] if forwards else [("send", 1)])
    assert finishes(compile_ranks(program, trace(program), {}, range(4), range(4), timed=False))
    # Where the transport sees to their order, no send waits, but all do that keep to times.
    assert waits(False, sorts=True) == [] and waits(True, sorts=True) == waits(True)
    assert finishes(compile_ranks(program, trace(program), {}, range(4), range(4), timed=False, sorts=True))


def overtaking():
    """Rank 0 sends rank 1 what it got from rank 2 and then, on the same connection, "i" 1. Rank 1 has room for the
    first once rank 3 has taken its "i" 0, and rank 3 has room for that once rank 1 has passed the second on."""
    return programs.program("custom", 4, 2, [(2, 2, 0, row) for row in (
        [
            (-1, 2, 0, [("r", "i", 0, "o", 0, 1)]),
            (1, -1, 0, [("s", "o", 0, "i", 0, 1, (0, 0)), ("s", "i", 1, "o", 1, 1)]),
        ],
        [
            (3, -1, 0, [("s", "i", 0, "o", 0, 1)]),
            (-1, 0, 0, [("r", "o", 0, "i", 0, 1, (0, 0)), ("r", "i", 1, "o", 1, 1)]),
            (3, -1, 1, [("s", "o", 1, "o", 0, 1, (1, 1))]),
        ],
        [(0, -1, 0, [("s", "i", 0, "o", 0, 1)])],
        [
            (-1, 1, 1, [("r", "o", 1, "o", 0, 1)]),
            (-1, 1, 0, [("r", "i", 0, "o", 0, 1, (0, 0))]),
        ],
    )])  # fmt: skip


def test_without_the_schedules_times_no_send_waits_for_one_of_its_connection_that_cannot_go():
    program = overtaking()
    timed, free = (
        compile_ranks(program, trace(program), {}, range(4), range(4), timed=timed) for timed in (True, False)
    )
    first, second = (0, 1, 0), (0, 1, 1)
    assert [op.order for op in timed[0].operations if op.kind == "send"] == [(0,), (1,)]
    assert [op.order for op in free[0].operations if op.kind == "send"] == [(), ()]
    # A transport may take either first, so that there is room for both.
    assert sum(plan.staging_chunks for plan in free) > 0
    assert finishes(free, waits={second: (first,)}) and finishes(free, waits={first: (second,)})


def test_sends_of_one_connection_follow_each_other():
    program = programs.program("custom", 2, 2, [
        (2, 2, 0, [(1, -1, 0, [("s", "i", c, "o", c, 1) for c in (0, 1)])]),
        (2, 2, 0, [(-1, 0, 0, [("r", "i", c, "o", c, 1) for c in (0, 1)])]),
    ])  # fmt: skip
    assert sends_of(program, (0, 1)) == [(), (0,)]


def test_where_order_would_hang_receives_have_memory_of_their_own():
    program = orderly(slot=True)
    assert sends_of(program, (0, 1)) == [(), (0,)]
    without, kept = (compile_ranks(program, trace(program), {}, range(2), nodes) for nodes in (None, (0, 1)))
    assert finishes(without) and finishes(kept)
    assert [plan.staging_chunks for plan in without] == [0, 0] and kept[1].staging_chunks > 0


def test_messages_that_wait_for_what_comes_later_do_not_finish():
    program = programs.program("custom", 2, 2, [
        (2, 2, 0, [(1, -1, 0, [("s", "i", c, "o", c, 1) for c in (0, 1)])]),
        (2, 2, 0, [(-1, 0, 0, [("r", "i", c, "o", c, 1) for c in (0, 1)])]),
    ])  # fmt: skip
    found = compile_ranks(program, trace(program), {}, range(2))
    first, second = (0, 1, 0), (0, 1, 1)
    assert finishes(found, waits={second: (first,)}) and finishes(found, waits={first: (second,)})
    assert held_for_ever(found, False, {first: (second,)}) is None
    circle = {first: (second,), second: (first,)}
    assert not finishes(found, waits=circle) and held_for_ever(found, False, circle) == [first, second]
    # With the program's order kept the second also waits for what is no message's turn.
    kept = compile_ranks(program, trace(program), {}, range(2), nodes=(0, 1))
    assert held_for_ever(kept, False, {second: (first,)}) is None
    assert held_for_ever(kept, False, {first: (second,)}) == [first]
