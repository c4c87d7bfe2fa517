"""Plots as inline SVG, for a page that loads nothing.

Each function returns one `<svg>`. Its colours are CSS classes of the page, so the same drawing
works in light and dark mode. The input is numbers and labels, and labels are escaped here. Tooltips
use `<title>`, which needs no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.clock import S
from holdfast.ledger.summary import duration_text

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 26
POINTS_MAX = 160

# Readable steps of a time axis, in seconds.
_STEPS_S = (
    *(1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800),
)


class PlotLine(NamedTuple):
    """Values over the plot's times. `style` is the CSS class of its colour."""

    label: str
    style: str
    values: Sequence[float]


class PlotColumn(NamedTuple):
    label: str
    value: float
    tooltip: str


def line_plot(
    seconds: Sequence[float],
    lines: Sequence[PlotLine],
    *,
    label: str,
    text: Callable[[float], str],
    stacked: bool = False,
) -> str:
    """Plot lines over time, each filled down to the line below if `stacked`, else to the axis."""
    keep = _thin_indexes(len(seconds))
    times = [seconds[at] for at in keep]
    curves = [[line.values[at] for at in keep] for line in lines]
    if stacked:
        for curve, below in zip(curves[1:], curves, strict=False):
            curve[:] = [a + b for a, b in zip(curve, below, strict=True)]
    start, end = times[0], max(times[-1], times[0] + 1e-3)
    top = _ticks(max((value for curve in curves for value in curve), default=0.0))

    def x(value: float) -> float:
        return LEFT + (value - start) / (end - start) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [_y_axis(top, y, text), _time_axis(start, end, x)]
    for at in reversed(range(len(lines))):
        upper = [f"{x(t):.1f},{y(v):.1f}" for t, v in zip(times, curves[at], strict=True)]
        floor = curves[at - 1] if stacked and at else [0.0] * len(times)
        lower = [f"{x(t):.1f},{y(v):.1f}" for t, v in zip(times, floor, strict=True)]
        style = lines[at].style
        parts.append(f'<polygon class="area {style}" points="{" ".join(upper + lower[::-1])}"/>')
        parts.append(f'<polyline class="line {style}" points="{" ".join(upper)}"/>')
    for at, t in enumerate(times):
        left = x(t) if at == 0 else (x(times[at - 1]) + x(t)) / 2
        right = x(t) if at == len(times) - 1 else (x(t) + x(times[at + 1])) / 2
        tooltip = ", ".join(f"{text(line.values[keep[at]])} {line.label}".strip() for line in lines)
        parts.append(
            f'<rect class="hover" x="{left:.1f}" y="{TOP}" width="{max(right - left, 1):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>'
            f"{html.escape(f'{duration_text(int(t * S))}: {tooltip}')}</title></rect>"
        )
    return _svg(label, "".join(parts), HEIGHT)


def histogram_plot(columns: Sequence[PlotColumn], *, label: str, style: str) -> str:
    """Plot vertical columns. Labels are written where they fit."""
    top = _ticks(max((column.value for column in columns), default=0.0), whole=True)
    slot = (WIDTH - LEFT - RIGHT) / max(len(columns), 1)
    every = max(1, math.ceil(len(columns) / max(1, int((WIDTH - LEFT - RIGHT) / 44))))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [_y_axis(top, y, count_text)]
    for at, column in enumerate(columns):
        left = LEFT + at * slot
        height = HEIGHT - BOTTOM - y(column.value)
        parts.append(
            f'<rect class="bar {style}" x="{left + 1.5:.1f}" y="{y(column.value):.1f}" rx="2" '
            f'width="{max(slot - 3, 1):.1f}" height="{height:.1f}">'
            f"<title>{html.escape(column.tooltip)}</title></rect>"
        )
        if at % every == 0:
            parts.append(_text(left, HEIGHT - BOTTOM + 16, column.label, "middle"))
    return _svg(label, "".join(parts), HEIGHT)


def bar_plot(columns: Sequence[PlotColumn], *, label: str, style: str) -> str:
    """Plot horizontal bars with their values."""
    row, left, right = 30, 112, 64
    height = TOP + row * max(len(columns), 1) + 8
    most = max((column.value for column in columns), default=0.0) or 1.0
    parts = []
    for at, column in enumerate(columns):
        top = TOP + at * row
        width = column.value / most * (WIDTH - left - right)
        parts.append(_text(left - 8, top + 15, column.label, "end"))
        parts.append(
            f'<rect class="bar {style}" x="{left}" y="{top + 2}" rx="2" '
            f'width="{max(width, 1):.1f}" height="{row - 12}">'
            f"<title>{html.escape(column.tooltip)}</title></rect>"
        )
        parts.append(_text(left + width + 6, top + 15, count_text(column.value), "start"))
    return _svg(label, "".join(parts), height)


# -- internals -----------------------------------------------------------------------------------


def _svg(label: str, body: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{html.escape(label, quote=True)}">{body}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _y_axis(
    ticks: Sequence[float], y: Callable[[float], float], text: Callable[[float], str]
) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" '
        f'y2="{y(tick):.1f}"/>' + _text(LEFT - 6, y(tick) + 4, text(tick), "end")
        for tick in ticks
    )


def _time_axis(start: float, end: float, x: Callable[[float], float]) -> str:
    step = next((step for step in _STEPS_S if (end - start) / step <= 6), (end - start) / 5)
    first = math.ceil(start / step - 1e-9)
    labels = []
    for n in range(first, int(end / step + 1e-9) + 1):
        at = n * step
        anchor = "end" if x(at) > WIDTH - RIGHT - 16 else "middle"
        labels.append(_text(x(at), HEIGHT - BOTTOM + 16, _run_time_text(at, step), anchor))
    return "".join(labels)


def _run_time_text(seconds: float, step: float) -> str:
    """Format a time of the run with the precision of the axis."""
    if step < 1 or seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"
    whole = round(seconds)
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes}:{rest:02d} min" if rest or step < 60 else f"{minutes} min"
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours < 48:
        return f"{hours}:{minutes:02d} h" if minutes or step < 3600 else f"{hours} h"
    return f"{hours / 24:.1f}".removesuffix(".0") + " d"


def _ticks(most: float, *, whole: bool = False) -> list[float]:
    """Return ticks from 0 to the next round number above `most`, in three to six steps."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 4
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * by for by in (1, 2, 2.5, 5, 10) if scale * by >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    return [step * n for n in range(math.ceil(most / step - 1e-9) + 1)]


def count_text(value: float) -> str:
    """Format a count briefly for an axis: `950`, `12k`, `2.5M`."""
    for by, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= by:
            scale = 1e3 if unit == "k" else by
            return f"{value / scale:.1f}".removesuffix(".0") + unit
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def _thin_indexes(count: int) -> list[int]:
    """Return at most POINTS_MAX evenly spaced indexes, including the first and the last."""
    if count <= POINTS_MAX:
        return list(range(count))
    return sorted({round(at * (count - 1) / (POINTS_MAX - 1)) for at in range(POINTS_MAX)})
