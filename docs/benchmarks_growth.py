"""Time against ranks: print the group `growth` of docs/benchmarks_scale.py and draw it into docs/growth.svg.

`make bench-growth`. The slope of each series is that of the least-squares line through the logarithms: 1 is linear in
the number of ranks, 2 quadratic. An allgather of n ranks has n (n - 1) deliveries, all of which are checked.
"""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks_scale import GROUPS, HEAD, RUNS, lines

PLOT = Path(__file__).with_name("growth.svg")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 400, 60, 350, 20
COLOURS = ("#1f5fa8", "#c25b14", "#2d8a4e", "#7a3fa0")


def slope(points: list[tuple[int, float]]) -> float:
    """Of the least-squares line through (log ranks, log seconds)."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(s) for _, s in points]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


def drawn(series: dict[str, list[tuple[int, float]]]) -> str:
    """An SVG document with both axes logarithmic."""
    every = [point for points in series.values() for point in points]
    decades = range(
        math.floor(math.log10(min(s for _, s in every))), math.ceil(math.log10(max(s for _, s in every))) + 1
    )
    low, high = decades[0], decades[-1]
    first, last = (f(math.log2(n) for n, _ in every) for f in (min, max))

    def x(ranks: float) -> float:
        return LEFT + (math.log2(ranks) - first) / (last - first) * (WIDTH - LEFT - 30)

    def y(seconds: float) -> float:
        return BOTTOM - (math.log10(seconds) - low) / (high - low) * (BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in decades:
        place = y(10**power)
        parts.append(f'<path d="M{LEFT} {place:.1f}H{WIDTH - 30}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for ranks in sorted({n for n, _ in every}):
        parts.append(f'<text x="{x(ranks):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{ranks}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">ranks</text>')
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(n):.1f},{y(s):.1f}" for n, s in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(n):.1f}" cy="{y(s):.1f}" r="3" fill="{colour}"/>' for n, s in points]
        label = f"{name}: slope {slope(points):.2f}"
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 16 + 18 * number}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    print(HEAD)
    series: dict[str, list[tuple[int, float]]] = {}
    for line in lines(GROUPS["growth"], RUNS):
        print(line, flush=True)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        series.setdefault(cells[0].split(":")[0], []).append((int(cells[1]), float(cells[9])))
    for name, points in series.items():
        print(f"\n{name}: seconds grow like ranks to the power {slope(points):.2f}")
    PLOT.write_text(drawn(series))
