"""One-shot allreduces for messages so small that only the number of rounds counts.

Every message is the whole vector. Doubling: partners swap their partial sums in log2(n) rounds (the classic
recursive-doubling allreduce of MPICH). All pairs: everybody sends its own vector to everybody, one round.
Both send what a rank held BEFORE its partner's half arrived, hence the explicit predecessors.
"""

from __future__ import annotations

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.network import Inapplicable, Network
from taccl.synth.engines.recursive_doubling import cube
from taccl.synth.schedule import Transfer


def doubling(topology: Topology, collective: Collective) -> list[Transfer]:
    """Full-vector recursive doubling. Raises Inapplicable for other collectives or missing partners."""
    everything = _vector(collective)
    network = Network(topology)
    rank_at = cube(topology, network)
    n = topology.ranks
    power = 1 << (n.bit_length() - 1)
    out: list[Transfer] = []
    into: dict[int, list[int]] = {rank: [] for rank in range(n)}

    def exchange(pairs: list[tuple[int, int]], op: str) -> None:
        after = {rank: tuple(before) for rank, before in into.items()}
        for a, b in pairs:
            src, dst = rank_at[a], rank_at[b]
            into[dst].append(len(out))
            out.append(Transfer(network.link(src, dst, len(everything)), everything, op, after[src]))

    exchange([(p, p - power) for p in range(power, n)], "reduce")
    for i in range(power.bit_length() - 1):
        exchange([(p, p ^ (1 << i)) for p in range(power)], "reduce")
    exchange([(p - power, p) for p in range(power, n)], "copy")
    return out


def all_pairs(topology: Topology, collective: Collective) -> list[Transfer]:
    """Every rank sends its vector to every other. Raises Inapplicable when a link is missing."""
    everything = _vector(collective)
    network = Network(topology)
    n = topology.ranks
    return [
        Transfer(network.link(src, (src + turn) % n, len(everything)), everything, "reduce", ())
        for turn in range(1, n)
        for src in range(n)
    ]


def _vector(collective: Collective) -> tuple[int, ...]:
    if collective.name != "allreduce":
        raise Inapplicable(f"one-shot algorithms serve allreduce, not {collective.name}")
    return tuple(range(len(collective.chunks)))
