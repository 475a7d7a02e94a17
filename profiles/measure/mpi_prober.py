"""Probes over MPI: rank 0 says what to do, the ranks of a flow do it, all others sleep. What is measured goes as the
messages of programs will: over MPI, within nodes through shared memory or from device to device, between them over TCP
connections of our own.

Every wait is a loop of MPI_Test with a deadline, so a rank that died or stalled is named instead of waited
for; sleeping ranks poll twice a millisecond, because a rank that spins on a crowded host would be measured
too.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from taccl.errors import RunFailed
from taccl.profiles.measure.buffers import Buffers, Lengths
from taccl.profiles.measure.busy import busy_cores
from taccl.profiles.measure.devices import Devices
from taccl.profiles.measure.probe import Probe, Times, Trial
from taccl.profiles.measure.wires import MpiWire, Request, TcpWire, Wire
from taccl.runtime import control_group
from taccl.runtime.machine import usable
from taccl.runtime.tcp_options import NO_LIMIT

_COMMAND, _RESULT, DATA, ACK, _GATE = 1, 2, 3, 4, 5  # tags
_SIGN_OF_LIFE = "-"  # a rank is alive, though it has nothing to ask for or to answer yet
_NAP_S = 0.0005
_POLLS_PER_CLOCK = 2048  # polls between two looks at the deadline
# Polls between two calls of MPI by a rank that waits for something else: a command that it has sent may still be in
# there, waiting for a connection to its receiver. So many take longer than most messages.
_POLLS_PER_CALL = 256


class Stalled(Exception):
    """A rank waited for another one in vain."""

    def __init__(self, peer: int, waited_for: str) -> None:
        super().__init__(waited_for)
        self.peer = peer
        self.waited_for = waited_for


class MpiProber:
    """The ranks of a communicator. `run` is called on rank 0 only, `serve` on all others.

    deadline_s: the longest wait for any one message or answer. near: to ranks of this node, connections: to ranks of
    others, whose messages do not go over MPI; the latter are closed with the prober. devices: between which those of
    `near` are copied, if they are not in host memory.
    """

    def __init__(
        self,
        MPI: Any,
        comm: Any,
        buffers: Buffers,
        deadline_s: float,
        near: Mapping[int, Wire],
        connections: Mapping[int, socket.socket],
        devices: Devices | None = None,
    ) -> None:
        self._MPI = MPI
        self._comm = comm.Dup()
        self._rank = int(comm.Get_rank())
        self._buffers = buffers
        self.over_tcp = bool(connections)
        self._connections = connections
        self.devices = devices
        self._by_device = frozenset(near) if devices is not None else frozenset()
        self._lengths = Lengths()
        self._wires: dict[int, Wire] = dict(near)
        self._wires |= {peer: TcpWire(connection, peer) for peer, connection in connections.items()}
        self._deadline_s = deadline_s
        self._last_sign = time.monotonic()
        self._lost = False  # a rank was given up: the others cannot be sent home any more
        node_comm = comm.Split_type(MPI.COMM_TYPE_SHARED)
        # Two containers may share a host name, and one host may show several: only together do they count.
        leader = np.array([self._rank], np.int64)
        node_comm.Bcast(leader, root=0)
        node_comm.Free()
        comm.Barrier()  # from here all ranks sleep
        host = f"{MPI.Get_processor_name()}/{leader[0]}"
        cores = sum(1 << core for core in os.sched_getaffinity(0)), control_group.cores()
        mine = (host, cores, buffers.name, busy_cores(), bool(near) and devices is None)
        about = [json.loads(text) for text in self._gather_texts(json.dumps(mine))]
        self.hosts = [str(host) for host, _, _, _, _ in about]
        # Ranks may be bound to cores of their own: a host has those of all its ranks.
        masks = {host: [(0, *has) for other, has, _, _, _ in about if other == host] for host in self.hosts}
        counts = {host: usable(ranks) for host, ranks in masks.items()}
        self.cores = [counts[host] for host in self.hosts]
        self.memory = sorted({str(name) for _, _, name, _, _ in about})
        # Cores of each rank's host that others keep busy, before the measurement.
        self.busy = [float(busy) for _, _, _, busy, _ in about]
        several = [bool(shared) for host, _, _, _, shared in about if self.hosts.count(host) > 1]
        self.receivers_work = bool(several) and all(several)

    def _gather_texts(self, mine: str) -> list[str]:
        """Every rank's text, on every rank."""
        encoded = mine.encode()
        lengths = np.zeros(self._comm.Get_size(), np.int64)
        self._comm.Allgather(np.array([len(encoded)], np.int64), lengths)
        row = np.zeros(int(lengths.max()), np.uint8)
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        rows = np.zeros((len(lengths), len(row)), np.uint8)
        self._comm.Allgather(row, rows)
        return [rows[rank, :length].tobytes().decode() for rank, length in enumerate(lengths)]

    # ---- rank 0 ----

    def run(self, probe: Probe) -> Times:
        """Do the probe. Raises RunFailed naming the rank that does not answer."""
        try:
            return self._run(probe)
        except RunFailed:
            self._lost = True
            raise

    def alive(self) -> None:
        """Let the sleeping ranks know, now and then, that rank 0 is at work."""
        if time.monotonic() - self._last_sign > self._deadline_s / 4:
            self._command(range(self._comm.Get_size()), _SIGN_OF_LIFE)
            self._last_sign = time.monotonic()

    def _run(self, probe: Probe) -> Times:
        self.alive()
        members = probe.members
        self._command(members, _encode(probe))
        answers: dict[int, Any] = {}
        # Our own part first; a rank that waited for another in vain says so before that one can be missed.
        for rank in sorted(members, key=lambda rank: rank != self._rank):
            answer = self._take_part(probe, members) if rank == self._rank else self._answer(rank)
            if "stalled" in answer:
                raise RunFailed(answer["stalled"])
            answers[rank] = answer
        times = np.empty((len(probe.trials), len(probe.flows), probe.repeats))
        if probe.together:
            times[:] = np.array(answers[members[0]]["times"])[:, None, :]
            return times
        for index, (src, _) in enumerate(probe.flows):
            times[:, index, :] = np.array(answers[src]["times"][str(index)])
        return times

    def reduce_times(self, sizes: Sequence[int]) -> list[float]:
        """Rank 0 adds arrays itself: ranks of one cluster are taken to add equally fast."""
        times = []
        for size in sizes:
            into, other = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)
            best = []
            for _ in range(9):
                start = time.perf_counter()
                np.add(into, other, out=into)
                best.append((time.perf_counter() - start) * 1e6)
            times.append(sorted(best)[2])
        return times

    def close(self) -> None:
        """Send all other ranks home; nothing when one of them is lost."""
        if not self._lost:
            self._command(range(self._comm.Get_size()), "")
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _command(self, members: Sequence[int], text: str) -> None:
        data = text.encode()
        for rank in members:
            if rank != self._rank:
                request = self._comm.Isend([data, self._MPI.BYTE], rank, _COMMAND)
                try:
                    self._wait(request, rank)
                except Stalled as error:
                    raise RunFailed(self._describe(error)) from error

    def _answer(self, rank: int) -> Any:
        heard = time.monotonic()
        while time.monotonic() - heard <= 2 * self._deadline_s + 1:
            self.alive()
            text = self._sleep_for(rank, _RESULT, self._deadline_s / 4)
            if text is not None and text != _SIGN_OF_LIFE:
                return json.loads(text)
            if text is not None:
                heard = time.monotonic()
        raise RunFailed(
            f"rank {rank} did not answer within {2 * self._deadline_s:g} s; it may have stopped or died, "
            "look at its host, or raise --deadline when the link is very slow"
        )

    # ---- the other ranks ----

    def serve(self) -> None:
        """Do what rank 0 asks until it sends this rank home.

        Raises RunFailed when rank 0 falls silent.
        """
        silence_s = 4 * self._deadline_s + 5  # rank 0 waits at most twice the deadline, and says so sooner
        while True:
            text = self._sleep_for(0, _COMMAND, silence_s)
            if text is None:
                raise RunFailed(
                    f"rank {self._rank} heard nothing from rank 0 for {silence_s:g} s; "
                    "rank 0 may have stopped or died"
                )
            if not text:
                self._disconnect()
                return
            if text == _SIGN_OF_LIFE:
                continue
            probe = _decode(text)
            members = probe.members
            self._last_sign = time.monotonic()
            answer = json.dumps(self._take_part(probe, members)).encode()
            self._wait(self._comm.Isend([answer, self._MPI.BYTE], 0, _RESULT), 0)

    # ---- every rank ----

    def _take_part(self, probe: Probe, members: Sequence[int]) -> dict[str, Any]:
        try:
            if probe.together:
                return {"times": self._together(probe, members)}
            times = {}
            for index, (src, dst) in enumerate(probe.flows):
                trials = [row[index] for row in probe.trials]
                if src == self._rank:
                    times[str(index)] = [self._send(dst, trial, probe.repeats) for trial in trials]
                elif dst == self._rank:
                    for trial in trials:
                        self._receive(src, trial, probe.repeats)
            return {"times": times}
        except Stalled as error:
            return {"stalled": self._describe(error)}

    def _at_work(self) -> None:
        """Let others know, now and then, that this rank is alive: a probe of slow links takes long."""
        if self._rank == 0:
            self.alive()
        elif time.monotonic() - self._last_sign > self._deadline_s / 4:
            self._wait(self._comm.Isend([_SIGN_OF_LIFE.encode(), self._MPI.BYTE], 0, _RESULT), 0)
            self._last_sign = time.monotonic()

    def _send(self, dst: int, trial: Trial, repeats: int) -> list[float]:
        wire, buffers = self._wire(dst), self._buffers_of(dst)
        areas = [buffers.wire(trial.bytes, True, slot) for slot in range(trial.messages)]
        acknowledged = wire.receiver(np.empty(1, np.uint8), ACK)
        sends = [wire.sender(area, DATA) for area in areas]
        times = []
        try:
            acknowledged.Start()
            self._wait(acknowledged, dst)  # the receiver has posted its receives
            for _ in range(repeats):
                start = time.perf_counter()
                for _ in range(trial.acks):
                    acknowledged.Start()
                    for area, send in zip(areas, sends, strict=True):
                        buffers.before_send(area)
                        send.Start()
                    self._wait(acknowledged, dst)
                    for send in sends:
                        self._wait(send, dst)
                times.append((time.perf_counter() - start) * 1e6)
                self._at_work()
        finally:
            _free([acknowledged, *sends])
        return times

    def _receive(self, src: int, trial: Trial, repeats: int) -> None:
        wire, buffers = self._wire(src), self._buffers_of(src)
        areas = [buffers.wire(trial.bytes, False, slot) for slot in range(trial.messages)]
        receives = [wire.receiver(area, DATA) for area in areas]
        acknowledge = wire.sender(np.zeros(1, np.uint8), ACK)
        rounds = repeats * trial.acks
        try:
            for receive in receives:
                receive.Start()
            acknowledge.Start()
            self._wait(acknowledge, src)
            for number in range(rounds):
                for area, receive in zip(areas, receives, strict=True):
                    self._wait(receive, src)
                    buffers.after_receive(area)
                if number + 1 < rounds:  # post before the reply: the next message must find its receive
                    for receive in receives:
                        receive.Start()
                acknowledge.Start()
                self._wait(acknowledge, src)
                if not (number + 1) % trial.acks:
                    self._at_work()
        finally:
            _free([*receives, acknowledge])

    def _together(self, probe: Probe, members: Sequence[int]) -> list[list[float]]:
        """All flows at once: each one message, each answered by a reply; a rank may have several.

        The first member's clock runs from the common start until every member is done: flows that did not
        overlap, because a rank came late, then show as more time and never as less.
        """
        elapsed: list[list[float]] = []
        for row in probe.trials:
            flows = list(zip(probe.flows, row, strict=True))
            into, out = self._flows_in(flows), self._flows_out(flows)
            elapsed.append([])
            self._keep_to(probe)
            try:
                for _ in range(probe.repeats):
                    for flow in into:
                        flow.message.Start()
                    for flow in out:
                        flow.answer.Start()
                    self._gather(members)
                    start = time.perf_counter()
                    self._release(members)
                    for flow in out:
                        self._buffers_of(flow.peer).before_send(flow.area)
                        flow.message.Start()
                    self._drain(into, out)
                    self._gather(members)
                    elapsed[-1].append((time.perf_counter() - start) * 1e6)
                    self._release(members)
                    self._at_work()
            finally:
                _free(request for flow in (*into, *out) for request in (flow.message, flow.answer))
                self._keep_to(replace(probe, rates=()))
        return elapsed

    def _keep_to(self, probe: Probe) -> None:
        """Let connections send no faster than the probe says, or as fast as they can."""
        for index, (src, dst) in enumerate(probe.flows):
            wire = self._wire(dst) if src == self._rank else None
            if isinstance(wire, TcpWire):
                wire.keep_to(probe.rates[index] if probe.rates else NO_LIMIT)

    def _flows_in(self, flows: Sequence[tuple[tuple[int, int], Trial]]) -> list[_Flow]:
        """Those that end here."""
        found: list[_Flow] = []
        for (src, dst), trial in flows:
            if dst == self._rank:
                wire, area = self._wire(src), self._buffers_of(src).wire(trial.bytes, False, len(found))
                answer = wire.sender(np.zeros(1, np.uint8), ACK)
                found.append(_Flow(src, area, wire.receiver(area, DATA), answer))
        return found

    def _flows_out(self, flows: Sequence[tuple[tuple[int, int], Trial]]) -> list[_Flow]:
        """Those that begin here."""
        found: list[_Flow] = []
        for (src, dst), trial in flows:
            if src == self._rank:
                wire, area = self._wire(dst), self._buffers_of(dst).wire(trial.bytes, True, len(found))
                answer = wire.receiver(np.empty(1, np.uint8), ACK)
                found.append(_Flow(dst, area, wire.sender(area, DATA), answer))
        return found

    def _drain(self, into: Iterable[_Flow], out: Iterable[_Flow]) -> None:
        """Complete all flows; answer each message that arrives."""
        polls, limit = 0, time.monotonic() + self._deadline_s
        unanswered = list(into)
        pending = [(flow.peer, request) for flow in out for request in (flow.message, flow.answer)]
        while pending or unanswered:
            for flow in unanswered[:]:
                if flow.message.Test():
                    self._buffers_of(flow.peer).after_receive(flow.area)
                    flow.answer.Start()
                    unanswered.remove(flow)
                    pending.append((flow.peer, flow.answer))
            pending = [(peer, request) for peer, request in pending if not request.Test()]
            os.sched_yield()
            polls += 1
            if polls % _POLLS_PER_CALL == 0:
                self._call_library()
            if (pending or unanswered) and polls % 512 == 0 and time.monotonic() > limit:
                peer = unanswered[0].peer if unanswered else pending[0][0]
                raise Stalled(peer, "its messages while flows ran together")

    def _gather(self, members: Sequence[int]) -> None:
        """The first member learns that all are here."""
        first, token = members[0], np.zeros(1, np.uint8)
        if self._rank == first:
            for rank in members[1:]:
                self._wait(self._comm.Irecv([token, self._MPI.BYTE], rank, _GATE), rank)
        else:
            self._wait(self._comm.Isend([token, self._MPI.BYTE], first, _GATE), first)

    def _release(self, members: Sequence[int]) -> None:
        """The first member lets all go on."""
        first, token = members[0], np.zeros(1, np.uint8)
        if self._rank == first:
            for rank in members[1:]:
                self._wait(self._comm.Isend([token, self._MPI.BYTE], rank, _GATE), rank)
        else:
            self._wait(self._comm.Irecv([token, self._MPI.BYTE], first, _GATE), first)

    def _wire(self, peer: int) -> Wire:
        """What is measured of the way to a rank."""
        if peer not in self._wires:
            self._wires[peer] = MpiWire(self._MPI, self._comm, peer)
        return self._wires[peer]

    def _buffers_of(self, peer: int) -> Buffers:
        """Where the bytes lie of messages to and from a rank."""
        return self._lengths if peer in self._by_device else self._buffers

    def _wait(self, request: Any, peer: int) -> None:
        test: Callable[[], bool] = request.Test
        polls, limit = 0, 0.0
        while not test():
            os.sched_yield()
            polls += 1
            if polls % _POLLS_PER_CALL == 0:
                self._call_library()
            if polls % _POLLS_PER_CLOCK == 0:
                now = time.monotonic()
                if not limit:
                    limit = now + self._deadline_s
                elif now > limit:
                    raise Stalled(peer, "a message or its acknowledgement")

    def _call_library(self) -> None:
        self._comm.Iprobe(self._MPI.ANY_SOURCE, self._MPI.ANY_TAG)

    def _sleep_for(self, rank: int, tag: int, limit_s: float) -> str | None:
        """Wait for a text from a rank without burning its core; None when the time is over."""
        status = self._MPI.Status()
        end = time.monotonic() + limit_s
        while not self._comm.Iprobe(rank, tag, status):
            if time.monotonic() > end:
                return None
            time.sleep(_NAP_S)
        data = np.empty(status.Get_count(self._MPI.BYTE), np.uint8)
        self._wait(self._comm.Irecv([data, self._MPI.BYTE], rank, tag), rank)
        return data.tobytes().decode()

    def _describe(self, error: Stalled) -> str:
        wire = self._wires.get(error.peer)
        if isinstance(wire, TcpWire) and wire.lost:
            return (
                f"rank {self._rank} has lost its connection to rank {error.peer} ({wire.lost}); it may have died, look "
                "at its host and the network between them"
            )
        return (
            f"rank {error.peer} stopped answering: rank {self._rank} waited {self._deadline_s:g} s for "
            f"{error.waited_for}; it may have stopped or died, look at its host, or raise --deadline when "
            "the link is very slow"
        )


@dataclass(frozen=True, slots=True)
class _Flow:
    """One of several at once, as one of its two ranks has it."""

    peer: int
    area: Any
    message: Request
    answer: Request


def _free(requests: Iterable[Request]) -> None:
    for request in requests:
        request.Free()  # MPI frees an active one once it is done


def _encode(probe: Probe) -> str:
    trials = [[(t.acks, t.messages, t.bytes) for t in row] for row in probe.trials]
    return json.dumps([probe.flows, trials, probe.repeats, probe.together, probe.rates, probe.first])


def _decode(text: str) -> Probe:
    flows, trials, repeats, together, rates, first = json.loads(text)
    return Probe(
        tuple((src, dst) for src, dst in flows),
        tuple(tuple(Trial(*trial) for trial in row) for row in trials),
        repeats,
        together,
        tuple(rates),
        first,
    )
