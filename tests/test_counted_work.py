"""A search ends by what it counted, so that a busy machine gives the same answer; files lower to their own program."""

from dataclasses import replace
from fractions import Fraction

import pytest
from test_coding_plan import hosts

from taccl.produce import Order, produce
from taccl.profiles.link_table import link_table
from taccl.profiles.profile_writer import write_topology
from taccl.sketches.restrictions import Restrictions
from taccl.synth import model_stages, synthesise
from taccl.synth.collective import build
from taccl.synth.counted import SEEDS_SHARE, SHARE
from taccl.synth.engines.greedy import Taste, greedy
from taccl.synth.lower import lower_exact
from taccl.synth.models.orbits import close, free_group, identity
from taccl.synth.native import read_native, write_native
from taccl.synth.problem import problem, with_symmetry
from taccl.synth.request import Request
from taccl.synth.search import Search
from taccl.synth.symmetric.quotient import quotient

LIMIT_S = 1.0


def irregular():
    """Four hosts, the last with a slow card, whose ranks share cores: nothing here is proved before work runs out."""
    return replace(hosts(4, 2, 4), load_us=Fraction(5))


@pytest.fixture(scope="module")
def runs():
    """(search as the models find it, its work by then, the answer), twice, with the clock out of the way."""
    found = []
    models = synthesise._models
    with pytest.MonkeyPatch.context() as patch:

        def watched(search: Search, *rest):
            found.append([search, search.worked_s, search.work_left()])
            models(search, *rest)

        patch.setattr(synthesise, "_models", watched)
        for limit_s in (3_000.0, 30_000.0):
            request = Request(irregular(), "allreduce", 8 << 20, time_limit_s=LIMIT_S)
            made = synthesise.synthesise(request, limit_s=limit_s)
            found[-1].append(made)
    return found


def test_equal_requests_count_equal_work_and_give_equal_answers(runs):
    (one, seeds, _, made), (other, its_seeds, _, also) = runs
    assert (one.worked_s, seeds) == (other.worked_s, its_seeds) and made == also


def test_work_ends_the_search_before_the_clock_does(runs):
    search, _, _, _ = runs[0]
    assert not search.work_left() and search.left_s() > 0
    # The last stage began with work left; none is so long that the sum would be far beyond.
    assert SHARE * LIMIT_S <= search.worked_s < 2 * LIMIT_S


def test_seeds_leave_work_for_models(runs):
    for _, worked_s, left, _ in runs:
        assert left and worked_s < SHARE * LIMIT_S
    assert SEEDS_SHARE < 1


def test_a_model_that_does_not_fit_is_not_built(monkeypatch):
    def beyond(*_, **__):
        raise AssertionError("a model was built that no work was left for")

    for name in ("pack_trees", "solve_trees", "solve_messages"):
        monkeypatch.setattr(model_stages, name, beyond)
    search = Search(
        irregular(), lambda k: build("allreduce", 8, k), 8 << 20, Restrictions(), (), 0, 0.0, 1, 0,
        budget_s=1e-3, limit_s=3_000.0, report=lambda stage, best_fs: None, should_stop=lambda: False,
    )  # fmt: skip
    p = search.problem(1)
    assert search.offer("greedy", p, greedy(p, Taste(1.0, True, 0))) is not None
    model_stages.pack(search, 1, 0.1)
    model_stages.timed_trees(search, 1, 0.1, symmetric=False)
    model_stages.batched_messages(search, 1, 0.1)


def test_free_groups_are_groups_without_fixed_ports():
    topology = hosts(3, 3)
    p = problem(topology, build("allgather", 9), 10**6, Restrictions())
    generators = quotient(topology, link_table(topology)).group.generators
    p = with_symmetry(p, [tuple(g) for g in generators])[0]
    group = free_group(p)
    assert group[0] == identity(p) and len(group) > 1
    assert {g.links for g in close(group)} == {g.links for g in group}
    for element in group[1:]:
        for link in range(len(topology.links)):
            ports = [r for r, _ in p.costs.holds[link][1:]]
            images = [r for r, _ in p.costs.holds[element.links[link]][1:]]
            assert all(a != b for a, b in zip(ports, images, strict=True))


@pytest.mark.parametrize(
    ("size_bytes", "limit_s"), [(64_000, 2), (10**6, 2), (64_000, 0.5), (64_000, 1), (128_000, 2)]
)
def test_a_native_file_lowers_to_the_program_that_it_came_with(tmp_path, size_bytes, limit_s):
    """As simulated, these schedules would lose time if they were lowered again, or become another program as quick."""
    topology = hosts(4, 2, 4)
    profile = tmp_path / "hosts.yaml"
    profile.write_text(write_topology(topology))
    made = produce(
        Order(str(profile), "allreduce", size_bytes, engine="greedy", partition=1, time_limit_s=limit_s)
    )
    first = lower_exact(made.algorithm, topology)
    assert first.simulated_time_fs == made.simulated_fs and first.program.gpus == made.program.gpus
    again, _ = read_native(write_native(made.algorithm, topology))
    assert lower_exact(again, topology).simulated_time_fs == made.simulated_fs
