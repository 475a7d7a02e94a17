"""Numbers of a profile: no more digits than measuring gives."""

from __future__ import annotations

from fractions import Fraction


def rounded(value: float) -> Fraction:
    """Four significant digits; what is measured is not known better. Exact as a decimal fraction."""
    return Fraction(f"{value:.4g}")


def or_none(value: float, least: Fraction) -> Fraction:
    """`rounded`; what a fit leaves below the least that a profile can state is nothing."""
    return rounded(value) if value >= least else Fraction(0)
