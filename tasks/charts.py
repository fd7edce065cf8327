"""Line charts as inline SVG: no script, no font, no network; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 26
_MANY = 40
PALETTE_SIZE = 8
"""Colours of lines: classes `s1` to `s8` of `report_style.html.j2`."""

Series = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scale:
    """A linear map from values to pixels, with the ticks between its ends."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """Pixel position of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(title: str, series: Mapping[str, Series]) -> str:
    """One chart; non-finite points are left out, long series get a running mean over the faint raw line.

    Args:
        title: for screen readers.
        series: name -> points (x, y), x ascending.

    Returns:
        An `<svg>` element, or an empty string if there is nothing to draw.
    """
    clean = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    drawn = {name: points for name, points in clean.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    x_scale = make_scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_scale = make_scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [_grid(x_scale, y_scale)]
    for index, points in enumerate(drawn.values()):
        parts.append(_line(points, index % PALETTE_SIZE + 1, x_scale, y_scale))
    label = escape(f"{title}: {', '.join(drawn)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def make_scale(low: float, high: float, start: float, end: float, wanted: int = 4) -> Scale:
    """A scale over [low, high] with about `wanted` round ticks; a single value gets room around it."""
    if high - low < 1e-12 * max(1.0, abs(high)):
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    raw = (high - low) / wanted
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return Scale(low, high, start, end, tuple(n * step for n in range(first, last + 1)))


def tick_label(value: float, scale: Scale) -> str:
    """A tick's text with as many decimals as neighbouring ticks need to differ."""
    step = scale.ticks[1] - scale.ticks[0] if len(scale.ticks) > 1 else abs(scale.high - scale.low)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.3g}" if decimals > 5 or abs(value) >= 1e5 else f"{value:.{decimals}f}"


def running_mean(points: Series, window: int) -> list[tuple[float, float]]:
    """Mean of the last `window` values at every point."""
    means = []
    for index, (x, _) in enumerate(points):
        recent = [y for _, y in points[max(0, index - window + 1) : index + 1]]
        means.append((x, sum(recent) / len(recent)))
    return means


def _line(points: Series, colour: int, x_scale: Scale, y_scale: Scale) -> str:
    if len(points) == 1:
        x, y = points[0]
        return f'<circle class="s{colour}" cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3"/>'
    if len(points) <= _MANY:
        return _polyline(points, f"s{colour}", x_scale, y_scale)
    smooth = running_mean(points, max(5, len(points) // 20))
    return _polyline(points, f"s{colour} raw", x_scale, y_scale) + _polyline(
        smooth, f"s{colour}", x_scale, y_scale
    )


def _polyline(points: Series, css: str, x_scale: Scale, y_scale: Scale) -> str:
    path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in points)
    return f'<polyline class="{css}" points="{path}"/>'


def _grid(x_scale: Scale, y_scale: Scale) -> str:
    parts = []
    for value in y_scale.ticks:
        y = y_scale(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = tick_label(value, y_scale)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value in x_scale.ticks:
        x = x_scale(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:.6g}</text>')
    return "".join(parts)
