"""One collective over many sizes: the programs worth having, and the sizes for which each is the quickest.

Every size gets a program of its own; then every program is priced at every size, because one made for 4 MB is often the
quickest at 1 MB too, and a search with a limit is not always lucky. What is never the quickest is dropped. Between two
sizes whose quickest programs differ, the size from which the second wins is found by bisection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from taccl.errors import Infeasible, UsageError
from taccl.produce import Order, Product, produce

if TYPE_CHECKING:
    from taccl.synth.program import Program
    from taccl.synth.request import Progress

MOST_SIZES = 64
# Two programs change over at a size that is known this exactly (relative).
EXACT = 0.01


@dataclass(frozen=True, slots=True)
class Point:
    """What the best program takes at one size, and what no algorithm can beat."""

    size_bytes: int
    time_fs: int
    lower_bound_us: float
    bound_by: str
    member: int  # index into Sweep.members


@dataclass(frozen=True, slots=True)
class Member:
    """A program that is the quickest somewhere, with the sizes where it is (both ends belong to it)."""

    product: Product
    made_for_bytes: int
    min_bytes: int
    max_bytes: int

    def program(self) -> Program:
        """The program with its range, so that a loader chooses it there."""
        assert self.product.program is not None
        return replace(self.product.program, min_bytes=self.min_bytes, max_bytes=self.max_bytes)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The programs by size, smallest first, and one point for each size that was asked for."""

    members: tuple[Member, ...]
    points: tuple[Point, ...]


def sizes_of(given: str) -> list[int]:
    """The sizes of `1KB:1GB` (every fourfold), `1KB:1GB:2` (every twofold), or `1KB,1MB,64MB`.

    Raises UsageError.
    """
    from taccl.profiles.quantity import quantity

    def size(text: str) -> int:
        try:
            found = quantity(text.strip(), "bytes")
        except ValueError as error:
            raise UsageError(f"--sweep: {error}") from error
        if found.denominator != 1 or not 1 <= found <= 2**50:
            raise UsageError(f"--sweep: expected a whole number of bytes from 1 to 2^50, found {text!r}")
        return int(found)

    if ":" not in given:
        sizes = sorted({size(text) for text in given.split(",")})
    else:
        parts = given.split(":")
        if len(parts) > 3:
            raise UsageError(
                "--sweep is FROM:TO or FROM:TO:FACTOR, e.g. 1KB:1GB:4, or sizes separated by commas"
            )
        low, high = size(parts[0]), size(parts[1])
        given_factor = parts[2] if len(parts) == 3 else "4"
        factor = int(given_factor) if re.fullmatch("[0-9]{1,19}", given_factor) else 0
        if factor < 2:
            raise UsageError(f"--sweep: the factor is a whole number from 2, found {given_factor[:40]!r}")
        if low > high:
            raise UsageError("--sweep: FROM is above TO")
        sizes = [low]
        while sizes[-1] * factor < high:
            sizes.append(sizes[-1] * factor)
        sizes += [high] if high > low else []
    if len(sizes) > MOST_SIZES:
        raise UsageError(f"--sweep: {len(sizes)} sizes; at most {MOST_SIZES} are synthesised in one run")
    return sizes


def sweep(
    order: Order,
    sizes: Sequence[int],
    on_size: Callable[[int], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Sweep:
    """Synthesise for every size (ascending) and keep what is the quickest somewhere.

    When should_stop turns true, the sizes so far are the sweep. Raises what `produce` raises, and Infeasible where a
    schedule has no program.
    """
    products: list[Product] = []
    for size in sizes:
        if on_size:
            on_size(size)
        product = produce(replace(order, size_bytes=size), on_progress, should_stop, (".xml",))
        if product.program is None:
            raise Infeasible(f"{product.no_program}; a sweep needs programs")
        products.append(product)
        if should_stop is not None and should_stop():
            break
    sizes = sizes[: len(products)]
    winners: list[int] = []
    for size in sizes:
        before = winners[-1] if winners else -1
        usable = [i for i in range(len(products)) if _may_run(products[i], size)]
        winners.append(min(usable, key=lambda i: (_judged_fs(products[i], size), i != before, i)))
    members: list[Member] = []
    points: list[Point] = []
    low = sizes[0]
    for place, (size, winner) in enumerate(zip(sizes, winners, strict=True)):
        certificate = products[place].algorithm.certificate
        time_fs = _time_fs(products[winner], size)
        points.append(Point(size, time_fs, certificate.lower_bound_us, certificate.bound_by, len(members)))
        following = winners[place + 1] if place + 1 < len(sizes) else -1
        if following != winner:
            high = (
                size
                if following < 0
                else _last(products[winner], products[following], size, sizes[place + 1])
            )
            members.append(Member(products[winner], sizes[winner], low, high))
            low = high + 1
    return Sweep(tuple(members), tuple(points))


def document(found: Sweep, paths: Sequence[str]) -> dict[str, Any]:
    """The JSON document of `taccl synth --sweep --json`. paths: of the members' files, empty for none."""
    from taccl.synth.cost import us
    from taccl.synth.gap import gap

    return {
        "schema": "taccl/sweep/v1",
        "algorithms": [
            {
                "min_bytes": member.min_bytes,
                "max_bytes": member.max_bytes,
                "made_for_bytes": member.made_for_bytes,
                "engine": member.product.algorithm.engine,
                "partition": member.product.explicit().collective.partition,
                "path": paths[number] if paths else None,
                "warnings": list(member.product.warnings),
            }
            for number, member in enumerate(found.members)
        ],
        "sizes": [
            {
                "size_bytes": point.size_bytes,
                "time_us": us(point.time_fs),
                "lower_bound_us": point.lower_bound_us,
                "bound_by": point.bound_by,
                "gap": gap(us(point.time_fs), point.lower_bound_us),
                "algorithm": point.member,
            }
            for point in found.points
        ],
    }


def _may_run(product: Product, size: int) -> bool:
    """Whether the program does not wait for ever at a size: messages must fit into FIFO slots (V303)."""
    assert product.program is not None
    return (
        product.program.max_bytes == 0
        or size <= product.program.max_bytes
        or size == product.algorithm.size_bytes
    )


def _time_fs(product: Product, size: int) -> int:
    from taccl.synth.simulate import simulate

    assert product.program is not None
    return simulate(product.program, product.topology, size, collective=product.explicit().collective).time_fs


def _judged_fs(product: Product, size: int) -> int:
    """What programs are compared by."""
    from taccl.synth.cost import judged_fs
    from taccl.synth.program import sent

    assert product.program is not None
    return judged_fs(product.topology, _time_fs(product, size), sent(product.program))


def _last(first: Product, second: Product, low: int, high: int) -> int:
    """The greatest size from `low` to below `high` at which the first program may run and is not slower."""
    while high - low > max(1, int(EXACT * low)):
        middle = (low + high) // 2
        if _may_run(first, middle) and _judged_fs(first, middle) <= _judged_fs(second, middle):
            low = middle
        else:
            high = middle
    return low
