"""Changes of a topology that might make a collective faster: what `explain` tries one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import LinkNumbers, LinkTable, link_table
from taccl.profiles.topology import Port, Topology
from taccl.synth.bounds import Bound

MAX_SINGLE = 3  # resources changed alone
MAX_OF_CLASS = 2  # pairs of ranks that get one more link of a class
MAX_LINKS = 6


@dataclass(frozen=True, slots=True)
class Change:
    """A topology that differs from the given one as `text` says."""

    text: str
    topology: Topology


def changes(topology: Topology, bound: Bound, path_links: Sequence[int]) -> list[tuple[Change, ...]]:
    """What to try, each as alternatives of which the best counts.

    Double the rate of the bottleneck's resources, singly, together and by class, and of every class of ports (nic: a
    double NIC); one more link; half the latency of a class. path_links: links of the critical path, whose classes are
    tried too. Link ids stay what they are.
    """
    links = tuple(topology.links)
    columns = replace(topology, links=link_table(topology))
    crossing = [c.id for c in bound.bottleneck.crossing] if bound.bottleneck else []
    found = []
    for resource in crossing[:MAX_SINGLE]:
        found.append(Change(f"twice the rate of {_name(topology, resource)}", faster(columns, [resource])))
    if 1 < len(crossing) <= len(links) // 2:
        found.append(
            Change(f"twice the rate of all {len(crossing)} resources of the cut", faster(columns, crossing))
        )
    for kind in dict.fromkeys(port.kind for port in topology.ports):
        members = [len(links) + p for p, port in enumerate(topology.ports) if port.kind == kind]
        found.append(
            Change(
                f"twice the rate of every {kind if kind == 'port' else f'{kind} port'}",
                faster(columns, members),
            )
        )
    on_path = [links[e].kind for e in path_links]
    kinds = [links[r].kind for r in crossing if r < len(links)]
    for kind in dict.fromkeys([*kinds, *on_path]):
        members = [e for e, link in enumerate(links) if link.kind == kind]
        if any(not links[e].ports for e in members):
            found.append(Change(f"twice the rate of every {_link(kind)}", faster(columns, members)))
    for kind in dict.fromkeys([*on_path, *(link.kind for link in links)]):
        if any(link.alpha_us for link in links if link.kind == kind):
            found.append(Change(f"half the alpha of every {_link(kind)}", quicker(columns, kind)))
    found = list({change.text: change for change in found}.values())
    plain = replace(topology, links=links)
    more = tuple(one_more(plain, e) for e in _worth_doubling(plain, bound, path_links))
    return [*((change,) for change in found), *([more] if more else [])]


def one_more(topology: Topology, link_id: int) -> Change:
    """Another cable like a link, there and back, that shares no port: of a NIC's class, another NIC for this pair."""
    link = topology.links[link_id]
    back = next(
        (x for x in topology.links if (x.src, x.dst, x.kind) == (link.dst, link.src, link.kind)), None
    )
    cable = [replace(x, ports=(), measured=None) for x in (link, back) if x is not None]
    a, b = (link.src, link.dst) if back is None else sorted((link.src, link.dst))
    ends = f"from rank {a} to rank {b}" if back is None else f"between ranks {a} and {b}"
    alone = ", with ports of its own" if link.ports else ""
    kind = _link(link.kind)
    return Change(f"one more {kind} {ends}{alone}", replace(topology, links=(*topology.links, *cable)))


def _link(kind: str) -> str:
    return "link" if kind == "link" else f"{kind} link"


def _worth_doubling(topology: Topology, bound: Bound, path_links: Sequence[int]) -> list[int]:
    """Links across the bottleneck, without one those of the critical path: a few of each class."""
    cut = bound.bottleneck
    candidates: list[int] = []
    if cut is not None and cut.ranks:
        inside = set(cut.ranks)
        candidates = [
            e
            for e, link in enumerate(topology.links)
            if (link.src in inside) != (link.dst in inside) and (link.src in inside) == cut.leaving
        ]
        first = set(path_links)
        candidates.sort(key=lambda e: e not in first)
    taken: dict[tuple[str, Fraction, Fraction], set[tuple[int, int]]] = {}
    chosen = []
    for e in candidates or [*path_links, *range(len(topology.links))]:
        link = topology.links[e]
        pairs = taken.setdefault((link.kind, link.alpha_us, link.beta_us_per_mb), set())
        pair = (min(link.src, link.dst), max(link.src, link.dst))
        if len(pairs) < MAX_OF_CLASS and pair not in pairs:
            pairs.add(pair)
            chosen.append(e)
    return chosen[:MAX_LINKS]


def faster(topology: Topology, resources: Iterable[int]) -> Topology:
    """Half the beta of links (by id) and ports (number of links + id).

    A link that crosses a doubled port and whose own beta is that of the port is doubled too: its number was
    only the port's, seen from the link.
    """
    links, chosen = link_table(topology), set(resources)
    count = len(links)
    own = np.zeros(count, np.bool_)
    own[[r for r in chosen if r < count]] = True
    doubled = np.array([count + p in chosen for p in range(len(topology.ports))], np.bool_)
    betas: dict[Fraction, int] = {}
    of_port = np.array([betas.setdefault(p.beta_us_per_mb, len(betas)) for p in topology.ports], np.int64)
    of_class = np.array([betas.setdefault(c.beta_us_per_mb, len(betas)) for c in links.classes], np.int64)
    for ports in links.ports.T:
        crossing = np.flatnonzero(ports >= 0)
        port = ports[crossing]
        own[crossing] |= doubled[port] & (of_port[port] == of_class[links.link_class[crossing]])
    ports_now = tuple(_halved_port(p) if count + i in chosen else p for i, p in enumerate(topology.ports))
    return replace(topology, links=_reclassed(links, own, _halved), ports=ports_now)


def quicker(topology: Topology, kind: str) -> Topology:
    """Half the alpha and the occupancy of every link of a class."""
    links = link_table(topology)
    of_kind = np.array([label.kind == kind for label in links.labels], np.bool_)
    return replace(topology, links=_reclassed(links, of_kind[links.link_label], _quickened))


def _reclassed(
    links: LinkTable, which: NDArray[np.bool_], change: Callable[[LinkNumbers], LinkNumbers]
) -> LinkTable:
    """The links with other numbers for some of them; every class still comes once, in the order of first use."""
    known = [*links.classes, *(change(numbers) for numbers in links.classes)]
    link_class = np.where(which, links.link_class + len(links.classes), links.link_class)
    ids: dict[LinkNumbers, int] = {}
    used, first = np.unique(link_class, return_index=True)
    number = np.zeros(len(known), np.int64)
    for old in used[np.argsort(first)].tolist():
        number[old] = ids.setdefault(known[old], len(ids))
    return replace(links, link_class=number[link_class], classes=tuple(ids))


def _halved(numbers: LinkNumbers) -> LinkNumbers:
    return replace(numbers, beta_us_per_mb=numbers.beta_us_per_mb / 2)


def _quickened(numbers: LinkNumbers) -> LinkNumbers:
    return replace(numbers, alpha_us=numbers.alpha_us / 2, occupancy_us=numbers.occupancy_us / 2)


def _halved_port(port: Port) -> Port:
    return replace(port, beta_us_per_mb=port.beta_us_per_mb / 2)


def _name(topology: Topology, resource: int) -> str:
    if resource < len(topology.links):
        link = topology.links[resource]
        return f"link {link.src}->{link.dst}"
    return topology.ports[resource - len(topology.links)].name
