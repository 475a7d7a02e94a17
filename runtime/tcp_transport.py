"""Messages between nodes over TCP connections of our own, which the kernel moves while nobody polls.

An MPI library over TCP has its data moved by the ranks themselves, whenever one of them calls it: ranks that wait for
each other poll, and where they share cores they take these from those that have something to do. Here the kernel has
the data of a send, and a rank that waits sleeps until something comes (`runtime/sleep.py`).

Messages keep the order of the program: to each peer goes a segment (`runtime/pace.py`) of the first message that has
begun and whose receiver is ready. The kernel keeps no more for a peer than its pace has on its way: what would wait
there is out of order, and where flows meet in a slow port their queue loses frames. Of turns (`runtime/turns.py`) the
receiver of the earlier message tells the sender of the later one.
"""

from __future__ import annotations

import functools
import select
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime.gates import Progress
from taccl.runtime.pace import MOST_SEGMENTS, Pace, usual
from taccl.runtime.sleep import Sleeper
from taccl.runtime.streams import Lane
from taccl.runtime.tcp_link import (
    MOST_TAGS,
    NONE,
    OPEN,
    READY,
    RUNS,
    Incoming,
    Link,
    Messages,
    Outgoing,
)
from taccl.runtime.transport import Message, Plain, Transport, take_done
from taccl.runtime.turns import Gate, Key
from taccl.runtime.uplink import Uplinks

EAGER_BYTES = 16 << 10  # messages up to here do not wait until their receive is ready
# Nor do the first ones from a rank to another, whose words would take as long as they do. If more did, all that has its
# data would go at once, and wait in the queues of slow links before what is wanted sooner.
LONG_BYTES, LONG_MESSAGES = 64 << 10, 2
LINGER_S = 2.0  # after a connection is lost, in which the job may end for a better known reason


def _eager(nbytes: int, tag: int) -> bool:
    """Whether a message goes before its receive is ready; its sender and its receiver find the same."""
    return nbytes <= EAGER_BYTES or (nbytes <= LONG_BYTES and tag < LONG_MESSAGES)


class Links:
    """All connections of a rank. They are closed with the job. everyone: they lead to ranks of its node, too."""

    def __init__(self, connections: Mapping[int, socket.socket], everyone: bool = False) -> None:
        self.everyone = everyone
        self.poller = select.epoll()
        self._lost = ""  # which connection is, and why
        self._lost_s = 0.0
        self._talking: list[Link] = []  # have words that were not handed to the kernel
        self._sending: dict[Link, None] = {}  # have messages that may go
        self.links = {
            peer: Link(peer, made, self.poller, self._lose, self._sending)
            for peer, made in connections.items()
        }
        self._at = {link.at: link for link in self.links.values()}
        self.sleeper: Sleeper | None = None
        self.uplinks = Uplinks()
        self.run = 0
        self.owner: object = None  # whose messages are under way

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost, self._lost_s = why, time.monotonic()

    def begin(self, owner: object, messages: Mapping[int, Messages]) -> None:
        """A run begins, with messages by peer."""
        self.run = (self.run + 1) % RUNS
        self.owner = owner
        for peer, link in self.links.items():
            link.begin(self.run, messages.get(peer, NONE))

    def say(self, peer: int, kind: int, tag: int) -> None:
        """Something that goes with the next look at the connections."""
        link = self.links[peer]
        link.say(kind, tag)
        self._talking.append(link)

    def _hand_over(self) -> None:
        """Words first, then segments of what may go, in the order of the program, as long as uplinks are free soon."""
        for link in self._talking:
            link.write()
        self._talking.clear()
        due_ns = 0
        while self._sending:
            now_ns, due_ns = time.monotonic_ns(), 0
            goes: tuple[int, Link] | None = None
            for link in list(self._sending):
                place = link.first
                if place is None:
                    if link.hungry() or link.lost:
                        del self._sending[link]
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
        if self.sleeper is not None:
            self.sleeper.due_ns = due_ns

    def move(self) -> None:
        """Move what can be moved. Raises RunFailed for a connection that is lost, after a moment in which the job may
        end for a better known reason, and for what does not belong here."""
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
        if self._lost and time.monotonic() - self._lost_s > LINGER_S:
            raise RunFailed(self._lost)

    def part(self) -> None:
        """A run ends. What is said at its end must leave before the rank computes."""
        self.move()
        while any(link.owes for link in self.links.values()):
            self.poller.poll(0.01)
            self.move()

    def forget(self, owner: object) -> None:
        """Let go of the messages of an owner."""
        if self.owner is owner:
            self.owner = None
            for link in self.links.values():
                link.begin(self.run, NONE)

    def close(self) -> None:
        """No run is under way."""
        for link in self.links.values():
            link.close()
        if self.sleeper is not None:
            self.sleeper.close()
        self.poller.close()


class TcpTransport(Plain):
    """The messages of one program over the connections of a rank; `others` to peers that it has none to.

    turns: the gates of messages between nodes, the same on all ranks. paces: by source and destination, the same on all
    ranks, where it is not the usual one. begins: the messages in the order in which a rank sends what is ready; without
    it that of the plan, in which sends are made.
    """

    name = "tcp"
    idle = None

    def __init__(
        self,
        links: Links,
        rank: int,
        others: Transport,
        turns: Mapping[Key, Sequence[Gate]] | None = None,
        paces: Mapping[tuple[int, int], Pace] | None = None,
        begins: Sequence[Key] = (),
    ) -> None:
        self._links, self._rank, self._others, self._paces = links, rank, others, paces or {}
        self.sleeper = links.sleeper
        self.news = 0  # messages that are finished, which nobody has asked for
        self._begun = False
        self._sends: dict[int, dict[int, Outgoing]] = {}
        self._receives: dict[int, dict[int, Incoming]] = {}
        self._places = {key: place for place, key in enumerate(begins) if key[0] == rank}
        self._next = len(begins)  # place of one that has none
        self._messages: dict[int, Messages] = {}
        self._turns = turns or {}
        # Messages with gates have numbers of their own on each rank.
        self._numbers: dict[Key, int] = {}
        counts: Counter[int] = Counter()
        # Of a message to this rank: the part that must have come, and the message that waits for it.
        self._told: defaultdict[Key, list[tuple[float, Key]]] = defaultdict(list)
        for later, gates in sorted(self._turns.items()):
            self._numbers[later] = counts[later[0]]
            counts[later[0]] += 1
            for gate in gates:
                if gate.message[1] == rank:
                    self._told[gate.message].append((gate.part, later))
        self._gated: dict[int, Outgoing] = {}
        self._peer_of: dict[Outgoing, int] = {}  # of those
        self._progress: list[Progress] = []

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self._links.links:
            return self._elsewhere(self._others.send(array, peer, tag, sized))
        assert tag < MOST_TAGS
        key, data = (self._rank, peer, tag), array.view(np.uint8)
        gates = len(self._turns.get(key, ()))
        place = self._places.get(key, self._next)
        self._next += 1
        message = Outgoing(data, tag, place, sized, _eager(data.nbytes, tag), gates)
        self._sends.setdefault(peer, {})[tag] = message
        links, link = self._links, self._links.links[peer]

        def begun() -> bool:
            return message.begun == links.run

        if not gates:

            def start() -> None:
                message.begin(links.run)
                if message.may_go(links.run):
                    link.send(message)

            return Message(self, message, start, begun=begun, wanted=link.hungry)
        self._gated[self._numbers[key]], self._peer_of[message] = message, peer

        def wait() -> None:
            message.begin(links.run)
            self._go(message)

        return Message(
            self,
            message,
            wait,
            begun=begun,
            held=lambda: begun() and message.waits(links.run),
            wanted=link.hungry,
        )

    def _elsewhere(self, message: Message) -> Message:
        """One whose transport moves it only when it is called, which a rank that sleeps seldom does."""
        self.sleeper = None
        return message

    def _go(self, message: Outgoing) -> None:
        if message.may_go(self._links.run):
            self._links.links[self._peer_of[message]].send(message)

    def _open(self, message: Outgoing) -> None:
        run = self._links.run
        waited = message.waits(run)
        message.open(run)
        if waited:
            self._go(message)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self._links.links:
            return self._elsewhere(self._others.recv(array, peer, tag, sized))
        data = array.view(np.uint8)
        eager = _eager(data.nbytes, tag)
        message = Incoming(data, sized, eager, self._tells((peer, self._rank, tag)))
        self._receives.setdefault(peer, {})[tag] = message
        links = self._links

        def start() -> None:
            if message.start(links.run):
                self._finished()
            elif not eager:
                links.say(peer, READY, tag)

        return Message(self, message, start)

    def _tells(self, key: Key) -> Progress | None:
        """Whom this rank tells how far a message has come to it."""
        if key not in self._told:
            return None
        words = [(part, functools.partial(self._tell, later)) for part, later in self._told[key]]
        self._progress.append(Progress(words))
        return self._progress[-1]

    def _tell(self, later: Key) -> None:
        number = self._numbers[later]
        if later[0] == self._rank:
            self._open(self._gated[number])
        else:
            self._links.say(later[0], OPEN, number)

    def _finished(self) -> None:
        self.news += 1

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        self._links.move()
        if not self.news:
            return None
        found = take_done(tokens)
        self.news -= len(found)
        return found

    def begin(self) -> str:
        if self._begun:
            return ""
        if closed := self._others.begin():
            return closed
        if not self._messages:
            self._connected()
        self._begun = True
        self.news = 0
        for progress in self._progress:
            progress.begin()
        self._links.begin(self, self._messages)
        return ""

    def _connected(self) -> None:
        """Lay out what the links have to know, when all messages are registered."""
        for peer in self._links.links:
            pace = self._paces.get((self._rank, peer), usual("TCP"))
            self._messages[peer] = Messages(
                self._sends.get(peer, {}), self._receives.get(peer, {}), self._gated, pace, self._finished,
                self._open,
            )  # fmt: skip

    def end(self) -> None:
        self._links.part()
        self._begun = False
        self._others.end()

    def close(self) -> None:
        self._links.forget(self)
        # They know this transport, and all memory that they move; nobody is to wait until a collector looks for rings.
        for known in (self._messages, self._sends, self._receives, self._gated, self._peer_of):
            known.clear()
        self._progress.clear()
        self._others.close()
