"""All ranks of one mpiexec as one job: they agree, they fail together, and they never hang.

A failure that all ranks learn of by agreement ends with one message from rank 0 and the same exit code on
every rank. A failure of one rank alone ends the job by MPI_Abort with that rank's message.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from taccl.entry import heed, interrupt
from taccl.errors import NO_ROOM, EnvironmentProblem, RunFailed, TacclError
from taccl.runtime import mpi, process_memory, shared, watchdog
from taccl.runtime.bind import Bound
from taccl.runtime.coders import CodecPort, CodecThread, Note, Pauses
from taccl.runtime.guard import Guard
from taccl.runtime.machine import machine
from taccl.synth.program import Program

if TYPE_CHECKING:
    from taccl.runtime.nccl_ranks import NcclRanks
    from taccl.runtime.sleep import Sleeper
    from taccl.runtime.tcp_links import Links
    from taccl.runtime.tcp_native import NativeLinks

T = TypeVar("T")

MESSAGE_BYTES = 4096  # of an error's text, as other ranks see it
POLLS_BEFORE_SLEEP = 20_000  # empty ones; some ten milliseconds
SPINS = 2  # empty polls before the core is offered to others, when every rank has one of its own
LEAST_PAUSE_S, MOST_PAUSE_S = 20e-6, 500e-6  # of a patient rank
RESTS_PER_CALL = 16  # of a waiting rank, of the MPI library


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Of each rank its node and those that it shares memory with, itself among them, and why this rank shares none, or
    not with all of its node."""

    nodes: tuple[int, ...]  # named by their first ranks
    sharing: tuple[tuple[int, ...], ...]
    why_not: str
    # Why this rank's node does not read private memory of one another's processes; "" where it does.
    no_reading: str = "nobody tried it"
    devices: tuple[str, ...] = ()  # of each rank its device's name on the host, where buffers are on devices
    # Of each rank those that it reaches by staged-shm only, itself among them, beside those that it shares memory with.
    staging: tuple[tuple[int, ...], ...] = ()
    nccl: NcclRanks | None = None  # the communicator of all ranks, where messages go over NCCL
    tcp: Links | NativeLinks | None = (
        None  # of host memory, where messages between nodes go over connections of our own
    )
    no_tcp: str = ""  # why they do not, though nobody has chosen another way

    def apart(self, source: int, target: int) -> bool:
        """Whether messages from one rank to another go through no memory of a node."""
        return target not in self.around(source)

    def linked(self, source: int, target: int) -> bool:
        """Whether a rank has a TCP connection of ours to another one."""
        return self.tcp is not None and (self.tcp.everyone or self.nodes[source] != self.nodes[target])

    def around(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank reaches through memory of its node, itself among them."""
        staged = self.staging[rank] if self.staging else ()
        return tuple(sorted({*self.sharing[rank], *staged}))

    @property
    def near(self) -> tuple[int, ...]:
        """Of each rank the first one that it shares memory with."""
        return tuple(ranks[0] for ranks in self.sharing)


class Job:
    """This rank's place in the job: communicators, watchdog, agreement. Use as a context manager."""

    def __init__(self, deadline_s: float) -> None:
        self._started = self._agreed = self.left = False
        if mpi.launcher().ranks > 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not the main thread
                heed(interrupt)
        self.guard = Guard(deadline_s)
        try:
            self.MPI = mpi.load()
            world = self.MPI.COMM_WORLD
            self.rank: int = world.Get_rank()
            self.ranks: int = world.Get_size()
            self.control = world.Dup()  # agreement, barriers, times
            self.data = world.Dup()  # the program's messages, whose tags are its own
            self.receipts = world.Dup()  # confirmations of messages, with the tags of these
            self.notices = world.Dup()  # that a message's turn has come
            self.board = watchdog.Board(self.MPI, world)
            self.machine = machine(world, self.board.node)
            self.watchdog = watchdog.Watchdog(self.MPI, deadline_s, self.board, self.guard)
            self.guard.started(self.board.key)
            self._started = True
        except EnvironmentProblem:  # there is no MPI, on no rank
            self.guard.close()
            raise
        except BaseException as error:
            self._fail(error)
        self.memory = shared.SharedMemory()
        self._links: Links | NativeLinks | None = None
        self._no_links: str | None = None  # why there are none, when that is known
        ranks, cores = self.machine.ranks, self.machine.cores
        self._spins = SPINS if ranks <= cores else 0
        self._waiting = self._moving(os.sched_yield)
        self._two_cores = 2 * ranks <= cores and len(os.sched_getaffinity(0)) > 1  # for each rank

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._agreed:
            self._fail(error)
        self.left = True
        try:
            self.watchdog.doing("it waits for the other ranks to end")
            self.control.Barrier()
            self.watchdog.doing(None)
            self.watchdog.close()
            self.guard.waits("it waits for all ranks to free what they share")
            if self._links is not None:
                self._links.close()
            self.board.close()
            self.control.Free()
            self.data.Free()
            self.receipts.Free()
            self.notices.Free()
            self.guard.close(_exit_code(error))
        except BaseException as late:
            self._fail(late)

    def _fail(self, error: BaseException) -> None:
        """End the job: the other ranks may be anywhere, and ending normally would wait for them for ever in
        MPI_Finalize."""
        rank = mpi.launcher().rank
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # mpiexec passes on what its ranks have got already
        if isinstance(error, KeyboardInterrupt):
            code, text = 130, "interrupted"
        elif isinstance(error, BrokenPipeError):  # the reader of the table has seen enough
            code, text = 141, ""
        elif isinstance(error, SystemExit):
            code, text = (
                mpi.JOB_FAILED,
                f"rank {rank} left with exit code {error.code}; the job is ended",
            )
        elif isinstance(error, TacclError):
            code, text = error.exit_code, f"rank {rank}: {error}; the job is ended"
        elif isinstance(error, OSError) and error.errno in NO_ROOM:
            what = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "an output"
            code, text = (
                EnvironmentProblem.exit_code,
                f"rank {rank}: {what}: {error.strerror}; the job is ended",
            )
        elif isinstance(error, MemoryError):
            code, text = (
                EnvironmentProblem.exit_code,
                f"rank {rank} has not enough memory; the job is ended (TACCL_DEBUG=1 says where)",
            )
        else:
            code = mpi.JOB_FAILED
            what = f"{type(error).__name__}: {error}"
            text = f"rank {rank} failed with {what}; the job is ended (TACCL_DEBUG=1 says where)"
        if self.guard.speaks() and text:
            mpi.say(f"taccl: {text}", last=True)
        if os.environ.get("TACCL_DEBUG", "") not in ("", "0"):
            traceback.print_exception(error)
        if self._started:
            self.guard.aborts(code)
            mpi.abort(self.MPI, code)
        self.guard.fail(code)

    def leave(self, code: int) -> NoReturn:
        """End this rank with an exit code that all ranks agree on."""
        self._agreed = True
        raise SystemExit(code)

    def fail_alike(self, failure: TacclError) -> NoReturn:
        """Raise on rank 0, and end the others with its code, what every rank has found out for itself."""
        if self.rank != 0:
            self.leave(failure.exit_code)
        self._agreed = True
        _ends_with_its_code(failure)
        raise failure

    def together(self, what: str, work: Callable[[], T]) -> T:
        """The result of local work, once it succeeded on every rank.

        When it raised a TacclError somewhere, or memory was not enough, rank 0 raises it (naming the rank unless all
        failed alike) and the others exit silently with its code.
        """
        result: list[T] = []
        text, code = b"", 0
        try:
            result.append(work())
        except TacclError as error:
            text, code = str(error).encode(errors="backslashreplace")[:MESSAGE_BYTES], error.exit_code
        except MemoryError:
            text, code = f"there is not enough memory for {what}".encode(), EnvironmentProblem.exit_code
        record = np.zeros(2 + MESSAGE_BYTES, np.uint8)
        record[0] = code
        record[2 : 2 + len(text)] = np.frombuffer(text, np.uint8)
        codes = self.gather_bytes(record[:2], what)[:, 0]
        if codes.any():
            first = int(np.flatnonzero(codes)[0])
            self.watchdog.doing(f"it waits for the other ranks in {what}")
            texts = np.zeros((self.ranks, MESSAGE_BYTES), np.uint8)
            self.control.Allgather(record[2:].copy(), texts)
            self.watchdog.doing(None)
            message = texts[first].tobytes().rstrip(b"\0").decode(errors="replace")
            alike = bool((codes == codes[first]).all() and (texts == texts[first]).all())
            failure = TacclError(message if alike else f"rank {first}: {message}")
            failure.exit_code = int(codes[first])
            self.fail_alike(failure)
        return result[0]

    def gather_bytes(self, mine: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
        """(ranks, bytes) uint8: every rank's bytes."""
        everyone = np.zeros((self.ranks, len(mine)), np.uint8)
        self.watchdog.doing(f"it waits for the other ranks in {what}")
        self.control.Allgather(np.ascontiguousarray(mine), everyone)
        self.watchdog.doing(None)
        return everyone

    def agree_on(self, digest: bytes, what: str) -> None:
        """Check before the first message that every rank means to run the same: `what`, and with the same options.

        Raises RunFailed on rank 0 (the others exit with its code), naming the ranks that differ from most.
        """
        everyone = self.gather_bytes(np.frombuffer(digest, np.uint8), "the comparison of programs")
        texts = [row.tobytes() for row in everyone]
        usual = max(sorted(set(texts)), key=texts.count)
        if texts.count(usual) == self.ranks:
            return
        others = [str(rank) for rank, text in enumerate(texts) if text != usual]
        one = len(others) == 1
        named = f"rank {others[0]} runs" if one else f"ranks {', '.join(others)} run"
        has = "has" if one else "have"
        self.fail_alike(
            RunFailed(
                f"{named} another {what}, or {has} other options, than the rest; "
                "give every rank the same file and options"
            )
        )

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """What is done inside waits for other ranks. what: the rest of "rank 3 made no progress for 5 s: ..."."""
        self.watchdog.doing(what)
        yield
        self.watchdog.doing(None)

    def barrier(self, patient: bool = False) -> None:
        """Wait for all ranks. patient: without the cores of those that are late; it may end a moment later."""
        with self.waiting("it waits for the other ranks at a barrier"):
            if not patient:
                self.control.Barrier()
                return
            request, pause_s = self.control.Ibarrier(), LEAST_PAUSE_S
            while not request.Test():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def reduce(self, values: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
        """Element by element the "max" or "sum" over all ranks, on every rank."""
        result = np.empty_like(values)
        self.watchdog.doing("it waits for the other ranks' results")
        self.control.Allreduce(values, result, op={"max": self.MPI.MAX, "sum": self.MPI.SUM}[how])
        self.watchdog.doing(None)
        return result

    def share_memory(self) -> Neighbours:
        """Find out who shares memory with whom (collective). Ranks of one node try it: they all do or none."""
        # What others try out is kept until all have tried it.
        why, no_reading = shared.why_not(), ""
        secret = np.array([secrets.randbits(62)], np.int64)  # in private memory
        mine = np.array([0, 0, 0, self.board.node, process_memory.address(secret), secret[0]], np.int64)
        if not why:
            try:
                trial = self.memory.empty(1, np.int64)
            except EnvironmentProblem as problem:
                why = str(problem)
            else:
                place = self.memory.place(trial)
                assert place is not None
                mine[:3] = place.process, place.fd, place.token
        everyone = self.gather_bytes(mine.view(np.uint8), "the trial of shared memory").view(np.int64)
        nodes = everyone[:, 3]
        for rank in np.flatnonzero(nodes == self.board.node) if not why else ():
            process, fd, token, _, place_of_secret, seen = everyone[rank].tolist()
            if not token:  # it has none
                continue
            try:
                shared.attach(process, fd, token, 8)
            except EnvironmentProblem as problem:
                why = str(problem)
            no_reading = no_reading or process_memory.why_not(process, place_of_secret, seen)
        tried = self.gather_bytes(
            np.array([bool(why), bool(no_reading)], np.uint8), "the trial of shared memory"
        )
        failed = tried[:, 0]
        # Of a node with a rank that failed, each rank is alone.
        sharing = [
            tuple(int(r) for r in np.flatnonzero(nodes == node))
            if not failed[nodes == node].any()
            else (rank,)
            for rank, node in enumerate(nodes)
        ]
        if not why and failed[nodes == self.board.node].any():
            why = "another rank of this node cannot share its memory"
        if not no_reading and tried[nodes == self.board.node, 1].any():
            no_reading = "another rank of this node cannot read its peers' memory"
        return Neighbours(tuple(nodes.tolist()), tuple(sharing), why, no_reading)

    def alone(self) -> Neighbours:
        """No rank shares memory with another (collective)."""
        nodes = self.gather_bytes(np.array([self.board.node], np.int64).view(np.uint8), "the look at nodes")
        return Neighbours(
            tuple(nodes.view(np.int64)[:, 0].tolist()), tuple((rank,) for rank in range(self.ranks)), ""
        )

    def join_nodes(self, neighbours: Neighbours, everyone: bool = False) -> Neighbours:
        """The same with TCP connections between the ranks of different nodes; on one node as they are. Collective.

        everyone: between ranks of one node, too. Raises EnvironmentProblem where one of them cannot be made.
        """
        found = self._joined(neighbours, everyone)
        if found.no_tcp:
            self.fail_alike(EnvironmentProblem(found.no_tcp))
        return found

    def reach_nodes(self, neighbours: Neighbours) -> Neighbours:
        """The same with TCP connections between the ranks of different nodes, where no node has a network that an MPI
        library uses better and all connections can be made, or with the reason why not. Collective."""
        from taccl.runtime import connections

        if len(set(neighbours.nodes)) == 1:
            return neighbours
        if self._no_links is None:
            self._no_links = connections.left_to_mpi(self)
        if self._no_links:
            return replace(neighbours, no_tcp=self._no_links)
        found = self._joined(neighbours, False)
        self._no_links = found.no_tcp
        return found

    def _joined(self, neighbours: Neighbours, everyone: bool) -> Neighbours:
        """With connections, or with the reason why one of them could not be made."""
        from taccl.runtime import connections, sleep, tcp_transport

        def peers(rank: int) -> list[int]:
            here = neighbours.nodes[rank]
            return [r for r, node in enumerate(neighbours.nodes) if r != rank and (everyone or node != here)]

        if not any(map(peers, range(self.ranks))):
            return neighbours
        if self._links is None or self._links.everyone != everyone:
            made, why = connections.connect(self, peers)
            if why:
                return replace(neighbours, no_tcp=why)
            if self._links is not None:
                self._links.close()
            self._links = tcp_transport.join(made, everyone)
            sleeper = sleep.Sleeper(self._links, self.memory, bool(self._spins))
            sleeper.meet(self, neighbours)
            self._links.sleeper = sleeper
            self._links.uplinks.meet(self, neighbours)
        return replace(neighbours, tcp=self._links)

    def connect(self, bound: Bound) -> None:
        """Let the ranks' transports learn of each other, after all have made their part of the collective."""
        offers = self.gather_bytes(bound.transport.offer().view(np.uint8), "the connection of the ranks")
        self.together("the connection of the ranks", lambda: bound.connect(offers.view(np.int64)))

    def run(self, bound: Bound) -> None:
        """Run a bound collective once. The watchdog ends the job when it stalls."""
        bound.start()
        executor, watchdog = bound.executor, self.watchdog
        waiting = self._waiting
        if (sleeper := bound.transport.sleeper) is not None:
            sleeper.watch(lambda: executor.left)
            # A barrier before may have left something in the library.
            waiting = self._moving(sleeper, sleeper)
        elif executor.coding and not self._two_cores:
            waiting = self._moving(Pauses(lambda: executor.left))
        watchdog.doing(executor)
        done = executor.advance(POLLS_BEFORE_SLEEP, waiting, self._spins)
        while not done:
            left = executor.left
            while not (done := executor.advance()) and executor.left == left:
                self._call_library()
                time.sleep(50e-6)  # a long wait: leave the core to others
            done = done or executor.advance(POLLS_BEFORE_SLEEP, waiting, self._spins)
        watchdog.doing(None)
        if sleeper is not None:
            sleeper.forget()
        bound.finish()

    def coder(self, notes: list[Note] | None = None) -> CodecPort:
        """What codes for this rank. notes: as in `CodecPort`. Close it."""
        return CodecThread(notes) if self._two_cores else CodecPort(notes)

    def _call_library(self) -> None:
        self.control.Iprobe(self.MPI.ANY_SOURCE, self.MPI.ANY_TAG)

    def _moving(self, rest: Callable[[], object], sleeper: Sleeper | None = None) -> Callable[[], object]:
        """`rest`, and a call of the MPI library now and then, and whenever the sleeper is about to sleep.

        MPI moves what it has taken only while it is called. A message that it calls finished may still be in there,
        waiting for the connection to its first receiver, while this rank waits for messages through shared memory.
        """
        rests, call = itertools.count(1), self._call_library

        def both() -> None:
            if (sleeper is not None and sleeper.armed) or not next(rests) % RESTS_PER_CALL:
                call()
            rest()

        return both


def _exit_code(error: BaseException | None) -> int:
    """Of a failure that all ranks have agreed on; 0 where there is none."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return error.exit_code if isinstance(error, TacclError) else 0


def _ends_with_its_code(failure: TacclError) -> None:
    """Let a program that does not catch a failure end with its code, as the other ranks do, once Python has shown where
    it was raised: a launcher mixes the codes of its ranks."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        if error is failure:
            raise SystemExit(failure.exit_code)

    sys.excepthook = hook


def fingerprint(program: Program, facts: Iterable[object]) -> bytes:
    """SHA-256 of what all ranks must share: the program (without names and lines) and these facts."""
    digest = hashlib.sha256()
    head = (
        program.collective, program.protocol, program.chunks_per_loop, program.ranks,
        program.inplace, program.outofplace, program.reduce_op, program.root,
    )  # fmt: skip
    digest.update(repr(head).encode())
    for gpu in program.gpus:
        digest.update(repr((gpu.rank, gpu.input_chunks, gpu.output_chunks, gpu.scratch_chunks)).encode())
        for tb in gpu.threadblocks:
            digest.update(repr((tb.id, tb.send, tb.recv, tb.channel)).encode())
            for s in tb.steps:
                step = (s.kind, s.src_buffer, s.src_offset, s.dst_buffer, s.dst_offset, s.count, s.depends)
                digest.update(repr(step).encode())
    digest.update(repr(tuple(facts)).encode())
    return digest.digest()
