"""Which schedule is taken where messages cost cores that ranks share, which is in no time."""

from dataclasses import replace
from fractions import Fraction

import pytest
from test_coding_plan import hosts

from taccl.synth.cost import judged_fs
from taccl.synth.request import Request
from taccl.synth.search import ALIKE
from taccl.synth.synthesise import synthesise

SIZE = 8 << 20


@pytest.fixture(scope="module")
def quickest():
    return synthesise(Request(hosts(2, 2, 4), "allgather", SIZE, time_limit_s=4))


def made(load_us):
    topology = replace(hosts(2, 2, 4), load_us=Fraction(load_us))
    return topology, synthesise(Request(topology, "allgather", SIZE, time_limit_s=4))


def test_of_schedules_that_are_nearly_the_best_the_one_of_fewest_messages_is_taken(quickest):
    topology, found = made("0.001")
    assert len(found.messages) < len(quickest.messages)
    assert (
        quickest.time_fs
        < found.time_fs
        <= ALIKE * judged_fs(topology, quickest.time_fs, len(quickest.messages))
    )
    assert found.provenance["quickest_messages"] == len(quickest.messages)


def test_of_all_others_the_one_whose_messages_cost_least(quickest):
    topology, found = made(2000)
    assert judged_fs(topology, found.time_fs, len(found.messages)) < judged_fs(
        topology, quickest.time_fs, len(quickest.messages)
    )
    assert len(found.messages) < len(quickest.messages)
