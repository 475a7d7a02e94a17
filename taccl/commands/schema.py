"""`taccl schema`: the JSON Schema of the input formats, for completion and checks in editors."""

from __future__ import annotations

import json

import click


@click.command("schema")
@click.argument("format", type=click.Choice(["sketch", "profile", "cluster", "collective"]))
def command(format: str) -> None:
    """Print the JSON Schema of an input format, for editors.

    cluster is the file of `taccl build`, collective that of --pre-post.

    Save it beside your file and begin the file with a line that the YAML language server understands:

        # yaml-language-server: $schema=./profile.schema.json
    """
    if format == "profile":
        from taccl.profiles.schema import profile_schema

        schema = profile_schema()
    elif format == "sketch":
        from taccl.sketches.schema import sketch_schema

        schema = sketch_schema()
    elif format == "cluster":
        from taccl.cluster_schema import cluster_schema

        schema = cluster_schema()
    else:
        from taccl.synth.collective_file import collective_schema

        schema = collective_schema()
    click.echo(json.dumps(schema, indent=2))
