"""What a survey found as a `Topology`, with numbers that people can read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median
from typing import Any

from taccl.profiles.measure.codec_fit import CodecFit, codec_document
from taccl.profiles.measure.rounding import or_none, rounded
from taccl.profiles.measure.survey import Survey
from taccl.profiles.measure.together import FoundPort
from taccl.profiles.schema import MIN_BETA_US_PER_MB, MIN_TIME_US
from taccl.profiles.topology import Link, Measurement, Nic, Port, Switch, Topology

_FROM_RANK = ("switch", "nic", "trunk", "port")  # kinds of ports, the nearest to a rank first
_EQUAL = 1.15  # ports of a kind whose betas differ by less, neighbour to neighbour, are equal
_SPAN = 1.3  # ports that count as equal never differ by more
_LEAST_BETA = Fraction(1, 1000)  # us/MB, 1 PB/s: faster than anything that can be told from zero


def topology(found: Survey, name: str, source: str) -> Topology:
    """The topology of a survey. Links of a class get the same numbers, ports that are about equal too."""
    ports = _equalised(found.ports)
    crossing: dict[tuple[int, int], list[int]] = {}
    for index in sorted(range(len(ports)), key=lambda index: _place(ports[index])):
        for link in ports[index].links:
            crossing.setdefault(link, []).append(index)
    links = []
    for cls in found.classes:
        alpha = or_none(cls.fit.alpha_us, MIN_TIME_US)
        measured = Measurement(
            samples=cls.fit.samples,
            residual=float(rounded(cls.fit.residual)),
            alpha_ci_us=float(rounded(cls.fit.alpha_ci_us)),
            beta_ci_us_per_mb=float(rounded(cls.fit.beta_ci_us_per_mb)),
        )
        for src, dst in cls.links:
            links.append(
                Link(
                    src=src,
                    dst=dst,
                    alpha_us=alpha,
                    beta_us_per_mb=max(rounded(cls.fit.beta_us_per_mb), _LEAST_BETA),
                    occupancy_us=min(alpha, or_none(cls.fit.occupancy_us, MIN_TIME_US)),
                    ports=tuple(crossing.get((src, dst), ())),
                    kind=cls.name,
                    measured=measured,
                )
            )
    result = Topology(
        name=name,
        nodes=found.nodes,
        links=tuple(sorted(links, key=lambda link: (link.src, link.dst))),
        ports=tuple(
            Port(port.name, max(rounded(port.beta_us_per_mb), _LEAST_BETA), port.kind) for port in ports
        ),
        switches=_switches(found),
        nics=_nics(ports),
        reduce_alpha_us=or_none(found.reduce_alpha_us, MIN_TIME_US),
        reduce_beta_us_per_mb=or_none(found.reduce_beta_us_per_mb, MIN_BETA_US_PER_MB),
        source=source,
        load_us=or_none(found.load_us, MIN_TIME_US),
    )
    result.check()
    return result


def _place(port: FoundPort) -> int:
    """Where a message comes to it on its way: like links are to have like ports in like order, since that is how one is
    seen to be another's image."""
    from_end = _FROM_RANK.index(port.kind)
    return {"out": from_end, "both": len(_FROM_RANK), "in": 2 * len(_FROM_RANK) - from_end}[port.direction]


def _equalised(ports: tuple[FoundPort, ...]) -> list[FoundPort]:
    """Ports of one kind whose betas cannot be told apart get their median: equal hardware looks equal."""
    level: dict[str, float] = {}
    for kind in sorted({port.kind for port in ports}):
        ordered = sorted((p for p in ports if p.kind == kind), key=lambda p: (p.beta_us_per_mb, p.name))
        groups: list[list[FoundPort]] = []
        for port in ordered:
            if not groups or port.beta_us_per_mb > _EQUAL * groups[-1][-1].beta_us_per_mb:
                groups.append([])
            groups[-1].append(port)
        for group in itertools.chain.from_iterable(map(_halved, groups)):
            middle = median(port.beta_us_per_mb for port in group)
            level.update({port.name: middle for port in group})
    return [replace(port, beta_us_per_mb=level[port.name]) for port in ports]


def _halved(group: list[FoundPort]) -> list[list[FoundPort]]:
    """Ordered ports, cut at the widest gaps until none that stay together differ by too much."""
    beta = [port.beta_us_per_mb for port in group]
    if beta[-1] <= _SPAN * beta[0]:
        return [group]
    # Of equally wide gaps the one in the middle, so that a row of even steps falls into even parts.
    at = max(range(1, len(group)), key=lambda k: (rounded(beta[k] / beta[k - 1]), -abs(2 * k - len(group))))
    return _halved(group[:at]) + _halved(group[at:])


def _switches(found: Survey) -> tuple[Switch, ...]:
    """A node is a switch when each of its ranks has a port of its own into it."""
    owners = {port.ranks[0] for port in found.ports if port.kind == "switch"}
    return tuple(
        Switch(f"node{index}.switch", ranks)
        for index, ranks in enumerate(found.nodes)
        if len(ranks) > 2 and owners >= set(ranks)
    )


def _nics(ports: list[FoundPort]) -> tuple[Nic, ...]:
    """The ports out of and into a node that the same ranks share are one network interface."""
    ways = {
        (port.node, port.ranks, port.direction): index
        for index, port in enumerate(ports)
        if port.kind == "nic"
    }
    return tuple(
        Nic(ports[out].name.rsplit(".", 1)[0], node, ranks, out, ways[node, ranks, "in"])
        for (node, ranks, direction), out in sorted(ways.items())
        if direction == "out" and (node, ranks, "in") in ways
    )


def document(found: Survey, result: Topology, codecs: Sequence[CodecFit] = ()) -> dict[str, Any]:
    """What `taccl profile --json` prints: classes, ports and every pair's own fit, and what codecs cost."""
    return {
        "schema": "taccl/measure/v1",
        "name": result.name,
        "source": result.source,
        "ranks": result.ranks,
        "nodes": [list(node) for node in found.nodes],
        "concurrent": found.concurrent,
        "classes": [
            {
                "name": cls.name,
                "links": len(cls.links),
                "alpha_us": float(rounded(cls.fit.alpha_us)),
                "beta_us_per_mb": float(rounded(cls.fit.beta_us_per_mb)),
                "occupancy_us": float(rounded(cls.fit.occupancy_us)),
                "offset_us": float(rounded(cls.fit.offset_us)),
                "residual": float(rounded(cls.fit.residual)),
            }
            for cls in found.classes
        ],
        "ports": [
            {"name": port.name, "kind": port.kind, "beta_us_per_mb": float(port.beta_us_per_mb)}
            for port in result.ports
        ],
        "load_us": float(result.load_us),
        "codecs": [codec_document(fit) for fit in codecs],
        "pairs": [
            {
                "src": src,
                "dst": dst,
                "alpha_us": float(rounded(fit.alpha_us)),
                "alpha_ci_us": float(rounded(fit.alpha_ci_us)),
                "beta_us_per_mb": float(rounded(fit.beta_us_per_mb)),
                "beta_ci_us_per_mb": float(rounded(fit.beta_ci_us_per_mb)),
                "occupancy_us": float(rounded(fit.occupancy_us)),
                "offset_us": float(rounded(fit.offset_us)),
                "residual": float(rounded(fit.residual)),
            }
            for (src, dst), fit in sorted(found.fits.items())
        ],
    }
