"""The topology inside a native algorithm file.

Exact numbers in us and us/MB; links as rows [src, dst, class, [ports]] over a table of link classes, so that a
cluster of a thousand ranks stays small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from math import gcd
from typing import Any

from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.profile_writer import number_text
from taccl.profiles.topology import Link, Measurement, Nic, Port, Switch, Topology
from taccl.synth.json_reader import MAX_INTEGER_DIGITS, Place

MAX_RANKS = 1 << 16
MAX_LINKS = 1 << 23
MAX_PORTS = 1 << 20
MAX_PORTS_OF_LINK = 64
MAX_CODECS = 1000
MAX_FRAME_BYTES = 1 << 62
_CODEC_KEYS = tuple(field.name for field in fields(CodecCost))


def topology_lines(topology: Topology) -> Iterator[str]:
    """The lines between the braces of the topology's object."""
    classes: dict[tuple[Any, ...], int] = {}
    rows = []
    for link in topology.links:
        key = (link.kind, link.alpha_us, link.beta_us_per_mb, link.occupancy_us, link.measured)
        number = classes.setdefault(key, len(classes))
        rows.append(f"[{link.src},{link.dst},{number},[{','.join(map(str, link.ports))}]]")
    yield f'"name": {json.dumps(topology.name)}, "source": {json.dumps(topology.source)},'
    yield (
        f'"reduce_alpha_us": {_number(topology.reduce_alpha_us)}, '
        f'"reduce_beta_us_per_mb": {_number(topology.reduce_beta_us_per_mb)},'
    )
    if topology.load_us:
        yield f'"load_us": {_number(topology.load_us)},'
    if topology.codecs:
        yield from _array("codecs", [_codec(cost) for cost in topology.codecs], ",")
    yield f'"nodes": {json.dumps([list(node) for node in topology.nodes])},'
    yield from _array(
        "ports",
        [
            f'{{"name": {json.dumps(p.name)}, "beta_us_per_mb": {_number(p.beta_us_per_mb)}, '
            f'"kind": {json.dumps(p.kind)}}}'
            for p in topology.ports
        ],
        ",",
    )
    yield from _array(
        "switches",
        [f'{{"name": {json.dumps(s.name)}, "ranks": {json.dumps(s.ranks)}}}' for s in topology.switches],
        ",",
    )
    yield from _array(
        "nics",
        [
            f'{{"name": {json.dumps(n.name)}, "node": {n.node}, "ranks": {json.dumps(n.ranks)}, '
            f'"out_port": {n.out_port}, "in_port": {n.in_port}}}'
            for n in topology.nics
        ],
        ",",
    )
    yield from _array("link_classes", [_class(key) for key in classes], ",")
    yield from _array("links", rows, "")


def read_topology_value(place: Place) -> Topology:
    """The topology at a place. Raises InvalidInput."""
    place.only(
        "name", "source", "reduce_alpha_us", "reduce_beta_us_per_mb", "nodes", "ports", "switches", "nics",
        "link_classes", "links", "codecs", "load_us",
    )  # fmt: skip
    nodes = tuple(_ranks(node, least=1) for node in place.at("nodes").items(1, MAX_RANKS))
    if sum(map(len, nodes)) > MAX_RANKS:
        place.at("nodes").fail(f"more than {MAX_RANKS} ranks")
    ports = tuple(_port(port) for port in place.at("ports").items(0, MAX_PORTS))
    switches = tuple(_switch(switch) for switch in place.at("switches").items(0, MAX_PORTS))
    topology = Topology(
        name=place.at("name").text(),
        nodes=nodes,
        links=_links(place, len(ports)),
        ports=ports,
        switches=switches,
        nics=tuple(_nic(nic, len(ports)) for nic in place.at("nics").items(0, MAX_PORTS)),
        reduce_alpha_us=_not_negative(place.at("reduce_alpha_us")),
        reduce_beta_us_per_mb=_not_negative(place.at("reduce_beta_us_per_mb")),
        source=place.at("source").text(),
        codecs=_codecs(place.at("codecs")) if "codecs" in place.mapping() else (),
        load_us=_not_negative(place.at("load_us")) if "load_us" in place.mapping() else Fraction(0),
    )
    try:
        topology.check()
    except ValueError as error:
        place.fail(str(error))
    for group in ("switches", "nics"):
        for entry in place.at(group).items():
            for rank in entry.at("ranks").items():
                rank.integer(0, topology.ranks - 1)
    return topology


def _number(value: Fraction) -> str:
    text = number_text(value)
    if len(text) <= MAX_INTEGER_DIGITS:
        return json.dumps(text) if "/" in text else text
    # Many digits are refused when they are read again: 1e300, 25e-90/7.
    below, exponent = value.denominator, 0
    while (shared := gcd(below, 10)) > 1:
        below, exponent = below // shared, exponent - 1
    above = value.numerator * 10**-exponent * below // value.denominator
    while above % 10 == 0:
        above, exponent = above // 10, exponent + 1
    return json.dumps(f"{above}e{exponent}" + (f"/{below}" if below > 1 else ""))


def _array(name: str, rows: list[str], end: str) -> Iterator[str]:
    yield f'"{name}": ['
    yield from (row + "," * (i + 1 < len(rows)) for i, row in enumerate(rows))
    yield "]" + end


def _class(key: tuple[Any, ...]) -> str:
    kind, alpha, beta, occupancy, measured = key
    text = (
        f'{{"kind": {json.dumps(kind)}, "alpha_us": {_number(alpha)}, "beta_us_per_mb": {_number(beta)}, '
        f'"occupancy_us": {_number(occupancy)}'
    )
    if measured is not None:
        numbers = {
            "samples": measured.samples,
            "residual": measured.residual,
            "alpha_ci_us": measured.alpha_ci_us,
            "beta_ci_us_per_mb": measured.beta_ci_us_per_mb,
        }
        text += f', "measured": {json.dumps(numbers, allow_nan=False)}'
    return text + "}"


def _codec(cost: CodecCost) -> str:
    return (
        f'{{"codec": {json.dumps(cost.codec)}, "dtype": {json.dumps(cost.dtype)}, '
        f'"lossless": {json.dumps(cost.lossless)}, "ratio": {_number(cost.ratio)}, '
        f'"frame_bytes": {cost.frame_bytes}, '
        f'"encode_alpha_us": {_number(cost.encode_alpha_us)}, '
        f'"encode_beta_us_per_mb": {_number(cost.encode_beta_us_per_mb)}, '
        f'"decode_alpha_us": {_number(cost.decode_alpha_us)}, '
        f'"decode_beta_us_per_mb": {_number(cost.decode_beta_us_per_mb)}, '
        f'"source": {json.dumps(cost.source)}}}'
    )


def _codecs(place: Place) -> tuple[CodecCost, ...]:
    found = []
    for entry in place.items(0, MAX_CODECS):
        entry.only(*_CODEC_KEYS)
        ratio = entry.at("ratio").exact()
        if ratio <= 0:
            entry.at("ratio").fail(f"must be above 0, found {entry.at('ratio').value}")
        found.append(
            CodecCost(
                codec=entry.at("codec").text(),
                dtype=entry.at("dtype").text(),
                lossless=entry.at("lossless").boolean(),
                ratio=ratio,
                frame_bytes=entry.at("frame_bytes").integer(0, MAX_FRAME_BYTES),
                encode_alpha_us=_not_negative(entry.at("encode_alpha_us")),
                encode_beta_us_per_mb=_not_negative(entry.at("encode_beta_us_per_mb")),
                decode_alpha_us=_not_negative(entry.at("decode_alpha_us")),
                decode_beta_us_per_mb=_not_negative(entry.at("decode_beta_us_per_mb")),
                source=entry.at("source").text() if "source" in entry.mapping() else "",
            )
        )
    return tuple(found)


def _ranks(place: Place, least: int) -> tuple[int, ...]:
    return tuple(rank.integer(0, MAX_RANKS - 1) for rank in place.items(least, MAX_RANKS))


def _not_negative(place: Place) -> Fraction:
    value = place.exact()
    if value < 0:
        place.fail(f"must not be below 0, found {place.value}")
    return value


def _port(place: Place) -> Port:
    place.only("name", "beta_us_per_mb", "kind")
    return Port(place.at("name").text(), place.at("beta_us_per_mb").exact(), place.at("kind").text())


def _switch(place: Place) -> Switch:
    place.only("name", "ranks")
    return Switch(place.at("name").text(), _ranks(place.at("ranks"), least=0))


def _nic(place: Place, ports: int) -> Nic:
    place.only("name", "node", "ranks", "out_port", "in_port")
    return Nic(
        place.at("name").text(),
        place.at("node").integer(0, MAX_RANKS - 1),
        _ranks(place.at("ranks"), least=0),
        place.at("out_port").integer(0, ports - 1),
        place.at("in_port").integer(0, ports - 1),
    )


def _links(place: Place, ports: int) -> tuple[Link, ...]:
    classes = [_read_class(entry) for entry in place.at("link_classes").items(0, MAX_LINKS)]
    links = []
    for row in place.at("links").items(0, MAX_LINKS):
        row.array(4, 4)
        src, dst, number, crossed = row.items()
        alpha, beta, occupancy, kind, measured = classes[number.integer(0, len(classes) - 1)]
        links.append(Link(
            src.integer(0, MAX_RANKS - 1),
            dst.integer(0, MAX_RANKS - 1),
            alpha,
            beta,
            occupancy,
            tuple(port.integer(0, ports - 1) for port in crossed.items(0, MAX_PORTS_OF_LINK)),
            kind,
            measured,
        ))  # fmt: skip
    return tuple(links)


def _read_class(place: Place) -> tuple[Fraction, Fraction, Fraction, str, Measurement | None]:
    place.only("kind", "alpha_us", "beta_us_per_mb", "occupancy_us", "measured")
    measured = None
    if "measured" in place.mapping():
        found = place.at("measured")
        found.only("samples", "residual", "alpha_ci_us", "beta_ci_us_per_mb")
        measured = Measurement(
            found.at("samples").integer(0, 2**62),
            found.at("residual").number(),
            found.at("alpha_ci_us").number(),
            found.at("beta_ci_us_per_mb").number(),
        )
    return (
        place.at("alpha_us").exact(),
        place.at("beta_us_per_mb").exact(),
        place.at("occupancy_us").exact(),
        place.at("kind").text(),
        measured,
    )
