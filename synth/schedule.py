"""From an ordered list of transfers to exact times: the list scheduler that every engine shares.

A transfer is a message without a clock. The order of the list is the order in which transfers take links and
ports; data dependencies follow from it too: a transfer of chunk c out of rank v waits for every earlier
transfer of c into v.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks to be sent as one message over a link."""

    link: int
    chunks: tuple[int, ...]
    op: str = "copy"  # "copy" | "reduce", as in Message
