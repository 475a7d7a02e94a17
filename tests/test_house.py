"""The house itself: packaging, the front door, what CI calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import taccl
from taccl.cli import EXIT_CODES
from taccl.commands.synth import COLLECTIVES, ENGINES, PROTOCOLS
from taccl.entry import launched
from taccl.errors import TacclError
from taccl.runtime.mpi import PLACES
from taccl.synth.collective import NAMES
from taccl.synth.program import PROTOCOLS as PROGRAM_PROTOCOLS
from taccl.synth.request import ENGINES as SYNTHESIS_ENGINES

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parents[1]
ROOMS = ("profiles", "sketches", "synth", "runtime")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_listed_and_mapped() -> None:
    with open(ROOT / "pyproject.toml", "rb") as stream:
        project = tomllib.load(stream)
    found = {
        ".".join(("taccl", *path.parent.relative_to(ROOT).parts))
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    found |= {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "taccl").rglob("__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == found
    assert project["project"]["version"] == taccl.__version__
    data = project["tool"]["setuptools"]["package-data"]
    for package in ("profiles", "sketches"):
        assert data[f"taccl.{package}.library"] == ["*.yaml"]
        assert list((ROOT / package / "library").glob("*.yaml"))


def test_choices_of_the_command_line_are_those_of_the_library() -> None:
    """The front door lists them itself, so that --help imports no solver."""
    assert set(COLLECTIVES) == set(NAMES)
    assert tuple(ENGINES) == tuple(SYNTHESIS_ENGINES)
    assert PROTOCOLS == PROGRAM_PROTOCOLS


def test_exit_codes_are_documented() -> None:
    def leaves(cls: type[TacclError]) -> list[type[TacclError]]:
        return [cls, *(leaf for sub in cls.__subclasses__() for leaf in leaves(sub))]

    assert {cls.exit_code for cls in leaves(TacclError)} <= set(EXIT_CODES)
    readme = (ROOT / "README.md").read_text()
    for code in EXIT_CODES:
        if code != 141:
            assert re.search(rf"\b{code} [a-z]", readme), f"README does not name exit code {code}"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[-1] == "make test" and "make lint" in lines
    assert "make demo" in (ROOT / "README.md").read_text() and "make test" in (ROOT / "README.md").read_text()


def make(*arguments: str, **added: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")} | added
    return subprocess.run(
        ["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60, env=environment
    )


def test_make_finds_a_python_and_says_so_when_there_is_none(tmp_path: Path) -> None:
    assert "-m venv" in make("-n", "test", f"VENV={tmp_path}/venv").stdout
    done = make("test", f"VENV={tmp_path}/venv", "PYTHON=")
    assert done.returncode != 0 and "needs Python 3.10 or newer" in done.stderr


def test_make_says_what_to_do_without_venv_and_pip(tmp_path: Path) -> None:
    """A Python without ensurepip and pip, as Debian's without python3-venv."""
    poor = tmp_path / "python3"
    poor.write_text("#!/bin/sh\nexit 1\n")
    poor.chmod(0o755)
    done = make("test", f"VENV={tmp_path}/venv", f"PYTHON={poor}")
    assert done.returncode != 0 and "sudo apt-get install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_sources_are_finished() -> None:
    """No marks of unfinished work, no absolute home of a machine, and a docstring at the top of each module."""
    sources = [path for room in ("taccl", *ROOMS) for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(sources) > 50
    for path in sources:
        text = path.read_text()
        assert text.startswith('"""') or not text.strip(), f"{path} has no docstring"
        assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text), f"{path} is unfinished"


def test_public_names_are_what_they_say_and_come_late() -> None:
    code = "import sys, taccl; print(sorted(m for m in sys.modules if m.startswith('taccl')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "['taccl']\n"
    for name in taccl.__all__:
        if name != "__version__":
            assert getattr(taccl, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = taccl.no_such_name


@pytest.mark.parametrize("kind", PLACES)
def test_a_rank_is_known_before_mpi_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come before anything is loaded, so `entry` names the launchers' variables itself."""
    for rank, _, _ in PLACES.values():
        monkeypatch.delenv(rank, raising=False)
    assert not launched()
    monkeypatch.setenv(PLACES[kind][0], "0")
    assert launched()
