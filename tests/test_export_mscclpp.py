"""MSCCL++ plans: run by an executor of their JSON, in random orders, they do what the program's collective promises."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runtime_programs
import verify_programs
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from native_algorithms import timed, two_nodes

from taccl.cli import cli
from taccl.errors import CheckFailed, Infeasible, UsageError
from taccl.profiles.topology import Topology
from taccl.synth.collective import build
from taccl.synth.export.mscclpp_json import MAX_OPS, write_plan
from taccl.synth.lower import lower_exact
from taccl.synth.msccl_xml import write_xml
from taccl.synth.program import Program
from taccl.synth.program_collective import collective_of

SIMPLE: dict[str, Program] = {
    "ring allgather": runtime_programs.ring_allgather(4, 2),
    "ring allgather in place": runtime_programs.ring_allgather(4, inplace=True),
    "direct alltoall": runtime_programs.direct_alltoall(4, 2),
    "ring allreduce": runtime_programs.ring_allreduce(4, 3),
    "ring reducescatter": runtime_programs.ring_reducescatter(4, 2),
    "chain broadcast": runtime_programs.chain_broadcast(4, 40, 1),
    "scratch reduce": verify_programs.flagged(runtime_programs.scratch_reduce(4, 2, 2)),
    "relays": verify_programs.relay_allgather(4),
    "two halves": verify_programs.split_allgather(4),
    "fused ring": verify_programs.ring_allreduce(4),
    "fan in": verify_programs.fan_in_reduce(4, 1),
    "relayed alltoall": verify_programs.relayed_alltoall(3),
    "tree": verify_programs.reducescatter_tree(4),
    "all pairs": replace(verify_programs.allpairs_allreduce(4), protocol="Simple"),
}  # fmt: skip
WIRES = ("memory", "port")


CASES = [(name, wires) for name in sorted(SIMPLE) for wires in WIRES]


def machine(program: Program, wires: str) -> Topology | None:
    """None: all on one node; else nodes of one rank each."""
    if wires == "memory":
        return None
    return Topology("apart", tuple((rank,) for rank in range(program.ranks)), ())


class Executor:
    """Runs a plan's JSON with multisets of (rank, input chunk) as data, one operation of any threadblock at a time.

    Operations and their meaning are those of MSCCL++'s execution_kernel.hpp; puts through ports happen later.
    """

    def __init__(self, plan: dict[str, Any], views: Any, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gpus = plan["gpus"]
        self.views = views
        self.memory: dict[tuple[int, str, int], Counter[Any]] = {}
        for gpu in self.gpus:
            for chunk in range(gpu["input_chunks"]):
                self.memory[self.cell(gpu["id"], "i", chunk)] = Counter([(gpu["id"], chunk)])
        self.count: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        self.pending: list[tuple[tuple[Any, ...], Any]] = []
        self.at = {(gpu["id"], tb["id"]): 0 for gpu in self.gpus for tb in gpu["threadblocks"]}

    def cell(self, rank: int, buffer: str, index: int) -> tuple[int, str, int]:
        view = None if self.views is None or buffer == "s" else self.views[rank]
        return (rank, buffer, index) if view is None else (rank, "m", view["io".index(buffer)] + index)

    def cells(self, rank: int, area: dict[str, Any], buffer: str) -> list[tuple[int, str, int]]:
        lengths = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}
        assert area["index"] >= 0 and area["index"] + area["size"] <= self.gpus[rank][lengths[buffer]]
        return [self.cell(rank, buffer, area["index"] + i) for i in range(area["size"])]

    def run(self) -> None:
        waiting = set(self.at)
        while waiting or self.pending:
            choices = sorted(waiting)
            self.rng.shuffle(choices)
            if self.pending and self.rng.random() < 0.3:
                self.land(self.rng.randrange(len(self.pending)))
            for here in choices:
                ops = self.gpus[here[0]]["threadblocks"][here[1]]["ops"]
                if self.at[here] == len(ops):
                    assert not any(owner == here for owner, _ in self.pending), (
                        "a kernel ends before its puts do"
                    )
                    waiting.discard(here)
                    break
                if self.do(here, ops[self.at[here]]):
                    self.at[here] += 1
                    break
            else:
                assert self.pending, "nothing can go on"
                self.land(0)

    def land(self, number: int) -> None:
        """A put arrives; those of one channel do so in order."""
        way = self.pending[number][0]
        first = next(i for i, (found, _) in enumerate(self.pending) if found == way)
        self.pending.pop(first)[1]()

    def channel(self, here: tuple[int, int], op: dict[str, Any]) -> tuple[str, int, int]:
        """(type, peer, ordinal among the channels of the two ranks)"""
        gpu = self.gpus[here[0]]
        kind, (number,) = op["channel_type"], op["channel_ids"]
        ids = next(
            c["channel_ids"] for c in gpu["threadblocks"][here[1]]["channels"] if c["channel_type"] == kind
        )
        assert len(ids) <= 16
        peers = next(c["connected_to"] for c in gpu["channels"] if c["channel_type"] == kind)
        peer = peers[ids[number]]
        return kind, peer, peers[: ids[number]].count(peer)

    def do(self, here: tuple[int, int], op: dict[str, Any]) -> bool:
        rank, name = here[0], op["name"]
        if name in ("wait", "sem_acquire"):
            if name == "wait":
                kind, peer, ordinal = self.channel(here, op)
                key: tuple[Any, ...] = (kind, peer, rank, ordinal)
            else:
                key = ("semaphore", rank, *op["semaphore_ids"])
            if not self.count[key]:
                return False
            self.count[key] -= 1
        elif name == "signal":
            kind, peer, ordinal = self.channel(here, op)
            self.count[kind, rank, peer, ordinal] += 1
        elif name == "sem_release":
            self.count["semaphore", rank, op["semaphore_ids"][0]] += 1
        elif name in ("copy", "re"):
            (target,) = op["dst_buff"]
            sources = [[self.memory[c] for c in self.cells(rank, a, a["type"])] for a in op["src_buff"]]
            assert len(sources) == (1 if name == "copy" else 2)
            for i, cell in enumerate(self.cells(rank, target, target["type"])):
                self.memory[cell] = sum((values[i] for values in sources), Counter())
        elif name in ("put", "pws"):
            self.put(here, op)
        else:
            assert name == "nop", name
        return True

    def put(self, here: tuple[int, int], op: dict[str, Any]) -> None:
        rank, kind = here[0], op["channel_type"]
        gpu = self.gpus[rank]
        (source,), (target,) = op["src_buff"], op["dst_buff"]
        assert source["size"] == target["size"]
        references = next(
            r["remote_buffer_ids"] for r in gpu["threadblocks"][here[1]]["remote_buffer_refs"]
            if r["access_channel_type"] == kind
        )  # fmt: skip
        remote = gpu["remote_buffers"][references[target["buffer_id"]]]
        assert kind in remote["access_channel_types"]
        into = self.cells(remote["rank"], target, remote["type"])
        source_cells = self.cells(rank, source, source["type"])

        def arrive() -> None:
            for src, dst in zip(source_cells, into, strict=True):
                self.memory[dst] = self.memory[src]
            if op["name"] == "pws":
                _, peer, ordinal = self.channel(here, op)
                assert peer == remote["rank"]
                self.count[kind, rank, peer, ordinal] += 1

        if kind == "memory":
            assert op["name"] == "put"  # MSCCL++ signals with a put through ports only
            arrive()
        else:
            self.pending.append(((kind, rank, *self.channel(here, op)[1:]), arrive))


def check(program: Program, plan: dict[str, Any], inplace: bool, seed: int) -> None:
    collective = collective_of(program.collective, program.ranks, program.chunks_per_loop, program.root)
    run = Executor(plan, collective.inplace if inplace else None, seed)
    run.run()
    assert not any(run.count.values()), "a signal or a semaphore is left over for the next launch"
    for chunk in collective.chunks:
        sources = chunk.sources if collective.combining else chunk.sources[:1]
        for rank, offset in chunk.destinations:
            assert run.memory[run.cell(rank, "o", offset)] == Counter(sources)


def threads_meet(plan: dict[str, Any]) -> None:
    """Threads of a block meet between a wait and data, data and data, data and a signal."""
    for gpu in plan["gpus"]:
        for tb in gpu["threadblocks"]:
            apart = False
            for op in tb["ops"]:
                if op["name"] == "nop":
                    apart = False
                elif op["name"] not in ("wait", "sem_acquire"):
                    assert not apart, (gpu["id"], tb["id"], op)
                if op["name"] in ("wait", "sem_acquire", "put", "copy", "re"):
                    apart = True


@pytest.mark.parametrize(("name", "wires"), CASES)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_plans_do_what_programs_do(name: str, wires: str, seed: int) -> None:
    program = SIMPLE[name]
    plan = json.loads(write_plan(program, machine(program, wires)))
    assert plan["inplace"] == program.inplace
    if program.inplace:
        check(program, plan, True, seed)
    if program.outofplace:
        check(program, plan, False, seed)


HIERARCHICAL = [
    (n, "hierarchical") for n in ("allgather", "allreduce", "alltoall", "broadcast", "reducescatter")
]


@pytest.mark.parametrize(("name", "engine"), [*HIERARCHICAL, ("allreduce", "one-shot-doubling")])
def test_plans_of_lowered_algorithms_work_between_nodes(name: str, engine: str) -> None:
    topology = two_nodes()
    collective = build(name, 4, 2)
    program = lower_exact(timed(topology, collective, engine), topology).program
    plan = json.loads(write_plan(program, topology, collective))
    threads_meet(plan)
    for seed in range(5):
        check(program, plan, program.inplace, seed)


@pytest.mark.parametrize(("name", "wires"), CASES)
def test_plans_keep_the_limits_of_the_reader(name: str, wires: str) -> None:
    program = SIMPLE[name]
    text = write_plan(program, machine(program, wires))
    assert text == write_plan(program, machine(program, wires))
    plan = json.loads(text)
    threads_meet(plan)
    signals: Counter[str] = Counter()
    for number, gpu in enumerate(plan["gpus"]):
        assert gpu["id"] == number
        assert [tb["id"] for tb in gpu["threadblocks"]] == list(range(len(gpu["threadblocks"])))
        for tb in gpu["threadblocks"]:
            assert len(tb["ops"]) <= MAX_OPS
            for op in tb["ops"]:
                signals["signal"] += op["name"] in ("signal", "pws")
                signals["wait"] += op["name"] == "wait"
                signals["acquire"] += op["name"] == "sem_acquire"
                signals["release"] += op["name"] == "sem_release"
    assert signals["signal"] == signals["wait"] > 0
    assert signals["acquire"] == signals["release"]


def test_golden_plan() -> None:
    """Two ranks send to one another, each way in threadblocks of its own: the smallest plan, in full."""
    gpus = [
        (1, 1, [(1 - r, -1, 0, [("s", "i0", "o0")]), (-1, 1 - r, 0, [("r", "i0", "o0")])]) for r in range(2)
    ]
    program = verify_programs.make("sendrecv", 1, gpus)
    plan = json.loads(write_plan(program, collective=build("sendrecv", 2, pairs=[(0, 1), (1, 0)])))
    channel, wires = {"channel_ids": [0], "channel_type": "memory"}, {"channel_type": "memory"}
    put = {
        "name": "put",
        "src_buff": [{"type": "i", "index": 0, "size": 1}],
        "dst_buff": [{"buffer_id": 0, "index": 0, "size": 1}],
        "channel_type": "memory",
    }
    send = [{"name": "wait", **channel}, {"name": "nop"}, put, {"name": "nop"}, {"name": "signal", **channel}]
    receive = [{"name": "signal", **channel}, {"name": "wait", **channel}]
    assert plan["gpus"][1] == {
        "id": 1, "input_chunks": 1, "output_chunks": 1, "scratch_chunks": 0,
        "threadblocks": [
            {"id": 0, "ops": send, "channels": [{**wires, "channel_ids": [1]}],
             "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0]}]},
            {"id": 1, "ops": receive, "channels": [{**wires, "channel_ids": [0]}], "remote_buffer_refs": []},
        ],
        "channels": [{**wires, "connected_to": [0, 0]}],
        "remote_buffers": [{"rank": 0, "type": "o", "access_channel_types": ["memory"]}],
        "semaphores": [],
    }  # fmt: skip
    assert {key: value for key, value in plan.items() if key != "gpus"} == {
        "name": "sendrecv", "collective": "sendrecv", "protocol": "Simple", "inplace": False,
        "reuse_resources": False, "num_threads_per_block": 1024, "use_double_scratch_buffer": False,
        "buffer_alignment": 16, "min_message_size": 0, "max_message_size": 2**30,
    }  # fmt: skip


def test_large_messages_stay_within_32_bits() -> None:
    plan = json.loads(write_plan(replace(SIMPLE["ring allreduce"], max_bytes=0)))
    chunks = max(max(g["input_chunks"], g["output_chunks"], g["scratch_chunks"]) for g in plan["gpus"])
    per_chunk = plan["max_message_size"] / SIMPLE["ring allreduce"].chunks_per_loop
    assert 2**31 < per_chunk * chunks < 2**32


def test_full_threadblocks_go_on_in_others() -> None:
    program = runtime_programs.chain_broadcast(3, 60)
    plan = json.loads(write_plan(program))
    before = sum(len(gpu.threadblocks) for gpu in program.gpus)
    assert sum(len(gpu["threadblocks"]) for gpu in plan["gpus"]) > before


@pytest.mark.parametrize(("program", "said"), [
    (replace(SIMPLE["relays"], protocol="LL"), "protocol LL"),
    (replace(SIMPLE["ring allreduce"], reduce_op="max"), "sum only"),
    (runtime_programs.direct_gather(3), "has no output"),
    (runtime_programs.direct_scatter(3), "has no input"),
])  # fmt: skip
def test_what_plans_lack_is_refused(program: Program, said: str) -> None:
    with pytest.raises(Infeasible, match=said):
        write_plan(program)


def test_other_topologies_are_refused() -> None:
    with pytest.raises(UsageError, match="ranks"):
        write_plan(SIMPLE["relays"], machine(SIMPLE["relayed alltoall"], "port"))


def test_fifo_slots_are_made_where_a_program_needs_them() -> None:
    """Both ranks send first and receive then, in one threadblock: fine with a FIFO, a deadlock without."""
    steps = [("s", "i0", "o0"), ("r", "i0", "o0")]
    crossed = verify_programs.make("sendrecv", 1, [(1, 1, [(1 - r, 1 - r, 0, steps)]) for r in range(2)])
    collective = build("sendrecv", 2, pairs=[(0, 1), (1, 0)])
    plan = json.loads(write_plan(crossed, collective=collective))
    assert [gpu["scratch_chunks"] for gpu in plan["gpus"]] == [2, 2]
    with pytest.raises(UsageError, match="pairs"):
        write_plan(crossed)


def test_programs_that_wait_for_themselves_are_refused() -> None:
    """Three messages before the first receive do not fit into two slots."""
    steps = [*[("s", f"i{j}", f"o{j}") for j in range(3)], *[("r", f"i{j}", f"o{j}") for j in range(3)]]
    crossed = verify_programs.make("sendrecv", 3, [(3, 3, [(1 - r, 1 - r, 0, steps)]) for r in range(2)])
    with pytest.raises(CheckFailed, match="deadlock"):
        write_plan(crossed, collective=build("sendrecv", 2, 3, pairs=[(0, 1), (1, 0)]))


def test_what_another_threadblock_overwrites_has_left_before() -> None:
    """Rank 0 sends s0 and then says so in a copy, on which the overwriting of s0 depends."""
    sender = [("s", "s0", "o0", 1, (1, 0)), ("cpy", "i1", "s1"), ("s", "i1", "o1")]
    copies = [("cpy", "i0", "s0"), ("cpy", "i1", "s0", 1, (0, 1))]
    receiver = [("r", "s0", "o0"), ("r", "i1", "o1")]
    ranks = [(2, 2, [(1, -1, 0, sender), (-1, -1, 0, copies)]), (2, 2, [(-1, 0, 0, receiver)])]
    program = verify_programs.make("sendrecv", 2, ranks, scratch=2)
    collective = build("sendrecv", 2, 2, pairs=[(0, 1), (1, 0)])
    plan = json.loads(write_plan(program, machine(program, "port"), collective))
    for seed in range(40):
        run = Executor(plan, None, seed)
        run.run()
        assert [run.memory[1, "o", chunk] for chunk in (0, 1)] == [Counter([(0, 0)]), Counter([(0, 1)])]


def test_refusals_are_infeasible_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "gather.xml"
    file.write_text(write_xml(runtime_programs.direct_gather(3)), "utf-8")
    refused = CliRunner().invoke(cli, ["convert", str(file), "--to", "mscclpp-json"])
    assert refused.exit_code == 4 and "--to msccl-xml" in refused.stderr and not refused.stdout
