"""All TCP connections of a rank: who sends next, and what has come over which."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from taccl.runtime.pace import MOST_SEGMENTS
from taccl.runtime.sleep import Sleeper
from taccl.runtime.tcp_link import NONE, Link
from taccl.runtime.tcp_messages import RUNS, Incoming, Messages, Outgoing
from taccl.runtime.uplink import Uplinks


class Lost(NamedTuple):
    """The first connection that is lost: which, and when that was noticed (monotonic)."""

    why: str
    at_s: float


class Program(NamedTuple):
    """The messages of a program by peer, and those of this rank that have gates by number."""

    messages: Mapping[int, Messages[Outgoing, Incoming]]
    gated: Mapping[int, Outgoing]


class Links:
    """They are closed with the job. everyone: they lead to ranks of its node, too."""

    def __init__(self, connections: Mapping[int, socket.socket], everyone: bool = False) -> None:
        self.everyone = everyone
        self.poller = select.epoll()
        self.lost: Lost | None = None
        self.talking: list[Link] = []  # have words that were not handed to the kernel
        self.sending: dict[Link, None] = {}  # have messages that may go
        self.sleeper: Sleeper | None = None
        self.due_ns = 0  # of the monotonic clock: something may go then; 0: nothing waits for that
        self.uplinks = Uplinks()
        self.run = 0  # its number
        self.news = 0  # messages that are finished, which nobody has asked for
        self.gated: Mapping[int, Outgoing] = {}
        self._program: Program | None = None  # whose messages are under way
        self.links = {peer: Link(peer, made, self) for peer, made in connections.items()}
        self._at = {link.at: link for link in self.links.values()}

    def lose(self, why: str) -> None:
        """A connection is lost."""
        if self.lost is None:
            self.lost = Lost(why, time.monotonic())

    def program(
        self, messages: Mapping[int, Messages[Outgoing, Incoming]], gated: Mapping[int, Outgoing]
    ) -> Program:
        """What `begin` takes, made once. messages: with every peer."""
        return Program(messages, gated)

    def begin(self, program: Program) -> None:
        """A run begins. Raises RunFailed for what has come of it already and does not belong there."""
        self.run = (self.run + 1) % RUNS
        self.news = 0
        self._program, self.gated = program, program.gated
        for peer, link in self.links.items():
            link.begin(program.messages[peer])

    def _hand_over(self) -> None:
        """Words first, then segments of what may go, in the order of the program, as long as uplinks are free soon."""
        for link in self.talking:
            link.write()
        self.talking.clear()
        due_ns = 0
        while self.sending:
            now_ns, due_ns = time.monotonic_ns(), 0
            goes: tuple[int, Link] | None = None
            for link in list(self.sending):
                place = link.first
                if place is None:
                    if link.idle() or link.lost:
                        del self.sending[link]
                    continue
                at_ns = self.uplinks.due_ns(link.uplinks, now_ns)
                if at_ns > now_ns:
                    due_ns = min(at_ns, due_ns or at_ns)
                elif goes is None or place < goes[0]:
                    goes = place, link
            if goes is None:
                break
            link = goes[1]
            # What is known of no uplink goes as far as the kernel takes it.
            handed = link.write(1 if link.uplinks else MOST_SEGMENTS)
            self.uplinks.take(link.uplinks, handed, now_ns)
        self.due_ns = due_ns

    def move(self) -> None:
        """Move what can be moved. Raises RunFailed for what does not belong here, FrameError for a damaged length."""
        self._hand_over()
        ready = self.poller.poll(0)
        for at, what in ready:
            if at not in self._at:  # a bell
                continue
            link = self._at[at]
            if what & ~select.EPOLLOUT:
                link.read()
            if what & select.EPOLLOUT:
                link.write()
        if ready:
            self._hand_over()  # words that follow from what was read: the rank may sleep next

    def wait(self, most_s: float) -> bool:
        """Sleep so long, or until there is something to move or a bell rings; whether one did."""
        if self.due_ns:
            most_s = min(most_s, max(0.0, (self.due_ns - time.monotonic_ns()) / 1e9))
        return any(at not in self._at for at, _ in self.poller.poll(most_s))

    @property
    def owes(self) -> bool:
        """Whether something waits until the kernel takes it."""
        return any(link.owes for link in self.links.values())

    def forget(self, program: Program) -> None:
        """Let go of the messages of a program."""
        if self._program is program:
            self._program, self.gated = None, {}
            for link in self.links.values():
                link.begin(NONE)

    def close(self) -> None:
        """No run is under way."""
        for link in self.links.values():
            link.close()
        if self.sleeper is not None:
            self.sleeper.close()
        self.poller.close()
