"""`taccl library`: the bundled profiles and where their numbers come from."""

from __future__ import annotations

import json
import textwrap

import click

from taccl.commands.completion import topologies
from taccl.errors import UsageError


@click.command("library")
@click.argument("name", required=False, shell_complete=topologies)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str | None, as_json: bool) -> None:
    """List the bundled profiles.

    With a NAME: the source of each of its numbers, and its YAML, to copy and change.
    """
    from taccl.profiles.load import library_names, library_profile, library_text
    from taccl.profiles.plain_forms import did_you_mean

    names = library_names()
    if name is not None and ":" in name and name.partition(":")[0] in names:
        name = name.partition(":")[0]  # as the list prints it; the parameter changes none of the numbers
    if name is not None and name not in names:
        hint = did_you_mean(name, names) or f"known: {', '.join(names)}"
        raise UsageError(f"there is no bundled profile {name!r}; {hint}")
    if as_json:
        entries = [library_profile(each) for each in names if name in (None, each)]
        rows = [
            {
                "name": entry.name,
                "example": entry.example,
                "parameter": entry.parameter,
                "description": entry.description,
                "source": entry.source,
                "class_sources": dict(entry.class_sources),
            }
            for entry in entries
        ]
        click.echo(json.dumps({"schema": "taccl/library/v1", "profiles": rows}, indent=2))
    elif name is None:
        for each in names:
            entry = library_profile(each)
            click.echo(f"{entry.example:<18}{entry.description}")
    else:
        entry = library_profile(name)
        click.echo(f"{entry.name}: {entry.description}\n")
        click.echo(textwrap.fill(entry.source, 100) + "\n")
        for link_class, source in entry.class_sources:
            click.echo(f"  {link_class}: {source}")
        click.echo(f"\n{library_text(name)}", nl=False)
