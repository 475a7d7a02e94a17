"""CP-SAT: which messages of a schedule are coded, and when everything happens, at fixed routes.

Every message is an interval on its link and ports whose length depends on whether it is coded; coding and decoding
are intervals on the codec engine of their rank, coding only where no frame is at hand, decoding only where values are
needed; reductions are intervals on the rank's adder. Minimised: the end of the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.coding.clock import MESSAGE, Activity, CodecPrices
from taccl.synth.coding.flow import Flow, passed_on
from taccl.synth.cost import costs
from taccl.synth.models.cp_sat import cp_model
from taccl.synth.models.solver import Strategy, solve

UNITS = 1 << 20  # of the best time so far; durations are rounded up to whole ones


@dataclass(frozen=True, slots=True)
class Decision:
    """Messages to be coded, and of each message its place among those that compete."""

    coded: tuple[int, ...]
    order: tuple[int, ...]


def decide(
    algorithm: Algorithm,
    topology: Topology,
    found: Flow,
    prices: CodecPrices,
    allowed: frozenset[int],
    known: Sequence[Activity],
    known_coded: Sequence[int],
    strategies: Sequence[Strategy],
    lossless: bool,
    should_stop: Callable[[], bool] | None = None,
) -> Decision | None:
    """A decision that is no worse than the known one by the model's clock; None when none was found in time.

    allowed: messages that may be coded if nothing makes them.
    """
    best_fs = max(a.end_fs for a in known)
    plain, framed = costs(topology, algorithm.chunk_bytes), prices.framed
    lengths = [
        prices.encode_fs,
        prices.decode_fs,
        *plain.alpha_fs,
        *plain.chunk_fs,
        *framed.chunk_fs,
        best_fs,
    ]
    unit = max(gcd(*lengths), best_fs // UNITS, 1)
    horizon = best_fs // unit + 2 * len(known) + 2  # what rounding up may add

    def units(fs: int) -> int:
        return -(-fs // unit)

    model = cp_model.CpModel()
    messages = algorithm.messages
    coded = [model.new_bool_var(f"coded[{i}]") for i in range(len(messages))]
    start = [model.new_int_var(0, horizon, f"start[{i}]") for i in range(len(messages))]
    time = model.new_int_var(0, horizon, "time")
    rounded = [
        model.new_bool_var(f"rounded[{i}]") for i in range(len(messages))
    ]  # its values have been coded
    on: dict[tuple[str, int], list[cp_model.IntervalVar]] = {}

    def interval(
        key: tuple[str, int],
        begin: cp_model.LinearExprT,
        length: cp_model.LinearExprT,
        present: cp_model.IntVar | None,
    ) -> None:
        end = model.new_int_var(0, 2 * horizon, "end")
        if present is None:
            on.setdefault(key, []).append(model.new_interval_var(begin, length, end, "held"))
        else:
            on.setdefault(key, []).append(
                model.new_optional_interval_var(begin, length, end, present, "held")
            )

    frames: list[cp_model.LinearExprT] = []  # of each message when its data, or its frames, are there
    values: list[cp_model.LinearExprT] = []  # when its values are
    decodes: list[cp_model.IntVar] = []
    for i, m in enumerate(messages):
        count = len(m.chunks)
        if i not in allowed:
            model.add(coded[i] == 0)
        for (resource, each), (_, short) in zip(plain.holds[m.link], framed.holds[m.link], strict=True):
            raw, less = units(plain.hold(m.link, each, count)), units(framed.hold(m.link, short, count))
            interval(("link", resource), start[i], raw + (less - raw) * coded[i], None)
        raw, less = units(plain.transit(m.link, count)), units(framed.transit(m.link, count))
        arrival: cp_model.LinearExprT = start[i] + raw + (less - raw) * coded[i]
        frames.append(arrival)
        there = model.new_int_var(0, horizon, f"values[{i}]")
        model.add(there >= arrival)
        took = units(count * prices.decode_fs)
        begin = model.new_int_var(0, horizon, f"decode[{i}]")
        decodes.append(coded[i] if found.keeps[i] else model.new_bool_var(f"decodes[{i}]"))
        interval(("codec", m.dst), begin, took, decodes[i])
        model.add(begin >= arrival).only_enforce_if(decodes[i])
        model.add(there >= begin + took).only_enforce_if(decodes[i])
        if m.op == "reduce" and plain.reduce(count):
            took = units(plain.reduce(count))
            begin = model.new_int_var(0, horizon, f"reduce[{i}]")
            interval(("adder", m.dst), begin, took, None)
            model.add(begin >= there)
            values.append(begin + took)
        else:
            values.append(there)
        frames[i] = values[i] if m.op == "reduce" else arrival
        model.add(time >= values[i])
    encodings: dict[tuple[int, int, tuple[int, ...]], tuple[cp_model.IntVar, cp_model.IntVar]] = {}
    owned: dict[tuple[int, int, tuple[int, ...]], cp_model.LinearExprT] = {}
    took = units(prices.encode_fs)
    combining = algorithm.collective.combining
    for i, m in enumerate(messages):
        for earlier in found.follows[i]:
            model.add(values[i] >= start[earlier])
        for c, supply in zip(m.chunks, found.supplies[i], strict=True):
            passed = passed_on(algorithm, supply)
            key = (m.src, c, supply)
            if key not in encodings:
                present = model.new_bool_var(f"encodes[{i},{c}]")
                begin = model.new_int_var(0, horizon, f"encode[{i},{c}]")
                encodings[key] = (present, begin)
                interval(("codec", m.src), begin, took, present)
                for s in supply:
                    model.add(begin >= values[s]).only_enforce_if(present)
                if combining and not lossless and found.complete[i]:
                    # The owner of a result decodes its own frame, so that all ranks end with the same values.
                    own = model.new_int_var(0, horizon, f"own[{i},{c}]")
                    owned[key] = own + units(prices.decode_fs)
                    interval(("codec", m.src), own, units(prices.decode_fs), present)
                    model.add(own >= begin + took).only_enforce_if(present)
                    model.add(time >= owned[key]).only_enforce_if(present)
            present, begin = encodings[key]
            if key in owned:
                model.add(start[i] >= owned[key]).only_enforce_if([present, coded[i].Not()])
            model.add(start[i] >= begin + took).only_enforce_if([present, coded[i]])
            if passed is None:
                model.add_implication(coded[i], present)
                for s in supply:
                    model.add(start[i] >= values[s])
                    model.add_implication(coded[s], decodes[s])
                    if not lossless and not found.complete[i]:
                        model.add_implication(coded[i], rounded[s].Not())
                continue
            model.add_bool_or([present, coded[i].Not(), coded[passed]])
            model.add(start[i] >= frames[passed])
            model.add(start[i] >= values[passed]).only_enforce_if(coded[i].Not())
            model.add_bool_or([decodes[passed], coded[passed].Not(), coded[i]])
            model.add_implication(present, coded[passed].Not())
            if not lossless:
                again = [] if combining else [rounded[passed].Not()]
                model.add_bool_or([coded[i].Not(), coded[passed], *again])
        if not lossless:
            model.add_implication(coded[i], rounded[i])
            for s in {s for supply in found.supplies[i] for s in supply}:
                model.add_implication(rounded[s], rounded[i])
    for intervals in on.values():
        if len(intervals) > 1:
            model.add_no_overlap(intervals)
    model.minimize(time)
    chosen = set(known_coded)
    for i in range(len(messages)):
        model.add_hint(coded[i], i in chosen)
    for a in known:
        if a.kind == MESSAGE:
            model.add_hint(start[a.message], min(horizon, units(a.start_fs)))
    outcome = solve(model, strategies, None, should_stop)
    if outcome.objective is None:
        return None
    starts = [outcome.value(variable) for variable in start]
    turn = sorted(range(len(messages)), key=lambda i: (starts[i], messages[i].start_fs, i))
    order = [0] * len(messages)
    for place, i in enumerate(turn):
        order[i] = place
    return Decision(tuple(i for i, var in enumerate(coded) if outcome.value(var)), tuple(order))
