"""A run of short messages within a node: each rank does its operations in the order of the trace.

That order is one for all ranks, and in it each message is sent before it is received. Where every message of the job is
finished for its sender when it is sent (`Transport.buffered`), the first operation that is not done can always be done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from taccl.runtime.actions import Action, Actions
from taccl.runtime.plan import Plan
from taccl.runtime.transport import Message

# What tells whether a message has arrived, its operation, and what to call then.
Step = tuple[Callable[[], bool], int, list[Action]]


class InOrder:
    """The steps of a plan, and runs of them. left: steps that are not done."""

    def __init__(self, plan: Plan, messages: Mapping[int, Message], actions: Actions) -> None:
        self._steps = _write(plan, messages, actions)
        self._run = _go_on(self._steps)
        self.left = 0

    def start(self) -> None:
        """Begin a run."""
        self.left = len(self._steps)

    def advance(self, polls: int, rest: Callable[[], object] | None, spins: int) -> bool:
        """As `Executor.advance`."""
        if not self.left:
            return True
        vain = 0
        for left in self._run:
            if not left:
                break
            if left != self.left:
                self.left = left
                vain = 0
            vain += 1
            if vain > spins and rest is not None:
                rest()
            if vain >= polls:
                return False
        self.left = 0
        return True

    def waiting(self) -> list[int]:
        """The message that the run waits for."""
        left = self.left  # the watchdog's thread asks too
        return [self._steps[-left][1]] if 0 < left < len(self._steps) else []


def _go_on(steps: Sequence[Step]) -> Generator[int]:
    """Do the steps, for run after run; yields how many are left when a message has not arrived, and at the end."""
    counted = [(len(steps) - place, *step) for place, step in enumerate(steps)]
    while True:
        for left, arrived, _, actions in counted:
            while not arrived():
                yield left
            for action in actions:
                action()
        yield 0


def _write(plan: Plan, messages: Mapping[int, Message], actions: Actions) -> list[Step]:
    """What to wait for, and what to do up to the next wait."""
    steps: list[Step] = []
    begin: list[Action] = []
    here = begin
    for number, op in enumerate(plan.operations):
        if op.kind == "recv":
            here = []
            arrived = messages[number].arrived
            assert arrived is not None
            steps.append((arrived, number, here))
            # Of what is staged the next operation is the only reader.
            action = None if actions.reduces_next(number) else actions.arrival(number, op)
        elif op.kind == "reduce" and actions.reduces_next(number - 1):
            action = actions.reduce_from(op, messages[number - 1].lies)
        else:
            action = actions.beginning(number, op)
        if action is not None:
            here.append(action)
    return [(_true, -1, begin), *steps]


def _true() -> bool:
    return True
