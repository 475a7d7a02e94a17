"""The answer of synthesis at scale: messages of representative chunks, and the group that makes the others of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from taccl.synth.algorithm import Certificate
from taccl.synth.message_table import MessageTable
from taccl.synth.symmetric.group import Group


@dataclass(frozen=True, slots=True, eq=False)
class SymmetricAlgorithm:
    """A schedule: the image of every message under every element of the group is sent too, at the same times.

    Chunks are numbered as `collective.build` numbers them: allgather, reducescatter, allreduce r*k+j for the block of
    rank r; alltoall (s*n+d)*k+j. The images of the messages of one chunk are the messages of that chunk's images.
    """

    name: str
    collective: str  # one of collective.NAMES
    ranks: int
    partition: int
    size_bytes: int
    topology_name: str
    group: Group
    messages: MessageTable  # of representative chunks, by start
    time_fs: int
    certificate: Certificate
    engine: str
    root: int = 0
    provenance: dict[str, object] = field(default_factory=dict)

    @property
    def message_count(self) -> int:
        """How many messages are sent altogether."""
        return len(self.messages) * self.group.order
