"""What an emulated cluster is: nodes, ranks on each, the rate of every uplink, latency between nodes, racks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Layout:
    """A star: every node hangs on one switch by an uplink that carries the same rate out and in. Or a tree: every node
    hangs on the switch of its rack so, and every rack on one switch.

    latency_us is one way between two nodes; it needs the user-space switch ("tap"). Rates alone are
    kernel queueing disciplines on veth links ("tbf"), which is faster and works without root.
    """

    nodes: int
    ranks_per_node: int
    rate_bits: tuple[int, ...]  # bit/s of each node's uplink
    latency_us: float = 0.0
    burst_bytes: int = 32_000  # of the token buckets: what passes at memory speed after a pause
    shaper: str = "tbf"  # "tbf" | "tap"
    rack_of: tuple[int, ...] = ()  # of each node; none: a star
    trunk_bits: tuple[int, ...] = ()  # bit/s of each rack's trunk, out and in

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 32 or not 1 <= self.ranks_per_node <= 16:
            raise ValueError("an emulated cluster has 1 to 32 nodes with 1 to 16 ranks each")
        if len(self.rate_bits) != self.nodes or min(self.rate_bits) < 100_000:
            raise ValueError("every node needs a rate of at least 100kbit")
        if self.shaper not in ("tbf", "tap"):
            raise ValueError("the shaper is tbf or tap")
        if (self.rack_of or self.trunk_bits) and (
            len(self.rack_of) != self.nodes or set(self.rack_of) != set(range(len(self.trunk_bits)))
        ):
            raise ValueError("every node needs a rack, and every rack a trunk and a node")
        if self.trunk_bits and min(self.trunk_bits) < 100_000:
            raise ValueError("every trunk needs a rate of at least 100kbit")
        if self.shaper == "tbf" and self.latency_us:
            raise ValueError("this kernel's shapers know no latency: use the tap shaper")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def beta_us_per_mb(self, node: int) -> float:
        """The uplink's time for 10^6 bytes."""
        return 8e12 / self.rate_bits[node]

    def trunk_us_per_mb(self, node: int, other: int) -> float:
        """The time for 10^6 bytes of the narrower trunk between two nodes; 0 where there is none."""
        racks = {self.rack_of[node], self.rack_of[other]} if self.rack_of else set()
        return max(8e12 / self.trunk_bits[rack] for rack in racks) if len(racks) == 2 else 0.0

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
    rack_of: Sequence[int] = (),
    trunks: Sequence[str] = (),
) -> Layout:
    """A layout in words: rate "200mbit" for all, slow {3: "50mbit"} for single nodes; rack_of [0, 0, 1, 1] with
    trunks ["300mbit", "300mbit"]."""
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
        rack_of=tuple(rack_of),
        trunk_bits=tuple(bits(word) for word in trunks),
    )


def bits(word: str) -> int:
    """Bit/s of a rate as tc writes it: 50kbit, 200mbit, 1gbit."""
    found = _RATE.fullmatch(word.strip())
    if not found:
        raise ValueError(f"{word!r} is no rate; write 50mbit or 1gbit")
    return int(float(found[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[found[2].lower()])
