"""A rank of a job in which rank 2 does something bad in the middle of a run. See test_run_faults.py."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import runtime_programs as programs

from taccl.errors import EnvironmentProblem
from taccl.runtime import guard
from taccl.runtime.bind import Bound, Buffers, compile_program
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.guard import process_state
from taccl.runtime.job import Job, fingerprint
from taccl.runtime.layout import Layout
from taccl.runtime.mpi import launcher
from taccl.runtime.semantics import collective_of
from taccl.runtime.shm import SharedMemoryTransport
from taccl.runtime.tcp_transport import TcpTransport
from taccl.runtime.trace import trace
from taccl.runtime.transports import MpiTransport

VICTIM = 2
DEADLINE_S = 2.0


def fail(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "kill_beside_child":
        if os.fork() == 0:  # as workers that load data are: it keeps all that the rank has open
            time.sleep(2.8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "unseen":
        kill_unseen()
    elif how == "sleep":
        time.sleep(600)
    elif how == "raise":
        raise ValueError("broken on purpose")
    elif how == "taccl":
        raise EnvironmentProblem("the disk is full on purpose")
    elif how == "exit":
        sys.exit(3)
    elif how == "os_exit":
        os._exit(3)
    elif how == "interrupt":
        os.kill(os.getsid(0), signal.SIGINT)  # the test starts mpiexec in a session of its own
    elif how == "interrupts":  # from the terminal, and the launcher's copies of it
        ranks = children(os.getppid())
        if os.fork() == 0:
            for _ in range(20):
                for rank in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank, signal.SIGINT)
                time.sleep(0.002)
            os._exit(0)


def children(process: int) -> list[int]:
    listed = (one.read_text().split() for one in Path(f"/proc/{process}/task").glob("*/children"))
    return [int(child) for one in listed for child in one]


def kill_unseen() -> None:
    """Die, and all others after it, while no child process of a rank can run; then this one's goes on first."""
    victim = os.getpid()
    ranks = children(os.getppid())
    guards = sorted(
        (child for rank in ranks for child in children(rank)), key=lambda one: one in children(victim)
    )
    for one in guards:
        os.kill(one, signal.SIGSTOP)
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 1024)
        for rank in sorted(ranks, key=lambda one: one != victim):
            with contextlib.suppress(
                ProcessLookupError
            ):  # its MPI has noticed the death, and the launcher its own
                os.kill(rank, signal.SIGKILL)
            while process_state(rank) not in "ZX":
                time.sleep(0.001)
        os.kill(guards.pop(), signal.SIGCONT)
        time.sleep(1.0)
        for one in guards:
            os.kill(one, signal.SIGCONT)
        os._exit(0)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_late(job: Job, how: str) -> None:
    """Stop where no code of the rank watches over what it waits for."""
    if how == "leaving":
        atexit.register(stop)
    elif how == "freeing":
        close = job.board.close
        job.board.close = lambda: (stop(), close())


def segments() -> list[str]:
    """Shared memory of MPICH that this process has mapped, under the names it was made with."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = [line.partition(" /dev/shm/")[2].split(" ")[0] for line in maps]
    return sorted({f"/dev/shm/{name}" for name in names if name.startswith("mpich_")})


def main(how: str, way: str) -> None:
    if how == "left" and launcher().rank == VICTIM:
        ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)  # after MPI_Finalize, which is registered later
    if how == "unseen":
        guard.continue_after_parent = lambda: None  # they are to be stopped for longer
    with Job(DEADLINE_S) as job:
        victim = job.rank == VICTIM
        if job.rank == 0:
            print("segments", *segments(), flush=True)
        program = programs.ring_allgather(job.ranks, 2 if how == "diverge" and victim else 1)
        size = 101 if how == "size" and victim else 100
        if how == "late" and victim:
            time.sleep(600)
        job.agree_on(fingerprint(program, (size,)), "program")
        if how == "uneven":
            job.together("the start", lambda: fail("taccl") if victim else None)
        order = trace(program)
        compiled = compile_program(program, collective_of(program, order), False, [job.rank], order)
        memory = job.memory.empty if way == "shm" else np.zeros
        buffers = Buffers(memory(size, np.int32), memory(size * job.ranks, np.int32))
        transport = MpiTransport(job.MPI, job.data, size * 4)
        if way == "shm":
            node = job.share_memory().sharing[job.rank]
            transport = SharedMemoryTransport(job.memory, job.rank, node, compiled.messages, transport)
        if way == "tcp":
            links = job.join_nodes(job.alone(), everyone=True).tcp
            transport = TcpTransport(links, job.rank, transport)
        shape = Layout(size, 1, job.ranks)
        bound = Bound(compiled, job.rank, shape, buffers, DTYPES["int32"], None, transport, np, memory)
        job.connect(bound)
        for turn in range(10**9):
            if turn == 100 and victim:
                print(f"at {time.time()}", flush=True)
                fail(how)
            job.run(bound)
            if turn == 100 and how == "computing":  # nobody waits for the rank that is stopped
                if victim:
                    stop()
                time.sleep(30)
            if turn == 100 and how in ("freeing", "leaving", "left"):
                if victim:
                    stop_late(job, how)
                break
            if turn == 200 and how == "barrier":
                if victim:
                    time.sleep(600)
                job.barrier()


main(sys.argv[1], *(sys.argv[2:] or ["mpi"]))
