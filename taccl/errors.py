"""Every error that `taccl` raises on purpose.

    TacclError                     exit code
    ├── CheckFailed                1    a verification or a data check failed
    ├── UsageError                 2    options that do not go together, unknown names
    ├── InvalidInput               3    a file that cannot be accepted; carries `Diagnostic`s
    ├── Infeasible                 4    no algorithm obeys the sketch; carries the conflicting rules
    ├── NoSolutionInTime           5    the time limit passed before a first algorithm
    ├── EnvironmentProblem         6    no MPI, no GPU, a library that cannot be loaded
    ├── RunFailed                 86    a rank of a job died, stalled or runs something else
    └── Interrupted              130    Ctrl-C with nothing worth keeping

The command line prints the message (never a traceback) and exits with `exit_code`.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

MOST_SHOWN = 160  # characters of a source line
MOST_SAID = 2000  # of a message
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})  # numbers of errors in writing that are nobody's fault


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding in an input file, in the form that editors and CI make clickable."""

    file: str
    line: int  # 1-based; 0 when the finding is about the whole file
    column: int  # 1-based; 0 when the finding is about the whole line or file
    code: str  # stable, e.g. "S104"
    message: str  # what is wrong and what was expected
    help: str = ""  # what to do about it
    path: str = ""  # e.g. "links[1].dst"
    source_line: str = ""  # the offending line, for the caret
    severity: str = "error"  # "error" | "warning"

    def render(self) -> str:
        """The compiler-style text: location, source line with a caret, help."""
        place = ":".join([self.file, *(str(n) for n in (self.line, self.column) if n)])
        message = self.message
        if len(message) > MOST_SAID:  # it quotes a word of the file, which may be the whole file
            message = f"{message[: MOST_SAID // 2]} ... {message[-MOST_SAID // 2 :]}"
        lines = [f"{place}: {self.severity}[{self.code}]: {message}"]
        if self.source_line and self.column:
            first = max(0, self.column - 1 - MOST_SHOWN // 2)
            shown = self.source_line[first : first + MOST_SHOWN]
            # Tabs keep their width on the screen only if the caret line repeats them.
            pad = "".join("\t" if char == "\t" else " " for char in shown[: self.column - 1 - first])
            lines += [f"  {shown}", f"  {pad}^"]
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


class TacclError(Exception):
    """Base of all errors raised on purpose; `str(error)` is a full sentence for the user."""

    exit_code = 1


class CheckFailed(TacclError):
    """A program, an algorithm or a data check is wrong."""

    exit_code = 1


class UsageError(TacclError):
    """Options or names that make no sense together."""

    exit_code = 2


class InvalidInput(TacclError):
    """An input file that cannot be accepted. `diagnostics` holds every finding, in file order."""

    exit_code = 3

    def __init__(self, diagnostics: Sequence[Diagnostic] | str) -> None:
        if isinstance(diagnostics, str):
            diagnostics = [Diagnostic("<input>", 0, 0, "E000", diagnostics)]
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))


class Infeasible(TacclError):
    """No algorithm obeys all rules. `conflict` names the rules that exclude each other."""

    exit_code = 4

    def __init__(self, message: str, conflict: Sequence[str] = ()) -> None:
        self.conflict = tuple(conflict)
        super().__init__("\n".join([message, *(f"  {line}" for line in self.conflict)]))


class NoSolutionInTime(TacclError):
    """The time limit passed before the first algorithm was found."""

    exit_code = 5


class EnvironmentProblem(TacclError):
    """Something this machine lacks: MPI, a GPU, a library, a right."""

    exit_code = 6


class RunFailed(TacclError):
    """A rank of a job died, stalled or runs another program; the whole job is ended."""

    exit_code = 86


class Interrupted(TacclError):
    """The user stopped the command before there was anything to keep."""

    exit_code = 130
