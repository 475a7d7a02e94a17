"""Why a plan codes what it codes: kinds of links, what coding saves and costs there, and what turning it would do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.coding.choose import Choice, chosen
from taccl.synth.coding.clock import DECODE, ENCODE
from taccl.synth.cost import costs, us


@dataclass(frozen=True, slots=True)
class KindReason:
    """Messages over links of one speed, inside nodes or between them."""

    where: str
    messages: int
    coded: int
    wire_us: float  # of one chunk, alpha left out
    framed_us: float  # the same of its frame
    none_us: float  # the schedule's time if none of these messages were coded
    all_us: float  # if all were that may be


@dataclass(frozen=True, slots=True)
class CodingReasons:
    """The plan's side of an explanation; codec times are of one chunk."""

    time_us: float
    uncoded_us: float  # of the best schedule without a codec
    lower_bound_us: float
    encode_us: float
    decode_us: float
    busiest_rank: int  # whose codec engine works longest
    busiest_us: float
    kinds: tuple[KindReason, ...]


def reasons(algorithm: Algorithm, topology: Topology) -> CodingReasons | None:
    """What a plan does and why, None without one; a few clockings of the schedule."""
    plan = algorithm.coding
    if plan is None:
        return None
    choice = chosen(algorithm, topology, plan.cost, plan.messages)
    if choice is None:
        return None
    node_of = topology.node_of()
    plain, framed = costs(topology, algorithm.chunk_bytes), choice.prices.framed
    kinds: dict[tuple[bool, Fraction], list[int]] = {}
    for i, m in enumerate(algorithm.messages):
        link = topology.links[m.link]
        ports = (topology.ports[port].beta_us_per_mb for port in link.ports)
        slowest = max(link.beta_us_per_mb, *ports, Fraction(0))
        kinds.setdefault((node_of[m.src] != node_of[m.dst], slowest), []).append(i)
    coded = set(choice.coded)
    told = []
    for (between, beta), members in sorted(kinds.items(), reverse=True):
        example = algorithm.messages[members[0]].link
        told.append(
            KindReason(
                f"{'between nodes' if between else 'inside nodes'}, {float(beta):g} us/MB",
                len(members),
                len(coded & set(members)),
                us(plain.chunk_fs[example]),
                us(framed.chunk_fs[example]),
                _time(choice, topology, coded - set(members)),
                _time(choice, topology, coded | set(members)),
            )
        )
    busy: dict[int, int] = {}
    for activity in choice.activities:
        if activity.kind in (ENCODE, DECODE):
            busy[activity.rank] = busy.get(activity.rank, 0) + activity.end_fs - activity.start_fs
    busiest = max(sorted(busy), key=lambda rank: busy[rank], default=0)
    return CodingReasons(
        us(plan.time_fs), plan.uncoded_time_us, plan.lower_bound_us, us(choice.prices.encode_fs),
        us(choice.prices.decode_fs), busiest, us(busy.get(busiest, 0)), tuple(told),
    )  # fmt: skip


def _time(choice: Choice, topology: Topology, wished: Collection[int]) -> float:
    other = chosen(choice.algorithm, topology, choice.cost, wished)
    return us(other.time_fs) if other is not None else us(choice.time_fs)
