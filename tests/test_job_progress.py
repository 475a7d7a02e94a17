"""A rank that waits calls the MPI library, which moves on what it has taken only then."""

from types import SimpleNamespace

import pytest

from taccl.runtime import job as job_module
from taccl.runtime.job import Job

CALLS = 5  # until the library has moved a message on


class Library:
    """A message that was handed over and called finished, and goes out in the last of CALLS calls."""

    def __init__(self):
        self.calls = 0

    def Iprobe(self, source, tag):
        self.calls += 1
        return False


class Waiting:
    """An executor that waits, not for MPI, for what another rank sends once it has that message."""

    coding = False
    left = 1

    def __init__(self, library):
        self.library, self.polls = library, 0

    def advance(self, polls=1, rest=None, spins=0):
        for _ in range(polls):
            self.polls += 1
            assert self.polls < 10**6, "no end"
            if self.library.calls >= CALLS:
                self.left = 0
                return True
            if rest is not None:
                rest()
        return False


class Sleeps:
    """What a rank does that waits for connections, too."""

    armed = False

    def watch(self, left):
        self.watched = left

    def forget(self):
        self.watched = None

    def __call__(self):
        assert self.watched is not None


@pytest.mark.parametrize("sleeper", [None, Sleeps()], ids=["polls", "sleeps"])
@pytest.mark.parametrize("polls", [1, 10_000])
def test_what_the_library_has_taken_goes_out_while_a_rank_waits_for_others(monkeypatch, polls, sleeper):
    """In the first polls, and after them, when the rank sleeps; also where connections wake it."""
    monkeypatch.setattr(job_module, "POLLS_BEFORE_SLEEP", polls)
    job, library = object.__new__(Job), Library()
    job.control, job.MPI = library, SimpleNamespace(ANY_SOURCE=-1, ANY_TAG=-1)
    job.watchdog = SimpleNamespace(doing=lambda what: None)
    job._two_cores, job._spins, job._waiting = False, 0, job._moving(lambda: None)
    executor, ends = Waiting(library), []
    job.run(
        SimpleNamespace(
            start=lambda: None, finish=lambda: ends.append(executor.left), executor=executor,
            transport=SimpleNamespace(sleeper=sleeper),
        )
    )  # fmt: skip
    assert ends == [0]
    assert executor.polls < 1000  # each may be a sleep


def test_it_is_called_before_every_sleep():
    job, library, sleeps = object.__new__(Job), Library(), Sleeps()
    job.control, job.MPI = library, SimpleNamespace(ANY_SOURCE=-1, ANY_TAG=-1)
    sleeps.watch(lambda: 1)
    waiting = job._moving(sleeps, sleeps)
    waiting()
    assert not library.calls
    sleeps.armed = True
    for calls in range(1, 4):
        waiting()
        assert library.calls == calls
