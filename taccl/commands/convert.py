"""`taccl convert FILE --to FORMAT`: an algorithm or a program in another format."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files, topologies
from taccl.commands.options import Size, write_output
from taccl.errors import UsageError
from taccl.program_file import (
    ProgramFile,
    collective_options,
    open_proven,
    size_of,
    topology_of,
    unproven_option,
)

if TYPE_CHECKING:
    from taccl.profiles.topology import Topology
    from taccl.synth.algorithm import Algorithm
    from taccl.synth.export.perfetto import TimeLine
    from taccl.synth.simulate import Simulation

FORMATS = ("msccl-xml", "mscclpp-json", "perfetto", "html", "json")


@click.command("convert")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--to", "form", required=True, type=click.Choice(FORMATS), help="The format to write.")
@click.option(
    "--topology",
    metavar="T",
    shell_complete=topologies,
    help="ndv2:2, profile.yaml ...; a native file brings its own.",
)
@click.option("--size", type=Size(), help="nccl-tests size, for times. Default: a native file's own.")
@click.option("-o", "--output", metavar="FILE", shell_complete=files, default="-", help="Default: stdout.")
@collective_options
@unproven_option
def command(
    file: str, form: str, topology: str | None, size: int | None, output: str, **options: Any
) -> None:
    """Write an algorithm or a program in another format.

    FILE is a native .json algorithm or MSCCL XML from any tool. msccl-xml and mscclpp-json are for the runtimes of
    these names; perfetto is a trace of the predicted time line, html a page that opens in any browser; json is the
    native format, in canonical form.
    """
    opened = open_proven(file, options)
    if opened.algorithm is not None and opened.algorithm.coding is not None and form != "json":
        own = size_of(opened, size) == opened.algorithm.size_bytes and (
            topology is None or topology_of(opened, topology) == opened.topology
        )
        if form not in ("perfetto", "html") or not own:
            codec = opened.algorithm.coding.cost.codec
            click.echo(
                f"taccl: warning: the plan to code messages with {codec} is left out of {form}", err=True
            )
    write_output(output, _text(opened, file, form, topology, size))


def _text(opened: ProgramFile, file: str, form: str, spec: str | None, size: int | None) -> str:
    if form == "msccl-xml":
        from taccl.synth.msccl_xml import write_xml

        for limit in opened.limits:
            click.echo(f"taccl: warning: {limit}", err=True)
        try:
            return write_xml(opened.program)
        except ValueError as error:
            raise UsageError(f"{file}: {error}") from error
    if form == "mscclpp-json":
        from taccl.profiles.load import load_topology
        from taccl.synth.export.mscclpp_json import write_plan

        topology = opened.topology if spec is None else load_topology(spec)
        return write_plan(opened.program, topology, opened.collective)
    if form == "json":
        from taccl.synth.native import write_native

        if opened.algorithm is None or opened.topology is None:
            raise UsageError(
                f"{file} is a program and has no schedule; the native format holds algorithms, as taccl synth "
                "-o FILE.json writes them"
            )
        return write_native(opened.algorithm, opened.topology)
    topology = topology_of(opened, spec)
    simulation = _simulation(opened, topology, size)
    # The schedule's times are those of its own topology and size; elsewhere the program speaks.
    own = (
        topology == opened.topology
        and opened.algorithm
        and opened.algorithm.size_bytes == simulation.size_bytes
    )
    if form == "perfetto":
        from taccl.synth.export.perfetto import write_trace

        coded = _coded(opened.algorithm, topology) if own and opened.algorithm else None
        return write_trace([coded or _predicted(simulation)])
    from taccl.synth.export.html import Entry, report_html

    title = opened.algorithm.name if opened.algorithm else opened.program.name or file
    judgement = opened.judgement
    if not own or opened.algorithm is None or judgement is None:
        return report_html([Entry(title, topology, simulation)], title)
    shown = replace(opened.algorithm, certificate=judgement.certificate)
    return report_html([Entry(title, topology, simulation, shown, checked=judgement.checked)], title)


def _predicted(simulation: Simulation) -> TimeLine:
    from taccl.synth.export.perfetto import TimeLine
    from taccl.synth.export.timeline import of_simulation

    return TimeLine("predicted", of_simulation(simulation))


def _coded(algorithm: Algorithm, topology: Topology) -> TimeLine | None:
    """The time line of a coding plan, None without one."""
    from taccl.synth.coding.choose import chosen
    from taccl.synth.export.perfetto import TimeLine
    from taccl.synth.export.timeline import of_plan

    plan = algorithm.coding
    choice = plan and chosen(algorithm, topology, plan.cost, plan.messages)
    return TimeLine(f"predicted with {plan.cost.codec}", of_plan(choice)) if plan and choice else None


def _simulation(opened: ProgramFile, topology: Topology, size: int | None) -> Simulation:
    from taccl.synth.simulate import simulate

    return simulate(opened.program, topology, size_of(opened, size), collective=opened.collective)
