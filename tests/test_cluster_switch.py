"""The switch of emulated clusters, with sockets for the devices: who has a link first."""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "cluster"
RUN = """
import json, sys, switch
switch.forward(*json.loads(sys.argv[1], object_hook=lambda one: bytes.fromhex(one["mac"])))
"""
MACS = [bytes([2, 0, 0, 0, 0, number]) for number in range(5)]
FRAME_BYTES = 8000
RATE = 10**6  # bytes in a second: a frame takes 8 ms


class Switch:
    """A running one. rates: bytes in a second of each port; one more port, the last, has none. rack_of: of each port.
    trunks: bytes in a second of each rack's."""

    def __init__(
        self,
        rates: Sequence[float],
        latency_s: float = 0.0,
        rack_of: Sequence[int] = (),
        trunks: Sequence[float] = (),
    ) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(len(rates) + 1)]
        for end in (end for pair in pairs for end in pair):
            end.setblocking(False)
        self.ends = [mine for mine, _ in pairs]
        self.theirs = [other for _, other in pairs]
        self.shape = [
            [1 / rate for rate in rates] + [0.0],
            latency_s,
            len(rates),
            rack_of,
            [1 / rate for rate in trunks],
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def send(self, src: int, dst: int, mark: int, nbytes: int = FRAME_BYTES) -> None:
        head = bytes(10) + MACS[dst] + MACS[src] + bytes([mark])
        self.ends[src].send(head + bytes(10 + nbytes - len(head)))

    def start(self) -> None:
        """What was sent before is there when it starts."""
        taps = [end.fileno() for end in self.theirs]
        macs = [{"mac": mac.hex()} for mac in MACS[: len(taps)]]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, json.dumps([taps, macs, *self.shape])],
            stdin=subprocess.PIPE,
            pass_fds=taps,
            cwd=FOLDER,
        )

    def arrivals(self, count: int) -> list[tuple[int, int]]:
        """(port, mark) of so many frames as they come."""
        found: list[tuple[int, int]] = []
        with selectors.DefaultSelector() as selector:
            for port, end in enumerate(self.ends):
                selector.register(end, selectors.EVENT_READ, port)
            while len(found) < count:
                ready = selector.select(20)
                assert ready, f"nothing comes after {found}"
                for key, _ in ready:
                    found.append((key.data, self.ends[key.data].recv(1 << 16)[22]))
        return found

    def close(self) -> None:
        for end in (*self.ends, *self.theirs):
            end.close()
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            assert self.process.wait(20) == 0


@pytest.fixture
def switches() -> Iterator[list[Switch]]:
    made: list[Switch] = []
    yield made
    for switch in made:
        switch.close()


def test_a_downlink_serves_first_what_comes_first_not_what_was_read_first(switches: list[Switch]) -> None:
    """Port 0 has sent two frames to port 2, the second of which leaves after 8 ms. What port 1 sends there meanwhile,
    over a quick uplink, does not wait for it: it is there long before a frame for port 3, whose downlink is slow."""
    switch = Switch([RATE, 1000 * RATE, 1000 * RATE, 2 * RATE])
    switches.append(switch)
    switch.send(0, 2, 1)
    switch.send(0, 2, 2)
    switch.send(1, 2, 3)
    switch.send(1, 3, 4)
    switch.start()
    came = switch.arrivals(4)
    assert came.index((2, 3)) < came.index((3, 4))
    assert came.index((2, 1)) < came.index((2, 2))


def test_frames_of_a_port_keep_their_order_and_others_overtake_a_long_queue(switches: list[Switch]) -> None:
    switch = Switch([RATE, RATE, 1000 * RATE], latency_s=0.001)
    switches.append(switch)
    for mark in range(6):
        switch.send(0, 2, mark)
    switch.send(1, 2, 100)
    switch.start()
    came = switch.arrivals(7)
    assert [mark for _, mark in came if mark < 100] == list(range(6))
    assert 0 < came.index((2, 100)) <= 2


def test_the_launcher_has_no_wire(switches: list[Switch]) -> None:
    """Its frames pass at once by what waits for a rate or for the latency."""
    switch = Switch([RATE, RATE], latency_s=0.05)
    switches.append(switch)
    switch.send(0, 1, 1)
    switch.send(0, 2, 2)
    switch.send(2, 1, 3)
    switch.start()
    assert sorted(switch.arrivals(3)[:2]) == [(1, 3), (2, 2)]


def test_a_downlink_loses_what_would_wait_too_long(switches: list[Switch]) -> None:
    """Of ten frames for a downlink where each takes 40 ms those come that wait no longer than 200 ms."""
    switch = Switch([1000 * RATE, RATE / 5])
    switches.append(switch)
    for mark in range(10):
        switch.send(0, 1, mark)
    switch.send(0, 2, 200)
    switch.start()
    came = switch.arrivals(7)
    assert came[0] == (2, 200)
    assert came[1:] == [(1, mark) for mark in range(6)]


def test_frames_wait_at_the_trunk_that_is_slow_and_at_no_other(switches: list[Switch]) -> None:
    """Ports 0 and 1 are in one rack, 2 and 3 in racks of their own, of which that of 2 has a slow trunk."""
    switch = Switch([1000 * RATE] * 4, rack_of=[0, 0, 1, 2], trunks=[1000 * RATE, RATE, 1000 * RATE])
    switches.append(switch)
    for mark in range(4):
        switch.send(0, 2, mark)
    switch.send(1, 2, 4)
    switch.send(0, 3, 10)
    switch.send(0, 1, 11)
    switch.start()
    came = switch.arrivals(7)
    assert {mark for _, mark in came[:2]} == {10, 11}  # the first frame over the slow trunk takes 8 ms
    slow = [mark for port, mark in came if port == 2]
    assert sorted(slow) == list(range(5)) and [mark for mark in slow if mark < 4] == list(range(4))
