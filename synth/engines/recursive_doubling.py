"""Recursive doubling and halving: log2(n) rounds between partners whose positions differ in one bit.

A chunk goes from its root to a target by correcting the differing bits of the position in one fixed order,
and all that goes to the same partner in a round is one message: allgather doubles its message every round,
broadcast and scatter are binomial trees, alltoall is the store-and-forward exchange on a hypercube, and
allreduce is recursive halving then doubling (Rabenseifner). When n is no power of two, the ranks beyond it
lean on a partner below, one round before and one after. Thakur, Rabenseifner, Gropp: Optimization of
Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

from collections.abc import Sequence

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.embedding import embed
from taccl.synth.engines.network import Inapplicable, Network, Want, both_ways
from taccl.synth.schedule import Transfer


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """Recursive doubling of any collective. Raises Inapplicable when partners cannot all have links."""
    return both_ways(topology, collective, _spread)


def cube(topology: Topology, network: Network) -> tuple[int, ...]:
    """The rank at each position of the hypercube; positions beyond the power of two lean on one below.

    Raises Inapplicable when no placing was found in which all partners are linked both ways.
    """
    n = topology.ranks
    power = 1 << (n.bit_length() - 1)
    pattern = [(p, p ^ bit) for bit in _bits(power) for p in range(power) if p < p ^ bit]
    pattern += [(p - power, p) for p in range(power, n)]
    order = [rank for node in topology.nodes for rank in node]
    positions = embed(pattern, order, network.linked)
    if positions is None:
        raise Inapplicable(
            f"no way was found to place the {n} ranks on a hypercube with links for all partners"
        )
    return positions


def _bits(power: int) -> list[int]:
    return [1 << i for i in range(power.bit_length() - 1)]


def _spread(topology: Topology, wants: Sequence[Want]) -> list[Transfer]:
    if not wants:
        return []
    network = Network(topology)
    rank_at = cube(topology, network)
    position_of = {rank: position for position, rank in enumerate(rank_at)}
    power = 1 << (topology.ranks.bit_length() - 1)
    bits = _bits(power)
    one_root = len({want.root for want in wants}) == 1
    if one_root or len(topology.nodes) > 1:
        # Far first: trees grow as they should, and the node boundary is crossed while messages are small.
        bits.reverse()
    rounds: list[dict[tuple[int, int], set[int]]] = [{} for _ in range(len(bits) + 2)]
    for want in wants:
        for target in want.targets:
            here, goal = position_of[want.root], position_of[target]
            last = goal
            if here >= power:
                rounds[0].setdefault((here, here - power), set()).add(want.chunk)
                here -= power
            goal -= power if goal >= power else 0
            for number, bit in enumerate(bits, 1):
                if (here ^ goal) & bit:
                    rounds[number].setdefault((here, here ^ bit), set()).add(want.chunk)
                    here ^= bit
            if last != goal:
                rounds[-1].setdefault((here, last), set()).add(want.chunk)
    return [
        Transfer(network.link(rank_at[src], rank_at[dst], len(chunks)), tuple(sorted(chunks)))
        for exchange in rounds
        for (src, dst), chunks in sorted(exchange.items())
    ]
