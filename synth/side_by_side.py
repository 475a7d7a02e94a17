"""Each group's own best schedule, all of them run at the same time on the links that they share.

What people run today, and a start for the search of one schedule for all groups: no answer is slower. A group is
looked at twice, on the links between its own ranks and on the whole machine with all others idle. Groups in equal
places are looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from taccl.profiles.topology import Topology
from taccl.sketches.symmetry import closure, find_symmetry
from taccl.synth.candidates import Candidate
from taccl.synth.collective import Collective
from taccl.synth.engines.groups import among_all, inside, merged
from taccl.synth.problem import link_images
from taccl.synth.schedule import Transfer, as_transfers
from taccl.synth.search import Search
from taccl.synth.seed_stages import MOST_MESSAGES

if TYPE_CHECKING:
    from taccl.synth.request import Request

    OwnSeeds = Callable[[Search, Request, list[int], float], dict[int, Candidate]]

ENGINE = "side-by-side"
# Of the limit, for all groups' own searches together.
SHARE = 0.3
# Places of groups that no symmetry joins, each with a search on the whole machine.
MOST_PLACES = 4


def side_by_side(search: Search, request: Request, ladder: list[int], own_seeds: OwnSeeds) -> None:
    """Offer the groups' own best schedules, merged, at every chunking that all of them have.

    own_seeds: what seeds find for another request at a chunking each, within a share of the search's limit.
    """
    if sum(len(chunk.destinations) for chunk in search.build(ladder[0]).chunks) > MOST_MESSAGES:
        return  # so many chunks that a look at each group takes longer than people wait
    within = _within(search, request, ladder, own_seeds)
    among = _among(search, request, ladder, own_seeds)
    choices = [within, among, [_quicker(a, b) for a, b in zip(within, among, strict=True)]]
    for found in choices:
        common = set.intersection(*(set(own) for own in found))
        for partition in sorted(common):
            p = search.problem(partition)
            own = [schedules[partition] for schedules in found]
            search.offer(ENGINE, p, merged([transfers for _, transfers in own]))


Own = dict[
    int, tuple[int, list[Transfer]]
]  # partition -> (time in fs, transfers in the numbers of the whole)


def _within(search: Search, request: Request, ladder: list[int], own_seeds: OwnSeeds) -> list[Own]:
    """Per group its best on the links between its ranks; a sketch's rules speak of the whole machine, none then."""
    if search.restrictions.rules:
        return [{} for _ in request.groups]
    one = search.build(1)
    parts = [inside(search.topology, one, number) for number in range(len(request.groups))]
    keys = [_numbers(part.topology) for part in parts]
    share = SHARE / 2 / len(set(keys))
    known: dict[object, dict[int, Candidate]] = {}
    for part, key in zip(parts, keys, strict=True):
        if key not in known:
            cut = part.collective.partition  # of a block, where the whole is cut into 1
            known[key] = {}
            if _connected(part.topology):
                alone = replace(
                    request, topology=part.topology, groups=(), root=part.collective.root,
                    restrictions=replace(search.restrictions, symmetry=None),
                )  # fmt: skip
                known[key] = own_seeds(search, alone, [k * cut for k in ladder], share)
    found = []
    for number, key in enumerate(keys):
        own: Own = {}
        for partition, candidate in known[key].items():
            whole, rest = divmod(partition, parts[number].collective.partition)
            if not rest:
                placed = inside(search.topology, search.build(whole), number)
                own[whole] = (candidate.time_fs, placed.outwards(_listed(candidate)))
        found.append(own)
    return found


def _among(search: Search, request: Request, ladder: list[int], own_seeds: OwnSeeds) -> list[Own]:
    """Per group its best with all other ranks idle and at its service."""
    n = search.topology.ranks
    if all(len(group) == n for group in request.groups):
        return [{} for _ in request.groups]
    turns = closure(find_symmetry(search.topology), n) if not search.restrictions.rules else ((*range(n),),)
    places: list[int] = []  # groups that are searched
    image: list[
        tuple[int, Sequence[int]] | None
    ] = []  # per group the one that is searched, and the turn from it
    for number, group in enumerate(request.groups):
        met: tuple[int, Sequence[int]] | None = next(
            (
                (first, turn)
                for first in places
                for turn in turns
                if tuple(turn[rank] for rank in request.groups[first]) == group
            ),
            None,
        )
        if met is None and len(places) < MOST_PLACES:
            places.append(number)
            met = (number, turns[0])
        image.append(met)
    known: dict[int, dict[int, Candidate]] = {}
    for number in places:
        size = len(request.groups[number])
        alone = replace(request, groups=(request.groups[number],))
        cut = _blocks(search.build(1), size)
        known[number] = own_seeds(search, alone, [k * cut for k in ladder], SHARE / 2 / len(places))
    found: list[Own] = []
    for number, met in enumerate(image):
        own: Own = {}
        for partition, candidate in known[met[0]].items() if met else ():
            assert met is not None
            whole, rest = divmod(partition, _blocks(search.build(1), len(request.groups[number])))
            links = link_images(search.topology, met[1])
            if not rest and links is not None:
                part = among_all(search.topology, search.build(whole), number)
                turned = [replace(t, link=links[t.link]) for t in _listed(candidate)]
                own[whole] = (candidate.time_fs, part.outwards(turned))
        found.append(own)
    return found


def _blocks(collective: Collective, size: int) -> int:
    """Into how many chunks a group of so many ranks cuts its blocks where the whole is cut into 1."""
    return 1 if collective.name in ("broadcast", "reduce") else collective.size_chunks // size


def _quicker(one: Own, other: Own) -> Own:
    """At each chunking the schedule that is the quicker alone."""
    found = dict(one)
    for partition, schedule in other.items():
        if partition not in found or schedule[0] < found[partition][0]:
            found[partition] = schedule
    return found


def _listed(candidate: Candidate) -> list[Transfer]:
    if any(not t.plain for t in candidate.transfers):
        return list(candidate.transfers)  # an exchange: what each half waits for is part of it
    return as_transfers(candidate.messages)


def _connected(topology: Topology) -> bool:
    """Whether every rank reaches every other."""
    for ends in ([(x.src, x.dst) for x in topology.links], [(x.dst, x.src) for x in topology.links]):
        seen, more = {0}, True
        while more:
            fresh = {b for a, b in ends if a in seen} - seen
            seen |= fresh
            more = bool(fresh)
        if len(seen) < topology.ranks:
            return False
    return True


def _numbers(topology: Topology) -> object:
    """All that decides a schedule's price, without names."""
    return (
        topology.nodes,
        tuple((x.src, x.dst, x.alpha_us, x.beta_us_per_mb, x.occupancy_us, x.ports) for x in topology.links),
        tuple(port.beta_us_per_mb for port in topology.ports),
    )
