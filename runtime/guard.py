"""A child process of each rank, for when the rank itself cannot speak or act.

MPI_Init waits for all ranks, for ever when one of them left before it, and holds Python's lock meanwhile: no thread
and no signal handler of this process can run. So the child limits the start, and the end for the same reason: what
frees memory and communicators, and MPI_Finalize, wait for all ranks when no watchdog of the rank can run any more. All
the time it waits for the end of its rank: who is killed or crashes cannot say so, and not every launcher does.

Of all ranks and children of a host one speaks, the first that claims the job's voice: a name in the system's abstract
socket names, which is there as long as somebody holds the socket and is no file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import itertools
import math
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from taccl.entry import status, voice
from taccl.runtime import mpi

LEAST_S = 10.0  # to start: processes of one job may begin seconds apart
TICK_S = 0.1  # between two looks at the other ranks
START_TICK_S = 0.02  # while MPI starts, at the memory that the rank has mapped: what is made in between stays
FORKED_S = 2.0  # by then a launcher has started all ranks of a host
FOR_EVER = math.inf
ASLEEP_S = 1.0  # between two looks that are due sooner: this process was stopped itself, as all of a suspended job are
ABORT_S = 5.0  # that a rank may take to end the job through MPI, which can hang
END_S = 1.0  # from the word to the launcher that the job is ended to the end of its ranks
INTERRUPT_S = 0.3  # after it has ended another rank, Ctrl-C comes here
REAPED_S = 0.5  # from the end of what a process has open to its own, with all its threads
SPOKEN_S = 0.2  # from a rank's last word to its passing on
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
NAME = "taccl-guard"  # of this process in lists of processes
ARGUMENTS = slice(45, 47)  # of `status`: where the command line begins and ends
LINGER_S = 10.0  # the longest that the voice is held after the rank's end, while the launcher ends the others
NOTE_BYTES = 1024
KEY_BYTES = 8
# What the rank tells its child; numbers of signals are smaller. STARTED is followed by a key, FAILED, AGREED and
# ABORTS by an exit code.
STARTED, WAITS, GOES_ON, LEAVES, FAILED, AGREED, ABORTS = range(0x80, 0x87)


class Guard:
    """The child, from before the start of MPI to the end of the job. Without a launcher there is none."""

    def __init__(self, deadline_s: float) -> None:
        self._place = mpi.launcher()
        # Two names, because some ranks may have started when others have not. Before the start the ranks of a host
        # have one launcher as their parent, or are taken for ranks of several hosts.
        self._names = [voice()]
        self._voices = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        self._note = mmap.mmap(-1, NOTE_BYTES)  # shared with the child
        self._child = 0
        if self._place.ranks < 2:
            return
        self.note("it starts MPI")
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        sys.stdout.flush()
        sys.stderr.flush()
        rank, launcher = os.getpid(), os.getppid()
        # A Ctrl-C meanwhile waits: the child must outlive it, and hear of it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._child = os.fork()
        if self._child == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                os.close(self._writer)
                self._watch(reader, rank, launcher, deadline_s)
            finally:
                os._exit(0)
        os.close(reader)
        # Python's own part of a signal handler runs inside MPI_Init too: it writes the signal's number.
        self._wakes = threading.current_thread() is threading.main_thread()
        if self._wakes:
            self._woken_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def started(self, key: bytes) -> None:
        """MPI has started. key: KEY_BYTES that the ranks of this host share and no other job has."""
        self._names.append(_name(key))
        self._awake()
        self._tell(bytes([STARTED]) + key)

    def waits(self, text: str) -> None:
        """From now on the child sees to the deadline of what the rank waits for."""
        self.note(text)
        self._tell(bytes([WAITS]))

    def note(self, text: str) -> None:
        """What the rank is doing, for the case that it cannot say so later."""
        line = text.encode(errors="backslashreplace")[: NOTE_BYTES - 16]
        self._note[: 16 + len(line)] = struct.pack("dQ", time.monotonic(), len(line)) + line

    def speaks(self) -> bool:
        """Whether this rank may speak for the host. One that may not waits for the end that the other one brings."""
        if self._claim():
            return True
        time.sleep(1.0)
        return False

    def _claim(self) -> bool:
        for name, held in zip(self._names, self._voices, strict=False):
            try:
                held.bind(name)
            except OSError as error:
                # Elsewhere than on Linux there are no such names; then everybody speaks.
                if error.errno in (errno.EADDRINUSE, errno.EINVAL):
                    return False
        return True

    def fail(self, code: int) -> None:
        """End the job, whose MPI has not started; does not return."""
        self._awake()
        self._tell(bytes([FAILED, code]))
        mpi.flush()
        os._exit(code)

    def aborts(self, code: int) -> None:
        """This rank is about to end the job through MPI. A launcher may hear of it from the child as well, and must not
        take another code from there."""
        self._tell(bytes([ABORTS, code]))

    def close(self, agreed: int = 0) -> None:
        """Nobody waits for this rank but in MPI_Finalize, when the process ends. The child stays until then.

        agreed: the exit code of a failure that all ranks know, of which rank 0 speaks before its process ends. When the
        end of MPI then takes too long, the child ends the job with that code and says no more.
        """
        if self._child:
            self._awake()
            self.note("it has left its job")
            self._tell(bytes([AGREED, agreed]) if agreed else bytes([GOES_ON]))
            atexit.register(self._leave)

    def _leave(self) -> None:
        """The process ends in an orderly way. mpi4py calls MPI_Finalize after all that Python calls at its exit."""
        self.note("it waits for all ranks to leave MPI")
        self._tell(bytes([LEAVES]))

    def _awake(self) -> None:
        if self._child and self._wakes:
            signal.set_wakeup_fd(self._woken_before)  # an event loop of the program may have one
            self._wakes = False

    def _tell(self, word: bytes) -> None:
        if self._child:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._writer, word)

    def _watch(self, reader: int, rank: int, launcher: int, deadline_s: float) -> None:
        """In the child, until the rank ends, dies, or is to be ended."""
        os.setsid()  # signals are for the rank; this process ends with it, and clears up
        continue_after_parent()
        rename(f"{NAME} of rank {self._place.rank}, process {rank}")
        # What the program has open is its own to close: who reads from a pipe waits until nobody can write into it. And
        # no object that a collector finds is to close what has the number of its file now.
        gc.disable()
        kept = [2, reader, *(held.fileno() for held in self._voices)]
        _close_others([*kept, int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else kept)
        listener = select.poll()
        listener.register(reader, select.POLLIN)
        # The end of the pipe is not heard while a process lives that the rank has forked.
        end_of_rank = -1
        with contextlib.suppress(AttributeError, OSError):  # an older system
            end_of_rank = os.pidfd_open(rank)
            listener.register(end_of_rank, select.POLLIN)
        begin, patience_s = time.monotonic(), max(deadline_s, LEAST_S)
        # One after another, so that the first one's message is the only one: it ends the job.
        end = begin + patience_s + 0.5 * min(self._place.rank, 20)
        me, starting, leaving, agreed, aborting = f"rank {self._place.rank}", True, False, False, False
        said, code, segments = "", mpi.JOB_FAILED, set[str]()
        siblings, word, look_at = Siblings(self._place, launcher), b"", begin
        before = begin
        while not said:
            now = time.monotonic()
            if now - before > ASLEEP_S:
                end += now - before
            before, left_s = now, end - now
            wait_s = max(0.0, min(left_s, START_TICK_S if starting else TICK_S))
            heard = bool(listener.poll(None if end == FOR_EVER else math.ceil(1000 * wait_s)))
            if end == FOR_EVER:
                before = time.monotonic()
            if left_s <= 0 and not heard:  # this process may have been stopped meanwhile
                said = (
                    f"{me} waited {patience_s:g} s for MPI to start: another rank "
                    "has ended (are its options the same?) or was never started"
                    if starting
                    else f"{me} made no progress for {deadline_s:g} s: {self._last_note()[1]}"
                )
                if aborting:
                    said = f"{me} could not end the job through MPI"
                elif (stopped := siblings.stopped(0.0)) is not None:
                    said += f"; rank {stopped} has been stopped"
                break
            word = _last_word(reader) if heard else b""
            if starting:
                segments.update(mpi.segments(rank))
            if not word and (heard or time.monotonic() >= look_at):
                look_at = time.monotonic() + TICK_S
                # A launcher that has ended this rank had started all of them, and one that is not there was the cause.
                siblings.look(starting and (heard or time.monotonic() - begin > FORKED_S), ended=heard)
            if heard and not word:
                if leaving or process_state(launcher) in "ZX":
                    break  # in order, or with its job
                # Where this rank has ended because of another one, that one is named.
                said = (
                    f"{siblings.gone} ended before all ranks had started MPI"
                    if siblings.gone and starting
                    else f"{siblings.gone or me} has died (killed or crashed)"
                )
                if not siblings.gone:
                    said += "; its last word, {:.1f} s before: {}".format(*self._last_note())
                if starting and (why := mpi.little_memory(self._place.local or self._place.ranks)):
                    said += f"; {why}"
            elif word == bytes([STARTED]):
                self._names.append(_name(os.read(reader, KEY_BYTES)))
                starting, end = False, FOR_EVER
            elif word in (bytes([GOES_ON]), bytes([AGREED])):
                starting, end = False, FOR_EVER
                if word == bytes([AGREED]):
                    agreed, code = True, os.read(reader, 1)[0]
            elif word in (bytes([WAITS]), bytes([LEAVES])):
                starting, leaving = False, word == bytes([LEAVES])
                end = time.monotonic() + deadline_s
            elif word == bytes([ABORTS]):
                code, end, aborting = os.read(reader, 1)[0], time.monotonic() + ABORT_S, True
            elif word == bytes([FAILED]):
                code = os.read(reader, 1)[0]
                break
            elif word == bytes([signal.SIGINT]):
                said, code = "interrupted", 130
            elif starting and siblings.gone and time.monotonic() - siblings.gone_since > INTERRUPT_S:
                said = f"{siblings.gone} ended before all ranks had started MPI"
            elif starting and (stopped := siblings.stopped(deadline_s)) is not None:
                said = f"rank {stopped} has been stopped for {deadline_s:g} s and MPI cannot start"
        if said and starting and os.getppid() == rank:
            # Inside MPI_Init it would crash when the job ends around it, and go on to make files in memory.
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGSTOP)
        if said and self._claim():
            if starting:
                siblings.stop()
            if not (agreed and leaving):
                mpi.say(f"taccl: {said}" + "; the job is ended" * (code != 130), last=True)
        elif said:  # somebody else ends the job; an interrupt may have been said by a rank that cannot
            _wait(lambda: os.getppid() != rank, SPOKEN_S if code == 130 else END_S)
        segments.update(mpi.segments(rank))
        if word == bytes([FAILED]) or os.getppid() == rank or self._holds():
            self._end(rank, launcher, code)
            siblings.free()
        mpi.unlink(segments)
        self._linger(launcher)

    def _last_note(self) -> tuple[float, str]:
        """How many seconds ago the rank noted what."""
        written, length = struct.unpack("dQ", self._note[:16])
        text = self._note[16 : 16 + length].decode(errors="replace")
        return max(0.0, time.monotonic() - written), text

    def _end(self, rank: int, launcher: int, code: int) -> None:
        """End the job where the launcher can be told to, and the rank in any case."""
        if self._place.kind == "mpich" and "PMI_FD" in os.environ:
            with contextlib.suppress(OSError):  # it has ended the job
                # What MPI_Abort does, in the words of PMI version 1.
                os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
            _wait(lambda: os.getppid() != rank or process_state(launcher) in "ZX", END_S)
        if os.getppid() == rank:
            os.kill(rank, signal.SIGKILL)

    def _holds(self) -> list[int]:
        """The sockets that hold the voice."""
        return [held.fileno() for held in self._voices if held.getsockname()]

    def _linger(self, launcher: int) -> None:
        """Hold the voice, if it is held, until the launcher has ended the other ranks."""
        held = self._holds()
        _close_others(held)
        if held:
            # A launcher that has ended may stay a zombie for seconds.
            _wait(lambda: process_state(launcher) in "ZX", LINGER_S)


def _last_word(reader: int) -> bytes:
    """What is in a pipe; nothing where its writer has ended."""
    pipe = select.poll()
    pipe.register(reader, select.POLLIN)
    return os.read(reader, 1) if pipe.poll(0) else b""


def _close_others(kept: Iterable[int]) -> None:
    """Close all files but those."""
    past = 1024
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        past = max(map(int, os.listdir("/proc/self/fd"))) + 1
    for last, following in itertools.pairwise([-1, *sorted({one for one in kept if one < past}), past]):
        os.closerange(last + 1, following)


def _name(key: bytes) -> str:
    return f"\0taccl-{key.hex()}"


def continue_after_parent() -> None:
    """Let the kernel make this process go on when its parent has ended, if somebody has stopped it: the launcher waits
    for all that hold its pipes."""
    with contextlib.suppress(AttributeError, OSError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGCONT, 0, 0, 0)


def rename(words: str) -> None:
    """What lists of processes show of this one, in place of the command line that it has from its parent, and no longer
    than that."""
    with contextlib.suppress(OSError, ValueError):  # elsewhere than on Linux it stays as it is
        begin, end = map(int, status("self")[ARGUMENTS])
        Path("/proc/self/comm").write_text(words)  # the system cuts it
        if begin < end:
            ctypes.memset(begin, 0, end - begin)
            ctypes.memmove(begin, words.encode(), min(len(words.encode()), end - begin - 1))


def is_guard(process: int) -> bool:
    """Whether it is such a child. Where a launcher has died, or is the first process of a container, those whose ranks
    have ended are its successor's children, or its own, as ranks are."""
    with contextlib.suppress(OSError):  # it has gone
        return Path(f"/proc/{process}/comm").read_text().startswith(NAME)
    return False


def _wait(until: Callable[[], bool], longest_s: float) -> None:
    end = time.monotonic() + longest_s
    while not until() and time.monotonic() < end:
        time.sleep(0.01)


class Siblings:
    """The ranks of this host, as far as they are children of one launcher and the system lists them."""

    def __init__(self, place: mpi.Launcher, launcher: int) -> None:
        self.gone = ""  # who ended, once one did
        self.gone_since = 0.0
        self._place, self._launcher = place, launcher
        self._seen: dict[int, int] = {}  # process -> rank
        self._stops: dict[int, float] = {}  # process that is stopped -> since when
        # The system lists what has become ready in the order in which it did, however late that is read. So all
        # who ask agree on who ended first: one rank's end makes others end, by their MPI or by the launcher.
        self._ends = select.epoll() if hasattr(os, "pidfd_open") else None
        self._handles: dict[int, int] = {}  # handle of a process -> rank
        self._order: list[int] = []  # ranks as they ended
        # A parent that has a rank itself is a wrapper of one rank.
        self._known = self._number(launcher) is None

    def _number(self, process: int) -> int | None:
        name = mpi.PLACES[self._place.kind][0].encode() + b"="
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        return next((int(one[len(name) :]) for one in environment if one.startswith(name)), None)

    def look(self, all_forked: bool, ended: bool = False) -> None:
        """See who is there. all_forked: whether who was never there has ended; ended: whether this rank has."""
        listed: list[str] = []
        try:  # Open MPI's daemons start ranks from several threads
            for thread in Path(f"/proc/{self._launcher}/task").iterdir():
                listed += (thread / "children").read_text().split()
        except OSError:
            return
        if not self._known or self.gone:
            return
        for process in map(int, listed):
            if process in self._seen or is_guard(process):
                continue
            if (number := self._number(process)) is not None:
                self._seen[process] = number
                self._expect(process, number)
        first: list[int] = []
        if all_forked and len(self._seen) < self._place.local:
            everywhere = self._place.local == self._place.ranks
            others = {*range(self._place.ranks)} - {self._place.rank, *self._seen.values()}
            first = sorted(others) if everywhere else [-1]
        first += self._ended(ended)
        if first and first[0] != self._place.rank:
            self.gone = f"rank {first[0]}" if first[0] >= 0 else "another rank of this host"
            self.gone_since = time.monotonic()

    def _expect(self, process: int, number: int) -> None:
        if self._ends is None:
            return
        try:
            handle = os.pidfd_open(process)
            self._handles[handle] = number
            self._ends.register(handle, select.EPOLLIN | select.EPOLLONESHOT)
        except ProcessLookupError:
            self._order.append(number)
        except OSError:  # no such call in this kernel or container, or too many open files
            self._ends = None

    def _ended(self, own: bool) -> list[int]:
        """Ranks that have ended, the first one first. own: this one has, or is about to; it is waited for."""
        if self._ends is None:
            # The launcher has looked after the first one by then, and others may have ended because of it.
            states = {number: process_state(process) for process, number in self._seen.items()}
            ended = [number for state in "XZ" for number in states if states[number] == state]
            return [number for number in ended if number != self._place.rank]
        until = time.monotonic() + REAPED_S
        while True:
            self._order += [self._handles[handle] for handle, _ in self._ends.poll(0)]
            missed = (
                own and self._place.rank in self._handles.values() and self._place.rank not in self._order
            )
            if not missed or time.monotonic() > until:
                return self._order
            time.sleep(0.001)

    def stopped(self, least_s: float) -> int | None:
        """A rank that has been stopped for so long, as far as it was looked at."""
        now = time.monotonic()
        stopped = [process for process in self._seen if process_state(process) == "T"]
        self._stops = {process: self._stops.get(process, now) for process in stopped}
        return min(
            (self._seen[p] for p, since in self._stops.items() if now - since >= least_s), default=None
        )

    def stop(self) -> None:
        """Stop all that were seen."""
        for process in self._seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)

    def free(self) -> None:
        """End who is stopped: a launcher that asks first waits for them."""
        self.stopped(0.0)
        for process in self._stops:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def process_state(process: int) -> str:
    """The letter of /proc/PID/stat; X: there is no such process."""
    try:
        return status(process)[0]
    except OSError:
        return "X"
