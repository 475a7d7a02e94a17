"""One finding of verification: what is wrong, why, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that the program breaks. Places that do not apply are -1, the line 0."""

    code: str  # stable, e.g. "V501"; docs/programs.md lists them
    message: str  # reason and place in words
    severity: str = "error"  # "error" | "warning" | "note": true, and no reason to change the program
    rank: int = -1
    threadblock: int = -1
    step: int = -1
    line: int = 0  # in the XML file
    mode: str = ""  # "in place" | "out of place", "" when it does not depend on it

    def render(self, file: str) -> str:
        """The compiler-style line that editors make clickable."""
        place = f"{file}:{self.line}" if self.line else file
        mode = f" ({self.mode})" if self.mode else ""
        return f"{place}: {self.severity}[{self.code}]: {self.message}{mode}"
