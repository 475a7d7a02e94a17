"""Messages of a measurement through shared memory: both ends in one process, which is its own peer."""

from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import RunFailed
from taccl.profiles.measure.boxes import SLOTS, Part
from taccl.profiles.measure.shm_wire import PART_BYTES, ShmWire, Stretch
from taccl.runtime import process_memory
from taccl.runtime.shm import READ_BYTES

TAGS = (3, 4)
SEVEN = np.full(1, 7)
WHY_NOT = process_memory.why_not(os.getpid(), process_memory.address(SEVEN), 7)
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def stretches() -> tuple[Stretch, Stretch]:
    return Stretch(), Stretch()


def ends(stretches: tuple[Stretch, Stretch]) -> tuple[ShmWire, ShmWire]:
    one, other = np.zeros(PART_BYTES, np.uint8), np.zeros(PART_BYTES, np.uint8)
    me = os.getpid()
    return ShmWire(1, Part(one, other, me), stretches, TAGS), ShmWire(
        0, Part(other, one, me), stretches, TAGS
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(TAGS), st.sampled_from([1, 8, 64, 65, READ_BYTES, READ_BYTES + 1, 3 * READ_BYTES])
        ),
        min_size=1,
        max_size=2 * SLOTS + 5,
    ),
    st.booleans(),
)
def test_messages_of_a_tag_keep_their_order(
    stretches: tuple[Stretch, Stretch], sent: list[tuple[int, int]], receives_first: bool
) -> None:
    here, there = ends(stretches)
    random = np.random.default_rng(0)
    data = [random.integers(0, 256, size, np.uint8) for _, size in sent]
    got = [np.zeros(size, np.uint8) for _, size in sent]
    out = [here.sender(values, tag) for (tag, _), values in zip(sent, data, strict=True)]
    into = [there.receiver(values, tag) for (tag, _), values in zip(sent, got, strict=True)]
    for _ in range(2):  # a request is used again and again
        for requests in (into, out) if receives_first else (out, into):
            for request in requests:
                request.Start()
        for _ in range(len(sent)):
            for request in (*into, *out):
                request.Test()
        assert all(request.Test() for request in (*into, *out))
        for (tag, size), values, found in zip(sent, data, got, strict=True):
            # What is long is read to where the measurement has it, beside the caller's data.
            if size <= (READ_BYTES if tag == TAGS[0] else 64):
                assert np.array_equal(values, found)
            found[:] = 0


def test_a_long_message_is_done_when_its_receiver_has_read_it(stretches: tuple[Stretch, Stretch]) -> None:
    here, there = ends(stretches)
    data = np.ones(READ_BYTES + 1, np.uint8)
    send, receive = here.sender(data, TAGS[0]), there.receiver(np.zeros_like(data), TAGS[0])
    send.Start()
    assert not send.Test()
    receive.Start()
    assert not send.Test() and receive.Test() and send.Test()


def test_long_messages_lie_one_behind_the_other() -> None:
    stretch = Stretch()
    stretch.reach(3 * READ_BYTES)
    places = [process_memory.address(stretch.place(3 * READ_BYTES)) for _ in range(400)]
    steps = {b - a for a, b in pairwise(places)}
    assert len(set(places)) > 300 and 3 * READ_BYTES in steps and min(steps) < 0


def test_another_length_than_is_expected_is_told(stretches: tuple[Stretch, Stretch]) -> None:
    here, there = ends(stretches)
    here.sender(np.zeros(9, np.uint8), TAGS[0]).Start()
    receive = there.receiver(np.zeros(8, np.uint8), TAGS[0])
    receive.Start()
    with pytest.raises(RunFailed, match="rank 0 sends 9 bytes where 8 are expected"):
        receive.Test()
    receive.Free()
    receive.Free()
