"""Where the messages of a measurement are copied by devices, from one's memory to another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The longest message that is tried between them. A device may move 1 MB in less than a microsecond, and what a message
# costs beside its bytes is 10 us or more (0.3 ms where processes take turns on a device), so what is shorter than some
# ten MB says little of its bytes.
LARGEST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Devices:
    """Of ranks whose memory is on devices. names: of each rank its device, on its host. sharing: of each rank those
    whose memory its device reads and whose devices read its own, itself among them."""

    names: tuple[str, ...]
    sharing: tuple[tuple[int, ...], ...]

    def copy(self, flow: tuple[int, int]) -> bool:
        """Whether a device copies the messages from one rank to another."""
        return flow[1] in self.sharing[flow[0]]

    def copy_all(self, ranks: Sequence[int]) -> bool:
        """Whether devices copy all messages among several ranks."""
        return len(ranks) > 1 and all(set(ranks) <= set(self.sharing[rank]) for rank in ranks)

    def shared(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Of the ranks of one host those that share a device, for each device: one rank or several."""
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self.names[rank], []).append(rank)
        return [tuple(group) for group in groups.values()]
