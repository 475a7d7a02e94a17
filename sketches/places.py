"""Findings at the places that a sketch remembers, and numbers in messages."""

from __future__ import annotations

from collections.abc import Iterable

from taccl.profiles.yaml_reader import Findings


def note(
    findings: Findings, where: str, code: str, message: str, help: str = "", severity: str = "error"
) -> None:
    """Note a finding at "file:line:column"; "" is the whole file."""
    line, column = where.rsplit(":", 2)[1:] if where else ("0", "0")
    findings.add(int(line), int(column), code, message, help, severity=severity)


def shown(numbers: Iterable[int]) -> str:
    """Numbers for a message, runs as ranges: 0-7, 9; at most eight of these."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
