"""`taccl simulate FILE`: price a program on a topology by discrete events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import topologies
from taccl.commands.options import Size, print_json
from taccl.program_file import (
    collective_options,
    open_proven,
    own_judgement,
    size_of,
    topology_of,
    unproven_option,
)

if TYPE_CHECKING:
    from taccl.profiles.topology import Topology
    from taccl.synth.simulate import Activity, Simulation

SHOWN = 24  # activities of the critical path that the text form prints


@click.command("simulate")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--topology",
    metavar="T",
    shell_complete=topologies,
    help="ndv2:2, profile.yaml ...; a native file brings its own.",
)
@click.option("--size", type=Size(), help="As nccl-tests prints it, e.g. 1MB. Default: a native file's own.")
@collective_options
@unproven_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(**options: Any) -> None:
    """Price a program on a topology by discrete events.

    FILE is MSCCL XML from any tool, or a native .json algorithm (lowered first). Shows the time, the bound
    that no algorithm beats, the busiest link or port, and the chain of messages that leads to the end. All of
    it without a codec: what a coding plan in the file predicts is printed beside it.
    """
    from taccl.synth.bounds import lower_bound
    from taccl.synth.cost import us
    from taccl.synth.gap import gap, gap_text
    from taccl.synth.simulate import resource_name, simulate

    file, size = options["file"], options["size"]
    opened = open_proven(file, options)
    cluster = topology_of(opened, options["topology"])
    size = size_of(opened, size)
    simulation = simulate(opened.program, cluster, size, collective=opened.collective)
    judgement = own_judgement(opened, cluster, size)
    schedule_us = None if judgement is None else judgement.time_us
    bound = judgement.bound if judgement else lower_bound(cluster, simulation.collective, size)
    plan = None if opened.algorithm is None else opened.algorithm.coding
    if options["as_json"]:
        print_json({
            "schema": "taccl/simulate/v1",
            "file": file,
            "topology": cluster.name,
            "collective": simulation.collective.name,
            "ranks": opened.program.ranks,
            "groups": [list(group) for group in simulation.collective.groups],
            "size_bytes": size,
            "time_us": us(simulation.time_fs),
            "schedule_us": schedule_us,
            "algbw_gbps": round(simulation.algbw_gbps, 6),
            "busbw_gbps": round(simulation.busbw_gbps, 6),
            "lower_bound_us": bound.time_us,
            "bound_by": bound.name,
            "gap": gap(us(simulation.time_fs), bound.time_us),
            "bottleneck": resource_name(cluster, simulation.bottleneck),
            "bottleneck_busy": round(_busy(simulation), 6),
            "messages": sum(activity.kind == "message" for activity in simulation.activities),
            "coding": None
            if plan is None
            else {
                "codec": plan.cost.codec,
                "coded_messages": len(plan.messages),
                "time_us": us(plan.time_fs),
            },
            "critical_path": [_entry(simulation.activities[i]) for i in simulation.critical_path],
        })  # fmt: skip
        return
    rows = [
        ("time", f"{us(simulation.time_fs):.3f} us"),
        *([] if schedule_us is None else [("schedule", f"{schedule_us:.3f} us, before it was lowered")]),
        ("algbw", f"{simulation.algbw_gbps:.3f} GB/s"),
        ("busbw", f"{simulation.busbw_gbps:.3f} GB/s"),
        ("lower bound", f"{bound.time_us:.3f} us, {bound.name}"),
        ("gap", gap_text(gap(us(simulation.time_fs), bound.time_us))),
        (
            "bottleneck",
            f"{resource_name(cluster, simulation.bottleneck)}, busy {100 * _busy(simulation):.0f} %",
        ),
    ]
    if plan is not None:
        text = (
            f"{len(plan.messages)} messages coded by {plan.cost.codec}, predicted {us(plan.time_fs):.3f} us"
        )
        rows.append(("coding plan", f"{text}; all of the above is without codec"))
    click.echo(
        f"{opened.program.name or file}: {simulation.collective.title} of {size} bytes on {cluster.name}"
    )
    for name, value in rows:
        click.echo(f"  {name:<12} {value}")
    _print_path(simulation, cluster)


def _busy(simulation: Simulation) -> float:
    """Share of the time that the bottleneck is held."""
    if simulation.bottleneck < 0 or not simulation.time_fs:
        return 0.0
    return simulation.busy_fs[simulation.bottleneck] / simulation.time_fs


WAITED_FOR = {
    "start": "",
    "data": "after its data",
    "threadblock": "after its threadblock",
    "dependency": "after its dependency",
    "slot": "after a FIFO slot",
    "resource": "after its link or port",
    "engine": "after the rank's reductions",
}


def _entry(activity: Activity) -> dict[str, Any]:
    from taccl.synth.cost import us

    return {
        "kind": activity.kind,
        "rank": activity.rank,
        "dst": activity.dst if activity.kind == "message" else None,
        "threadblock": activity.threadblock,
        "step": activity.step,
        "line": activity.line or None,
        "chunks": activity.count,
        "ready_us": us(activity.ready_fs),
        "start_us": us(activity.start_fs),
        "end_us": us(activity.end_fs),
        "reason": activity.reason,
    }


def _print_path(simulation: Simulation, cluster: Topology) -> None:
    from taccl.synth.cost import us
    from taccl.synth.simulate import resource_name

    path = simulation.critical_path
    click.echo(f"critical path, {len(path)} long:")
    skipped = len(path) - SHOWN
    for position, index in enumerate(path):
        if skipped > 0 and SHOWN // 2 <= position < SHOWN // 2 + skipped:
            if position == SHOWN // 2:
                click.echo(f"  ... {skipped} more ...")
            continue
        activity = simulation.activities[index]
        place = f"rank {activity.rank} tb {activity.threadblock} step {activity.step}"
        chunks = f"{activity.count} chunk{'s' * (activity.count > 1)}"
        if activity.kind == "message":
            what = f"{chunks} over {resource_name(cluster, activity.link)}"
        else:
            what = f"reduces {chunks}"
        click.echo(
            f"  {us(activity.start_fs):12.3f} .. {us(activity.end_fs):12.3f} us  {place}: {what}"
            f"{', ' if WAITED_FOR[activity.reason] else ''}{WAITED_FOR[activity.reason]}"
        )
