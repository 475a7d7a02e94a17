"""The `changes` of a profile: failed or slow links, another NIC on one node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from taccl.profiles.draft import Draft, rank_set
from taccl.profiles.forms import Values
from taccl.profiles.link_columns import LinkClass, LinkColumns, by_first_use
from taccl.profiles.link_table import Ints
from taccl.profiles.plain_forms import did_you_mean
from taccl.profiles.yaml_reader import shorten

_MAX_WORK = 100_000_000  # changes times links: each change looks at every link


def apply_changes(draft: Draft, values: Values) -> None:
    """Apply `changes` in order to the links and ports built so far."""
    changes: list[Values] = values.get("changes", [])
    if len(changes) * len(draft.links) > _MAX_WORK:
        message = (
            f"{len(changes)} changes of {len(draft.links)} links are too many; write the links one by one"
        )
        values.at("changes").error("P106", message)
        return
    for change in changes:
        subject = [key for key in ("from", "to", "nic", "port") if key in change.nodes]
        if subject not in (["from", "to"], ["nic"], ["port"]):
            change.node.error("P107", "a change is of links (`from` and `to`), of a `nic` or of a `port`")
        elif not change.broken and subject == ["from", "to"]:
            _change_links(draft, change)
        elif not change.broken:
            _change_ports(draft, change, subject[0])


def _change_ports(draft: Draft, change: Values, subject: str) -> None:
    extra = sorted(set(change.fields) - {subject, "beta"})
    if extra or "beta" not in change:
        change.node.error("P107", f"a change of a {subject} sets its `beta`" + (" alone" if extra else ""))
        return
    name: str = change[subject]
    if subject == "nic":
        found = draft.nic_ids.get(name)
        if found is None:
            if not draft.incomplete:
                known = list(draft.nic_ids)
                help = did_you_mean(name, known) or f"NICs: {', '.join(known[:8]) or 'none'}"
                change.at("nic").error("P104", f"there is no NIC {shorten(name)!r}", help)
            return
        ids = [draft.nics[found].out_port, draft.nics[found].in_port]
    else:
        port_id = draft.port(name, change.at("port"))
        ids = [port_id] if port_id is not None else []
    for port in ids:
        draft.ports[port] = replace(draft.ports[port], beta_us_per_mb=change["beta"])


def _change_links(draft: Draft, change: Values) -> None:
    limit = sum(len(node) for node in draft.nodes)
    froms, tos = (rank_set(change, key, limit, "the cluster") for key in ("from", "to"))
    link_class = draft.link_class(change)
    if froms is None or tos is None or ("class" in change and link_class is None):
        return
    settings = [key for key in ("class", "alpha", "beta", "occupancy") if key in change]
    remove: bool = change.get("remove", False)
    if remove == bool(settings):
        settable = "`class`, `alpha`, `beta` or `occupancy`"
        change.node.error("P107", f"a change of links removes them (`remove: true`) or sets their {settable}")
        return
    links = draft.links
    source, target = np.zeros((2, limit), np.bool_)
    source[list(froms)] = target[list(tos)] = True
    src, dst = links.src[: len(links)], links.dst[: len(links)]
    hit = source[src] & target[dst]
    if change.get("both_ways", False):
        hit |= source[dst] & target[src]
    which = np.flatnonzero(hit)
    if not len(which):
        if not draft.incomplete:
            change.node.error("P107", "there is no link between these ranks")
    elif remove:
        links.remove(which)
    elif (new := _new_classes(links, which, change, link_class)) is not None:
        links.reclass(which, new.__getitem__)


def _new_classes(
    links: LinkColumns, which: Ints, change: Values, link_class: LinkClass | None
) -> dict[LinkClass, LinkClass] | None:
    """What each class among the links becomes; None after an error was noted."""
    known = list(links.class_ids)
    new: dict[LinkClass, LinkClass] = {}
    for number in by_first_use(links.link_class[which], len(known)).tolist():
        changed = _changed(known[number], change, link_class)
        if changed is None:
            return None
        new[known[number]] = changed
    return new


def _changed(old: LinkClass, change: Values, link_class: LinkClass | None) -> LinkClass | None:
    link = link_class if link_class is not None else old
    alpha = change.get("alpha", link.alpha_us)
    whole = link.occupancy_us == link.alpha_us  # occupancy was all of alpha, and stays so
    occupancy = change.get("occupancy", alpha if whole else min(link.occupancy_us, alpha))
    if occupancy > alpha:
        change.node.error("P105", f"the occupancy ({occupancy} us) is above alpha ({alpha} us)")
        return None
    beta = change.get("beta", link.beta_us_per_mb)
    measured = link.measured if (alpha, beta) == (link.alpha_us, link.beta_us_per_mb) else None
    return replace(link, alpha_us=alpha, beta_us_per_mb=beta, occupancy_us=occupancy, measured=measured)
