"""What an author asks of synthesis, as read from a file and before any topology is known.

Ranks inside a node are LOCAL: 0 is the first rank of each node, whatever its number in the cluster. Links are
selected by ranks of the CLUSTER. `where` is "file:line:column" of the value in the file, "" when it was not
read from one; every rule that `taccl.sketches.restrict` derives carries it on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from taccl.sketches.restrictions import Permutation

STRATEGIES = ("none", "switch", "minmax", "maxmin")
POLICIES = ("uc-min", "uc-max", "free")
CONNECTIONS = ("direct-map", "fully-connected")
SCOPES = ("intra", "inter")  # links inside a node, links between nodes
PATTERNS = ("round-robin", "relay")


@dataclass(frozen=True, slots=True)
class SwitchSet:
    """GPUs of a node that a switch joins, and how many of the links between them to use.

    Given by local ranks, or by the name that a switch has in the topology ("nvswitch": in every node); with
    neither, all GPUs of a node are meant.
    """

    ranks: tuple[int, ...]  # local
    policy: str  # of POLICIES
    name: str = ""
    where: str = ""
    policy_where: str = ""  # "" = `where`


@dataclass(frozen=True, slots=True)
class Intranode:
    """What happens inside each node.

    strategy "none": nothing is asked; "switch": the policies of `switches`; "minmax" and "maxmin": spread the
    load over the node's links.
    """

    strategy: str = "none"  # of STRATEGIES
    switches: tuple[SwitchSet, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class Sender:
    """One line of an explicit connection: local rank `sender` of a node sends to `receivers` of other nodes."""

    sender: int
    receivers: tuple[int, ...]
    where: str = ""


@dataclass(frozen=True, slots=True)
class Relay:
    """The local ranks whose chunks `sender` takes to other nodes; other ranks' chunks leave elsewhere."""

    sender: int
    sources: tuple[int, ...]
    where: str = ""


@dataclass(frozen=True, slots=True)
class Internode:
    """Which links between nodes may be used, and by whom.

    connection "direct-map": local rank i to local rank i; "fully-connected": each to each; "explicit": as in
    `senders`. A sender without a relay line takes everybody's chunks.
    """

    connection: str = "fully-connected"  # of CONNECTIONS, or "explicit"
    senders: tuple[Sender, ...] = ()  # of "explicit"
    relays: tuple[Relay, ...] = ()
    own_first: bool = False  # a sender's own chunks leave before those that it relays
    where: str = ""  # of the connection
    own_first_where: str = ""


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """Groups of nodes: inside one every node sends to every other; between groups by `pattern`.

    "round-robin": the k-th node of a group exchanges with the k-th node of every other group;
    "relay": only the first node of each group exchanges with other groups, for all.
    """

    pattern: str  # of PATTERNS
    size: int = 0  # nodes of a group, in the order of their numbers; 0 when `groups` lists them
    groups: tuple[tuple[int, ...], ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """Links that meet all that is said: `pairs` or `sources` x `targets` (None: any), kind, scope.

    Ranks are those of the cluster. `both_ways` adds the links of the other direction.
    """

    pairs: tuple[tuple[int, int], ...] | None = None
    sources: tuple[int, ...] | None = None
    targets: tuple[int, ...] | None = None
    kind: str = ""  # link class of the topology, e.g. "nvlink"; "" = any
    scope: str = ""  # of SCOPES; "" = any
    both_ways: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class LinkCap:
    """At most `limit` chunks in total over each of some links."""

    links: LinkChoice
    limit: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class SymmetryOffset:
    """TACCL's [offset, group size]: rank r looks like (r % group + offset) % group + r // group * group."""

    offset: int
    group: int  # 0: all ranks of the cluster
    where: str = ""


@dataclass(frozen=True, slots=True)
class ExplicitPermutation:
    """A symmetry written out: `image[r]` is the rank that r looks like."""

    image: Permutation
    where: str = ""


@dataclass(frozen=True, slots=True)
class Symmetry:
    """kind "auto": find it; "none": use none; "listed": the group that offsets and permutations generate."""

    kind: str = "auto"
    offsets: tuple[SymmetryOffset, ...] = ()
    permutations: tuple[ExplicitPermutation, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A sketch. None (or the default) of a field leaves the choice to synthesis.

    `places` holds "file:line:column" of the plain values by their path in the file, e.g. "nodes" or
    "hyperparameters.seed"; what has a `where` of its own is not in it. `text` is the text of `file`,
    from which messages repeat the line.
    """

    name: str = ""
    description: str = ""
    nodes: int | None = None  # None: any number
    intranode: Intranode | None = None
    internode: Internode | None = None
    node_groups: NodeGroups | None = None
    use: tuple[LinkChoice, ...] = ()  # when given, links outside of all of them are not used
    avoid: tuple[LinkChoice, ...] = ()
    caps: tuple[LinkCap, ...] = ()
    symmetry: Symmetry = Symmetry()
    size_bytes: int | None = None  # as nccl-tests counts it
    partition: int | None = None  # chunks per natural block (TACCL: input_chunkup)
    extra_hops: int | None = None  # hops beyond a shortest path
    codec: str = "auto"  # "auto", "none" or the name of a codec
    codec_links: tuple[LinkChoice, ...] = ()  # when given, messages over other links are not coded
    time_limit_s: float | None = None
    target_gap: float | None = None  # 0.05 = stop within 5 % of the lower bound
    seed: int | None = None
    workers: int | None = None
    places: dict[str, str] = field(default_factory=dict)
    file: str = ""
    text: str = field(default="", repr=False, compare=False)
