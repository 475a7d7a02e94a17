"""Fixtures of the tests of `taccl run`."""

from __future__ import annotations

import pytest
from mpi_jobs import needs_mpi

from taccl.synth.msccl_xml import write_xml


@pytest.fixture
def needs_a_launcher():
    for mark in needs_mpi[1:]:
        if mark.args[0]:
            pytest.skip(mark.kwargs["reason"])


@pytest.fixture
def saved(tmp_path):
    """A function that writes a program to a file and gives its path."""

    def save(program):
        path = tmp_path / f"{program.name}.xml"
        path.write_text(write_xml(program))
        return str(path)

    return save
