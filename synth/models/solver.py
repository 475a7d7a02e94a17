"""Running CP-SAT: deterministic, interruptible, with a line of progress for every improvement.

Every run has one worker: that repeats itself exactly. (CP-SAT's own lockstep portfolio, interleave_search, also
repeats, but aborted the whole process on some infeasible models of ours.) Several cores serve several runs with
different strategies side by side; they do not talk to each other, so the outcome does not depend on the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taccl.synth.models.cp_sat import cp_model


@dataclass(frozen=True, slots=True)
class Strategy:
    """One run. The deterministic limit decides; the wall limit is a safety net."""

    deterministic_s: float
    wall_s: float
    seed: int = 0
    relax: bool = True  # use the linear relaxation; pure ordering models search faster without
    spend: Callable[[float], None] = lambda share: None  # hears what share of its limit was used


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the solver ended with. `value` reads a variable of the best solution."""

    status: str  # "optimal" | "feasible" | "infeasible" | "unknown"
    objective: int | None
    bound: int
    value: Callable[[cp_model.LinearExprT], int]


def solve(
    model: cp_model.CpModel,
    strategies: Sequence[Strategy],
    on_objective: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Minimise a model with every strategy at once; the first strategy that proves its answer wins, else the best.

    on_objective gets (objective, bound) at every improvement, in the solver's units. The searches run in threads,
    so that the main thread can take Ctrl-C (see `should_stop`). Ties go to the earlier strategy.
    """
    runs = [_Run(model, strategy, on_objective) for strategy in strategies]
    for run in runs:
        run.start()
    for index, run in enumerate(runs):
        while not run.done.wait(0.05):
            if should_stop is not None and should_stop():
                for other in runs:
                    other.solver.stop_search()
        run.thread.join()
        if run.proved():
            # Later strategies can only confirm; earlier ones have ended without a proof.
            for other in runs[index + 1 :]:
                other.solver.stop_search()
            for other in runs[index + 1 :]:
                other.thread.join()
            max(runs[: index + 1], key=_Run.used).spend()
            return run.outcome()
    outcomes = [run.outcome() for run in runs]
    max(runs, key=_Run.used).spend()
    found = [o for o in outcomes if o.objective is not None]
    best = min(found, key=lambda o: o.objective or 0) if found else outcomes[0]
    return Outcome(best.status, best.objective, max(o.bound for o in outcomes), best.value)


class _Run:
    """One CP-SAT search in its own thread."""

    def __init__(
        self, model: cp_model.CpModel, strategy: Strategy, report: Callable[[int, int], None] | None
    ) -> None:
        self.solver = cp_model.CpSolver()
        parameters = self.solver.parameters
        parameters.num_workers = 1
        parameters.random_seed = strategy.seed
        parameters.max_deterministic_time = strategy.deterministic_s
        parameters.max_time_in_seconds = strategy.wall_s
        parameters.catch_sigint_signal = False
        if not strategy.relax:
            parameters.linearization_level = 0
        self.model = model
        self.strategy = strategy
        self.callback = _callback(report) if report else None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._solve, name="cp-sat", daemon=True)
        self.status = cp_model.UNKNOWN

    def start(self) -> None:
        """Begin searching."""
        self.thread.start()

    def _solve(self) -> None:
        try:
            self.status = self.solver.solve(self.model, self.callback)
        finally:
            self.done.set()

    def used(self) -> float:
        """Share of the deterministic limit that was used."""
        return min(1.0, self.solver.response_proto.deterministic_time / self.strategy.deterministic_s)

    def spend(self) -> None:
        """Say how much was used."""
        self.strategy.spend(self.used())

    def proved(self) -> bool:
        """Whether the search space was exhausted."""
        return self.status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)

    def outcome(self) -> Outcome:
        """The result in plain values."""
        if self.status == cp_model.MODEL_INVALID:
            raise ValueError(f"the model is invalid: {self.model.validate()}")
        names = {
            cp_model.OPTIMAL: "optimal",
            cp_model.FEASIBLE: "feasible",
            cp_model.INFEASIBLE: "infeasible",
        }
        name = names.get(self.status, "unknown")
        found = name in ("optimal", "feasible")
        return Outcome(
            name,
            round(self.solver.objective_value) if found else None,
            # The bound of an integer objective may carry a rounding error of the LP; keep what is clear.
            0 if name == "infeasible" else -int(-(self.solver.best_objective_bound - 1e-6) // 1),
            self.solver.value,
        )


def _callback(report: Callable[[int, int], None]) -> cp_model.CpSolverSolutionCallback:
    class Callback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            report(round(self.objective_value), round(self.best_objective_bound))

    return Callback()
