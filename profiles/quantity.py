"""Exact numbers with units: `46`, `1e3`, `10/3`, `2.6us`, `46us/MB`, `100GB/s`, `25Gbit/s`, `1MiB`, `5%`.

The same rule for files and for command-line options. Nothing passes through floating point.
"""

from __future__ import annotations

import re
from fractions import Fraction

from taccl.profiles.yaml_reader import MAX_DIGITS, shorten

MAX_EXPONENT = 400  # covers every float; larger ones are a mistake, or meant to make reading slow

_TIMES_US = {
    "ns": Fraction(1, 1000),
    "us": Fraction(1),
    "µs": Fraction(1),  # micro sign
    "μs": Fraction(1),  # Greek mu
    "ms": Fraction(1000),
    "s": Fraction(10**6),
    "min": Fraction(60 * 10**6),
    "h": Fraction(3600 * 10**6),
}
_SIZES = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_BITS = {"bit": 1, "b": 1, "kbit": 10**3, "Kbit": 10**3, "Kb": 10**3, "Mbit": 10**6, "Mb": 10**6}
_BITS |= {"Gbit": 10**9, "Gb": 10**9, "Tbit": 10**12, "Tb": 10**12}

_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>[0-9]*)(?P<point>\.(?P<part>[0-9]*))?([eE](?P<exponent>[-+]?[0-9]+))?"
    r"(/(?P<below>[0-9]+))?\s*(?P<unit>[^0-9\s].*)?",
    re.ASCII | re.DOTALL,
)

UNIT_WORDS = {
    "us": "a time such as 2.6us (a bare number is in us)",
    "s": "a time such as 60s or 5min (a bare number is in seconds)",
    "us/MB": "a rate such as 46us/MB, 100GB/s or 25Gbit/s (a bare number is in us/MB)",
    "bytes": "a size such as 1MB (10^6) or 1MiB (2^20) (a bare number is in bytes)",
    "fraction": "a fraction such as 0.05 or 5%",
    "": "a number",
}


def quantity(text: str, unit: str) -> Fraction:
    """The exact number that `text` states, in `unit`: "us", "s", "us/MB", "bytes", "fraction" or "" (none).

    Raises ValueError with a sentence. Exponents and lengths are limited, so that no text makes it slow.
    """
    if len(text) > 2 * MAX_DIGITS + 20:
        raise ValueError(f"expected {UNIT_WORDS[unit]}, found {len(text)} characters")
    found = _NUMBER.fullmatch(text.strip())
    digits = (found["whole"] + (found["part"] or "")) if found else ""
    if found is None or not digits:
        raise ValueError(f"expected {UNIT_WORDS[unit]}, found {shorten(text)!r}{_number_hint(text)}")
    whole, part = found["whole"], found["part"] or ""
    if len(whole) > 1 and whole[0] == "0":
        raise ValueError(f"the number {shorten(text)!r} begins with 0, which some readers take for octal")
    exponent = found["exponent"] or "0"
    if len(exponent) > 4 or abs(int(exponent)) > MAX_EXPONENT or len(digits) > MAX_DIGITS:
        raise ValueError(f"the number {shorten(text)!r} is out of all proportion")
    value = Fraction(int(digits)) * Fraction(10) ** (int(exponent) - len(part))
    if found["below"] is not None:
        if int(found["below"]) == 0:
            raise ValueError(f"{shorten(text)!r} divides by 0")
        value /= int(found["below"])
    if found["sign"] == "-":
        value = -value
    return _scaled(value, (found["unit"] or "").strip(), unit, text)


def _number_hint(text: str) -> str:
    word = text.strip().lower()
    if word.lstrip("+-").lstrip(".") in ("nan", "inf", "infinity"):
        return ": a number must be finite"
    if word.lstrip("+-").startswith(("0x", "0o", "0b")) or "_" in word:
        return ": write it with decimal digits only"
    return ""


def _scaled(value: Fraction, suffix: str, unit: str, text: str) -> Fraction:
    """`value suffix` in `unit`."""
    if not suffix:
        return value
    if unit in ("us", "s") and suffix in _TIMES_US:
        return value * _TIMES_US[suffix] / (10**6 if unit == "s" else 1)
    if unit == "bytes" and suffix in _SIZES:
        return value * _SIZES[suffix]
    if unit == "fraction" and suffix == "%":
        return value / 100
    if unit == "us/MB":
        scaled = _rate_us_per_mb(value, suffix, text)
        if scaled is not None:
            return scaled
    hint = _number_hint(text)
    if suffix in ("K", "M", "G", "T", "k"):
        hint = f": write {suffix.upper()}B (powers of 1000) or {suffix.upper()}iB (powers of 1024)"
    raise ValueError(f"expected {UNIT_WORDS[unit]}, found {shorten(text)!r}{hint}")


def _rate_us_per_mb(value: Fraction, suffix: str, text: str) -> Fraction | None:
    """us/MB of a rate written as time per size (46us/MB) or as size per time (100GB/s, 25Gbps)."""
    if suffix.endswith("ps") and suffix not in _TIMES_US:
        suffix = suffix[:-2] + "/s"
    above, slash, below = (word.strip() for word in suffix.partition("/"))
    if not slash:
        return None
    if above in _TIMES_US and below in _SIZES:
        return value * _TIMES_US[above] * 10**6 / _SIZES[below]
    if below in _TIMES_US and (above in _SIZES or above in _BITS):
        if value == 0:
            raise ValueError(f"the rate {shorten(text)!r} must be above 0")
        size = Fraction(_SIZES[above]) if above in _SIZES else Fraction(_BITS[above], 8)
        bytes_per_us = value * size / _TIMES_US[below]
        return 10**6 / bytes_per_us
    return None


def units_of(unit: str) -> list[str]:
    """Every suffix that `quantity` takes for a unit, for the JSON Schema."""
    if unit in ("us", "s"):
        return sorted(_TIMES_US)
    if unit == "bytes":
        return sorted(_SIZES)
    if unit == "fraction":
        return ["%"]
    if unit == "us/MB":
        per_size = [f"{time}/{size}" for time in _TIMES_US for size in _SIZES]
        per_time = [f"{size}/{time}" for size in (*_SIZES, *_BITS) for time in _TIMES_US]
        return sorted([*per_size, *per_time, *(f"{size}ps" for size in (*_SIZES, *_BITS))])
    return []
