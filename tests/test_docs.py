"""The documents: the reference is that of the commands, links lead somewhere, examples exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from taccl.cli import COMMANDS, cli, load_command

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


def test_command_reference_is_up_to_date() -> None:
    # A process of its own: click keeps a command's help option once another test has asked for it without
    # the group's settings.
    command = [sys.executable, str(ROOT / "docs" / "commands.py")]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert (ROOT / "docs" / "commands.md").read_text() == made, "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_decisions_are_numbered_without_gaps() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for number, page in enumerate(pages, 1):
        assert page.name.startswith(f"{number:04d}-")
        assert page.read_text().startswith(f"# {number}. ")


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """(page, arguments) of every line in README and the docs that calls taccl."""
    for page in PAGES:
        if page.name == "commands.md":
            continue
        for line in page.read_text().splitlines():
            found = re.fullmatch(r"(?:\$ )?(?:mpiexec (?:-n \S+ )?)?taccl ((?:[a-z]+)(?: .*)?)", line.strip())
            if found and line.startswith((" ", "$")):
                yield page.name, shlex.split(found[1], comments=True)


@pytest.mark.parametrize(("page", "arguments"), list(shown_commands()), ids=lambda value: str(value)[:60])
def test_shown_commands_exist(page: str, arguments: list[str]) -> None:
    assert arguments[0] in COMMANDS
    command, rest = load_command(arguments[0]), arguments[1:]
    if isinstance(command, click.Group):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"{page}: taccl {arguments[0]} {rest[0]}"
        command, rest = found, rest[1:]
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    for word in rest:
        if word.startswith("-") and word != "-":
            assert word.partition("=")[0] in known, f"{page}: {word} of taccl {arguments[0]}"


def test_examples_are_found() -> None:
    assert len(list(shown_commands())) >= 10


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, (
            f"docs/index.md does not link {page.name}"
        )


def test_the_shown_explanation_of_a_plan_is_what_the_commands_say(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "coding.md").read_text()
    (shown,) = re.findall(r"\n\n((?:    .+\n)+)\n`taccl convert", text)
    (line,) = re.findall(r"    taccl (synth -t docs/topologies/\S+ .*)\n", text)
    path = tmp_path / "allgather.json"
    made = CliRunner().invoke(cli, [*shlex.split(line)[:-1], str(path)])
    assert made.exit_code == 0, made.output
    said = CliRunner().invoke(cli, ["explain", str(path)]).output
    assert "".join(f"    {line}\n" for line in said.split("\n\n")[-2].splitlines()) == shown
