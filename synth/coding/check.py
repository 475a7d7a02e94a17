"""Whether a coding plan is what it says: allowed, of this time, and not better than its bound."""

from __future__ import annotations

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.coding.bound import coded_bound
from taccl.synth.coding.choose import chosen
from taccl.synth.cost import us

TOLERANCE = 1e-6


def check_plan(algorithm: Algorithm, topology: Topology) -> list[str]:
    """What is wrong with the plan of a right algorithm, one sentence a problem; empty without a plan.

    Checked: values are coded once by a lossy codec; the time is that of the schedule's order with coded messages and
    codec tasks; no schedule of the collective could be quicker by the bound. The uncoded time is another schedule's
    and cannot be checked here.
    """
    plan = algorithm.coding
    if plan is None:
        return []
    found = chosen(algorithm, topology, plan.cost, plan.messages)
    if found is None:
        return ["the plan codes messages of a schedule whose ranks hold several sums of a chunk"]
    problems = []
    refused = sorted(set(plan.messages) - set(found.coded))
    if refused:
        problems.append(
            f"the plan codes message {refused[0]} again: what it carries has been through {plan.cost.codec} before"
        )
    elif found.time_fs != plan.time_fs:
        problems.append(
            f"the plan says {us(plan.time_fs):g} us with {plan.cost.codec}, the schedule's order gives "
            f"{us(found.time_fs):g} us"
        )
    proved = us(coded_bound(topology, algorithm.collective, algorithm.size_bytes, plan.cost).time_fs)
    if plan.lower_bound_us > proved * (1 + TOLERANCE):
        problems.append(
            f"the plan says that nothing takes less than {plan.lower_bound_us:g} us with {plan.cost.codec}; only "
            f"{proved:g} us is proved"
        )
    return problems
