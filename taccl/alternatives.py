"""Other schedules of one search, each proven and priced, for `taccl choose` to time on the cluster itself.

A model prices links and ports; it does not know what several flows do to each other in a switch, nor how ranks share
cores. Schedules that it finds alike may differ by a quarter when they run, so where that matters the best few are made
and the cluster is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from taccl.synth.search import NEAR

if TYPE_CHECKING:
    from taccl.produce import Order, Product
    from taccl.synth.algorithm import Algorithm

MOST = 32  # that can be asked for
MOST_LOOKED = 32  # schedules that are lowered or passed over on the way


def alternatives(order: Order, best: Product, candidates: Iterable[Algorithm]) -> tuple[Product, ...]:
    """Up to `order.alternatives` products beside the best one, the quickest first by their simulated times.

    candidates: in the order in which they are tried. Left out are those whose program takes over NEAR times as long as
    the best one's, has no room within MSCCL's limits, or moves what another one moves in the same way.
    """
    from itertools import islice

    from taccl.produce import lowered

    if best.program is None:
        return ()
    limit_fs = NEAR * best.simulated_fs
    made: list[Product] = []
    sent = [_sent(best)]
    for candidate in islice(candidates, MOST_LOOKED):
        if len(made) == order.alternatives:
            break
        if candidate.time_fs > limit_fs:
            continue
        blank = replace(
            best, algorithm=candidate, program=None, simulated_fs=candidate.time_fs, warnings=(), coded=None
        )
        product = lowered(order, blank, iter(()))
        if product.program is None or product.simulated_fs > limit_fs or _sent(product) in sent:
            continue
        sent.append(_sent(product))
        made.append(product)
    return tuple(sorted(made, key=lambda product: product.simulated_fs))


def _sent(product: Product) -> list[tuple[int, int, int, str]]:
    """Which links carry messages when: the same at two chunkings where all chunks of a block travel together."""
    return sorted((m.start_fs, m.end_fs, m.link, m.op) for m in product.explicit().messages)


def path_of(path: str, number: int) -> str:
    """The file of an alternative beside that of the best: number 2 of `x/a.json` is `x/a.2.json`."""
    whole = PurePath(path)
    return str(whole.with_name(f"{whole.stem}.{number}{whole.suffix}"))
