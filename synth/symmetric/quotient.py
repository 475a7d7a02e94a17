"""A topology up to symmetry: a group that moves every rank and every port, and the orbits of links and ports.

A port that an element keeps would have to carry two images of one message at one moment, so the group acts freely on
the ports in use too: with two GPUs to a NIC only every second rotation of a node counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.symmetric.group import (
    Group,
    Ints,
    smallest_in_orbit,
    trivial_group,
    with_generator,
)


@dataclass(frozen=True, slots=True, eq=False)
class Quotient:
    """A free group of automorphisms, orbits numbered from 0."""

    group: Group
    link_orbit: Ints  # per link
    port_orbit: Ints  # per port; ports that no link crosses keep a number of their own


def quotient(
    topology: Topology,
    links: LinkTable,
    generators: Iterable[Sequence[int]] | None = None,
    usable: Ints | None = None,
) -> Quotient:
    """The quotient by the largest group that is found among `generators`, by default the natural candidates.

    usable: one number a link; only links of equal number may be images of one another (a sketch's rules).
    Memory and time are linear in links and ports, times the number of candidates that survive a first look.
    """
    fabric = _Fabric(topology, links, usable)
    best = _grown(fabric, list(natural(topology) if generators is None else generators))
    group, port_images = best
    ports = len(topology.ports)
    port_orbit = _numbered(smallest_in_orbit(port_images, ports)) if ports else np.zeros(0, np.int64)
    return Quotient(group, _link_orbits(fabric, group), port_orbit)


def trivial_quotient(topology: Topology, links: LinkTable) -> Quotient:
    """No symmetry: every link and port is an orbit of its own."""
    return Quotient(
        trivial_group(topology.ranks),
        np.arange(len(links), dtype=np.int64),
        np.arange(len(topology.ports), dtype=np.int64),
    )


def image_links(links: LinkTable, group: Group, element: Ints | int, which: Ints) -> Ints:
    """Where group elements take links, elementwise; parallel links keep their order."""
    fabric = _Fabric(None, links, None)
    return fabric.find(
        group.image(element, links.src[which]), group.image(element, links.dst[which]), fabric.ordinal[which]
    )


class _Fabric:
    """Links in an order in which images are found by bisection."""

    def __init__(self, topology: Topology | None, links: LinkTable, usable: Ints | None) -> None:
        self.topology = topology
        self.links = links
        self.ranks = int(max(links.src.max(initial=-1), links.dst.max(initial=-1))) + 1
        pair = links.src * self.ranks + links.dst
        self.order = np.argsort(pair, kind="stable")
        self.sorted_pair = pair[self.order]
        first = np.searchsorted(self.sorted_pair, pair)
        self.ordinal = np.empty(len(links), np.int64)
        self.ordinal[self.order] = np.arange(len(links))
        self.ordinal -= first
        self.kind = (
            links.link_class if usable is None else links.link_class * (usable.max(initial=0) + 1) + usable
        )
        # The links of a few ranks decide most candidates.
        sample = np.unique(np.linspace(0, self.ranks - 1, 4).astype(np.int64))
        self.sample = np.flatnonzero(np.isin(links.src, sample))

    def find(self, src: Ints, dst: Ints, ordinal: Ints) -> Ints:
        """Index of the link of an ordinal between two ranks, -1 for none."""
        pair = src * self.ranks + dst
        place = np.searchsorted(self.sorted_pair, pair) + ordinal
        inside = place < len(self.order)
        place = np.where(inside, place, 0)
        found = self.order[place]
        return np.where(inside & (self.sorted_pair[place] == pair), found, -1)

    def images(self, p: Ints, which: Ints) -> Ints | None:
        """Images of links under a rank permutation; None when one has none of its kind."""
        links = self.links
        image = self.find(p[links.src[which]], p[links.dst[which]], self.ordinal[which])
        if (image < 0).any() or not np.array_equal(self.kind[image], self.kind[which]):
            return None
        return image

    def port_image(self, permutation: Sequence[int]) -> Ints | None:
        """The port permutation of an automorphism, None when the rank permutation is none."""
        p = np.asarray(permutation, np.int64)
        if self.images(p, self.sample) is None:
            return None
        image = self.images(p, np.arange(len(self.links)))
        if image is None:
            return None
        assert self.topology is not None
        count = len(self.topology.ports)
        of_port = np.arange(count, dtype=np.int64)
        here, there = self.links.ports.ravel(), self.links.ports[image].ravel()
        used = here >= 0
        if not np.array_equal(used, there >= 0):
            return None
        of_port[here[used]] = there[used]
        rates: dict[object, int] = {}
        rate = np.array(
            [rates.setdefault(port.beta_us_per_mb, len(rates)) for port in self.topology.ports], np.int64
        )
        consistent = np.array_equal(of_port[here[used]], there[used]) and np.array_equal(rate[of_port], rate)
        return of_port if consistent and len(np.unique(of_port)) == count else None


def _grown(fabric: _Fabric, candidates: list[Sequence[int]]) -> tuple[Group, list[Ints]]:
    """Generators are taken as they come, each if the group stays free on ranks and on ports."""
    assert fabric.topology is not None
    ranks = fabric.topology.ranks
    group, port_images = trivial_group(ranks), list[Ints]()
    used_ports = np.unique(fabric.links.ports[fabric.links.ports >= 0])
    for candidate in candidates:
        if group.order == ranks:
            break
        larger = with_generator(group, candidate)
        if larger is None:
            continue
        image = fabric.port_image(candidate)
        if image is None:
            continue
        if len(used_ports):
            orbit = smallest_in_orbit([*port_images, image], len(image))[used_ports]
            if (np.bincount(orbit)[orbit] != larger.order).any():
                continue
        group = larger
        port_images.append(image)
    return group, port_images


def natural(topology: Topology) -> Iterator[tuple[int, ...]]:
    """Rank permutations worth trying: rotations of one digit of the rank in mixed radix, then its reversals.

    That covers rotations of nodes, and within all nodes at once, translations of grids and XOR shifts.
    """
    n = topology.ranks
    digits = [
        (stride, width) for width in reversed(_divisors(n)) if width > 1 for stride in _divisors(n // width)
    ]
    for stride, width in digits:
        yield tuple(r + ((r // stride % width + 1) % width - r // stride % width) * stride for r in range(n))
    for stride, width in digits:
        if width > 2:
            yield tuple(r + (width - 1 - 2 * (r // stride % width)) * stride for r in range(n))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _link_orbits(fabric: _Fabric, group: Group) -> Ints:
    links = fabric.links
    apart = group.subtract(group.element[links.dst], group.element[links.src])
    ends = (group.orbit[links.src] * group.orbits + group.orbit[links.dst]) * group.order + apart
    return _numbered(ends * (int(fabric.ordinal.max(initial=0)) + 1) + fabric.ordinal)


def _numbered(labels: Ints) -> Ints:
    _, numbers = np.unique(labels, return_inverse=True)
    return numbers.astype(np.int64)
