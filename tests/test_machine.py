"""Which ranks share a machine, whatever looks like a node to MPI, and the cores that these have."""

import os
import sys

import pytest
from cluster_jobs import on_cluster
from mpi_jobs import launch, needs_mpi

from taccl.runtime import machine

pytestmark = needs_mpi

TELL = """
import os
from taccl.runtime.job import Job
with Job(20.0) as job:
    found = job.machine
    os.write(1, f"{found.ranks} {found.cores} {job._spins > 0} {job._two_cores}\\n".encode())  # in one piece
"""


def test_without_a_word_of_the_kernel_a_node_is_a_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "none")
    assert machine.identity(3) == machine.identity(3) != machine.identity(4)


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        ([(0, 0b1111, 0)], 4),
        ([(0, 0b0011, 0), (0, 0b0110, 0)], 3),
        ([(0, 0b1111, 2), (0, 0b1111, 2)], 2),  # of one container
        ([(0, 0b1111, 1), (1, 0b1111, 2)], 3),
        ([(0, 0b1111, 1), (1, 0b1111, 0)], 4),
        ([(0, 0b0001, 3)], 1),
    ],
)
def test_containers_have_no_more_cores_than_they_have_time(ranks, cores):
    assert machine.usable(ranks) == cores


@pytest.mark.parametrize("own", [1, 2])
def test_the_cores_of_a_machine_are_those_of_all_its_ranks(own):
    """A rank that a launcher binds to one core or two sees these alone."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    bind = f"""
import os
from taccl.runtime.mpi import launcher
cores = {cores}
os.sched_setaffinity(0, [cores[launcher().rank]] if {own} == 1 else cores[:2])
"""
    ended = launch(2, "-c", bind + TELL)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["2 2 True False"] * 2


def test_kernels_are_told_apart(tmp_path):
    """Ranks 0 and 2 say that they have one, rank 1 has another."""
    for rank in range(3):
        (tmp_path / str(rank)).write_text("even\n" if rank % 2 == 0 else "odd\n")
    elsewhere = f"""
import pathlib
from taccl.runtime import machine
from taccl.runtime.mpi import launcher
machine.BOOT_ID = pathlib.Path({str(tmp_path)!r}) / str(launcher().rank)
"""
    ended = launch(3, "-c", elsewhere + TELL)
    assert ended.code == 0, ended.err
    assert sorted(line.split()[0] for line in ended.out.splitlines()) == ["1", "2", "2"]


@pytest.mark.cluster
@pytest.mark.alone
def test_network_namespaces_are_on_one_machine():
    """Two nodes of one rank: each would have all cores for itself if the other were elsewhere."""
    done = on_cluster((sys.executable, "-c", TELL))
    cores = len(os.sched_getaffinity(0))
    assert done.stdout.splitlines() == [f"2 {cores} {cores >= 2} {cores >= 4}"] * 2
