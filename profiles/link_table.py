"""Links as columns, for machines with more links than Python objects are made for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link import Link, Measurement, fault_of

if TYPE_CHECKING:  # a topology may hold a table
    from taccl.profiles.topology import Topology

Ints = NDArray[np.int64]

_ROWS = 1 << 18  # looked at together, so that what a pass needs besides the table stays small


@dataclass(frozen=True, slots=True)
class LinkNumbers:
    """What links of one class have in common."""

    alpha_us: Fraction
    beta_us_per_mb: Fraction
    occupancy_us: Fraction


@dataclass(frozen=True, slots=True)
class LinkLabel:
    """What is said of links that no time depends on."""

    kind: str
    measured: Measurement | None


@dataclass(frozen=True, slots=True, eq=False)
class LinkTable(Sequence[Link]):
    """Row i describes link i of a topology: a sequence of links that makes a `Link` when one is asked for.

    Equal to a tuple of equal links. Reading it link by link is several times slower than reading a tuple; what has
    very many links to look at takes the columns.
    """

    src: Ints
    dst: Ints
    ports: Ints  # [links, most ports of a link]; -1 fills up
    link_class: Ints  # index into `classes`
    classes: tuple[LinkNumbers, ...]  # different ones, in the order in which links use them
    link_label: Ints  # index into `labels`
    labels: tuple[LinkLabel, ...]

    def __len__(self) -> int:
        return len(self.src)

    @overload
    def __getitem__(self, index: int) -> Link: ...
    @overload
    def __getitem__(self, index: slice) -> LinkTable: ...
    def __getitem__(self, index: int | slice) -> Link | LinkTable:
        if isinstance(index, slice):
            return self._rows(index)
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"there is no link {index} (links are 0..{len(self) - 1})")
        return next(iter(self._rows(slice(at, at + 1))))

    def __iter__(self) -> Iterator[Link]:
        classes, labels = self.classes, self.labels
        for rows in self._blocks():
            columns = (rows.src, rows.dst, rows.ports, rows.link_class, rows.link_label)
            for src, dst, ports, number, label in zip(*(c.tolist() for c in columns), strict=True):
                crossed = tuple(port for port in ports if port >= 0)
                c, said = classes[number], labels[label]
                yield Link(
                    src, dst, c.alpha_us, c.beta_us_per_mb, c.occupancy_us, crossed, said.kind, said.measured
                )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LinkTable):
            return self is other or self._same(other)
        if isinstance(other, tuple):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))  # that of the tuple of links that it is equal to

    def __repr__(self) -> str:
        return f"<LinkTable of {len(self)} links of {len(self.classes)} classes>"

    def turned(self) -> LinkTable:
        """Every link turned round; the ports that it crosses keep their order."""
        return replace(self, src=self.dst, dst=self.src)

    def check(self, ranks: int, ports: int) -> None:
        """Raise ValueError for the first link that breaks a rule in a topology of so many ranks and ports."""
        wrong = np.array(
            [
                c.beta_us_per_mb <= 0 or not 0 <= c.occupancy_us <= c.alpha_us  # so alpha is not below 0
                for c in self.classes
            ],
            np.bool_,
        )
        first = 0
        for rows in self._blocks():
            bad = wrong[rows.link_class] | (rows.src == rows.dst)
            for end in (rows.src, rows.dst):
                bad |= (end < 0) | (end >= ranks)
            crossed = rows.ports.T
            for place, column in enumerate(crossed):
                bad |= column >= ports
                for other in crossed[:place]:
                    bad |= (column == other) & (column >= 0)
            if bad.any():
                index = first + int(np.argmax(bad))
                link = self[index]
                raise ValueError(f"link {index} ({link.src}->{link.dst}): {fault_of(link, ranks, ports)}")
            first += len(rows)

    def _rows(self, which: slice) -> LinkTable:
        return replace(
            self,
            src=self.src[which],
            dst=self.dst[which],
            ports=self.ports[which],
            link_class=self.link_class[which],
            link_label=self.link_label[which],
        )

    def _blocks(self) -> Iterator[LinkTable]:
        return (self._rows(slice(first, first + _ROWS)) for first in range(0, len(self), _ROWS))

    def _same(self, other: LinkTable) -> bool:
        if len(self) != len(other):
            return False
        numbers, other_numbers = _common(self.classes, other.classes)
        labels, other_labels = _common(self.labels, other.labels)
        return all(
            np.array_equal(a.src, b.src)
            and np.array_equal(a.dst, b.dst)
            and np.array_equal(numbers[a.link_class], other_numbers[b.link_class])
            and np.array_equal(labels[a.link_label], other_labels[b.link_label])
            and _same_ports(a.ports, b.ports)
            for a, b in zip(self._blocks(), other._blocks(), strict=True)
        )


def _common(mine: Sequence[Hashable], others: Sequence[Hashable]) -> tuple[Ints, Ints]:
    """Numbers of the values of two lists, equal ones for equal values."""
    known: dict[Hashable, int] = {}
    a, b = ([known.setdefault(value, len(known)) for value in values] for values in (mine, others))
    return np.array(a, np.int64), np.array(b, np.int64)


def _same_ports(a: Ints, b: Ints) -> bool:
    narrow, wide = sorted((a, b), key=lambda ports: ports.shape[1])
    width = narrow.shape[1]
    return np.array_equal(narrow, wide[:, :width]) and bool((wide[:, width:] < 0).all())


def link_table(topology: Topology) -> LinkTable:
    """The links of a topology as columns; at once where it holds them so, else in one pass over them."""
    links = topology.links
    if isinstance(links, LinkTable):
        return links
    width = max((len(link.ports) for link in links), default=0)
    ports = np.full((len(links), width), -1, np.int64)
    classes: dict[LinkNumbers, int] = {}
    labels: dict[LinkLabel, int] = {}
    link_class, link_label = np.empty((2, len(links)), np.int64)
    src = np.fromiter((link.src for link in links), np.int64, len(links))
    dst = np.fromiter((link.dst for link in links), np.int64, len(links))
    for index, link in enumerate(links):
        ports[index, : len(link.ports)] = link.ports
        numbers = LinkNumbers(link.alpha_us, link.beta_us_per_mb, link.occupancy_us)
        link_class[index] = classes.setdefault(numbers, len(classes))
        label = LinkLabel(link.kind, link.measured)
        link_label[index] = labels.setdefault(label, len(labels))
    return LinkTable(src, dst, ports, link_class, tuple(classes), link_label, tuple(labels))
