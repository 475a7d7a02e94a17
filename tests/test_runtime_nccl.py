"""When NCCL is called, and for what: rounds of one rank, with everything around them played."""

from types import SimpleNamespace

import numpy as np
import pytest

from taccl.errors import RunFailed
from taccl.runtime.nccl import POLLS, NcclTransport


class Ranks:
    """What is called of the communicator."""

    def __init__(self):
        self.groups, self.error = [], ""

    def group(self, calls, stream):
        self.groups.append([(sends, peer, nbytes) for sends, _, nbytes, peer in calls])

    def failed(self):
        return self.error


class Lane:
    def __init__(self):
        self.done = True

    def ready(self):
        return self.done


def transport(rounds):
    """Of rank 0; `seen` says whether the last group is over."""
    state = SimpleNamespace(over=False)
    event = SimpleNamespace(record=lambda stream: setattr(state, "over", False))
    cuda = SimpleNamespace(stream=object, event=lambda: event, done=lambda event: state.over)
    ranks = Ranks()
    made = NcclTransport(ranks, cuda, 0, rounds, lengths=None)
    return made, ranks, state


def array(nbytes):
    return np.zeros(nbytes, np.uint8)


def test_a_round_is_one_group_in_the_order_of_tags_and_rounds_follow_each_other():
    made, ranks, state = transport({(0, 1, 0): 2, (0, 1, 1): 2, (1, 0, 0): 2, (0, 2, 0): 5})
    lane = Lane()
    second = made.send(array(11), 1, 1, lane=lane)  # of another channel, whose step comes first here
    first = made.send(array(10), 1, 0, lane=lane)
    back = made.recv(array(12), 1, 0, lane=lane)
    later = made.send(array(13), 2, 0, lane=lane)
    tokens = [message.token for message in (first, second, back, later)]
    for _ in range(2):  # runs
        ranks.groups.clear()
        assert made.begin() == ""
        for message in (later, second, first):
            message.start()
        assert ranks.groups == []  # the round has another message, and the later one waits for it
        lane.done = False
        back.start()
        assert ranks.groups == [] and not made.poll(tokens)
        lane.done = True
        assert not made.poll(tokens)
        assert ranks.groups == [[(True, 1, 10), (False, 1, 12), (True, 1, 11)]]
        state.over = True
        assert made.poll(tokens) == [0, 1, 2]
        assert ranks.groups[1:] == [[(True, 2, 13)]]
        assert not made.poll(tokens)
        state.over = True
        assert made.poll(tokens) == [3]


def test_an_error_that_nccl_reports_ends_the_wait():
    made, ranks, _ = transport({(1, 0, 0): 0})
    message = made.recv(array(1), 1, 0, lane=Lane())
    made.begin()
    message.start()
    ranks.error = "NCCL failed: remote process exited or there was a network error"
    with pytest.raises(RunFailed, match="remote process exited"):
        for _ in range(POLLS):
            made.poll([message.token])
