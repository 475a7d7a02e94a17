"""A commented sketch derived from a topology: a start for an author to change.

Every value is one that the topology gives a reason for, and the comment beside it is that reason. What gives none
is left open, for synthesis then chooses; `taccl.sketches.restrict` accepts the text on the same topology.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from taccl.profiles.profile_writer import scalar_text
from taccl.profiles.topology import Nic, Switch, Topology
from taccl.profiles.yaml_reader import shorten
from taccl.sketches.restrictions import Permutation
from taccl.sketches.schema import SCHEMA_NAME
from taccl.sketches.symmetry import closure, find_symmetry

# Each rank's data goes to each: routes may be shared, so a node's data can leave through few senders.
SPREADING = ("allgather", "reducescatter", "allreduce")
# Each rank has other data for each: whoever relays only adds a hop.
PERSONAL = ("alltoall", "alltoallv", "sendrecv", "gather", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
UNEVEN = ("alltoallv", "sendrecv", "custom")  # who has what for whom is not known here
WHOLE = ("broadcast", "reduce", "sendrecv")  # the size is that of one block
LONGEST_PERMUTATION = 64
LARGEST_PARTITION = 8


@dataclass(frozen=True, slots=True)
class _Between:
    """How nodes are suggested to exchange: the lines of `internode`, and the links that they leave."""

    lines: tuple[str, ...]
    allowed: frozenset[int]


def suggest_sketch(topology: Topology, collective: str = "allgather", size_bytes: int | None = None) -> str:
    """The YAML of a sketch for a collective; `size_bytes` as nccl-tests counts it.

    The same arguments give the same text.
    """
    name = f"{_printable(topology.name)}-{collective}".replace(":", "-")
    sized = "" if size_bytes is None else f" of {_size_text(size_bytes)}"
    nodes = len(topology.nodes)
    lines = [
        f"# Suggested for {collective}{sized} on {_printable(topology.name)}: "
        f"{topology.ranks} ranks on {nodes} node{'s' * (nodes > 1)}.",
        "# Change what you know better. What a sketch leaves out, synthesis chooses.",
        f"schema: {SCHEMA_NAME}",
        f"name: {scalar_text(name)}",
    ]
    latency_bound = None if size_bytes is None else _latency_bound(topology, collective, size_bytes)
    lines += _switch_lines(topology, latency_bound)
    between = _between_nodes(topology, collective)
    if between is not None:
        lines += between.lines
    lines += _symmetry_lines(topology, collective, between)
    if size_bytes is not None:
        lines += _size_lines(topology, collective, size_bytes, bool(latency_bound))
    lines.append("# More: use, avoid, caps, extra_hops, time_limit, target_gap (docs/sketches.md).")
    return "\n".join(lines) + "\n"


def _size_text(size_bytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"


def _block_bytes(topology: Topology, collective: str, size_bytes: int) -> Fraction:
    return Fraction(size_bytes, 1 if collective in WHOLE else topology.ranks)


def _transits(topology: Topology, bytes_: Fraction) -> list[Fraction]:
    """The time in us that so many bytes take over each link, without alpha."""
    slowest = [
        max([link.beta_us_per_mb, *(topology.ports[port].beta_us_per_mb for port in link.ports)])
        for link in topology.links
    ]
    return [beta * bytes_ / 10**6 for beta in slowest]


def _latency_bound(topology: Topology, collective: str, size_bytes: int) -> bool:
    """Whether being a message costs more than a block's bytes do, on most links."""
    transits = sorted(_transits(topology, _block_bytes(topology, collective, size_bytes)))
    alphas = sorted(link.alpha_us for link in topology.links)
    return bool(alphas) and transits[len(transits) // 2] <= alphas[len(alphas) // 2]


# Switches


def _switch_lines(topology: Topology, latency_bound: bool | None) -> list[str]:
    """`intranode`: the switches that every node has alike."""
    switches = _local_switches(topology)
    if not switches:
        return []
    policy, reason = {
        None: (
            "free",
            "uc-min: few connections for each rank, for large sizes; uc-max: many, for small ones",
        ),
        True: ("uc-max", "the size is small: of equally fast algorithms the one that sends straight"),
        False: ("uc-min", "the size is large: few connections for each rank, each kept busy"),
    }[latency_bound]
    lines = ["intranode:", "  switches:"]
    for ranks, switch in switches.items():
        name = switch.name.rpartition(".")[2]
        lines.append(f"    - {{ranks: {_ranges(ranks)}, policy: {policy}}}  # {_printable(name)}; {reason}")
    return lines


def _local_switches(topology: Topology) -> dict[tuple[int, ...], Switch]:
    """Switches by their local ranks: those that stand in every node and share no rank with another."""
    place = {
        rank: (node, local) for node, ranks in enumerate(topology.nodes) for local, rank in enumerate(ranks)
    }
    pairs = {(link.src, link.dst) for link in topology.links}
    at: dict[tuple[int, ...], dict[int, Switch]] = {}
    for switch in topology.switches:
        nodes = {place[rank][0] for rank in switch.ranks}
        joined = all((a, b) in pairs for a in switch.ranks for b in switch.ranks if a != b)
        if len(nodes) == 1 and len(switch.ranks) > 1 and joined:
            local = tuple(sorted(place[rank][1] for rank in switch.ranks))
            at.setdefault(local, {}).setdefault(nodes.pop(), switch)
    common = {local: found[0] for local, found in at.items() if len(found) == len(topology.nodes)}
    kept: dict[tuple[int, ...], Switch] = {}
    for local, switch in sorted(common.items()):
        if not any(set(local) & set(other) for other in kept):
            kept[local] = switch
    return kept


# Between nodes


def _between_nodes(topology: Topology, collective: str) -> _Between | None:
    node_of = topology.node_of()
    inter = {i for i, link in enumerate(topology.links) if node_of[link.src] != node_of[link.dst]}
    if not inter:
        return None
    local = {rank: i for node in topology.nodes for i, rank in enumerate(node)}
    ends: dict[tuple[int, int], set[int]] = {}
    for index in sorted(inter):
        link = topology.links[index]
        ends.setdefault((local[link.src], local[link.dst]), set()).add(index)
    joined = _joins(topology, node_of, inter)
    # Only what joins all the nodes that are joined at all can stand for the links that are left out.
    ends = {pair: found for pair, found in ends.items() if _joins(topology, node_of, found) == joined}
    near = _near(topology) if _connected_inside(topology, node_of) else None
    sizes = {len(node) for node in topology.nodes}
    alone = near is not None and all(len(ranks) == 1 for ranks in near)

    def allowed(pairs: Sequence[tuple[int, int]]) -> frozenset[int]:
        return frozenset(index for pair in pairs for index in ends.get(pair, ()))

    if collective in PERSONAL:
        reason = "every rank has other data for every rank: relays would only add hops"
        return _Between(_internode_lines("fully-connected", reason), frozenset(inter))
    if collective not in SPREADING or near is None or len(sizes) != 1:
        reason = "the topology gives no reason to keep links between nodes out"
        return _Between(_internode_lines("fully-connected", reason), frozenset(inter))
    size = sizes.pop()
    straight = [(i, i) for i in range(size)]
    if alone and all(pair in ends for pair in straight):
        reason = "each rank has a NIC of its own, so the nodes' data leave through all of them at once"
        return _Between(_internode_lines("direct-map", reason), allowed(straight))
    senders = [relay for relay in (_relay(topology, ranks, ends) for ranks in near) if relay is not None]
    if not alone and all(pair in ends for pair in straight) and not _filled_by_one(topology, senders, ends):
        reason = "one rank alone cannot fill the NIC that it shares, so each sends for itself"
        return _Between(_internode_lines("direct-map", reason), allowed(straight))
    if alone or len(senders) != len(near):
        reason = "which ranks are near which NIC gives no better rule"
        return _Between(_internode_lines("fully-connected", reason), frozenset(inter))
    connect = ", ".join(f"{sender}: [{receiver}]" for sender, receiver in senders)
    lines = [
        "internode:",
        "  # Of the ranks that share a NIC one sends and one receives; one is enough to fill it.",
        f"  connect: {{{connect}}}",
    ]
    if len(near) > 1 and sum(len(ranks) for ranks in near) == size:
        lines.append("  relays:  # each rank's chunks leave through the NIC that is near it")
        lines += [
            f"    {sender}: [{', '.join(map(str, ranks))}]"
            for (sender, _), ranks in zip(senders, near, strict=True)
        ]
    lines.append(
        "  own_first: true  # the sender has its own chunks at once; the others' are on their way to it"
    )
    return _Between(tuple(lines), allowed(senders))


def _joins(topology: Topology, node_of: Sequence[int], links: Iterable[int]) -> set[tuple[int, int]]:
    return {(node_of[topology.links[index].src], node_of[topology.links[index].dst]) for index in links}


def _connected_inside(topology: Topology, node_of: Sequence[int]) -> bool:
    """Whether in each node every rank reaches every other without leaving the node."""
    for turned in (False, True):
        out: dict[int, list[int]] = {}
        for link in topology.links:
            if node_of[link.src] == node_of[link.dst]:
                src, dst = (link.dst, link.src) if turned else (link.src, link.dst)
                out.setdefault(src, []).append(dst)
        for members in topology.nodes:
            seen, queue = {members[0]}, [members[0]]
            while queue:
                fresh = set(out.get(queue.pop(), ())) - seen
                seen |= fresh
                queue.extend(fresh)
            if len(seen) < len(members):
                return False
    return True


def _internode_lines(connect: str, reason: str) -> tuple[str, ...]:
    return ("internode:", f"  connect: {connect}  # {reason}")


def _near(topology: Topology) -> list[tuple[int, ...]] | None:
    """For each NIC of a node the local ranks near it; None when nodes differ or a rank has several NICs."""
    local = {rank: i for node in topology.nodes for i, rank in enumerate(node)}
    of_node: dict[int, list[tuple[int, ...]]] = {node: [] for node in range(len(topology.nodes))}
    for nic in topology.nics:
        of_node[nic.node].append(_own_ranks(topology, nic, local))
    first = sorted(of_node[0])
    ranks = [rank for near in first for rank in near]
    alike = all(sorted(found) == first for found in of_node.values())
    return first if first and all(first) and alike and len(set(ranks)) == len(ranks) else None


def _own_ranks(topology: Topology, nic: Nic, local: Mapping[int, int]) -> tuple[int, ...]:
    members = set(topology.nodes[nic.node])
    return tuple(sorted(local[rank] for rank in nic.ranks if rank in members))


def _relay(
    topology: Topology, ranks: Sequence[int], ends: Mapping[tuple[int, int], set[int]]
) -> tuple[int, int] | None:
    """The (sender, receiver) of a NIC: two ranks near it, joined inside the node by its fastest link."""
    rate: dict[tuple[int, int], Fraction] = {}
    for link, transit in zip(topology.links, _transits(topology, Fraction(10**6)), strict=True):
        pair = (link.src, link.dst)
        rate[pair] = min(rate.get(pair, transit), transit)
    node = topology.nodes[0]
    pairs = [(s, r) for s in ranks for r in ranks if s != r and (s, r) in ends]
    joined = [(rate[node[s], node[r]], s, r) for s, r in pairs if (node[s], node[r]) in rate]
    return min(joined)[1:] if joined else None


def _filled_by_one(
    topology: Topology, senders: Sequence[tuple[int, int]], ends: Mapping[tuple[int, int], set[int]]
) -> bool:
    """Whether on each sender's links nothing is slower than the NIC itself."""
    nic_ports = {port for nic in topology.nics for port in (nic.out_port, nic.in_port)}
    for index in sorted(index for pair in senders for index in ends[pair]):
        link = topology.links[index]
        nic = [topology.ports[port].beta_us_per_mb for port in link.ports if port in nic_ports]
        own = [topology.ports[port].beta_us_per_mb for port in link.ports if port not in nic_ports]
        if not nic or max([link.beta_us_per_mb, *own]) > max(nic):
            return False
    return True


# Symmetry


def _symmetry_lines(topology: Topology, collective: str, between: _Between | None) -> list[str]:
    if collective in ROOTED:
        return ["symmetry: none  # the root does what no other rank does"]
    if collective in UNEVEN:
        return ["symmetry: auto  # what the chunks leave of the topology's symmetry"]
    generators = find_symmetry(_marked(topology, between))
    if not generators:
        return ["symmetry: none  # no rank is like another: exchanging ranks would change links or ports"]
    order = len(closure(generators, topology.ranks))
    head = f"symmetry:  # found and checked: {order} images of each rank, so a model {order} times smaller"
    rows = [_offset(generator) for generator in generators]
    if all(row is not None for row in rows):
        return [head, *(f"  - [{a}, {b}]  # {_turn(topology, a, b)}" for a, b in filter(None, rows))]
    if topology.ranks > LONGEST_PERMUTATION:
        return [f"symmetry: auto  # {order} images of each rank, too long to be written out"]
    written = [f"    - [{', '.join(map(str, image))}]" for image in generators]
    return [head, "  permutations:  # the rank that stands for 0, for 1, and so on", *written]


def _marked(topology: Topology, between: _Between | None) -> Topology:
    """The topology with the links between nodes that are left out told apart, so that symmetry keeps them apart."""
    if between is None:
        return topology
    node_of = topology.node_of()
    slowest = max(link.beta_us_per_mb for link in topology.links)
    links = tuple(
        link
        if node_of[link.src] == node_of[link.dst] or index in between.allowed
        else replace(link, beta_us_per_mb=link.beta_us_per_mb + slowest)
        for index, link in enumerate(topology.links)
    )
    return replace(topology, links=links)


def _offset(image: Permutation) -> tuple[int, int | str] | None:
    """[offset, group] when the permutation turns consecutive groups of ranks round; group "all" is the cluster."""
    n = len(image)
    for group in (d for d in range(2, n + 1) if n % d == 0):
        offset = image[0]
        if 0 < offset < group and all(
            image[r] == (r % group + offset) % group + r // group * group for r in range(n)
        ):
            return offset, "all" if group == n else group
    return None


def _turn(topology: Topology, offset: int, group: int | str) -> str:
    size = len(topology.nodes[0])
    if group == "all" and len(topology.nodes) > 1 and offset % size == 0:
        step = offset // size
        return f"each node does as {'the next one' if step == 1 else f'the one {step} further'}"
    turn = "each rank does as " + ("the next one" if offset == 1 else f"the one {offset} further")
    if group == "all":
        return turn
    return f"{turn} in its {'node' if group == size else f'group of {group}'}"


# Size


def _size_lines(topology: Topology, collective: str, size_bytes: int, latency_bound: bool) -> list[str]:
    size = f"size: {_size_text(size_bytes)}  # as nccl-tests counts it"
    if latency_bound:
        return [size, "partition: 1  # a chunk costs less for its bytes than for being a message: do not cut"]
    transits = _transits(topology, _block_bytes(topology, collective, size_bytes))
    alpha = sorted(link.alpha_us for link in topology.links)[len(topology.links) // 2] if transits else 0
    partition = 1
    while partition < LARGEST_PARTITION and min(transits, default=0) >= 4 * alpha * partition * 2:
        partition *= 2
    return [
        size,
        f"# partition: {partition}  # chunks of a block; left out, synthesis tries several and pipelines the best",
    ]


def _ranges(ranks: Sequence[int]) -> str:
    """`0-7,12` for ascending ranks."""
    parts = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return parts[0] if len(parts) == 1 and "-" in parts[0] else f'"{",".join(parts)}"'


def _printable(text: str) -> str:
    """A name from a topology, safe in a name and in a comment."""
    return shorten("".join(char if char.isprintable() else "?" for char in text), 40)
