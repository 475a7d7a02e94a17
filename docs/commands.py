"""Print docs/commands.md, the command reference, from the commands themselves: `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from taccl.cli import COMMANDS, EXIT_CODES, cli, load_command

INTRODUCTION = """# Commands

Made from the commands' own help by `make docs`; change it there. Results go to stdout, progress and messages
to stderr. `--json` prints one document with a versioned `schema` key. Sizes are nccl-tests' (`1MB` = 10^6,
`1MiB` = 2^20 bytes). Shell completion: `eval "$(_TACCL_COMPLETE=bash_source taccl)"` (or `zsh_source`,
`fish_source`).
"""


def reference() -> str:
    """The whole reference as Markdown."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    parts = [INTRODUCTION, f"## Exit codes\n\n| code | meaning |\n| --- | --- |\n{codes}\n"]
    for name in COMMANDS:
        parts += _sections(load_command(name), f"taccl {name}", 2)
    return "\n".join(parts)


def _sections(command: click.Command, path: str, level: int) -> Iterator[str]:
    settings = {**cli.context_settings, "terminal_width": 100, "max_content_width": 100}
    context = click.Context(command, info_name=path, **settings)
    yield f"{'#' * level} {path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None:
                yield from _sections(found, f"{path} {name}", level + 1)


if __name__ == "__main__":
    sys.stdout.write(reference())
