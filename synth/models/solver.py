"""Running CP-SAT: deterministic, interruptible, with a line of progress for every improvement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how to search. The deterministic limit decides; the wall limit is a safety net."""

    deterministic_s: float
    wall_s: float
    workers: int = 2
    seed: int = 0
    relax: bool = True  # use the linear relaxation; pure ordering models search faster without


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the solver ended with. `value` reads a variable of the best solution."""

    status: str  # "optimal" | "feasible" | "infeasible" | "unknown"
    objective: int | None
    bound: int
    value: Callable[[cp_model.LinearExprT], int]


def solve(
    model: cp_model.CpModel,
    limits: Limits,
    on_objective: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Minimise a model. on_objective gets (objective, bound) at every improvement, in the solver's units.

    The search runs in a thread of its own, so that the main thread can take Ctrl-C (see `should_stop`).
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = max(1, limits.workers)
    # Workers that run in lockstep batches make the search repeatable; free-running threads do not.
    parameters.interleave_search = limits.workers > 1
    parameters.random_seed = limits.seed
    parameters.max_deterministic_time = limits.deterministic_s
    parameters.max_time_in_seconds = limits.wall_s
    parameters.catch_sigint_signal = False
    if not limits.relax:
        parameters.linearization_level = 0
    callback = _Callback(on_objective) if on_objective else None
    done = threading.Event()
    status: list[cp_model.CpSolverStatus] = []

    def run() -> None:
        try:
            status.append(solver.solve(model, callback) if callback else solver.solve(model))
        finally:
            done.set()

    thread = threading.Thread(target=run, name="cp-sat", daemon=True)
    thread.start()
    while not done.wait(0.1):
        if should_stop is not None and should_stop():
            solver.stop_search()
    thread.join()
    names = {
        cp_model.OPTIMAL: "optimal",
        cp_model.FEASIBLE: "feasible",
        cp_model.INFEASIBLE: "infeasible",
        cp_model.MODEL_INVALID: "invalid",
    }
    name = names.get(status[0], "unknown") if status else "unknown"
    if name == "invalid":
        raise ValueError(f"the model is invalid: {model.validate()}")
    found = name in ("optimal", "feasible")
    return Outcome(
        name,
        round(solver.objective_value) if found else None,
        # The bound of an integer objective may carry a rounding error of the LP; round up only what is clear.
        -int(-(solver.best_objective_bound - 1e-6) // 1) if name != "infeasible" else 0,
        solver.value,
    )


class _Callback(cp_model.CpSolverSolutionCallback):
    def __init__(self, report: Callable[[int, int], None]) -> None:
        super().__init__()
        self._report = report

    def on_solution_callback(self) -> None:
        self._report(round(self.objective_value), round(self.best_objective_bound))
