"""What a message adds where all ranks send at once: ranks that share cores wait for each other.

Times of links are those of ranks that have a core to themselves. Where more ranks than cores take part, each message
takes some of what all share, and of two schedules that are about as quick the one of fewer messages is quicker.
"""

from __future__ import annotations

import numpy as np

from taccl.profiles.measure.boundary import Partition
from taccl.profiles.measure.probe import TINY_BYTES, Probe, Prober, posted_together, solo

_MESSAGES = 8  # of each rank that sends, posted together
_SWEEPS = 3
_DISTURBED = 1.15  # all at once take so many times what the slowest takes alone, or messages add nothing


def find_load(prober: Prober, nodes: Partition, repeats: int) -> float:
    """Us a message: how much longer half of the ranks take to send some messages to the other half at once than the
    slowest of them alone, divided by the number of all these messages; the median of three sweeps. 0 for less than four
    ranks, of which no two pairs can be at work."""
    order = [rank for node in nodes for rank in node]
    half = len(order) // 2
    flows = tuple(zip(order[:half], order[half : 2 * half], strict=True))
    if len(flows) < 2:
        return 0.0
    trial = posted_together(_MESSAGES, TINY_BYTES)
    found = []
    for _ in range(_SWEEPS):
        # The first repeat opens connections and touches pages.
        alone = max(
            float(np.median(prober.run(solo(*flow, [trial], repeats + 1))[0, 0, 1:])) for flow in flows
        )
        beside = prober.run(Probe(flows, ((trial,) * half,), repeats + 1))[0, :, 1:]
        together = float(np.median(beside.max(axis=0)))
        more = together - alone if together > _DISTURBED * alone else 0.0
        found.append(more / (_MESSAGES * half))
    return float(np.median(found))
