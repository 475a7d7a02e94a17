"""Links as columns, for machines with more links than Python objects are made for."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.topology import Topology

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LinkNumbers:
    """What links of one class have in common."""

    alpha_us: Fraction
    beta_us_per_mb: Fraction
    occupancy_us: Fraction


@dataclass(frozen=True, slots=True, eq=False)
class LinkTable:
    """Row i describes link i of a topology."""

    src: Ints
    dst: Ints
    ports: Ints  # [links, most ports of a link]; -1 fills up
    link_class: Ints  # index into `classes`
    classes: tuple[LinkNumbers, ...]

    def __len__(self) -> int:
        return len(self.src)


def link_table(topology: Topology) -> LinkTable:
    """The links of a topology as columns; one pass over them."""
    links = topology.links
    width = max((len(link.ports) for link in links), default=0)
    ports = np.full((len(links), width), -1, np.int64)
    classes: dict[LinkNumbers, int] = {}
    link_class = np.empty(len(links), np.int64)
    src = np.fromiter((link.src for link in links), np.int64, len(links))
    dst = np.fromiter((link.dst for link in links), np.int64, len(links))
    for index, link in enumerate(links):
        ports[index, : len(link.ports)] = link.ports
        numbers = LinkNumbers(link.alpha_us, link.beta_us_per_mb, link.occupancy_us)
        link_class[index] = classes.setdefault(numbers, len(classes))
    return LinkTable(src, dst, ports, link_class, tuple(classes))
