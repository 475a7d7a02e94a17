"""`taccl sketch`: check sketches, list the bundled ones, suggest one for a topology."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from taccl.commands.completion import files, sketches, topologies
from taccl.commands.options import Size, write_output
from taccl.commands.synth import COLLECTIVES

if TYPE_CHECKING:
    from taccl.errors import Diagnostic
    from taccl.profiles.topology import Topology


@click.group("sketch")
def command() -> None:
    """Check a sketch, or suggest one for a topology.

    A sketch says what an algorithm may look like: links, relays, symmetry, chunking. See docs/sketches.md.
    """


@command.command("check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=sketches)
@click.option(
    "-t",
    "--topology",
    metavar="T",
    shell_complete=topologies,
    help="Also check against a profile (ndv2:2) or YAML file.",
)
@click.option(
    "--format", "style", type=click.Choice(["text", "json", "github"]), default="text", show_default=True,
    help="Text with places that editors follow, one JSON document, or annotations on GitHub.",
)  # fmt: skip
@click.pass_context
def check(ctx: click.Context, files: tuple[str, ...], topology: str | None, style: str) -> None:
    """Say everything that is wrong with sketches, with line and column.

    Without --topology only what a sketch says by itself is checked: not whether its ranks and links exist.
    FILE may also be a bundled sketch. Exit code 3 when there is an error; warnings are no errors.
    """
    from taccl.profiles.load import load_topology

    loaded = None if topology is None else load_topology(topology)
    found = [diagnostic for file in files for diagnostic in _findings(file, loaded)]
    errors = sum(diagnostic.severity == "error" for diagnostic in found)
    if style == "json":
        document = {
            "schema": "taccl/sketch-check/v1",
            "ok": not errors,
            "files": list(files),
            "findings": [
                {
                    "file": d.file, "line": d.line, "column": d.column, "severity": d.severity, "code": d.code,
                    "message": d.message, "help": d.help, "path": d.path,
                }
                for d in found
            ],
        }  # fmt: skip
        click.echo(json.dumps(document, indent=2))
    elif style == "github":
        for diagnostic in found:
            click.echo(_annotation(diagnostic))
    else:
        for diagnostic in found:
            click.echo(diagnostic.render() + "\n")
        where = "" if loaded is None else f" on {loaded.name}"
        counted = f"{_count(errors, 'error')}, {_count(len(found) - errors, 'warning')}"
        click.echo(f"{_count(len(files), 'sketch', 'sketches')}{where}: {counted}")
    if errors:
        ctx.exit(3)


UNKNOWN_KEY = "Y102"


def _findings(file: str, topology: Topology | None) -> list[Diagnostic]:
    from taccl.errors import InvalidInput
    from taccl.profiles.yaml_reader import read_text
    from taccl.sketches import load_sketch
    from taccl.sketches.restrict import check_sketch
    from taccl.sketches.sketch_file import read_known_keys

    try:
        sketch = load_sketch(file)
    except InvalidInput as error:
        if topology is None or {d.code for d in error.diagnostics} != {UNKNOWN_KEY}:
            return list(error.diagnostics)
        # Apart from keys that mean nothing the sketch is whole: say in the same run what is wrong with it there.
        found = [*error.diagnostics, *check_sketch(read_known_keys(read_text(file), file), topology)]
        return sorted(found, key=lambda d: (d.line, d.column, d.code, d.message))
    return [] if topology is None else check_sketch(sketch, topology)


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _annotation(diagnostic: Diagnostic) -> str:
    """GitHub's workflow command: an annotation at the line of a pull request."""
    place = {"file": diagnostic.file, "line": diagnostic.line or 1, "col": diagnostic.column or 1}
    fields = ",".join(f"{key}={_escaped(str(value), ':,')}" for key, value in place.items())
    title = _escaped(diagnostic.code, ":,")
    message = diagnostic.message + (f"\nhelp: {diagnostic.help}" if diagnostic.help else "")
    return f"::{diagnostic.severity} {fields},title={title}::{_escaped(message, '')}"


def _escaped(text: str, also: str) -> str:
    for char in "%\r\n" + also:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_sketches(as_json: bool) -> None:
    """List the bundled sketches."""
    from taccl.sketches import load_sketch, sketch_names

    rows = [(name, load_sketch(name).description) for name in sketch_names()]
    if as_json:
        entries = [{"name": name, "description": description} for name, description in rows]
        click.echo(json.dumps({"schema": "taccl/sketches/v1", "sketches": entries}, indent=2))
    else:
        for name, description in rows:
            click.echo(f"{name:<12}{description}")


@command.command("suggest")
@click.option(
    "-t",
    "--topology",
    required=True,
    metavar="T",
    shell_complete=topologies,
    help="Bundled profile (ndv2:2) or YAML file.",
)
@click.option(
    "-c", "--collective", type=click.Choice(COLLECTIVES), default="allgather", show_default=True,
    help="What the sketch is for.",
)  # fmt: skip
@click.option("--size", type=Size(), help="nccl-tests size: 1MB = 10^6, 1MiB = 2^20 bytes.")
@click.option(
    "-o",
    "--output",
    default="-",
    show_default=True,
    metavar="FILE",
    shell_complete=files,
    help="File; - is stdout.",
)
def suggest(topology: str, collective: str, size: int | None, output: str) -> None:
    """Write a commented sketch for a topology: a start to change.

    The symmetry is found, and every line says why it stands there. Without --size no chunking is suggested.
    """
    from taccl.profiles.load import load_topology
    from taccl.sketches.suggest import suggest_sketch

    write_output(output, suggest_sketch(load_topology(topology), collective, size))
    if output != "-":
        click.echo(f"taccl: wrote {output}", err=True)
