"""The time line of the report: a row for each link, shared port and reducing rank; colour says the chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence

from taccl.synth.cost import us
from taccl.synth.export.html_style import HUES
from taccl.synth.export.html_text import escape, time_text
from taccl.synth.export.timeline import WORK, Row, Span

MAX_BARS = 6000
WIDTH = 940  # of the drawing; the names stand left of it
NAMES = 190
ROW = 16
LABELLED = 1000  # up to so many bars, those that are wide enough carry their chunk


def timeline_svg(spans: Sequence[Span], rows: Sequence[Row], end_fs: int) -> str:
    """The drawing and its legend. Where there are too many bars the busiest rows are kept, in order."""
    if not rows or us(end_fs) <= 0:
        return '<p class="note">Nothing is sent.</p>'
    kept = _busiest(rows)
    scale = WIDTH / end_fs
    height = ROW * len(kept) + 30
    labels = sum(len(row.held) for row in kept) <= LABELLED
    parts = [
        f'<div class="scroll"><svg width="{NAMES + WIDTH + 20}" height="{height}" '
        f'viewBox="0 0 {NAMES + WIDTH + 20} {height}" role="img"><title>time line</title>'
    ]
    for tick in _ticks(us(end_fs)):
        x = NAMES + tick * 10**9 * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height - 12}"/>'
            f'<text class="axis" x="{x:.1f}" y="11" text-anchor="middle">{time_text(tick)}</text>'
        )
    for number, row in enumerate(kept):
        y = 20 + number * ROW
        parts.append(
            f'<text x="{NAMES - 8}" y="{y + 10}" text-anchor="end">{escape(_shortened(row.name))}</text>'
        )
        parts.append(f'<g transform="translate({NAMES},{y})">')
        for index, until_fs in row.held:
            parts.append(_bar(spans[index], until_fs, scale, labels))
        parts.append("</g>")
    parts.append("</svg></div>")
    parts.append(f'<p class="note">{_legend(spans, rows, kept)}</p>')
    return "".join(parts)


def _busiest(rows: Sequence[Row]) -> list[Row]:
    kept: set[int] = set()
    bars = 0
    for number in sorted(range(len(rows)), key=lambda n: (-rows[n].busy_fs, n)):
        bars += len(rows[number].held)
        if bars > MAX_BARS and kept:
            break
        kept.add(number)
    return [row for number, row in enumerate(rows) if number in kept]


def _shortened(name: str) -> str:
    return name if len(name) <= 30 else name[:28] + "…"


def _ticks(end_us: float) -> list[float]:
    """Round times, some five of them."""
    step = 10 ** math.floor(math.log10(end_us / 4))
    step = next(step * f for f in (1, 2, 5, 10) if end_us / (step * f) <= 8)
    return [i * step for i in range(int(end_us / step) + 1)]


def _bar(span: Span, until_fs: int, scale: float, labelled: bool) -> str:
    x, width = span.start_fs * scale, max(0.4, (until_fs - span.start_fs) * scale)
    colour = f"c{span.chunks[0] % HUES}" if span.chunks else f"c{span.src % HUES}"
    if span.kind in WORK:
        colour = "x"
    tail = ""
    if span.end_fs > until_fs:
        tail = (
            f'<rect class="tail {colour}" x="{x + width:.2f}" y="4" width="{(span.end_fs - until_fs) * scale:.2f}" '
            f'height="{ROW - 9}"/>'
        )
    text = ""
    if labelled and span.chunks and width >= 7 * len(_chunks(span)):
        text = f'<text class="in" x="{x + 3:.1f}" y="10">{_chunks(span)}</text>'
    return (
        f'{tail}<rect class="bar {colour}" x="{x:.2f}" y="1" width="{width:.2f}" height="{ROW - 3}">'
        f"<title>{_tip(span)}</title></rect>{text}"
    )


def _chunks(span: Span) -> str:
    return str(span.chunks[0]) if len(span.chunks) == 1 else f"{span.chunks[0]}+{len(span.chunks) - 1}"


def _tip(span: Span) -> str:
    what = f"rank {span.src} {span.kind}s" if span.kind in WORK else f"{span.src}→{span.dst}"
    if span.chunks:
        listed = ", ".join(map(str, span.chunks[:8])) + (" …" if len(span.chunks) > 8 else "")
        what += f" chunk{'s' * (len(span.chunks) > 1)} {listed}"
    else:
        what += f" {span.count} chunk{'s' * (span.count > 1)}" + (f", {span.place}" if span.place else "")
    what += ", coded" if span.coded else ""
    return escape(f"{what}: {time_text(us(span.start_fs))} to {time_text(us(span.end_fs))}")


def _legend(spans: Sequence[Span], rows: Sequence[Row], kept: Sequence[Row]) -> str:
    known = any(span.chunks for span in spans)
    text = f"Colour: {'first chunk of the message' if known else 'sender'}. "
    text += "Solid: the link or port is held; faint: on its way until arrival; grey: "
    text += "reductions, coding and decoding. " if any(span.coded for span in spans) else "reductions. "
    if len(kept) < len(rows):
        text += f"The {len(kept)} busiest of {len(rows)} rows. "
    return text + "Hover for details."
