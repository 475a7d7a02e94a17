"""`taccl explain`: what an algorithm's time consists of, what bounds it, and what would help."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import topologies
from taccl.commands.options import Size, print_json
from taccl.program_file import (
    NativeFile,
    collective_options,
    open_native,
    open_proven,
    own_judgement,
    size_of,
    topology_of,
    unproven_option,
)

if TYPE_CHECKING:
    from taccl.synth.algorithm import Algorithm
    from taccl.synth.coding.reasons import CodingReasons
    from taccl.synth.explain import Explanation

MAX_RUNS = 40  # of the critical path, in text


@click.command("explain")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--topology",
    metavar="T",
    shell_complete=topologies,
    help="ndv2:2, profile.yaml ...; a native file brings its own.",
)
@click.option("--size", type=Size(), help="As nccl-tests prints it, e.g. 1MB. Default: a native file's own.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@collective_options
@unproven_option
def command(file: str, topology: str | None, size: int | None, as_json: bool, **options: Any) -> None:
    """Say what bounds an algorithm's time, and what would help.

    FILE is a native .json algorithm or MSCCL XML from any source.
    """
    from taccl.errors import UsageError
    from taccl.synth.coding.reasons import reasons
    from taccl.synth.explain import explain

    opened = open_native(file, options) or open_proven(file, options)
    subject = opened.algorithm if isinstance(opened, NativeFile) else opened.program
    collective = None if isinstance(opened, NativeFile) else opened.collective
    cluster = topology_of(opened, topology)
    size = size_of(opened, size)
    judgement = own_judgement(opened, cluster, size)
    bound = None if judgement is None else judgement.bound
    try:
        explanation = explain(subject, cluster, size, collective, bound)
    except ValueError as error:
        raise UsageError(f"{file} on {cluster.name}: {error}") from error
    planned = (
        isinstance(opened, NativeFile) and cluster == opened.topology and size == opened.algorithm.size_bytes
    )
    coding = reasons(opened.algorithm, cluster) if isinstance(opened, NativeFile) and planned else None
    if as_json:
        certificate = judgement and judgement.document()
        print_json({**document(explanation), "certificate": certificate, "coding": coding and asdict(coding)})
    else:
        click.echo(text(explanation), nl=False)
        if coding is not None and opened.algorithm is not None:
            click.echo("\n".join(coding_lines(opened.algorithm, coding)))
        if judgement is not None:
            click.echo(f"\nCertificate of the file\n  {judgement.text()}")


def coding_lines(algorithm: Algorithm, coding: CodingReasons) -> list[str]:
    """Where a plan codes messages, and why there."""
    plan = algorithm.coding
    assert plan is not None
    codec, messages = plan.cost.codec, len(algorithm.messages)
    lines = [
        "",
        f"Coding (times above are without): {codec} on {plan.cost.dtype}, {len(plan.messages)} of {messages} messages",
        f"  time {coding.time_us:.3f} us, {coding.uncoded_us:.3f} us by the best schedule without a codec; nothing "
        f"takes less than {coding.lower_bound_us:.3f} us with {codec}",
        f"  a chunk takes {coding.encode_us:.3f} us to code and {coding.decode_us:.3f} us to decode; rank "
        f"{coding.busiest_rank} is busy with that for {coding.busiest_us:.3f} us",
    ]
    for kind in coding.kinds:
        wire = f"a chunk {kind.wire_us:.3f} us on the wire, its frame {kind.framed_us:.3f} us"
        others = []
        if kind.coded:
            others.append(f"with none of them coded {kind.none_us:.3f} us in all")
        if kind.coded < kind.messages:
            others.append(f"with all that may be {kind.all_us:.3f} us")
        lines.append(f"  {kind.where}: {kind.coded} of {kind.messages} coded; {wire}; {', '.join(others)}")
    return lines


def document(explanation: Explanation) -> dict[str, Any]:
    """The JSON form, schema taccl/explain/v1."""
    cut = explanation.bound.bottleneck
    return {
        "schema": "taccl/explain/v1",
        "name": explanation.name,
        "collective": explanation.collective,
        "topology": explanation.topology,
        "ranks": explanation.ranks,
        "groups": [list(group) for group in explanation.groups],
        "size_bytes": explanation.size_bytes,
        "time_us": explanation.time_us,
        "lower_bound_us": explanation.bound.time_us,
        "gap": explanation.gap,
        "bound_by": explanation.bound.name,
        "bottleneck": cut
        and {
            "ranks": list(cut.ranks),
            "direction": "out" if cut.leaving else "in",
            "bytes": cut.bytes,
            "resources": [
                {"resource": c.resource, "weight": round(c.weight, 6), "latency_us": c.latency_us}
                for c in cut.crossing
            ],
        },
        "bounds": [{"name": name, "time_us": fs / 10**9} for name, fs in explanation.bound.tried],
        "critical_path": [
            {
                "kind": leg.kind,
                "src": leg.src,
                "dst": leg.dst,
                "link": leg.link,
                "chunks": leg.chunks,
                "start_us": leg.start_us,
                "end_us": leg.end_us,
                "waited_us": leg.waited_us,
                "reason": leg.reason,
                "resource": leg.resource,
            }
            for leg in explanation.path
        ],
        "resources": [
            {"resource": load.resource, "busy_us": load.busy_us, "utilisation": round(load.utilisation, 6)}
            for load in explanation.loads
        ],
        "remedies": [
            {"change": r.change, "lower_bound_us": r.bound_us, "time_us": r.time_us}
            for r in explanation.remedies
        ],
        "without_effect": list(explanation.without_effect),
    }


def text(explanation: Explanation) -> str:
    """The readable form."""
    from taccl.synth.collective import titled
    from taccl.synth.gap import gap_text

    e = explanation
    lines = [
        f"{titled(e.collective, e.groups)} of {e.size_bytes} bytes on {e.topology}, {e.ranks} ranks: {e.name}",
        f"time {e.time_us:.3f} us, no algorithm takes less than {e.bound.time_us:.3f} us (gap {gap_text(e.gap)})",
        f"bound by: {e.bound.name}",
    ]
    lines += _path_lines(e)
    lines += ["", "Busiest links and ports"]
    lines += [f"  {x.utilisation:>6.1%} {x.busy_us:>12.3f} us  {x.resource}" for x in e.loads]
    lines += _cut_lines(e)
    lines += ["", "What would help"]
    for r in e.remedies:
        bound = (
            f"bound {e.bound.time_us:.3f} -> {r.bound_us:.3f} us"
            if r.bound_us < e.bound.time_us
            else "bound stays"
        )
        time = f"this algorithm {e.time_us:.3f} -> {r.time_us:.3f} us"
        if r.time_us == e.time_us:
            time = "this algorithm stays"
        lines.append(f"  {r.change}: {bound}, {time}")
    if e.without_effect:
        lines.append(f"  neither bound nor time is lowered by: {'; '.join(e.without_effect)}")
    return "\n".join(lines) + "\n"


def _path_lines(e: Explanation) -> list[str]:
    from itertools import groupby

    from taccl.synth.explain import REASON_TEXT

    # A run of equal messages over one link is told once, or a long pipeline would fill the screen.
    runs = [
        list(run) for _, run in groupby(e.path, key=lambda x: (x.kind, x.src, x.dst, x.reason, x.resource))
    ]
    lines = ["", f"Critical path ({len(e.path)} steps)"]
    shown = runs[-MAX_RUNS:]
    if len(shown) < len(runs):
        hidden = sum(len(run) for run in runs[:-MAX_RUNS])
        lines.append(f"  ... {hidden} earlier steps, all in --json")
    for run in shown:
        leg = run[0]
        what = f"{leg.src}->{leg.dst}" if leg.kind == "message" else f"reduce on {leg.src}"
        why = REASON_TEXT[leg.reason] + (f" ({leg.resource})" if leg.resource else "")
        longest = max(x.waited_us for x in run)
        wait = f", waited {longest:.3f} us" if longest > 0 else ""
        total = sum(x.chunks for x in run)
        chunks = f"{total} chunk{'s' if total != 1 else ''}" + (
            f" in {len(run)} messages" if len(run) > 1 else ""
        )
        lines.append(f"  {leg.start_us:>12.3f} - {run[-1].end_us:>12.3f} us  {what}, {chunks}: {why}{wait}")
    return lines


def _cut_lines(e: Explanation) -> list[str]:
    from taccl.synth.bounds import ranks_text

    cut = e.bound.bottleneck
    if cut is None:
        return []
    lines = ["", "Bottleneck"]
    if cut.ranks:
        way = "leave" if cut.leaving else "enter"
        lines.append(f"  {cut.bytes:.0f} bytes must {way} {ranks_text(cut.ranks)} over:")
    else:
        lines.append("  All data together must pass these; weight = share in the argument:")
    for c in cut.crossing[:12]:
        lines.append(f"  weight {c.weight:.3f}, latency {c.latency_us:.3f} us  {c.resource}")
    if len(cut.crossing) > 12:
        lines.append(f"  and {len(cut.crossing) - 12} more, all in --json")
    return lines
