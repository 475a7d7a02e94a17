"""Timed algorithms for the tests of the native file and of the exports: baselines on small machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from hypothesis import strategies as st

from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Measurement, Nic, Port, Switch, Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.coding.choose import chosen
from taccl.synth.coding.plan import CodingPlan
from taccl.synth.collective import NAMES, Chunk, Collective, build
from taccl.synth.cost import costs, us
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.schedule import completion_fs, time_in_order

FROM_LIBRARY = ("ring:2", "ring:5", "dgx1v:1", "ndv2:2", "torus2d:2x3")


def timed(topology: Topology, collective: Collective, engine: str, size_bytes: int = 10**6) -> Algorithm:
    """The baseline `engine`, priced. Raises Inapplicable."""
    priced = costs(topology, collective.chunk_bytes(size_bytes))
    transfers = BASELINES[engine](topology, collective)
    messages = tuple(
        sorted(
            time_in_order(topology, collective, priced, transfers),
            key=lambda m: (m.start_fs, m.link, m.chunks),
        )
    )
    time_fs = completion_fs(priced, messages)
    return Algorithm(
        f"{collective.name}-{engine}", collective, topology.name, size_bytes, messages, time_fs,
        Certificate(us(time_fs) / 2, "half of it", us(time_fs) / 3, "feasible"), engine, {"seed": 7},
    )  # fmt: skip


def two_nodes() -> Topology:
    """Two nodes of two ranks, every field of a topology in use, numbers that are no decimals."""
    ports = tuple(Port(f"n{n}.nic.{way}", Fraction(100, 3), "nic") for n in range(2) for way in ("out", "in"))
    inner = [(0, 1), (1, 0), (2, 3), (3, 2)]
    measured = Measurement(12, 0.03, 0.25, 1.5)
    links = [
        Link(u, v, Fraction(7, 10), Fraction(46), Fraction(7, 10), (), "nvlink", measured) for u, v in inner
    ]
    for u in range(4):
        for v in range(4):
            if u // 2 != v // 2:
                crossed = (u // 2 * 2, v // 2 * 2 + 1)
                links.append(Link(u, v, Fraction(5, 3), Fraction(106), Fraction(1), crossed, "ib"))
    made = Topology(
        'two "nodes" <é>', ((0, 1), (2, 3)), tuple(links), ports,
        (Switch("left", (0, 1)), Switch("right", (2, 3))),
        (Nic("nic0", 0, (0, 1), 0, 1), Nic("nic1", 1, (2, 3), 2, 3)),
        Fraction(1, 7), Fraction(2), "made up",
        (
            CodecCost("q8", "float32", False, Fraction(197, 50), 112, Fraction(30), Fraction(250),
                      Fraction(61, 3), Fraction(0)),
            CodecCost("xw", "bfloat16", True, Fraction(10, 7), 88, Fraction(0), Fraction(9999),
                      Fraction(1, 3), Fraction(2000), "made up"),
        ),
        Fraction(81, 2),
    )  # fmt: skip
    made.check()
    return made


def custom(ranks: int) -> Collective:
    """Rank 0's two chunks to two places of the last rank: nothing that `build` makes."""
    last = ranks - 1
    chunks = tuple(Chunk(((0, j),), ((last, 1 - j), (last, 2 + j))) for j in range(2))
    made = Collective(
        "custom", ranks, chunks, False, (2,) * ranks, (4,) * ranks, (None,) * ranks, 4, 1
    )  # fmt: skip
    made.check()
    return made


def with_plan(
    algorithm: Algorithm,
    numbers: Iterable[int],
    codec: str = "q8",
    dtype: str = "float32",
    topology: Topology | None = None,
) -> Algorithm:
    """The algorithm with these messages planned as coded, at costs that are made up. topology: by which the plan says
    how long it takes; None: it says that coding changes nothing."""
    cost = CodecCost(
        codec, dtype, codec == "xw", Fraction(2), 128, Fraction(1), Fraction(10), Fraction(1), Fraction(10)
    )
    messages = tuple(sorted(numbers))
    found = None if topology is None else chosen(algorithm, topology, cost, messages)
    time_fs = algorithm.time_fs if found is None else found.time_fs
    return replace(algorithm, coding=CodingPlan(cost, messages, time_fs, 0.0, us(algorithm.time_fs)))


@st.composite
def algorithms(draw: st.DrawFn) -> tuple[Algorithm, Topology]:
    """An algorithm and its topology."""
    spec = draw(st.sampled_from((*FROM_LIBRARY, "two nodes")))
    topology = two_nodes() if spec == "two nodes" else load_topology(spec)
    ranks = topology.ranks
    name = draw(st.sampled_from(NAMES))
    partition = draw(st.integers(1, 3))
    if name == "custom":
        collective = custom(ranks)
    elif name == "alltoallv":
        row = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)
        demand = [draw(row) for _ in range(ranks)]
        demand[0][ranks - 1] = 1
        collective = build(name, ranks, partition, demand=demand)
    elif name == "sendrecv":
        order = draw(st.permutations(range(ranks)))
        pairs = [(rank, peer) for rank, peer in enumerate(order) if rank != peer] or [(0, 1)]
        collective = build(name, ranks, partition, pairs=pairs)
    else:
        collective = build(name, ranks, partition, root=draw(st.integers(0, ranks - 1)))
    size = draw(st.integers(1, 10**7))
    for engine in draw(st.permutations(sorted(BASELINES))):
        try:
            made = timed(topology, collective, engine, size)
        except Inapplicable:
            continue
        # One-shot reductions depend on the size: synthesis drops those where a sum overtakes its parts.
        if not check_algorithm(made, topology):
            return made, topology
    raise AssertionError(f"no baseline does {name} on {spec}")
