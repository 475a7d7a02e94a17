"""What an emulated cluster is: nodes, ranks on each, the rate of every uplink, latency between nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Layout:
    """A star: every node hangs on one switch by an uplink that carries the same rate out and in.

    latency_us is one way between two nodes; it needs the user-space switch ("tap"). Rates alone are
    kernel queueing disciplines on veth links ("tbf"), which is faster and works without root.
    """

    nodes: int
    ranks_per_node: int
    rate_bits: tuple[int, ...]  # bit/s of each node's uplink
    latency_us: float = 0.0
    burst_bytes: int = 32_000  # of the token buckets: what passes at memory speed after a pause
    shaper: str = "tbf"  # "tbf" | "tap"

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 32 or not 1 <= self.ranks_per_node <= 16:
            raise ValueError("an emulated cluster has 1 to 32 nodes with 1 to 16 ranks each")
        if len(self.rate_bits) != self.nodes or min(self.rate_bits) < 100_000:
            raise ValueError("every node needs a rate of at least 100kbit")
        if self.shaper not in ("tbf", "tap"):
            raise ValueError("the shaper is tbf or tap")
        if self.shaper == "tbf" and self.latency_us:
            raise ValueError("this kernel's shapers know no latency: use the tap shaper")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def beta_us_per_mb(self, node: int) -> float:
        """The uplink's time for 10^6 bytes."""
        return 8e12 / self.rate_bits[node]

    def address(self, node: int) -> str:
        """The node's address; the launcher sits at .254."""
        return f"10.77.0.{node + 1}"


def layout(
    nodes: int,
    ranks_per_node: int,
    rate: str,
    slow: Mapping[int, str] | None = None,
    latency_us: float = 0.0,
    shaper: str = "",
) -> Layout:
    """A layout in words: rate "200mbit" for all, slow {3: "50mbit"} for single nodes."""
    rates = [bits(rate)] * nodes
    for node, word in (slow or {}).items():
        if not 0 <= node < nodes:
            raise ValueError(f"there is no node {node}")
        rates[node] = bits(word)
    return Layout(
        nodes,
        ranks_per_node,
        tuple(rates),
        latency_us,
        shaper=shaper or ("tap" if latency_us else "tbf"),
    )


def bits(word: str) -> int:
    """Bit/s of a rate as tc writes it: 50kbit, 200mbit, 1gbit."""
    found = _RATE.fullmatch(word.strip())
    if not found:
        raise ValueError(f"{word!r} is no rate; write 50mbit or 1gbit")
    return int(float(found[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[found[2].lower()])
