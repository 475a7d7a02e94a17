"""Equal links share one class: the profile of a thousand links stays readable and its symmetry visible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from taccl.profiles.measure.fit import LinkFit

_GAP = 1.2  # neighbours in a sorted list that differ by more belong to different classes
_SPAN = 1.5  # a class never holds links that differ by more
_SMALL_US = 1.0  # latencies closer than this are equal whatever their ratio: it is less than their noise


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Links that cannot be told apart, and the numbers that all of them get."""

    name: str
    links: tuple[tuple[int, int], ...]
    fit: LinkFit


def classify(
    fits: Mapping[tuple[int, int], LinkFit], label: Mapping[tuple[int, int], str]
) -> list[LinkClass]:
    """Group the links of each label ("intra", "inter") by beta, then by alpha.

    Values are cut where neighbours differ by more than 20 % and by more than their 95 % intervals, and
    where a group would span more than 1.5x. The class gets the medians of its members.
    """
    classes = []
    for name in sorted(set(label.values())):
        links = sorted(link for link in fits if label[link] == name)
        groups = []
        for same_beta in _cut(links, {x: fits[x].beta_us_per_mb for x in links}, _beta_slack(links, fits)):
            alphas = {x: fits[x].alpha_us for x in same_beta}
            groups += _cut(same_beta, alphas, _alpha_slack(same_beta, fits))
        for index, group in enumerate(groups):
            members = tuple(sorted(group))
            suffix = str(index) if len(groups) > 1 else ""
            classes.append(LinkClass(name + suffix, members, pool([fits[x] for x in members])))
    return classes


def _alpha_slack(
    links: Sequence[tuple[int, int]], fits: Mapping[tuple[int, int], LinkFit]
) -> dict[tuple[int, int], float]:
    # Nor may one link whose latency was disturbed: at most half of it counts, for latencies vary more.
    return {x: max(_SMALL_US, min(fits[x].alpha_ci_us, fits[x].alpha_us / 2)) for x in links}


def _beta_slack(
    links: Sequence[tuple[int, int]], fits: Mapping[tuple[int, int], LinkFit]
) -> dict[tuple[int, int], float]:
    # A wide interval on one bad fit must not glue classes together: at most a third of the value counts.
    return {x: min(fits[x].beta_ci_us_per_mb, fits[x].beta_us_per_mb / 3) for x in links}


def _cut(
    links: Sequence[tuple[int, int]],
    value: Mapping[tuple[int, int], float],
    slack: Mapping[tuple[int, int], float],
) -> list[list[tuple[int, int]]]:
    """Cut the sorted links at gaps, then at the widest gap of every group that spans too much."""
    ordered = sorted(links, key=lambda link: (value[link], link))
    if not ordered:
        return []
    groups = [[ordered[0]]]
    for before, link in pairwise(ordered):
        gap = value[link] - value[before]
        if gap > max((_GAP - 1) * value[before], slack[before], slack[link]):
            groups.append([])
        groups[-1].append(link)
    return [part for group in groups for part in _halve(group, value, slack)]


def _halve(
    group: list[tuple[int, int]],
    value: Mapping[tuple[int, int], float],
    slack: Mapping[tuple[int, int], float],
) -> list[list[tuple[int, int]]]:
    low, high = value[group[0]], value[group[-1]]
    if high - low <= max((_SPAN - 1) * low, max(slack[x] for x in group)):
        return [group]
    ratios = [
        (math.log(max(value[b], 1e-9) / max(value[a], 1e-9)), -abs(2 * i - len(group)), i)
        for i, (a, b) in enumerate(pairwise(group), start=1)
    ]
    at = max(ratios)[2]
    return _halve(group[:at], value, slack) + _halve(group[at:], value, slack)


def pool(fits: Sequence[LinkFit]) -> LinkFit:
    """The numbers of links that count as equal: the medians of theirs."""
    shrink = math.sqrt(len(fits))
    alpha = median(fit.alpha_us for fit in fits)
    return LinkFit(
        alpha_us=alpha,
        beta_us_per_mb=median(fit.beta_us_per_mb for fit in fits),
        occupancy_us=min(alpha, median(fit.occupancy_us for fit in fits)),
        offset_us=median(fit.offset_us for fit in fits),
        samples=sum(fit.samples for fit in fits),
        residual=median(fit.residual for fit in fits),
        alpha_ci_us=median(fit.alpha_ci_us for fit in fits) / shrink,
        beta_ci_us_per_mb=median(fit.beta_ci_us_per_mb for fit in fits) / shrink,
    )
