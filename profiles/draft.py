"""A topology while it is being built from a profile, and the parts of a profile that name things in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from taccl.profiles.forms import Values
from taccl.profiles.link_columns import LinkClass, LinkColumns
from taccl.profiles.plain_forms import did_you_mean
from taccl.profiles.topology import Measurement, Nic, Port, Switch
from taccl.profiles.yaml_reader import Node, shorten


@dataclass(slots=True)
class Draft:
    """The topology while it is being built."""

    values: Values
    nodes: list[tuple[int, ...]] = field(default_factory=list)
    links: LinkColumns = field(default_factory=LinkColumns)
    ports: list[Port] = field(default_factory=list)
    port_ids: dict[str, int] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)
    switch_names: set[str] = field(default_factory=set)
    nics: list[Nic] = field(default_factory=list)
    nic_ids: dict[str, int] = field(default_factory=dict)
    classes: dict[str, LinkClass | None] = field(default_factory=dict)  # None: noted as wrong already
    incomplete: bool = False  # something was left out, noted already: what is missing may follow from it

    def add_port(self, name: str, beta: Fraction, kind: str, at: Node) -> int:
        if name in self.port_ids:
            at.error("P104", f"two ports have the name {shorten(name)!r}", "rename one of the two")
            return self.port_ids[name]
        self.port_ids[name] = len(self.ports)
        self.ports.append(Port(name, beta, kind))
        return self.port_ids[name]

    def add_port_entry(self, name: str, entry: Values) -> None:
        """A port as a profile writes it; one whose rate is unreadable exists all the same."""
        self.add_port(name, entry.get("beta", Fraction(1)), entry.get("kind", "port"), entry.node)

    def add_switch(self, name: str, ranks: tuple[int, ...], at: Node) -> None:
        if name in self.switch_names:
            at.error("P104", f"two switches have the name {shorten(name)!r}", "rename one of the two")
        self.switch_names.add(name)
        self.switches.append(Switch(name, ranks))

    def add_nic(self, nic: Nic, at: Node) -> None:
        if nic.name in self.nic_ids:
            at.error("P104", f"two NICs have the name {shorten(nic.name)!r}", "rename one of the two")
        self.nic_ids[nic.name] = len(self.nics)
        self.nics.append(nic)

    def port(self, name: str, at: Node, prefix: str = "") -> int | None:
        """The id of a port, or None after noting that there is none (unless something was left out)."""
        found = self.port_ids.get(prefix + name)
        if found is None and not self.incomplete:
            known = [port.removeprefix(prefix) for port in self.port_ids if port.startswith(prefix)]
            at.error("P104", f"there is no port {shorten(name)!r}", did_you_mean(name, known))
        return found

    def link_class(self, values: Values, key: str = "class") -> LinkClass | None:
        """The class that `values[key]` names, or None after noting that there is none."""
        name = values.get(key)
        if name is None:
            return None
        if name not in self.classes:
            help = did_you_mean(name, self.classes) or f"known classes: {', '.join(self.classes) or 'none'}"
            values.at(key).error("P103", f"there is no link class {shorten(name)!r}", help)
            self.classes[name] = None
        return self.classes[name]


def read_classes(draft: Draft, values: Values) -> None:
    """Fill `draft.classes` from `classes`."""
    for name, entry in values.get("classes", {}).items():
        draft.classes[name] = _read_class(entry, name)
    for key, _ in values.at("classes").entries if "classes" in values else ():
        draft.classes.setdefault(key.text, None)  # unreadable ones exist all the same


def _read_class(entry: Values, name: str) -> LinkClass | None:
    if entry.broken:
        return None
    alpha: Fraction = entry["alpha"]
    occupancy: Fraction = entry.get("occupancy", alpha)
    if occupancy > alpha:
        entry.at("occupancy").error("P105", f"the occupancy ({occupancy} us) is above alpha ({alpha} us)")
        return None
    measured: Values | None = entry.get("measured")
    if measured is not None and measured.broken:
        return None
    return LinkClass(
        alpha, entry["beta"], occupancy, entry.get("kind", name), _measurement(measured) if measured else None
    )


def _measurement(values: Values) -> Measurement:
    return Measurement(
        values["samples"],
        float(values["residual"]),
        float(values.get("alpha_ci", 0)),
        float(values.get("beta_ci", 0)),
    )


def rank_set(values: Values, key: str, limit: int, whole: str) -> tuple[int, ...] | None:
    """The ranks of a rank set, in the order written; None after noting what is wrong.

    `limit` ranks exist, in `whole` ("the cluster", "a node").
    """
    if key not in values:
        return None
    return parse_rank_set(values[key], values.at(key), limit, whole)


def parse_rank_set(value: Any, at: Node, limit: int, whole: str) -> tuple[int, ...] | None:
    """As `rank_set`, of a value that the form RANK_SET has read."""
    if value == "all":
        return tuple(range(limit))
    spans: list[tuple[int, int]] = []
    if isinstance(value, int):
        spans.append((value, value))
    elif isinstance(value, list):
        spans.extend((rank, rank) for rank in value)
    else:
        for part in value.split(","):
            first, _, last = part.strip().partition("-")
            spans.append((int(first), int(last or first)))
    for first, last in spans:
        if max(first, last) >= limit:
            message = f"rank {max(first, last)} does not exist: {whole} has {limit} ranks (0-{limit - 1})"
            at.error("P102", message)
            return None
        if last < first:
            at.error("P102", f"the range {first}-{last} runs backwards", f"write {last}-{first}")
            return None
    ranks = tuple(rank for first, last in spans for rank in range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        at.error("P102", "a rank stands twice in this set")
        return None
    return ranks
