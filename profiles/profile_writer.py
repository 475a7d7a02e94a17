"""`Topology` to profile text: canonical, so that equal topologies give equal bytes.

The link-by-link form is written: classes, ports, then one row for each link, in the topology's order. Reading
it back gives an equal topology.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.schema import SCHEMA_NAME
from taccl.profiles.topology import Link, Measurement, Topology

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,60}")
_RESERVED = frozenset(["true", "false", "null", "yes", "no", "on", "off", "y", "n", "all"])
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def write_topology(topology: Topology, description: str = "") -> str:
    """The profile text of a topology. Raises ValueError when the topology breaks its own rules."""
    topology.check()
    classes = _classes(topology.links)
    lines = [f"schema: {SCHEMA_NAME}", f"name: {scalar_text(topology.name)}"]
    if description:
        lines.append(f"description: {scalar_text(description)}")
    if topology.source:
        lines.append(f"source: {scalar_text(topology.source)}")
    lines += ["nodes:", *(f"  - {_ranks(node)}" for node in topology.nodes)]
    if topology.reduce_alpha_us or topology.reduce_beta_us_per_mb:
        alpha, beta = number_text(topology.reduce_alpha_us), number_text(topology.reduce_beta_us_per_mb)
        lines.append(f"reduce: {{alpha: {alpha}, beta: {beta}}}")
    if topology.load_us:
        lines.append(f"load: {number_text(topology.load_us)}  # us a message, where all ranks send at once")
    lines += codec_lines(topology.codecs)
    if classes:
        lines.append("classes:  # alpha and occupancy in us, beta in us/MB")
        lines += [f"  {name}: {{{_class(name, key)}}}" for key, name in classes.items()]
    if topology.ports:
        lines.append("ports:")
        for port in topology.ports:
            kind = f", kind: {scalar_text(port.kind)}" if port.kind != "port" else ""
            lines.append(f"  {scalar_text(port.name)}: {{beta: {number_text(port.beta_us_per_mb)}{kind}}}")
    if topology.switches:
        lines.append("switches:")
        lines += [f"  - {{name: {scalar_text(s.name)}, ranks: {_ranks(s.ranks)}}}" for s in topology.switches]
    if topology.nics:
        lines.append("nics:")
        for nic in topology.nics:
            out, into = (scalar_text(topology.ports[port].name) for port in (nic.out_port, nic.in_port))
            place = f"node: {nic.node}, ranks: {_ranks(nic.ranks)}"
            lines.append(f"  - {{name: {scalar_text(nic.name)}, {place}, out: {out}, in: {into}}}")
    if topology.links:
        lines.append("links:  # [src, dst, class, [ports]]")
        for link in topology.links:
            ports = ", ".join(scalar_text(topology.ports[port].name) for port in link.ports)
            tail = f", [{ports}]" if ports else ""
            lines.append(f"  - [{link.src}, {link.dst}, {classes[_key(link)]}{tail}]")
    return "\n".join(lines) + "\n"


_Key = tuple[Fraction, Fraction, Fraction, str, Measurement | None]


def _key(link: Link) -> _Key:
    return (link.alpha_us, link.beta_us_per_mb, link.occupancy_us, link.kind, link.measured)


def _classes(links: Iterable[Link]) -> dict[_Key, str]:
    """A name for each class of links, in order of first use: the kind, numbered where several share it."""
    keys = list(dict.fromkeys(_key(link) for link in links))
    stems = [re.sub(r"[^A-Za-z0-9_.-]", "-", key[3])[:50] for key in keys]
    stems = [
        stem if _PLAIN.fullmatch(stem) and stem.lower() not in _RESERVED else f"class-{stem}"
        for stem in stems
    ]
    names: dict[_Key, str] = {}
    taken: set[str] = set(stems)
    for key, stem in zip(keys, stems, strict=True):
        name = stem
        number = 0
        while (stems.count(stem) > 1 and number == 0) or (number and name in taken):
            number += 1
            name = f"{stem}-{number}"
        taken.add(name)
        names[key] = name
    return names


def _class(name: str, key: _Key) -> str:
    alpha, beta, occupancy, kind, measured = key
    parts = [f"alpha: {number_text(alpha)}", f"beta: {number_text(beta)}"]
    if occupancy != alpha:
        parts.append(f"occupancy: {number_text(occupancy)}")
    if kind != name:
        parts.append(f"kind: {scalar_text(kind)}")
    if measured is not None:
        numbers = [f"samples: {measured.samples}", f"residual: {measured.residual!r}"]
        if measured.alpha_ci_us:
            numbers.append(f"alpha_ci: {measured.alpha_ci_us!r}")
        if measured.beta_ci_us_per_mb:
            numbers.append(f"beta_ci: {measured.beta_ci_us_per_mb!r}")
        parts.append(f"measured: {{{', '.join(numbers)}}}")
    return ", ".join(parts)


def codec_lines(costs: Sequence[CodecCost]) -> list[str]:
    """The lines of `codecs` in a profile; none for none."""
    if not costs:
        return []
    head = "codecs:  # alpha in us, beta in us/MB of values, frame in bytes of a chunk"
    return [head, *(f"  - {{{_codec(cost)}}}" for cost in costs)]


def _codec(cost: CodecCost) -> str:
    encode = _coding(cost.encode_alpha_us, cost.encode_beta_us_per_mb)
    decode = _coding(cost.decode_alpha_us, cost.decode_beta_us_per_mb)
    parts = [
        f"codec: {scalar_text(cost.codec)}",
        f"dtype: {scalar_text(cost.dtype)}",
        f"lossless: {'true' if cost.lossless else 'false'}",
        f"ratio: {number_text(cost.ratio)}",
        f"frame: {cost.frame_bytes}",
        f"encode: {{{encode}}}",
        f"decode: {{{decode}}}",
    ]
    if cost.source:
        parts.append(f"source: {scalar_text(cost.source)}")
    return ", ".join(parts)


def _coding(alpha_us: Fraction, beta_us_per_mb: Fraction) -> str:
    return f"alpha: {number_text(alpha_us)}, beta: {number_text(beta_us_per_mb)}"


def number_text(value: Fraction) -> str:
    """Exact: a decimal where a short one exists, else a fraction."""
    as_float = float(value)
    shortest = Fraction(repr(as_float))
    if shortest == value and "e" not in repr(as_float):
        return str(value) if value.denominator == 1 else repr(as_float)
    return f"{value.numerator}/{value.denominator}" if value.denominator != 1 else str(value.numerator)


def _ranks(ranks: tuple[int, ...]) -> str:
    """A rank set that keeps the order: `0-7` for a run, else a list."""
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return f"[{', '.join(map(str, ranks))}]"


def scalar_text(text: str) -> str:
    """A plain or a double-quoted YAML scalar that reads back as this text."""
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return _ESCAPED.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(text, ensure_ascii=False))
