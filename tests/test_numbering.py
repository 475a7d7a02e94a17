"""Chunks of a kind change places so that those that travel together are neighbours."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_algorithms import algorithms, timed

from taccl.profiles.load import load_topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import build
from taccl.synth.cost import costs
from taccl.synth.lower import lower_exact
from taccl.synth.numbering import neatly_numbered
from taccl.synth.schedule import Transfer, completion_fs, time_in_order


def scrambled(made: Algorithm, seed: int) -> Algorithm:
    """Chunks from the same ranks to the same ranks on each other's routes."""
    kinds: defaultdict[object, list[int]] = defaultdict(list)
    for number, chunk in enumerate(made.collective.chunks):
        ends = tuple(tuple(rank for rank, _ in places) for places in (chunk.sources, chunk.destinations))
        kinds[ends].append(number)
    new: dict[int, int] = {}
    for numbers in kinds.values():
        new.update(zip(numbers, random.Random(seed).sample(numbers, len(numbers)), strict=True))
    return replace(
        made,
        messages=tuple(replace(m, chunks=tuple(sorted(new[c] for c in m.chunks))) for m in made.messages),
    )


@settings(max_examples=60, deadline=None)
@given(algorithms(), st.integers(0, 99))
def test_the_schedule_stays_what_it_is(drawn: tuple[Algorithm, object], seed: int) -> None:
    made, topology = drawn
    other = scrambled(made, seed)
    found = neatly_numbered(other)
    assert check_algorithm(other, topology) == check_algorithm(found, topology) == []
    assert (found.time_fs, found.collective) == (made.time_fs, made.collective)
    for new, old in zip(found.messages, other.messages, strict=True):
        assert replace(new, chunks=()) == replace(old, chunks=()) and len(new.chunks) == len(old.chunks)
    assert neatly_numbered(found) is found


ENGINES = {"broadcast": "chain", "allgather": "ring", "alltoall": "ring"}


def together(name: str) -> tuple[Algorithm, object]:
    """Every second chunk of a block in one message, the others in another: by time, and by links where data come from
    one rank."""
    topology = load_topology("ring:4")
    collective = build(name, topology.ranks, 8)
    made = timed(topology, collective, ENGINES[name])
    gathered: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for message in made.messages:
        for chunk in message.chunks:
            gathered[message.link, message.op, chunk // 8, chunk % 2].append(chunk)
    listed = [Transfer(link, tuple(sorted(chunks)), op) for (link, op, _, _), chunks in gathered.items()]
    priced = costs(topology, made.chunk_bytes)
    messages = time_in_order(topology, collective, priced, listed)
    return replace(made, messages=messages, time_fs=completion_fs(priced, messages)), topology


def copied_chunks(made: Algorithm, topology: object) -> int:
    program = lower_exact(made, topology).program
    steps = (step for gpu in program.gpus for tb in gpu.threadblocks for step in tb.steps)
    return sum(step.count for step in steps if step.kind == "cpy")


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_programs_gather_and_spread_nothing_in_scratch(name: str) -> None:
    made, topology = together(name)
    assert check_algorithm(made, topology) == []
    found = neatly_numbered(made)
    neat = lower_exact(found, topology).program
    own = {"broadcast": 8, "allgather": 4 * 8, "alltoall": 4 * 8}[name]  # out of place, of input to output
    assert copied_chunks(found, topology) == own < copied_chunks(made, topology)
    if name != "alltoall":  # whose relays keep what they pass on there
        assert all(gpu.scratch_chunks == 0 for gpu in neat.gpus)
