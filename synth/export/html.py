"""The report: one HTML page with topology, time lines, predicted against measured times, bounds and provenance.

Self-contained: inline SVG and CSS, no script, nothing fetched. Every text that comes from a file is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.check_certificate import CLAIMED
from taccl.synth.cost import costs, us
from taccl.synth.export.html_chart import comparison_chart
from taccl.synth.export.html_style import HUES, STYLE
from taccl.synth.export.html_text import escape, size_text, time_text
from taccl.synth.export.html_timeline import timeline_svg
from taccl.synth.export.html_topology import topology_svg
from taccl.synth.export.timeline import of_algorithm, of_plan, of_simulation, rows
from taccl.synth.gap import gap, gap_text
from taccl.synth.simulate import Simulation, resource_name

BUSIEST = 6
MAX_MEASUREMENTS = 1000


@dataclass(frozen=True, slots=True)
class Entry:
    """One algorithm, or one program from elsewhere, on a topology at a size.

    measurements: rows with the keys size_bytes, time_us, and if known reference_time_us (the MPI library's own
    collective), predicted_us, wrong (elements that differ) and mode.
    """

    title: str
    topology: Topology
    simulation: Simulation  # of the program
    algorithm: Algorithm | None = None  # the schedule that the program was lowered from
    measurements: Sequence[Mapping[str, object]] = field(default=())
    checked: bool = True  # False: the solver's own bound is what a file says, and nobody proved it again


def report_html(entries: Sequence[Entry], title: str = "taccl report") -> str:
    """The page. Equal entries give equal bytes."""
    drawn: dict[str, Topology] = {}
    for entry in entries:
        drawn.setdefault(entry.topology.name, entry.topology)
    body = [f"<h1>{escape(title)}</h1>"]
    if len(entries) > 1:
        links = "".join(f'<a href="#e{i}">{escape(e.title)}</a>' for i, e in enumerate(entries))
        body.append(f"<nav>{links}</nav>")
        body.append(_overview(entries))
    body += [_topology(topology) for topology in drawn.values()]
    body += [_entry(i, entry) for i, entry in enumerate(entries)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}{_hues()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _hues() -> str:
    # Neighbouring ids get hues that lie far apart (golden angle).
    return "".join(f".c{i}{{fill:hsl({i * 137.508 % 360:.0f} 62% 56%)}}\n" for i in range(HUES))


def _overview(entries: Sequence[Entry]) -> str:
    lines = []
    for i, entry in enumerate(entries):
        time_us, bound = us(entry.simulation.time_fs), None
        if entry.algorithm is not None:
            bound = entry.algorithm.certificate.lower_bound_us
        lines.append(
            f'<tr><td><a href="#e{i}">{escape(entry.title)}</a></td>'
            f"<td>{size_text(entry.simulation.size_bytes)}</td><td>{time_text(time_us)}</td>"
            f"<td>{'' if bound is None else time_text(bound)}</td>"
            f"<td>{'' if bound is None else gap_text(gap(time_us, bound))}</td>"
            f"<td>{entry.simulation.algbw_gbps:.3g}</td><td>{entry.simulation.busbw_gbps:.3g}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("algorithm", "size", "time", "bound", "gap", "algbw GB/s", "busbw GB/s")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _topology(topology: Topology) -> str:
    kinds: dict[tuple[str, float, float, float], int] = {}
    for link in topology.links:
        key = (
            link.kind,
            float(link.alpha_us),
            float(link.beta_us_per_mb),
            float(link.occupancy_us),
        )
        kinds[key] = kinds.get(key, 0) + 1
    shown = sorted(kinds.items(), key=lambda item: (item[0][0], -item[1], item[0]))[:40]
    lines = [
        f"<tr><td>{escape(kind)}</td><td>{count}</td><td>{alpha:.4g}</td><td>{beta:.4g}</td>"
        f"<td>{occupancy:.4g}</td></tr>"
        for (kind, alpha, beta, occupancy), count in shown
    ]
    rest = len(kinds) - len(shown)
    more = f'<p class="note">and {rest} more kinds of links</p>' if rest else ""
    head = "".join(
        f"<th>{name}</th>" for name in ("link", "number", "alpha µs", "beta µs/MB", "occupancy µs")
    )
    source = f'<p class="note">{escape(topology.source)}</p>' if topology.source else ""
    return (
        f"<section><h2>Topology {escape(topology.name)}</h2><p>{topology.ranks} ranks on "
        f"{len(topology.nodes)} node{'s' * (len(topology.nodes) != 1)}, {len(topology.links)} links, "
        f'{len(topology.ports)} shared ports</p><div class="two"><figure>{topology_svg(topology)}</figure>'
        f"<div><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{more}{source}"
        "</div></div></section>"
    )


def _entry(number: int, entry: Entry) -> str:
    simulation, algorithm, topology = entry.simulation, entry.algorithm, entry.topology
    collective = simulation.collective
    price = costs(topology, collective.chunk_bytes(simulation.size_bytes))
    exact = algorithm is not None and algorithm.time_fs == simulation.time_fs
    spans = (
        of_algorithm(algorithm, topology) if algorithm is not None and exact else of_simulation(simulation)
    )
    parts = [
        f'<section id="e{number}"><h2>{escape(entry.title)}</h2>',
        f"<p>{escape(collective.title)} of {size_text(simulation.size_bytes)} on {escape(topology.name)}: "
        f"{len(collective.chunks)} chunks of {size_text(float(collective.chunk_bytes(simulation.size_bytes)))}, "
        f"{sum(span.kind == 'message' for span in spans)} messages</p>",
        _headline(entry),
        "<h3>Time line</h3>",
        timeline_svg(spans, rows(spans, topology, price), simulation.time_fs),
        _coded(entry),
        _busiest(entry),
    ]
    if entry.measurements:
        parts.append(_measured(entry.measurements))
    if algorithm is not None:
        provenance = {"engine": algorithm.engine, **algorithm.provenance}
        lines = [
            f"<tr><td>{escape(key)}</td><td>{escape(_plain(value))}</td></tr>"
            for key, value in sorted(provenance.items())
        ]
        parts.append(
            '<details><summary>Provenance</summary><table class="left"><tbody>'
            f"{''.join(lines)}</tbody></table></details>"
        )
    return "".join(parts) + "</section>"


def _coded(entry: Entry) -> str:
    """The time line of the coding plan; nothing without one."""
    from taccl.synth.coding.choose import chosen

    algorithm, topology = entry.algorithm, entry.topology
    plan = None if algorithm is None else algorithm.coding
    choice = algorithm and plan and chosen(algorithm, topology, plan.cost, plan.messages)
    if algorithm is None or plan is None or not choice:
        return ""
    spans, price = of_plan(choice), costs(topology, algorithm.chunk_bytes)
    drawn = timeline_svg(spans, rows(spans, topology, price, choice.prices.framed), plan.time_fs)
    return (
        f"<h3>Time line with {escape(plan.cost.codec)}</h3><p>{len(plan.messages)} of {len(algorithm.messages)} "
        f"messages are coded, for {escape(plan.cost.dtype)}: {time_text(us(plan.time_fs))}, and by the best schedule "
        f"without a codec {time_text(plan.uncoded_time_us)}</p>{drawn}"
    )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _headline(entry: Entry) -> str:
    simulation, algorithm = entry.simulation, entry.algorithm
    time_us = us(simulation.time_fs)
    facts = [
        ("predicted time", time_text(time_us)),
        ("algorithm bandwidth", f"{simulation.algbw_gbps:.4g} GB/s"),
        ("bus bandwidth", f"{simulation.busbw_gbps:.4g} GB/s"),
    ]
    if algorithm is None:
        return _facts(facts)
    certificate = algorithm.certificate
    status = certificate.status + (f" ({certificate.proved_by})" if certificate.proved_by else "")
    facts[1:1] = [
        ("no algorithm below", time_text(certificate.lower_bound_us)),
        ("gap", gap_text(certificate.gap(time_us))),
        ("status", status),
    ]
    share = min(1.0, certificate.lower_bound_us / time_us) if time_us else 1.0
    solver = min(1.0, certificate.solver_bound_us / time_us) if time_us else 1.0
    bar = (
        '<svg class="gap" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img">'
        f"<title>lower bound {time_text(certificate.lower_bound_us)} of {time_text(time_us)}</title>"
        f'<rect class="rest" width="1000" height="16"/><rect class="bound" width="{1000 * share:.1f}" height="16"/>'
        f'<rect class="mark" x="{max(0.0, 1000 * solver - 3):.1f}" width="3" height="16"/></svg>'
    )
    notes = [
        f"bound: {escape(certificate.bound_by)}",
        f"the solver's own bound (dark mark): {time_text(certificate.solver_bound_us)}"
        + ("" if entry.checked else f", {CLAIMED}"),
    ]
    if algorithm.time_fs != simulation.time_fs:
        notes.append(f"the schedule alone takes {time_text(us(algorithm.time_fs))}")
    return _facts(facts) + bar + f'<p class="note">{"; ".join(notes)}</p>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts)
    return f'<div class="facts">{cells}</div>'


def _busiest(entry: Entry) -> str:
    simulation = entry.simulation
    order = sorted(range(len(simulation.busy_fs)), key=lambda r: (-simulation.busy_fs[r], r))[:BUSIEST]
    lines = [
        f"<tr><td>{escape(resource_name(entry.topology, r))}</td><td>{time_text(us(simulation.busy_fs[r]))}</td>"
        f"<td>{100 * simulation.busy_fs[r] / simulation.time_fs:.0f} %</td></tr>"
        for r in order
        if simulation.busy_fs[r] and simulation.time_fs
    ]
    return (
        "<details><summary>Busiest links and ports</summary><table><thead><tr><th>resource</th><th>held</th>"
        f"<th>of the time</th></tr></thead><tbody>{''.join(lines)}</tbody></table></details>"
    )


def _measured(measurements: Sequence[Mapping[str, object]]) -> str:
    shown = list(measurements)[:MAX_MEASUREMENTS]
    lines = []
    for row in shown:
        time, reference = _number(row.get("time_us")), _number(row.get("reference_time_us"))
        predicted, wrong = _number(row.get("predicted_us")), row.get("wrong")
        speed = f"{reference / time:.2f}" if time and reference else ""
        ratio = f"{time / predicted:.2f}" if time and predicted else ""
        checked = "not checked" if wrong is None else "0" if wrong == 0 else f"<b>{escape(wrong)}</b>"
        lines.append(
            f"<tr><td>{size_text(_number(row.get('size_bytes')) or 0)}</td>"
            f"<td>{escape(row.get('mode') or '')}</td><td>{_time(predicted)}</td><td>{_time(time)}</td>"
            f"<td>{ratio}</td><td>{_time(reference)}</td><td>{speed}</td><td>{checked}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "size", "mode", "predicted", "measured", "measured / predicted", "MPI's own", "speed-up over it",
            "wrong elements",
        )
    )  # fmt: skip
    points = [
        tuple(_number(row.get(key)) for key in ("size_bytes", "predicted_us", "time_us", "reference_time_us"))
        for row in shown
        if row.get("mode") == shown[0].get("mode")  # the others are in the table
    ]
    return (
        f"<h3>Predicted and measured</h3>{comparison_chart(points)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        return None
    return float(value)


def _time(value: float | None) -> str:
    return "" if value is None else time_text(value)
