"""The drawing of a topology in the report: nodes as boxes, their ranks in circles, links as lines."""

from __future__ import annotations

import math

from taccl.profiles.topology import Link, Topology
from taccl.synth.export.html_text import escape

MAX_WIRES = 3000
MAX_RANKS = 512
KINDS = 6  # colours
SPACING = 34  # between neighbours on a circle


def topology_svg(topology: Topology) -> str:
    """The drawing; beyond MAX_RANKS ranks a sentence instead."""
    if topology.ranks > MAX_RANKS:
        return f'<p class="note">{topology.ranks} ranks are too many to draw.</p>'
    places, boxes, width, height = _layout(topology)
    node_of = topology.node_of()
    kinds = {kind: i for i, kind in enumerate(sorted({link.kind for link in topology.links}))}
    pairs: dict[tuple[int, int], list[Link]] = {}
    for link in topology.links:
        pairs.setdefault((min(link.src, link.dst), max(link.src, link.dst)), []).append(link)
    shown_width = min(560, int(1.4 * width))
    parts = [
        f'<svg width="{shown_width}" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        f"<title>{escape(topology.name)}</title>"
    ]
    for number, (x, y, w, h) in enumerate(boxes):
        parts.append(
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="8">'
            f"<title>node {number}</title></rect>"
        )
    for (u, v), links in sorted(pairs.items())[:MAX_WIRES]:
        (x1, y1), (x2, y2) = places[u], places[v]
        crowded = len(pairs) > 150 or (node_of[u] != node_of[v] and len(pairs) > 40)
        faint = ' style="opacity:.3;stroke-width:.8"' if crowded else ""
        parts.append(
            f'<line class="wire k{kinds[links[0].kind] % KINDS}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" '
            f'y2="{y2:.1f}"{faint}><title>{_tip(links)}</title></line>'
        )
    for rank, (x, y) in enumerate(places):
        parts.append(
            f'<circle class="rank" cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{rank}</text>'
        )
    parts.append("</svg>")
    legend = ", ".join(
        f'<svg style="display:inline" width="18" height="8"><line class="wire k{i % KINDS}" x1="0" x2="18" y1="4" '
        f'y2="4"/></svg> {escape(kind)}'
        for kind, i in kinds.items()
    )
    rest = f"; {len(pairs) - MAX_WIRES} links are not drawn" if len(pairs) > MAX_WIRES else ""
    return "".join(parts) + f'<figcaption class="note">{legend}{rest}</figcaption>'


Box = tuple[float, float, float, float]


def _layout(topology: Topology) -> tuple[list[tuple[float, float]], list[Box], float, float]:
    """Places of the ranks, boxes of the nodes, width and height."""
    places = [(0.0, 0.0)] * topology.ranks
    if all(len(node) == 1 for node in topology.nodes):
        order = [node[0] for node in topology.nodes]
        radius = _radius(len(order))
        for i, rank in enumerate(order):
            places[rank] = _on_circle(i, len(order), radius, radius + 20, radius + 20)
        return places, [], 2 * radius + 40, 2 * radius + 40
    boxes = []
    side = max(2 * _radius(len(node)) + 44 for node in topology.nodes)
    columns = math.ceil(math.sqrt(len(topology.nodes)))
    for number, node in enumerate(topology.nodes):
        left, top = number % columns * (side + 40) + 4, number // columns * (side + 40) + 4
        boxes.append((left, top, side, side))
        for i, rank in enumerate(node):
            places[rank] = _on_circle(i, len(node), _radius(len(node)), left + side / 2, top + side / 2)
    lines = math.ceil(len(topology.nodes) / columns)
    return places, boxes, columns * (side + 40) - 32, lines * (side + 40) - 32


def _radius(ranks: int) -> float:
    return max(28.0, ranks * SPACING / (2 * math.pi)) if ranks > 1 else 0.0


def _on_circle(i: int, of: int, radius: float, x: float, y: float) -> tuple[float, float]:
    angle = 2 * math.pi * i / of - math.pi / 2
    return x + radius * math.cos(angle), y + radius * math.sin(angle)


def _tip(links: list[Link]) -> str:
    lines = [
        f"{link.src}→{link.dst} {link.kind}: {float(link.alpha_us):.4g} µs + {float(link.beta_us_per_mb):.4g} µs/MB"
        for link in links[:8]
    ]
    return escape("\n".join([*lines, *(["…"] if len(links) > 8 else [])]))
