"""A sketch on a topology: what is wrong with it there, and the rules that synthesis obeys.

Findings: S201 the number of nodes, S202 a rank, S203 a link, S204 a link kind, S205 a switch, S206 a sender or a
node group, S207 a relay, S208 ranks that are cut off, S209 a symmetry, S210 a codec. What only some collectives could
do (chunks of a rank that cannot leave, ranks cut off) is a warning, for others can do without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taccl.errors import Diagnostic, InvalidInput
from taccl.profiles.plain_forms import did_you_mean
from taccl.profiles.topology import Topology
from taccl.profiles.yaml_reader import Findings
from taccl.sketches.asked_symmetry import generators_of
from taccl.sketches.chosen_links import chosen, in_words, neighbours
from taccl.sketches.places import note, shown
from taccl.sketches.restrictions import Restrictions, Rule
from taccl.sketches.sketch import NodeGroups, Sketch, SwitchSet


def check_sketch(sketch: Sketch, topology: Topology) -> list[Diagnostic]:
    """Everything that a sketch gets wrong about a topology, errors and warnings, in file order."""
    resolver = _Resolver(sketch, topology)
    resolver.restrictions()
    found = (*resolver.findings.errors, *resolver.findings.warnings)
    return sorted(found, key=lambda d: (d.line, d.column, d.code, d.message))


def restrict(sketch: Sketch, topology: Topology) -> Restrictions:
    """The rules of a sketch over the links of a topology, one for each line that asks for one.

    Raises InvalidInput with every error that `check_sketch` finds.
    """
    resolver = _Resolver(sketch, topology)
    restrictions = resolver.restrictions()
    if resolver.findings.errors:
        raise InvalidInput(resolver.findings.errors)
    return restrictions


class _Resolver:
    """Turns local ranks and link choices into link ids, and notes what does not exist."""

    def __init__(self, sketch: Sketch, topology: Topology) -> None:
        self.sketch = sketch
        self.topology = topology
        self.findings = Findings(sketch.file or sketch.name or "<sketch>", sketch.text)
        self.node_of = topology.node_of()
        self.local_of = [0] * topology.ranks
        for node in topology.nodes:
            for local, rank in enumerate(node):
                self.local_of[rank] = local
        self.largest_node = max(len(node) for node in topology.nodes)
        self.inter = frozenset(
            index
            for index, link in enumerate(topology.links)
            if self.node_of[link.src] != self.node_of[link.dst]
        )
        self.every = frozenset(range(len(topology.links)))

    def note(self, where: str, code: str, message: str, help: str = "") -> None:
        """Note an error at a "file:line:column"."""
        note(self.findings, where, code, message, help)

    def warn(self, where: str, code: str, message: str, help: str = "") -> None:
        """Note a warning."""
        note(self.findings, where, code, message, help, "warning")

    def restrictions(self) -> Restrictions:
        """Everything that the sketch asks; worthless when errors were noted."""
        sketch = self.sketch
        nodes = len(self.topology.nodes)
        if sketch.nodes is not None and sketch.nodes != nodes:
            message = f"the sketch is for {sketch.nodes} node(s), {self.topology.name} has {nodes}"
            self.note(
                sketch.places.get("nodes", ""), "S201", message, "take `nodes` out, or another topology"
            )
        rules = [*self.link_rules(), *self.switch_rules()]
        if nodes > 1:
            rules += self.node_rules()
        forbidden = frozenset[int]().union(*(rule.links for rule in rules if rule.kind == "forbid-links"))
        if not self.findings.errors:
            self.check_reach(forbidden)
        allowed = {
            (link.src, link.dst) for index, link in enumerate(self.topology.links) if index not in forbidden
        }
        self.check_codec()
        generators = generators_of(sketch.symmetry, self.topology, allowed, self.findings)
        options = {"seed": sketch.seed, "workers": sketch.workers}
        return Restrictions(
            rules=tuple(rule for rule in rules if rule.links or rule.routes),
            symmetry=generators,
            symmetry_where=sketch.symmetry.where,
            partition=sketch.partition,
            extra_hops=sketch.extra_hops,
            codec=sketch.codec,
            codec_where=sketch.places.get("codec", ""),
            codec_links=self.codec_links(),
            size_bytes=sketch.size_bytes,
            time_limit_s=sketch.time_limit_s,
            target_gap=sketch.target_gap,
            sketch_name=sketch.name,
            options={key: value for key, value in options.items() if value is not None},
        )

    # Links

    def check_codec(self) -> None:
        """Warn of a codec that the profile says nothing of: synthesis refuses it, but for XML, which has none."""
        name, known = self.sketch.codec, sorted({cost.codec for cost in self.topology.codecs})
        if name not in ("auto", "none", *known):
            self.warn(
                self.sketch.places.get("codec", ""), "S210",
                f"{self.topology.name} has no codec {name!r}; it has {', '.join(known) or 'none'}",
                did_you_mean(name, known) or f"taccl profile --codecs {name} measures it, if there is such a codec",
            )  # fmt: skip

    def codec_links(self) -> frozenset[int] | None:
        """The links over which messages may be coded."""
        choices = self.sketch.codec_links
        if not choices:
            return None
        return frozenset[int]().union(*(chosen(choice, self.topology, self.findings) for choice in choices))

    def link_rules(self) -> list[Rule]:
        """The rules of `use`, `avoid` and `caps`."""
        sketch = self.sketch
        rules = []
        if sketch.use:
            used = frozenset[int]().union(
                *(chosen(choice, self.topology, self.findings) for choice in sketch.use)
            )
            text = "only the links listed under `use` may be used"
            rules.append(Rule("forbid-links", sketch.use[0].where, text, links=self.every - used))
        for choice in sketch.avoid:
            links = chosen(choice, self.topology, self.findings)
            rules.append(
                Rule("forbid-links", choice.where, f"{in_words(choice)} may not be used", links=links)
            )
        for cap in sketch.caps:
            text = f"{in_words(cap.links)} carry at most {cap.limit} chunk(s) each"
            rules.append(
                Rule(
                    "cap",
                    cap.where,
                    text,
                    links=chosen(cap.links, self.topology, self.findings),
                    limit=cap.limit,
                )
            )
        return rules

    # Inside nodes

    def switch_rules(self) -> list[Rule]:
        """The policies of switches, and the spreading of load over a node's links."""
        intranode = self.sketch.intranode
        if intranode is None:
            return []
        if intranode.strategy in ("minmax", "maxmin"):
            text = "the load inside a node is spread over its links"
            return [Rule("uc-max", intranode.where, text, links=self.every - self.inter)]
        rules = []
        seen: dict[frozenset[int], SwitchSet] = {}
        for switch in intranode.switches if intranode.strategy == "switch" else ():
            links = self.switch_links(switch)
            for others, other in seen.items():
                if links & others and (links != others or switch.policy != other.policy):
                    self.note(
                        switch.policy_where or switch.where, "S105",
                        f"the policy of {'these' if links == others else 'some of these'} links is {other.policy} at "
                        f"{other.policy_where or other.where}, here {switch.policy}"
                        if switch.policy != other.policy
                        else f"some of these links are in the switch at {other.where}, which has others, too",
                        "let two switches have the same ranks, or none in common",
                    )  # fmt: skip
            if links in seen:  # parallel switches: the same ranks, said again
                continue
            seen[links] = switch
            if switch.policy == "free":
                continue
            few = "as few" if switch.policy == "uc-min" else "as many"
            what = switch.name or (shown(switch.ranks) if switch.ranks else "each node")
            text = f"{few} links as possible are used through the switch of {what} ({switch.policy})"
            rules.append(Rule(switch.policy, switch.policy_where or switch.where, text, links=links))
        return rules

    def switch_links(self, switch: SwitchSet) -> frozenset[int]:
        """The links between the ranks of a switch, in every node."""
        if switch.name:
            sets = [
                each.ranks
                for each in self.topology.switches
                if each.name == switch.name or each.name.endswith(f".{switch.name}")
            ]
            if not sets:
                known = sorted({each.name.rpartition(".")[2] for each in self.topology.switches})
                help = did_you_mean(switch.name, known) or (
                    f"switches are {', '.join(known)}" if known else "name the switch by its `ranks`"
                )
                message = f"{self.topology.name} has no switch {switch.name!r}"
                self.note(switch.where, "S205", message, help)
                return frozenset()
        elif switch.ranks:
            if not self.local_ranks_exist(switch.ranks, switch.where):
                return frozenset()
            sets = [
                tuple(node[local] for local in switch.ranks if local < len(node))
                for node in self.topology.nodes
            ]
        else:
            sets = list(self.topology.nodes)
        pairs = {(a, b) for members in sets for a in members for b in members if a != b}
        links = frozenset(
            index for index, link in enumerate(self.topology.links) if (link.src, link.dst) in pairs
        )
        missing = pairs - {(self.topology.links[i].src, self.topology.links[i].dst) for i in links}
        if missing:
            src, dst = min(missing)
            self.note(
                switch.where, "S205", f"these ranks are under no common switch: no link joins {src} to {dst}",
                f"{neighbours(self.topology, src)}; a switch joins each of its ranks to each",
            )  # fmt: skip
        return links

    def local_ranks_exist(self, ranks: Iterable[int], where: str) -> bool:
        """Whether some node has these local ranks; the first that none has is noted."""
        unknown = sorted(rank for rank in ranks if rank >= self.largest_node)
        if unknown:
            message = (
                f"local rank {unknown[0]} does not exist: a node of {self.topology.name} has ranks 0 to "
                f"{self.largest_node - 1}"
            )
            self.note(where, "S202", message)
        return not unknown

    # Between nodes

    def node_rules(self) -> list[Rule]:
        """The rules of `internode`: connection, relays, order, groups."""
        rules = []
        groups = self.sketch.node_groups
        joined = self.joined_nodes(groups) if groups is not None else None
        if groups is not None and joined is not None:
            apart = frozenset(index for index in self.inter if self.nodes_of(index) not in joined)
            text = f"nodes exchange within their groups and, between groups, by {groups.pattern}"
            rules.append(Rule("forbid-links", groups.where, text, links=apart, mirrored=True))
        internode = self.sketch.internode
        if internode is None:
            return rules
        connected = self.connected()
        allowed = frozenset(i for i in connected if joined is None or self.nodes_of(i) in joined)
        if internode.connection != "fully-connected":
            if internode.connection == "direct-map":
                text = "links between nodes run only from a rank to that of its number (direct-map)"
            else:
                lines = "; ".join(f"{line.sender} -> {shown(line.receivers)}" for line in internode.senders)
                text = f"links between nodes run only between the local ranks {lines}"
            apart = self.inter - connected
            rules.append(Rule("forbid-links", internode.where, text, links=apart, mirrored=True))
        senders = {self.local_of[self.topology.links[index].src] for index in allowed}
        relayed: set[int] = set()
        for relay in internode.relays:
            if not self.local_ranks_exist((relay.sender, *relay.sources), relay.where):
                continue
            if relay.sender not in senders:
                message = f"local rank {relay.sender} has no link to another node, so it relays nothing"
                self.warn(relay.where, "S207", message)
            relayed |= set(relay.sources)
            takes = set(relay.sources)
            routes = frozenset(
                (rank, index)
                for index in allowed
                if self.local_of[self.topology.links[index].src] == relay.sender
                for rank in self.topology.nodes[self.nodes_of(index)[0]]
                if self.local_of[rank] not in takes
            )
            text = (
                f"local rank {relay.sender} takes only the chunks of {shown(relay.sources)} out of its node"
            )
            rules.append(Rule("forbid-routes", relay.where, text, routes=routes, mirrored=True))
        if internode.relays and senders <= {relay.sender for relay in internode.relays}:
            left = sorted(set(range(self.largest_node)) - relayed)
            if left:
                self.warn(
                    internode.relays[0].where, "S207",
                    f"no sender takes the chunks of local rank {shown(left)} out of the node",
                    "add them to a line of `relays`, or give one sender no line: it then takes everybody's",
                )  # fmt: skip
        if internode.own_first:
            text = "a sender's own chunks leave the node before those that it relays"
            rules.append(Rule("own-first", internode.own_first_where, text, links=allowed))
        return rules

    def nodes_of(self, index: int) -> tuple[int, int]:
        """The nodes that a link joins."""
        link = self.topology.links[index]
        return self.node_of[link.src], self.node_of[link.dst]

    def connected(self) -> frozenset[int]:
        """The links between nodes that the connection leaves."""
        internode = self.sketch.internode
        assert internode is not None
        ends: dict[tuple[int, int], set[int]] = {}
        for index in self.inter:
            link = self.topology.links[index]
            ends.setdefault((self.local_of[link.src], self.local_of[link.dst]), set()).add(index)
        if internode.connection == "fully-connected":
            return frozenset[int]().union(*ends.values())
        if internode.connection == "direct-map":
            links = frozenset(index for (a, b), found in ends.items() if a == b for index in found)
            if not links:
                message = f"{self.topology.name} links no rank to that of its own number in another node"
                self.note(internode.where, "S206", message, "list the senders and their receivers")
            return links
        allowed: set[int] = set()
        for line in internode.senders:
            if not self.local_ranks_exist((line.sender, *line.receivers), line.where):
                continue
            for receiver in line.receivers:
                found = ends.get((line.sender, receiver), set())
                if not found:
                    linked = sorted(b for a, b in ends if a == line.sender)
                    message = f"local rank {line.sender} has no link to local rank {receiver} of another node"
                    self.note(
                        line.where, "S206", message,
                        f"rank {line.sender} is linked to {shown(linked)} there" if linked
                        else f"senders can be {shown(sorted({a for a, _ in ends}))}",
                    )  # fmt: skip
                allowed |= found
        return frozenset(allowed)

    def joined_nodes(self, groups: NodeGroups) -> set[tuple[int, int]] | None:
        """The pairs of nodes that may exchange; None after noting what is wrong."""
        nodes = len(self.topology.nodes)
        if groups.groups:
            members: Sequence[tuple[int, ...]] = groups.groups
            listed = sorted(node for group in members for node in group)
            if listed != list(range(nodes)):
                wrong = [node for node in listed if node >= nodes]
                absent = sorted(set(range(nodes)) - set(listed))
                message = (
                    f"node {wrong[0]} does not exist: {self.topology.name} has {nodes} nodes"
                    if wrong
                    else f"node {shown(absent)} is in no group"
                )
                self.note(groups.where, "S206", message, "list every node once")
                return None
        else:
            if nodes % groups.size:
                message = f"{nodes} nodes do not make groups of {groups.size}"
                self.note(groups.where, "S206", message, "take a divisor, or list the nodes of each group")
                return None
            members = [tuple(range(n, n + groups.size)) for n in range(0, nodes, groups.size)]
        joined = {(a, b) for group in members for a in group for b in group if a != b}
        places = range(1) if groups.pattern == "relay" else range(len(members[0]))
        for k in places:
            joined |= {(a[k], b[k]) for a in members for b in members if a is not b}
        return joined

    # The whole

    def check_reach(self, forbidden: frozenset[int]) -> None:
        """Warn of ranks that the rules cut off from others, where the topology does not."""
        where = self.sketch.internode.where if self.sketch.internode is not None else ""
        where = where or next((choice.where for choice in (*self.sketch.use, *self.sketch.avoid)), "")
        for backwards in (False, True):
            cut = self.reached(self.every, backwards) - self.reached(self.every - forbidden, backwards)
            if cut:
                ranks = shown(sorted(cut))
                what = (
                    f"rank 0 is out of reach of rank {ranks}"
                    if backwards
                    else f"rank {ranks} is out of reach of rank 0"
                )
                help = (
                    "collectives in which every rank hears of every other have no algorithm under this sketch"
                )
                self.warn(where, "S208", f"{what} over the links that the sketch leaves", help)

    def reached(self, links: frozenset[int], backwards: bool) -> set[int]:
        """The ranks that rank 0 reaches (backwards: that reach it) over some links."""
        out: dict[int, list[int]] = {}
        for index in links:
            link = self.topology.links[index]
            src, dst = (link.dst, link.src) if backwards else (link.src, link.dst)
            out.setdefault(src, []).append(dst)
        seen, queue = {0}, [0]
        while queue:
            fresh = set(out.get(queue.pop(), ())) - seen
            seen |= fresh
            queue.extend(fresh)
        return seen
