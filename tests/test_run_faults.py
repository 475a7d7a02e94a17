"""Ranks that die, stall, raise, leave or diverge: the job always ends, soon, with one clear message."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_jobs import Ended, launch, messages, needs_mpi, taccl_but

from taccl.runtime import mpi

pytestmark = [*needs_mpi, pytest.mark.alone]

WORKER = str(Path(__file__).with_name("run_fault_worker.py"))
DEADLINE_S = 2.0  # the worker's
START_S = 8.0  # of a job on a busy machine


def fault(how, way="mpi"):
    ended = launch(4, WORKER, how, way)
    assert ended.code != 0
    assert ended.seconds < DEADLINE_S + 2 + START_S
    assert "Traceback" not in ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("segments")]
    assert [path for path in line.split()[1:] if Path(path).exists()] == []  # no memory is left behind
    assert list(Path("/dev/shm").glob("*taccl*")) == []
    return ended


@pytest.mark.parametrize(
    ("how", "way", "words"),
    [
        ("stop", "mpi", "rank 2 has shown no sign of life for"),
        ("stop", "shm", "rank 2 has shown no sign of life for"),
        ("stop", "tcp", "rank 2 has shown no sign of life for"),
        ("sleep", "mpi", "rank 2 lives and waits for nobody"),
        ("barrier", "mpi", "rank 2 lives and waits for nobody"),
    ],
)
def test_a_rank_that_stalls_is_named(how, way, words):
    ended = fault(how, way)
    assert ended.code == 86
    said = messages(ended)
    assert len(said) == 1
    assert "made no progress for 2 s: " in said[0] and words in said[0]
    if how != "barrier":
        assert "threadblock 0, step " in said[0] and " rank " in said[0].split("step ")[1]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("computing", "rank 2 has been stopped for "),
        ("freeing", "it waits for all ranks to free what they share; rank 2 has been stopped; "),
        ("leaving", "it waits for all ranks to leave MPI; rank 2 has been stopped; "),
        ("left", "rank 2 made no progress for 2 s: it waits for all ranks to leave MPI; "),
    ],
)
def test_a_rank_that_is_stopped_while_nothing_watches_is_named(how, words):
    """While the others compute, while they free what they share, in MPI_Finalize, and after it."""
    ended = fault(how)
    assert ended.code == 86
    (said,) = messages(ended)
    assert words in said


# All ranks, and their guards, are stopped for longer than the deadline while one of them waits for the others.
SUSPENDED = """
import os, subprocess, sys, time
from pathlib import Path
from taccl.runtime.job import Job
def children(process):
    listed = (one.read_text().split() for one in Path(f"/proc/{process}/task").glob("*/children"))
    return [int(child) for one in listed for child in one]
with Job(1.0) as job:
    if job.rank == 0:
        ranks = children(os.getppid())
        everyone = [*ranks, *(child for rank in ranks for child in children(rank))]
        # In a session of its own, so that it is none of them.
        words = "import os, sys, time\\nfor how, s in ((19, 2.2), (18, 0.0)):\\n"
        words += "    for process in map(int, sys.argv[1:]): os.kill(process, how)\\n    time.sleep(s)"
        subprocess.Popen([sys.executable, "-c", words, *map(str, everyone)], start_new_session=True)
    for _ in range(10):
        if job.rank == 1:
            time.sleep(0.3)
        job.barrier()
os.write(1, b"done\\n")  # in one piece
"""


def test_a_job_that_is_suspended_goes_on_when_it_is_continued():
    ended = launch(3, "-c", SUSPENDED)
    assert (ended.code, ended.err, ended.out.split()) == (0, "", ["done"] * 3)


# A rank has a pipe to a child that reads until nobody can write any more.
PIPED = """
import subprocess, sys
from taccl.runtime.job import Job
child = subprocess.Popen([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], stdin=subprocess.PIPE)
with Job(5.0) as job:
    child.stdin.write(b"x" * 1000)
    child.stdin.close()
    assert child.wait(10) == 0
    job.barrier()
"""


def test_what_a_program_has_open_is_its_own_to_close():
    ended = launch(2, "-c", PIPED)
    assert (ended.code, ended.err, ended.out.split()) == (0, "", ["1000"] * 2)


# A rank has more files open than `select` can tell apart, and the signals of an event loop.
MANY_FILES = """
import os, resource, signal, socket, sys, time
from taccl.runtime.job import Job
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
near, far = socket.socketpair()
near.setblocking(False)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.set_wakeup_fd(near.fileno())
with Job(5.0) as job:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert far.recv(1) == bytes([signal.SIGUSR1])
    job.barrier()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job.barrier()
"""


def test_a_rank_that_dies_is_named_however_many_files_are_open():
    ended = launch(3, "-c", MANY_FILES)
    assert ended.code != 0
    (said,) = messages(ended)
    assert "rank 1 has died" in said


def test_a_rank_that_never_comes_is_waited_for_until_the_deadline():
    ended = fault("late")
    assert ended.code == 86
    (said,) = messages(ended)
    assert "the comparison of programs" in said and "rank 2 lives and waits for nobody" in said


@pytest.mark.parametrize(
    ("line", "more", "words"),
    [
        (("run", "none.xml", "--deadline", "2"), ("--unknown",), "No such option '--unknown'."),
        (
            ("profile", "-o", "none.yaml", "--deadline", "2"),
            ("--help",),
            "rank 2 ended before all ranks had started MPI; the job is ended",
        ),
    ],
)
def test_a_rank_that_ends_before_mpi_starts_is_not_waited_for(line, more, words):
    """The others are inside MPI_Init, where no code of Python's runs."""
    ended = taccl_but(4, 2, more, *line)
    assert ended.code == 86
    assert messages(ended) == [f"taccl: {words}"]


def test_of_ranks_that_the_launcher_ends_the_one_that_was_gone_before_is_named():
    """Rank 1 has ended before rank 0 looks round for the first time; Open MPI's launcher then kills rank 0."""
    done = subprocess.run([sys.executable, "-c", ENDED], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == "taccl: rank 1 ended before all ranks had started MPI; the job is ended\n"


ENDED = """
import os, subprocess, sys, time
rank = "import os, signal; from taccl.runtime.guard import Guard; Guard(5.0); os.write(1, b'.'); signal.pause()"
place = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_SIZE": "2"}.items()}
left = subprocess.Popen(
    [sys.executable, "-c", rank], env={**os.environ, **place}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
)
assert left.stdout.read(1) == b"."
left.kill()
left.wait()
sys.stderr.buffer.write(left.stderr.readline())  # launchers outlive their ranks
"""


@pytest.mark.parametrize(
    ("agreed", "said"),
    [
        (
            0,
            "taccl: rank 0 made no progress for 0.5 s: it waits for all ranks to leave MPI; the job is ended\n",
        ),
        (6, ""),
    ],
)
def test_an_end_of_mpi_that_takes_too_long_is_not_spoken_of_after_a_failure_that_was(agreed, said):
    """The ranks have agreed on the failure, and rank 0 has said it."""
    place = {f"OMPI_COMM_WORLD_{name}": number for name, number in (("RANK", "0"), ("SIZE", "2"))}
    done = under_a_launcher(UNENDING, str(agreed), **place)
    assert (done.returncode, done.stderr) == (signal.SIGKILL, said)


def under_a_launcher(script, *arguments, **environment):
    """As a child of a process of its own: after a failure those of one launcher are silent for ten seconds."""
    launcher = "import subprocess, sys; sys.exit(abs(subprocess.call(sys.argv[1:])))"
    return subprocess.run(
        [sys.executable, "-c", launcher, sys.executable, "-c", script, *arguments],
        text=True, capture_output=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


UNENDING = """
import signal, sys
from taccl.runtime.guard import Guard
guard = Guard(0.5)
guard.close(int(sys.argv[1]))
guard._leave()
signal.pause()
"""


@pytest.mark.parametrize(("kernel", "first"), [("", "rank 0"), ("del os.pidfd_open", "rank 1")])
def test_ranks_that_threads_of_the_launcher_have_started_are_seen(kernel, first):
    """As Open MPI's daemons on other hosts do. Of two that have ended rank 0 was first, and the launcher looked after
    rank 1 first: that is all that an old kernel shows."""
    script = THREADS.format(kernel=kernel)
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"none\nrank 2\n{first}\n", "")


def test_ranks_that_ended_because_of_this_one_are_not_named():
    """However late that is seen."""
    done = subprocess.run([sys.executable, "-c", ORDER], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "none\nrank 3\n", "")


ORDER = """
import os, subprocess
from taccl.runtime import guard, mpi
def start(rank):
    one = subprocess.Popen(["sleep", "60"], env={**os.environ, "PMI_RANK": str(rank)})
    while b"PMI_RANK" not in open(f"/proc/{one.pid}/environ", "rb").read():
        pass
    return one
def end(rank):
    ranks[rank].kill()
    os.waitid(os.P_PID, ranks[rank].pid, os.WEXITED | os.WNOWAIT)
ranks = [start(rank) for rank in range(4)]
views = [guard.Siblings(mpi.Launcher("mpich", rank, 4, 4), os.getpid()) for rank in (3, 2)]
for view in views:
    view.look(False)
for rank in (3, 1, 0, 2):
    end(rank)
ranks[0].wait()
for view in views:
    view.look(False, ended=True)
    print(view.gone or "none")
"""


def test_guards_whose_ranks_have_ended_are_no_ranks():
    """A launcher may have died, so that whoever takes its children has guards among them; who stops one for a rank
    that cannot start stops it for ever, since its rank's end lets it go on no more."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False\n", "")


ORPHAN = """
import os, signal, subprocess, sys
from taccl.runtime import guard, mpi
waits = "import sys; print(1, flush=True); sys.stdin.read()"
named = "from taccl.runtime.guard import rename; rename('taccl-guard of rank 1, process 5'); "
def start(rank, script):
    one = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PMI_RANK": str(rank)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    one.stdout.readline()
    return one
both = [start(0, waits), start(1, named + waits)]
siblings = guard.Siblings(mpi.Launcher("mpich", 2, 3, 3), os.getpid())
siblings.look(False)
siblings.stop()
os.waitid(os.P_PID, both[0].pid, os.WSTOPPED)
print(*(guard.process_state(one.pid) == "T" for one in both))
for one in both:
    one.kill()
    one.communicate()
"""


THREADS = """
import os, subprocess, threading
from taccl.runtime import guard, mpi
{kernel}
def start(rank):
    started[rank] = subprocess.Popen(["sleep", "60"], env={{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)}})
    both.wait()
    over.wait()
started, both, over = {{}}, threading.Barrier(3), threading.Event()
for rank in range(2):
    threading.Thread(target=start, args=(rank,), daemon=True).start()
both.wait()
for one in started.values():  # the system shows a new program's environment a moment after it has begun
    while b"OMPI_COMM_WORLD_RANK" not in open(f"/proc/{{one.pid}}/environ", "rb").read():
        pass
for ranks in (2, 3):
    siblings = guard.Siblings(mpi.Launcher("openmpi", 0, ranks, ranks), os.getpid())
    siblings.look(True)
    print(siblings.gone or "none")
siblings = guard.Siblings(mpi.Launcher("openmpi", 2, 3, 3), os.getpid())
siblings.look(False)
started[0].kill()
os.waitid(os.P_PID, started[0].pid, os.WEXITED | os.WNOWAIT)
started[1].kill()
started[1].wait()
siblings.look(False)
print(siblings.gone)
"""


def test_a_rank_that_is_stopped_before_mpi_starts_is_named():
    ended = taccl_but(2, 1, ("--stop",), "run", "none.xml", "--deadline", "1")
    assert ended.code == 86
    (said,) = messages(ended)
    assert said == "taccl: rank 1 has been stopped for 1 s and MPI cannot start; the job is ended"


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 86, "rank 2 failed with ValueError: broken on purpose"),
        ("taccl", 6, "rank 2: the disk is full on purpose"),
        ("exit", 86, "rank 2 left with exit code 3"),
    ],
)
def test_a_rank_that_leaves_ends_the_job_at_once(how, code, words):
    ended = fault(how)
    assert ended.code == code
    (said,) = messages(ended)
    assert words in said and "the job is ended" in said


@pytest.mark.parametrize(("how", "way"), [
    ("kill", "mpi"), ("kill", "shm"), ("os_exit", "mpi"), ("kill_beside_child", "shm"),
])  # fmt: skip
def test_a_rank_that_dies_takes_the_job_with_it(how, way):
    """Nobody can speak for a process that is gone but its own child."""
    ended = fault(how, way)
    assert ended.code == 86
    (said,) = messages(ended)
    assert said.startswith("taccl: rank 2 has died (killed or crashed); ")


def test_a_rank_that_dies_is_named_though_all_others_are_dead_when_that_is_seen():
    """Its child speaks, but late: the others' MPI has noticed the death and ended them by then."""
    ended = fault("unseen")
    assert ended.code == 86
    (said,) = messages(ended)
    assert said.startswith("taccl: rank 2 has died (killed or crashed); its last word, ")


def test_an_interrupt_of_mpiexec_ends_the_job_with_one_word():
    ended = fault("interrupt")
    assert ended.code == 130
    assert messages(ended) == ["taccl: interrupted"]


def test_an_interrupt_that_ranks_get_many_times_is_one():
    ended = fault("interrupts")
    assert ended.code == 130
    assert messages(ended) == ["taccl: interrupted"]


def test_an_interrupt_before_all_ranks_have_started_ends_the_job_with_one_word():
    ended = taccl_but(4, 2, ("--interrupt",), "run", "none.xml", "--deadline", "5")
    assert ended.code == 130
    assert messages(ended) == ["taccl: interrupted"]
    assert "Traceback" not in ended.err


def test_what_speaks_for_a_host_goes_when_the_launcher_is_a_zombie():
    """mpiexec has ended then, and whoever inherited its helper has not looked after it yet."""
    done = under_a_launcher(LINGER)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


LINGER = """
import os, time
from taccl.runtime import guard
speaker = guard.Guard(1.0)
assert speaker.speaks()
launcher = os.fork()
if launcher == 0:
    os._exit(0)
while guard.process_state(launcher) != "Z":
    time.sleep(0.01)
begin = time.monotonic()
child = os.fork()
if child == 0:
    speaker._linger(launcher)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("gone" if time.monotonic() - begin < guard.LINGER_S / 2 else "there")
"""


def test_containers_that_share_a_network_have_voices_of_their_own():
    """The launchers of two may have the same number, and a job of one must not keep that of the other silent."""
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*container, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs the right to make PID namespaces")
    launcher = f"{shlex.quote(sys.executable)} -c {shlex.quote(VOICES)}; true"  # number 1 in both
    begin = [*container, "sh", "-c", launcher]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(begin, **pipes) as one, subprocess.Popen(begin, **pipes) as other:
        assert [one.stdout.readline(), other.stdout.readline()] == ["1 True\n"] * 2
        one.communicate("")
        other.communicate("")


VOICES = """
import os, sys
from taccl.runtime import guard
speaker = guard.Guard(1.0)
print(os.getppid(), speaker.speaks(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("mount", "words"), [("size=1m", "has 0 MB free and may need 32"), ("ro", "cannot be written")]
)
def test_where_mpi_finds_no_memory_to_meet_in_that_is_said(mount, words):
    """The kernel kills the ranks as they start MPI, and MPI says nothing."""
    private = ["unshare", "--mount", "sh", "-c"]
    mounted = f"mount -t tmpfs -o {mount} none /dev/shm"
    if shutil.which("unshare") is None or subprocess.run([*private, mounted], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    said = subprocess.run([mpi.mpiexec(), "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in said:
        pytest.skip("needs an MPI that takes no other memory than that of /dev/shm: MPICH")
    job = [mpi.mpiexec(), "-n", "4", sys.executable, "-c", "from taccl import Job; Job(5.0)"]
    ended = subprocess.run(
        [*private, f"{mounted} && exec {shlex.join(job)}"], env=mpi.launch_environment(), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 86
    (said,) = messages(Ended(ended.returncode, ended.stdout, ended.stderr, 0.0))
    assert f"; /dev/shm, in which MPI's ranks of a host meet, {words}" in said


FULL = """
from taccl import Job
with Job(5.0) as job:
    if job.rank == 0:
        open("/dev/full", "w", 1).write("a line\\n")
    job.barrier()
"""


def test_a_full_disk_is_no_failure_of_a_rank():
    ended = launch(2, "-c", FULL)
    assert ended.code == 6
    assert messages(ended) == ["taccl: rank 0: an output: No space left on device; the job is ended"]


@pytest.mark.parametrize("how", ["diverge", "size"])
def test_a_rank_with_another_program_is_named_before_the_first_message(how):
    ended = launch(4, "-c", SURROUND.format(worker=WORKER, how=how))
    assert ended.code == 86
    (said,) = messages(ended)
    assert "rank 2 runs another program, or has other options, than the rest" in said


def test_a_failure_of_one_rank_that_all_learn_of_is_said_once():
    ended = launch(4, "-c", SURROUND.format(worker=WORKER, how="uneven"))
    assert ended.code == 6
    assert messages(ended) == ["taccl: rank 2: the disk is full on purpose"]


# What the command line does with an error that a rank raises after all agreed on it.
SURROUND = """
import runpy, sys
sys.argv = [{worker!r}, {how!r}]
sys.path.insert(0, {worker!r}.rpartition('/')[0])
from taccl.errors import TacclError
try:
    runpy.run_path({worker!r}, run_name="__main__")
except TacclError as error:
    print(f"taccl: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


# Rank 1's guard is stopped, killed or left alone, and then the job ends well, or some rank does not.
GUARDED = """
import os, signal, sys, time
from pathlib import Path
from taccl.errors import CheckFailed
from taccl.runtime.job import Job
what, victim, end = sys.argv[1:]
with Job(5.0) as job:
    guard = job.guard._child
    if job.rank == 1:
        while not Path(f"/proc/{guard}/cmdline").read_bytes().startswith(b"taccl-guard"):  # it is being made
            time.sleep(0.01)
        print(Path(f"/proc/{guard}/cmdline").read_text().rstrip(chr(0)), os.getpid(), flush=True)
        if what != "none":
            os.kill(guard, signal.Signals[what])
    job.barrier()
    if job.rank == int(victim) and end == "raises":
        raise CheckFailed("something is wrong")
    if job.rank == int(victim) and end == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    job.barrier()
"""


@pytest.mark.parametrize(
    ("what", "victim", "end", "words"),
    [
        ("none", 1, "ends", ""),
        ("SIGSTOP", 1, "ends", ""),
        ("SIGKILL", 1, "ends", ""),
        ("SIGSTOP", 1, "raises", "something is wrong"),
        ("SIGSTOP", 2, "raises", "something is wrong"),
        ("SIGKILL", 2, "raises", "something is wrong"),
        ("SIGSTOP", 1, "dies", "rank 1 has died"),
        ("SIGSTOP", 2, "dies", "rank 2 has died"),
        ("SIGKILL", 2, "dies", "rank 2 has died"),
    ],
)
def test_a_guard_that_is_stopped_or_killed_holds_nobody_up(what, victim, end, words):
    """The launcher waits for all that hold its pipes. Lists of processes tell a guard from its rank."""
    ended = launch(3, "-c", GUARDED, what, str(victim), end)
    (line,) = [line for line in ended.out.splitlines() if line.startswith("taccl-guard")]
    said, rank = line.split("process ")[0], line.split("process ")[1].split()
    assert said == "taccl-guard of rank 1, " and rank[0] == rank[1]
    assert ended.seconds < START_S + 5
    assert (ended.code == 0) == (end == "ends")
    assert [words in one for one in messages(ended)] == [True] * (end != "ends")
