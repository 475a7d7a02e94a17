"""A small chart of times over sizes, both logarithmic: predicted, measured, and the library's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from taccl.synth.export.html_text import size_text, time_text

WIDTH, HEIGHT = 560, 240
LEFT, BOTTOM, TOP, RIGHT = 64, 28, 10, 14
SERIES = ("predicted", "measured", "MPI's own")


def comparison_chart(points: Sequence[tuple[float | None, ...]]) -> str:
    """points: (size in bytes, predicted, measured, reference in us); what is None or not above 0 is left out."""
    series: list[list[tuple[float, float]]] = [[] for _ in SERIES]
    for size, *found in points:
        for line, time in zip(series, found, strict=True):
            if size is not None and size > 0 and time is not None and time > 0:
                line.append((size, time))
    every = [point for line in series for point in line]
    if not every:
        return ""
    sizes, times = sorted({size for size, _ in every}), [time for _, time in every]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)
    first, last = math.log10(sizes[0]), math.log10(sizes[-1])

    def x_of(size: float) -> float:
        share = 0.5 if first == last else (math.log10(size) - first) / (last - first)
        return LEFT + 14 + share * (WIDTH - LEFT - RIGHT - 28)

    def y_of(time: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(time) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg width="{WIDTH}" viewBox="0 0 {WIDTH} {HEIGHT + 20}" role="img"><title>time over size</title>'
    ]
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{time_text(10.0**power)}</text>'
        )
    step = max(1, math.ceil(len(sizes) / 8))
    for size in sizes[::step]:
        parts.append(
            f'<text class="axis" x="{x_of(size):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{size_text(size)}</text>'
        )
    for number, (name, line) in enumerate(zip(SERIES, series, strict=True)):
        if not line:
            continue
        marks = [(x_of(size), y_of(time)) for size, time in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in marks)
        parts.append(f'<polyline class="s{number}" points="{path}"/>')
        parts += [f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in marks]
        x = LEFT + 14 + number * 120
        parts.append(
            f'<rect class="s{number}" x="{x}" y="{HEIGHT + 4}" width="10" height="10"/>'
            f'<text x="{x + 15}" y="{HEIGHT + 13}">{name}</text>'
        )
    return "".join(parts) + "</svg>"
