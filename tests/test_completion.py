"""What shells are told to offer."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import BashComplete

from taccl.cli import COMMANDS, cli, load_command

PLACES = ("output", "topology", "sketch", "pre_post", "demand", "file", "files")


def offered(words: list[str], incomplete: str) -> list[tuple[str, str]]:
    shell = BashComplete(cli, {}, "taccl", "_TACCL_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions(words, incomplete)]


def test_names_come_before_files() -> None:
    assert offered(["synth", "-t"], "nd") == [("plain", "ndv2"), ("plain", "ndv2-1mb")]
    assert offered(["synth", "-t"], "my") == [("file", "my")]
    assert offered(["synth", "-s"], "dgx2-sk-3") == [("plain", "dgx2-sk-3")]
    assert offered(["synth", "-o"], "out/") == [("file", "out/")]
    assert offered(["build"], "cl") == [("file", "cl")]


def commands() -> list[tuple[str, click.Command]]:
    found = [(name, load_command(name)) for name in COMMANDS]
    return found + [
        (f"{name} {sub}", command)
        for name, parent in found if isinstance(parent, click.Group)
        for sub, command in parent.commands.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_every_place_for_a_file_offers_files(name: str, command: click.Command) -> None:
    with click.Context(command) as context:
        for param in command.params:
            if param.name in PLACES:
                kind = "dir" if param.metavar == "DIR" else "file"
                assert [item.type for item in param.shell_complete(context, "./zz")] == [kind], param.name
