"""How far a time is from a lower bound: rounded once, here, so that every command prints the same."""

from __future__ import annotations

DIGITS = 6


def gap(time_us: float, lower_bound_us: float) -> float:
    """(time - lower bound) / time to DIGITS digits; 0 for a time of nothing or below the bound."""
    return 0.0 if time_us <= 0 else round(max(0.0, (time_us - lower_bound_us) / time_us), DIGITS)


def gap_text(share: float) -> str:
    """A gap for people, e.g. "18.71 %"."""
    return f"{100 * share:.2f} %"
