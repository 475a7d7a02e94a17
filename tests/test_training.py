"""Coded sums with error feedback: what coding takes away is paid later, and training arrives where it does without."""

import numpy as np
import pytest
from native_algorithms import timed, two_nodes, with_plan

from taccl.errors import UsageError
from taccl.profiles.load import load_topology
from taccl.runtime.codecs import CODECS, ErrorFeedback
from taccl.runtime.coded import Coding
from taccl.runtime.local import run_in_process
from taccl.runtime.planned import planned
from taccl.synth.collective import build
from taccl.synth.lower import lower_exact
from taccl.synth.request import Request
from taccl.synth.synthesise import synthesise

NODES = (0, 0, 1, 1)
RANKS = 4
TWO = two_nodes()


def allreduce(engine):
    """The program, and what is coded: all between nodes, or as planned where only the results are."""
    made = timed(TWO, build("allreduce", RANKS, 2), engine)
    program = lower_exact(made, TWO).program
    results = [n for n, m in enumerate(made.messages) if m.op == "copy" and NODES[m.src] != NODES[m.dst]]
    hops = planned(with_plan(made, results), made.collective).hops
    return program, {"nodes": Coding(NODES, False), "results": Coding(None, False, hops=hops)}


@pytest.mark.parametrize("codec", ["bf16", "q8", "fp8"])
@pytest.mark.parametrize("engine", ["hierarchical", "direct"])
def test_sums_of_many_steps_lack_the_last_residuals_alone(engine, codec):
    """Of chunks that are equally long and such that are not; sums of nodes, contributions and results are coded."""
    program, codings = allreduce(engine)
    random = np.random.default_rng(0)
    for coding in codings.values():
        for elements, op in ((1024, "sum"), (1003, "avg")):
            feedback = [ErrorFeedback(elements) for _ in range(RANKS)]
            exact, came, without = np.zeros((3, elements))
            for _ in range(6):
                inputs = [random.standard_normal(elements, np.float32) for _ in range(RANKS)]
                before = [values.copy() for values in inputs]
                how = {"op": op, "codec": CODECS[codec], "coding": coding}
                outputs = run_in_process(program, inputs, **how, feedback=feedback)
                assert all(output.tobytes() == outputs[0].tobytes() for output in outputs)
                assert all((a == b).all() for a, b in zip(inputs, before, strict=True))
                exact += np.sum(inputs, axis=0, dtype=np.float64)
                came += outputs[0] * (RANKS if op == "avg" else 1.0)
                without += run_in_process(program, inputs, **how)[0] * (RANKS if op == "avg" else 1.0)
            owed = np.sum([one.residual for one in feedback], axis=0, dtype=np.float64)
            assert np.abs(owed).max() > 1e-3
            np.testing.assert_allclose(came + owed, exact, rtol=0, atol=1e-4)
            assert np.square(came - exact).mean() < np.square(without - exact).mean() / 2


class Opposed:
    """Least squares that ranks share, where the ranks of each node pull at some weights against those of the other.

    Pulls cancel in the sum. In what nodes send they are the largest values of their blocks, so that a codec's levels
    lie far apart there, and gradients of the other weights are lost: 256 values have one scale in q8.
    """

    WEIGHTS, SAMPLES, PULL, RATE, STEPS = 512, 160, 100.0, 0.2, 80

    def __init__(self):
        random = np.random.default_rng(1)
        shape = (RANKS, self.SAMPLES, self.WEIGHTS)
        self.samples = random.standard_normal(shape).astype(np.float32)
        self.wanted = self.samples @ random.standard_normal(self.WEIGHTS).astype(np.float32)
        self.pulls = np.zeros((RANKS, self.WEIGHTS), np.float32)
        self.pulls[:2, ::64], self.pulls[2:, ::64] = self.PULL, -self.PULL

    def gradient(self, weights, rank):
        missed = self.samples[rank] @ weights - self.wanted[rank]
        return missed @ self.samples[rank] / self.SAMPLES + self.pulls[rank]

    def loss(self, weights):
        return float(np.square(self.samples @ weights - self.wanted).mean())

    def train(self, average):
        """The loss in the end. average: of (RANKS, WEIGHTS) gradients, the ranks' results."""
        weights = np.zeros((RANKS, self.WEIGHTS), np.float32)
        for _ in range(self.STEPS):
            gradients = [self.gradient(weights[rank], rank) for rank in range(RANKS)]
            weights -= np.float32(self.RATE) * np.stack(average(gradients))
        assert (weights == weights[0]).all(), "ranks have different weights"
        return self.loss(weights[0])


def test_training_with_q8_and_feedback_reaches_the_loss_of_training_without_a_codec():
    problem = Opposed()
    program, codings = allreduce("hierarchical")
    coded = {"codec": CODECS["q8"], "coding": codings["nodes"]}
    feedback = [ErrorFeedback(problem.WEIGHTS) for _ in range(RANKS)]
    plain = problem.train(lambda gradients: run_in_process(program, gradients, op="avg"))
    paid = problem.train(
        lambda gradients: run_in_process(program, gradients, op="avg", **coded, feedback=feedback)
    )
    lost = problem.train(lambda gradients: run_in_process(program, gradients, op="avg", **coded))
    start = problem.loss(np.zeros(problem.WEIGHTS, np.float32))
    assert plain < start / 100
    assert abs(paid - plain) < start / 1000
    assert lost - plain > start / 100


def test_a_relay_that_would_code_what_others_owe_is_refused():
    """Ranks 0 and 2 sum over relays on the node of rank 0: what crosses to rank 2 is coded by a rank without a part."""
    topology = load_topology("ring:4")
    found = synthesise(Request(topology, "allreduce", 4096, engine="greedy", groups=((0, 2),)))
    program = lower_exact(found, topology).program
    coding = Coding((0, 0, 1, 0), lossless=False)
    inputs = [np.ones(64 if rank in (0, 2) else 0, np.float32) for rank in range(4)]
    how = {"codec": CODECS["q8"], "coding": coding, "collective": found.collective}
    assert run_in_process(program, inputs, **how)[2].tolist() == [2.0] * 64
    with pytest.raises(UsageError, match="a rank that contributes nothing to some values codes them"):
        run_in_process(program, inputs, **how, feedback=[ErrorFeedback(len(values)) for values in inputs])
