"""The coding plan of an algorithm in its native file; what the codec costs stands in the topology there."""

from __future__ import annotations

import json

from taccl.profiles.topology import Topology
from taccl.synth.coding.plan import CodingPlan
from taccl.synth.json_reader import Place
from taccl.synth.native_head import MAX_FS, plain_json
from taccl.synth.native_runs import read_runs, runs_text

KEYS = ("codec", "dtype", "time_fs", "lower_bound_us", "uncoded_time_us", "messages")


def coding_text(plan: CodingPlan) -> str:
    """The plan on one line."""
    values = (plan.cost.codec, plan.cost.dtype, plan.time_fs, plan.lower_bound_us, plan.uncoded_time_us)
    head = ", ".join(
        f"{json.dumps(key)}: {plain_json(value)}" for key, value in zip(KEYS, values, strict=False)
    )
    return f'{{{head}, "messages": {runs_text(plan.messages)}}}'


def read_coding(place: Place, topology: Topology, messages: int) -> CodingPlan:
    """The plan at a place, for an algorithm of so many messages. Raises InvalidInput."""
    place.only(*KEYS)
    codec, dtype = place.at("codec").text(), place.at("dtype").text()
    cost = next((cost for cost in topology.codecs if (cost.codec, cost.dtype) == (codec, dtype)), None)
    if cost is None:
        place.at("codec").fail(f"the topology says nothing of codec {codec!r} for {dtype!r}")
    return CodingPlan(
        cost,
        read_runs(place.at("messages"), messages),
        place.at("time_fs").integer(0, MAX_FS),
        place.at("lower_bound_us").not_negative(),
        place.at("uncoded_time_us").not_negative(),
    )
