"""Fixtures of several files of tests."""

from __future__ import annotations

import pytest
from kernels_on_host import compile_kernels, compiler
from mpi_jobs import needs_mpi

from taccl.synth.msccl_xml import write_xml


@pytest.fixture
def needs_a_launcher():
    for mark in needs_mpi[1:]:
        if mark.args[0]:
            pytest.skip(mark.kwargs["reason"])


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory):
    """The kernels of codecs, compiled for the host: a shared library."""
    if compiler() is None:
        pytest.skip("needs g++ or clang++")
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def saved(tmp_path):
    """A function that writes a program to a file and gives its path."""

    def save(program):
        path = tmp_path / f"{program.name}.xml"
        path.write_text(write_xml(program))
        return str(path)

    return save
