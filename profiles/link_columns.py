"""The links of a profile while they are read: columns that grow, so that millions of links take no Python objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from taccl.profiles.link import Link, Measurement
from taccl.profiles.link_table import Ints, LinkLabel, LinkNumbers, LinkTable

# Up to so many links a topology holds a tuple of them: what looks at one link at a time is several times faster on
# it, and nobody waits for it to be made.
MANY_LINKS = 20_000


@dataclass(frozen=True, slots=True)
class LinkClass:
    """A link class as profiles name them."""

    alpha_us: Fraction
    beta_us_per_mb: Fraction
    occupancy_us: Fraction
    kind: str
    measured: Measurement | None


def _no_ints(*shape: int) -> Ints:
    return np.empty(shape, np.int64)


@dataclass(slots=True)
class LinkColumns:
    """Links in the order in which they are added. Rows from `length` on are room for more."""

    length: int = 0
    src: Ints = field(default_factory=lambda: _no_ints(0))
    dst: Ints = field(default_factory=lambda: _no_ints(0))
    ports: Ints = field(default_factory=lambda: _no_ints(0, 0))  # -1 fills up
    link_class: Ints = field(default_factory=lambda: _no_ints(0))
    class_ids: dict[LinkClass, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.length

    def reserve(self, links: int, width: int) -> None:
        """Make room for `links` links in all, of up to `width` ports."""
        room = max(links, len(self.src))
        width = max(width, self.ports.shape[1])
        if (room, width) == self.ports.shape:
            return
        ports = np.full((self.length, width), -1, np.int64)
        ports[:, : self.ports.shape[1]] = self.ports[: self.length]
        self.ports = _with_room(ports, room)
        self.src, self.dst, self.link_class = (
            _with_room(column[: self.length], room) for column in (self.src, self.dst, self.link_class)
        )

    def add(self, link_class: LinkClass, src: ArrayLike, dst: ArrayLike, ports: ArrayLike = ()) -> None:
        """Links from src[i] to dst[i], or from one rank or to one rank; ports[i] are what each crosses, out before
        in, or one row for all."""
        ends = np.broadcast_arrays(np.asarray(src, np.int64), np.asarray(dst, np.int64))
        crossed = np.asarray(ports, np.int64)
        first, last, width = self.length, self.length + ends[0].size, crossed.shape[-1]
        if first == last:
            return
        if last > len(self.src) or width > self.ports.shape[1]:
            self.reserve(max(last, 2 * first) if last > len(self.src) else last, width)
        self.src[first:last], self.dst[first:last] = ends
        self.ports[first:last, :width] = crossed
        self.ports[first:last, width:] = -1
        self.link_class[first:last] = self.class_ids.setdefault(link_class, len(self.class_ids))
        self.length = last

    def remove(self, which: Ints) -> None:
        """Take links out; the others keep their order."""
        kept = np.ones(self.length, np.bool_)
        kept[which] = False
        self.src, self.dst, self.link_class = (
            column[: self.length][kept] for column in (self.src, self.dst, self.link_class)
        )
        self.ports = self.ports[: self.length][kept]
        self.length = len(self.src)

    def reclass(self, which: Ints, changed: Callable[[LinkClass], LinkClass]) -> None:
        """Give links other classes: `changed` tells which for each class among them."""
        known = list(self.class_ids)
        numbers = np.arange(len(known))
        for old in np.unique(self.link_class[which]).tolist():
            numbers[old] = self.class_ids.setdefault(changed(known[old]), len(self.class_ids))
        self.link_class[which] = numbers[self.link_class[which]]

    def sequence(self) -> Sequence[Link]:
        """The links: few as a tuple, many as a table."""
        table = self._table()
        return table if self.length > MANY_LINKS else tuple(table)

    def _table(self) -> LinkTable:
        length = self.length
        known = tuple(self.class_ids)
        link_class = self.link_class[:length]
        used = [known[number] for number in by_first_use(link_class, len(known)).tolist()]
        numbers, classes = _renumbered(
            known, used, lambda c: LinkNumbers(c.alpha_us, c.beta_us_per_mb, c.occupancy_us)
        )
        names, labels = _renumbered(known, used, lambda c: LinkLabel(c.kind, c.measured))
        by_number = _mapped(numbers, link_class)
        # Most profiles have one name for each class: one column then says both.
        by_name = by_number if np.array_equal(names, numbers) else _mapped(names, link_class)
        return LinkTable(
            self.src[:length], self.dst[:length], self.ports[:length], by_number, classes, by_name, labels
        )


def crossing(*ports: Ints | int) -> Ints:
    """Rows of ports: each argument is the column of one, or one port in all rows."""
    rows: Ints = np.stack(np.broadcast_arrays(*(np.asarray(column, np.int64) for column in ports)), axis=-1)
    return rows


def by_first_use(numbers: Ints, count: int) -> Ints:
    """Which of 0..count-1 stand in a column, in the order in which they first do."""
    first = np.full(count, len(numbers), np.int64)
    step = 1 << 20
    for start in range(0, len(numbers), step):
        some = numbers[start : start + step]
        np.minimum.at(first, some, np.arange(start, start + len(some)))
    return np.argsort(first, kind="stable")[: int((first < len(numbers)).sum())]


_Part = TypeVar("_Part", bound=Hashable)


def _renumbered(
    known: Sequence[LinkClass], used: Sequence[LinkClass], part: Callable[[LinkClass], _Part]
) -> tuple[Ints, tuple[_Part, ...]]:
    """(per known class the number of its part, the parts in the order of use); -1 for parts that are not used."""
    numbers: dict[_Part, int] = {}
    for link_class in used:
        numbers.setdefault(part(link_class), len(numbers))
    return np.array([numbers.get(part(c), -1) for c in known], np.int64), tuple(numbers)


def _mapped(numbers: Ints, column: Ints) -> Ints:
    """numbers[column], and the column itself where nothing changes: it may be long."""
    return column if np.array_equal(numbers, np.arange(len(numbers))) else numbers[column]


def _with_room(column: Ints, room: int) -> Ints:
    wider = _no_ints(room, *column.shape[1:])
    wider[: len(column)] = column
    return wider
