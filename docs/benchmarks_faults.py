"""`make bench-faults`: jobs of 4 ranks of which one fails, and a thousand collectives one after another.

    python docs/benchmarks_faults.py                   the tables of docs/benchmarks.md
    python docs/benchmarks_faults.py kill stop mpi 5   5 tries of these faults over one transport
    python docs/benchmarks_faults.py collectives       the second table only

A try runs `mpiexec -n 4 taccl run`: an allreduce of many sizes, types and reductions, beside MPI's; over TCP also one
with codecs, `coded`. A rank drawn by chance fails at a moment drawn by chance, three of ten times while the job starts.
Seeds are fixed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from taccl.runtime import check, mpi
from taccl.runtime.bind import Bound, compile_program
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.guard import LEAST_S
from taccl.runtime.host_transport import host_transport
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.layout import layout
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace
from taccl.synth.msccl_xml import read_xml

RANKS = 4
TRIES = 20
DEADLINE_S = 2.0
GRACE_S = 2.0  # from the deadline to the end of the job
EARLY = 0.3  # of the faults come before the ranks have agreed on what they run
LATEST_S = 1.0  # a fault comes up to this long after the start of mpiexec, or after the agreement
HANG_S = 60.0
TOKEN = "TACCL_BENCH_JOB"
FAULTS = ("kill", "stop", "raise", "exit", "diverge", "interrupt", "ctrl-c")
WAYS = {
    "mpi": ("-d", "all", "-o", "all", "--transport", "mpi"),
    "shm": ("-d", "all", "-o", "all", "--transport", "shm"),
    "tcp": ("-d", "all", "-o", "all", "--transport", "tcp"),
    "coded": (
        *("-d", "float32", "-o", "sum", "--transport", "tcp"),
        *("--codec", "q8,xw", "--codec-links", "all", "--recode"),
    ),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGALRM, "exit": signal.SIGALRM}

ROUNDS, WARM = 10, 2  # of collectives; memory is compared from the end of round WARM on
KINDS = ("allgather", "allreduce", "reducescatter", "alltoall", "broadcast", "reduce", "gather", "scatter")
ELEMENTS = (16, 100, 1028, 20000, 150000)
CASES = 100  # a round

# A rank: raises or leaves when it gets a signal, or has other arguments.
RANK = """
import os, signal, sys, time
from taccl import entry
class Broken(Exception):  # that no library takes for its own
    pass
how, victim, moment_s, *line = sys.argv[1:]
split = line.index("--other")
line, other = line[:split], line[split + 1:]
def fail(_, frame):
    while frame is not None:  # Python drops what is raised in a finalizer, and in one of its locks of imports
        if frame.f_code.co_filename.endswith("weakref.py") or frame.f_code.co_name == "cb":
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return
        frame = frame.f_back
    if how == "exit":
        raise SystemExit(3)
    raise Broken("on purpose")
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == victim:
    if how in ("raise", "exit"):
        signal.signal(signal.SIGALRM, fail)
    elif how == "diverge":
        time.sleep(float(moment_s))
        line = other
sys.argv = line
entry.main()
"""


@dataclass(frozen=True)
class Try:
    """One job, and how it ended."""

    victim: int
    code: int
    seconds: float  # from the fault to the end of mpiexec
    early: bool  # whether the fault came before all ranks had agreed on what they run
    said: tuple[str, ...]  # lines of taccl's
    launcher: str  # what else was said
    left: tuple[str, ...]  # processes, segments and files that outlived the job


def attempt(how: str, way: str, chance: random.Random, folder: str) -> Try:
    """Start a job and let it fail."""
    victim, early, moment_s = chance.randrange(RANKS), chance.random() < EARLY, chance.uniform(0.0, LATEST_S)
    line = ["taccl", "run", f"{folder}/allreduce-ring.xml", "-b", "16", "-e", "1M", "-n", "50", "-v", "--deadline",
            str(DEADLINE_S), *WAYS[way]]  # fmt: skip
    other_file = [*line[:2], f"{folder}/allreduce-direct.xml", *line[3:]]
    other = chance.choice([other_file, [one.replace("1M", "512K") for one in line]])
    token, scratch = uuid.uuid4().hex, tempfile.mkdtemp(dir=folder)
    command = [mpi.mpiexec(), "-n", str(RANKS), sys.executable, "-c", RANK, how, str(victim), str(moment_s), *line,
               "--other", *other]  # fmt: skip
    memory = set(os.listdir("/dev/shm"))
    out, err = Path(scratch, "out"), Path(scratch, "err")

    def agreed() -> bool:
        return err.read_text(errors="replace").count(" host buffers, ") == RANKS

    with out.open("w") as to, err.open("w") as errors:
        job = subprocess.Popen(
            command, env={**mpi.launch_environment(), TOKEN: token, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL, stdout=to, stderr=errors, start_new_session=True,
        )  # fmt: skip
    fault = time.monotonic()
    if how != "diverge":
        while not early and not agreed() and job.poll() is None:
            time.sleep(0.02)
        time.sleep(moment_s)
        while (process := member(token, victim)) is None and job.poll() is None:
            time.sleep(0.01)
        early = not agreed()
        fault = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            if how == "interrupt":
                os.kill(job.pid, signal.SIGINT)
            elif how == "ctrl-c":
                os.killpg(job.pid, signal.SIGINT)
            elif process is not None:
                os.kill(process, SIGNALS[how])
    left = []
    try:
        job.wait(HANG_S)
    except subprocess.TimeoutExpired:
        left.append("the job hung")
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    seconds = time.monotonic() - fault
    left += remains(token, memory, scratch)
    text = err.read_text(errors="replace") + out.read_text(errors="replace")
    lines = text.replace("\0", "").splitlines()  # which Open MPI ends its own messages with
    said = tuple(one for one in lines if one.startswith("taccl:") and " host buffers, " not in one)
    rest = "\n".join(one for one in lines if not one.startswith(("taccl:", "#", " ")))
    return Try(victim, job.returncode, seconds, early or how == "diverge", said, rest, tuple(left))


def faults_of(how: str, t: Try) -> str:
    """What was wrong with the end of a job; empty when nothing was."""
    limit_s = (LEAST_S if t.early else DEADLINE_S) + GRACE_S
    ends = [one for one in t.said if "the job is ended" in one or "runs another program" in one]
    if t.code == 0:
        return "exit code 0"
    if t.seconds > limit_s:
        return f"it took {t.seconds:.1f} s"
    if t.left:
        return f"left: {', '.join(t.left)}"
    if "Traceback" in t.launcher and not (
        how == "raise" and t.early
    ):  # that of a module that is being loaded
        return "a traceback"
    if how in ("interrupt", "ctrl-c"):
        return "" if set(t.said) <= {"taccl: interrupted"} and len(t.said) <= 1 else "more than one message"
    if not ends and t.early and ("signal" in t.launcher or "exited" in t.launcher):
        return ""  # before taccl was loaded only the launcher can speak
    if len(ends) != 1:
        return f"{len(ends)} messages"
    return "" if f"rank {t.victim} " in ends[0] else "the rank is not named"


def members(token: str) -> dict[int, list[bytes]]:
    """The processes of a job, zombies excepted, and their environments."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"{TOKEN}={token}".encode() in environment:
                    found[int(entry.name)] = environment
    return found


def member(token: str, victim: int) -> int | None:
    """The process of a rank: of those that have its number the one that is no child of another. Numbers of processes
    start anew now and then, so the rank's need not be the lowest."""
    names = {f"{name}={victim}".encode() for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")}
    known = [pid for pid, found in members(token).items() if names & set(found)]
    return next((pid for pid in known if parent(pid) not in known), None)


def parent(pid: int) -> int:
    """Of a process; 0 where it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def remains(token: str, memory: set[str], scratch: str) -> list[str]:
    """What is left of a job; its helpers have a moment to go."""
    end = time.monotonic() + GRACE_S
    while True:
        left = [f"process {pid}" for pid in members(token)]
        new = set(os.listdir("/dev/shm")) - memory
        held = "".join(map(maps, Path("/proc").glob("[0-9]*"))) if new else ""  # by jobs of others
        left += [f"/dev/shm/{name}" for name in sorted(new) if name not in held]
        left += [
            str(one) for one in Path(scratch).rglob("*") if one.is_file() and one.name not in ("out", "err")
        ]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def maps(process: Path) -> str:
    try:
        return (process / "maps").read_text(errors="replace")
    except OSError:
        return ""


def faults(arguments: list[str], tries: int, library: str, folder: str) -> bool:
    """Print the table of faults; whether all was well."""
    print(
        "| MPI | transport | fault | tries | as it should be | longest (s) | while starting (s) | exit codes |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    well = True
    for way in [one for one in WAYS if one in arguments] or WAYS:
        for how in [one for one in FAULTS if one in arguments] or FAULTS:
            chance = random.Random(f"{how} {way}")
            found = [attempt(how, way, chance, folder) for _ in range(tries)]
            problems = [(t, problem) for t in found if (problem := faults_of(how, t))]
            longest = [f"{max(times):.1f}" if times else "" for times in
                       ([t.seconds for t in found if t.early == early] for early in (False, True))]  # fmt: skip
            codes = sorted({t.code for t in found})
            print(
                f"| {library} | {way} | {how} | {tries} | {tries - len(problems)} | {longest[0]} | {longest[1]} | "
                f"{', '.join(map(str, codes))} |",
                flush=True,
            )
            for t, problem in problems:
                print(f"{how} over {way}: {problem}\n{t}", file=sys.stderr, flush=True)
            well &= not problems
    return well


def collectives(folder: str) -> None:
    """A rank: ROUNDS times the same cases in another order, each bound, run, checked and closed."""
    with Job(60.0) as job:
        near = job.share_memory()
        programs = {name: read_xml(Path(f"{folder}/{name}.xml").read_text(), name) for name in made(folder)}
        orders = {name: trace(program) for name, program in programs.items()}
        chance = random.Random(0)
        names, modes, wrong = sorted(programs), (False, True), 0
        cases = [
            (names[i % len(names)], chance.choice(sorted(DTYPES)), chance.choice(("sum", "max")),
             chance.choice(ELEMENTS), modes[i // len(names) % 2], chance.choice(("mpi", "private", "shared")))
            for i in range(CASES)
        ]  # fmt: skip
        for turn in range(ROUNDS):
            chance.shuffle(cases)
            for case in cases:
                wrong += one(job, near, programs[case[0]], orders[case[0]], *case[1:])
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what was freed is not counted
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            pieces = Path("/proc/self/maps").read_text().count("memfd:taccl")
            counts = np.array([pages * 4096, len(os.listdir("/proc/self/fd")), pieces])
            highest, errors = job.reduce(counts, "max"), job.reduce(np.array([wrong]), "sum")
            if job.rank == 0:
                print(json.dumps([(turn + 1) * CASES, int(errors[0]), *highest.tolist()]), flush=True)


def one(
    job, near: Neighbours, program, order, type_: str, op: str, elements: int, inplace: bool, how: str
) -> int:
    """Wrong elements and bytes outside of one collective, run twice."""
    collective = collective_of(program, order)
    dtype, reduction = DTYPES[type_], op if collective.combining else None
    compiled = compile_program(program, collective, inplace, [job.rank], order)
    shape = layout(collective, elements)
    empty = job.memory.empty if how == "shared" else np.empty
    guarded = check.allocate(collective, shape, job.rank, dtype, inplace, empty)
    kind = "mpi" if how == "mpi" else "shm"
    transport, own = host_transport(job, compiled, shape.chunk_elements * dtype.bytes, near, kind)
    bound = Bound(compiled, job.rank, shape, guarded.buffers, dtype, reduction, transport, np, own)
    job.connect(bound)
    bad = 0
    for _ in range(2):
        check.fill(guarded.buffers, dtype, reduction, job.rank, job.ranks)
        job.run(bound)
        found = check.inspect(guarded, collective, shape, job.rank, dtype, reduction, inplace)
        bad += found.wrong + found.outside
    job.barrier()
    bound.close()
    transport.close()
    return bad


def thousand(library: str, folder: str) -> bool:
    """Print the table of collectives; whether all was well."""
    command = [mpi.mpiexec(), "-n", str(RANKS), sys.executable, __file__, "--collectives", folder]
    # The UCX inside MPICH keeps 150 bytes of each memory mapping that anybody makes, unless told not to follow them.
    environment = {**mpi.launch_environment(), "UCX_MEM_EVENTS": "no"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    print("| MPI | collectives | wrong | resident (MB) | open files | pieces of shared memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows[WARM - 1 :]:
        print(f"| {library} | {row[0]} | {row[1]} | {row[2] / 1e6:.2f} | {row[3]} | {row[4]} |", flush=True)
    if done.returncode or len(rows) != ROUNDS:
        return False
    first, last = rows[WARM - 1], rows[-1]
    return last[1] == 0 and last[2] <= 1.01 * first[2] and last[3:] == first[3:]


def made(folder: str) -> list[str]:
    return [path.stem for path in Path(folder).glob("*.xml")]


def make(folder: str, kind: str, engine: str) -> None:
    """A program for even links between the ranks."""
    subprocess.run(
        [sys.executable, "-m", "taccl", "synth", "-t", f"fat-tree:1x{RANKS}", "-c", kind, "--size", "1MB",
         "--engine", engine, "--partition", "1", "-o", f"{folder}/{kind}-{engine}.xml"],
        check=True, capture_output=True,
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--collectives"]:
        collectives(arguments[1])
        return
    tries = next((int(one) for one in arguments if one.isdigit()), TRIES)
    ask = "from taccl.runtime import mpi; found = mpi.library(mpi.load()); print(found.name, found.version)"
    command = [mpi.mpiexec(), "-n", "1", sys.executable, "-c", ask]
    asked = subprocess.run(command, check=True, capture_output=True, text=True, env=mpi.launch_environment())
    named = asked.stdout.strip()
    well = True
    with tempfile.TemporaryDirectory() as folder:
        for kind, engine in [("allreduce", "ring"), *((kind, "direct") for kind in KINDS)]:
            make(folder, kind, engine)
        if set(arguments) != {"collectives"}:
            well &= faults(arguments, tries, named, folder)
            print()
        if not arguments or "collectives" in arguments:
            well &= thousand(named, folder)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
