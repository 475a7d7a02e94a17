"""Text for the report: escaping, times and sizes for people."""

from __future__ import annotations

import html
import re

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")


def escape(value: object) -> str:
    """Text that may stand between tags and in quoted attributes, whatever it was."""
    return html.escape(_CONTROL.sub("\ufffd", str(value)))


def time_text(time_us: float) -> str:
    """A time in us with four digits, in the unit that fits."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if time_us >= factor:
            return f"{time_us / factor:.4g} {unit}"
    return f"{time_us:.4g} µs"


def size_text(size: float) -> str:
    """A number of bytes: MB = 10^6, or MiB = 2^20 where that is round."""
    for names, base in ((("B", "KiB", "MiB", "GiB"), 1024), (("B", "KB", "MB", "GB"), 1000)):
        value, unit = size, 0
        while value >= base and unit < 3:
            value, unit = value / base, unit + 1
        if (value == int(value) and value < base) or base == 1000:
            return f"{value:.4g} {names[unit]}"
    return f"{size:g} B"
