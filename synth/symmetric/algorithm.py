"""The answer of synthesis on the quotient: messages of representatives, and the group that makes all others of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from taccl.profiles.link_table import LinkTable, link_table
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.collective import build
from taccl.synth.message_table import MessageTable, messages_of
from taccl.synth.symmetric.expand import batches, expanded, link_lookup, sorted_by_start
from taccl.synth.symmetric.group import Group


@dataclass(frozen=True, slots=True, eq=False)
class SymmetricAlgorithm:
    """A schedule: the image of every message under every element of the group is sent too, at the same times.

    Chunks are numbered as `collective.build` numbers them: allgather, reducescatter, allreduce r*k+j for the block of
    rank r; alltoall (s*n+d)*k+j.
    """

    name: str
    collective: str  # one of collective.NAMES
    ranks: int
    partition: int
    size_bytes: int
    topology_name: str
    group: Group
    messages: MessageTable  # by (start, link, chunks)
    time_fs: int  # completion of the last arrival or reduction
    certificate: Certificate
    engine: str
    root: int = 0  # of rooted collectives, for which the group is trivial
    provenance: dict[str, object] = field(default_factory=dict)

    @property
    def message_count(self) -> int:
        """Messages of the whole schedule."""
        return self.group.order * len(self.messages)

    def batches(self, links: LinkTable, most: int = 1 << 20) -> Iterator[MessageTable]:
        """All messages, in batches of about `most` that hold all messages of the chunks in them."""
        lookup = link_lookup(links, self.ranks)
        return batches(self.messages, self.group, self.collective, self.ranks, self.partition, lookup, most)

    def to_algorithm(self, topology: Topology) -> Algorithm:
        """The schedule message by message; for up to a few hundred ranks. Raises ValueError for another topology."""
        if topology.ranks != self.ranks:
            raise ValueError(f"the algorithm is for {self.ranks} ranks, {topology.name} has {topology.ranks}")
        lookup = link_lookup(link_table(topology), self.ranks)
        elements = np.arange(self.group.order, dtype=np.int64)
        table = expanded(
            self.messages, self.group, elements, self.collective, self.ranks, self.partition, lookup
        )
        return Algorithm(
            name=self.name,
            collective=build(self.collective, self.ranks, self.partition, root=self.root),
            topology_name=self.topology_name,
            size_bytes=self.size_bytes,
            messages=messages_of(sorted_by_start(table)),
            time_fs=self.time_fs,
            certificate=self.certificate,
            engine=self.engine,
            provenance=self.provenance,
        )
