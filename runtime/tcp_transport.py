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

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime import native
from taccl.runtime.pace import Pace, usual
from taccl.runtime.streams import Lane
from taccl.runtime.tcp_links import Links
from taccl.runtime.tcp_messages import MOST_TAGS, Messages, Word
from taccl.runtime.tcp_native import NativeLinks
from taccl.runtime.transport import Message, Plain, Transport, take_done
from taccl.runtime.turns import Gate, Key

EAGER_BYTES = 16 << 10  # messages up to here do not wait until their receive is ready
# Nor do the first ones from a rank to another, whose words would take as long as they do. If more did, all that has its
# data would go at once, and wait in the queues of slow links before what is wanted sooner.
LONG_BYTES, LONG_MESSAGES = 64 << 10, 2
LINGER_S = 2.0  # after a connection is lost, in which the job may end for a better known reason


def _eager(nbytes: int, tag: int) -> bool:
    """Whether a message goes before its receive is ready; its sender and its receiver find the same."""
    return nbytes <= EAGER_BYTES or (nbytes <= LONG_BYTES and tag < LONG_MESSAGES)


def join(connections: Mapping[int, socket.socket], everyone: bool = False) -> Links | NativeLinks:
    """The links of a rank by peer, moved by compiled code where there is some."""
    kind = Links if native.library() is None else NativeLinks
    return kind(connections, everyone)


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
        links: Links | NativeLinks,
        rank: int,
        others: Transport,
        turns: Mapping[Key, Sequence[Gate]] | None = None,
        paces: Mapping[tuple[int, int], Pace] | None = None,
        begins: Sequence[Key] = (),
    ) -> None:
        # Messages are those of its links: of one kind.
        self._links: Any = links
        self._rank, self._others, self._paces = rank, others, paces or {}
        self.sleeper = links.sleeper
        self._begun = False
        self._sends: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._receives: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._places = {key: place for place, key in enumerate(begins) if key[0] == rank}
        self._next = len(begins)  # place of one that has none
        self._program: Any = None
        self._turns = turns or {}
        # Messages with gates have numbers of their own on each rank.
        self._numbers: dict[Key, int] = {}
        counts: Counter[int] = Counter()
        # Of a message to this rank: what it says when a part of it has come.
        self._words: defaultdict[Key, list[Word]] = defaultdict(list)
        for later, gates in sorted(self._turns.items()):
            number = self._numbers[later] = counts[later[0]]
            counts[later[0]] += 1
            whom = None if later[0] == rank else later[0]
            for gate in gates:
                if gate.message[1] == rank:
                    self._words[gate.message].append(Word(gate.part, whom, number))
        self._gated: dict[int, Any] = {}

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        link = self._links.links.get(peer)
        if link is None:
            return self._elsewhere(self._others.send(array, peer, tag, sized))
        assert tag < MOST_TAGS
        key, data = (self._rank, peer, tag), array.view(np.uint8)
        gates = len(self._turns.get(key, ()))
        place = self._places.get(key, self._next)
        self._next += 1
        message = link.outgoing(data, tag, place, sized, _eager(data.nbytes, tag), gates)
        self._sends[peer][tag] = message
        if gates:
            self._gated[self._numbers[key]] = message
        return Message(
            self,
            message,
            message.starts(),
            held=message.held if gates else None,
            wanted=link.idle,
        )

    def _elsewhere(self, message: Message) -> Message:
        """One whose transport moves it only when it is called, which a rank that sleeps seldom does."""
        self.sleeper = None
        return message

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        link = self._links.links.get(peer)
        if link is None:
            return self._elsewhere(self._others.recv(array, peer, tag, sized))
        data = array.view(np.uint8)
        words = self._words.get((peer, self._rank, tag), ())
        message = link.incoming(data, tag, sized, _eager(data.nbytes, tag), words)
        self._receives[peer][tag] = message
        return Message(self, message, message.starts())

    @property
    def news(self) -> int:
        """Messages that are finished, which nobody has asked for."""
        return int(self._links.news)

    def _move(self) -> None:
        """Move what can be moved. Raises RunFailed for a connection that is lost, after a moment in which the job may
        end for a better known reason, and for what does not belong here."""
        self._links.move()
        lost = self._links.lost
        if lost is not None and time.monotonic() - lost.at_s > LINGER_S:
            raise RunFailed(lost.why)

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        self._move()
        if not self._links.news:
            return None
        found = take_done(tokens)
        self._links.news -= len(found)
        return found

    def begin(self) -> str:
        if self._begun:
            return ""
        if closed := self._others.begin():
            return closed
        if self._program is None:
            self._program = self._links.program(
                {peer: self._messages(peer) for peer in self._links.links}, self._gated
            )
        self._begun = True
        self._links.begin(self._program)
        return ""

    def _messages(self, peer: int) -> Messages[Any, Any]:
        """Those with a peer, when all are registered."""
        pace = self._paces.get((self._rank, peer), usual("TCP"))
        return Messages(self._sends.get(peer, {}), self._receives.get(peer, {}), pace)

    def end(self) -> None:
        # What is said at the end of a run must leave before the rank computes.
        self._move()
        while self._links.owes:
            self._links.poller.poll(0.01)
            self._move()
        self._begun = False
        self._others.end()

    def close(self) -> None:
        if self._program is not None:
            self._links.forget(self._program)
        # They know this transport, and all memory that they move; nobody is to wait until a collector looks for rings.
        self._program = None
        for known in (self._sends, self._receives, self._gated):
            known.clear()
        self._others.close()
