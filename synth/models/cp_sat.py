"""CP-SAT, loaded when the first model is made: with the packages that it imports that takes half a second, and most
commands need no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortools.sat.python import cp_model as cp_model
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            from ortools.sat.python import cp_model as loaded

            return getattr(loaded, name)

    cp_model = _Later()
