"""`taccl schema`: the JSON Schema of the input formats, for completion and checks in editors."""

from __future__ import annotations

import json

import click


@click.command("schema")
@click.argument("format", type=click.Choice(["sketch", "profile"]))
def command(format: str) -> None:
    """Print the JSON Schema of an input format, for editors.

    Save it beside your file and begin the file with a line that the YAML language server understands:

        # yaml-language-server: $schema=./profile.schema.json
    """
    if format == "profile":
        from taccl.profiles.schema import profile_schema

        schema = profile_schema()
    else:
        from taccl.sketches.schema import sketch_schema

        schema = sketch_schema()
    click.echo(json.dumps(schema, indent=2))
