"""Line charts as inline SVG. Colours come from classes, so that a page's theme decides them."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Literal

import attrs

WIDTH, HEIGHT = 400, 215
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 38
TICKS = 5

Point = tuple[float, float]


@attrs.frozen
class Axis:
    """From numbers to places.

    Attributes:
        low: the number at its start.
        high: the number at its end.
        label: what it shows.
        show: a number as text.
        scale: `"linear"` or `"log"`.
    """

    low: float
    high: float
    label: str
    show: Callable[[float], str]
    scale: Literal["linear", "log"] = "linear"

    def place(self, value: float) -> float:
        """Where `value` is, from 0 to 1."""
        if self.scale == "log":
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers along it."""
        return _log_ticks(self.low, self.high) if self.scale == "log" else self._linear_ticks()

    def _linear_ticks(self) -> list[float]:
        step = _round_step((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@attrs.frozen
class Line:
    """One line.

    Attributes:
        points: in order.
        style: classes of CSS.
        title: shown when pointed at.
    """

    points: Sequence[Point]
    style: str
    title: str


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, *, title: str) -> str:
    """An `<svg>` element with axes, grid and lines; the last line lies on top.

    Args:
        lines: what to draw.
        x: to the right.
        y: upwards.
        title: for those who cannot see it.
    """
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        f' aria-label="{escape(title)}">',
        *(_y_tick(y, value) for value in y.ticks()),
        *(_x_tick(x, value) for value in x.ticks()),
        f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">'
        f"{escape(x.label)}</text>",
        *(_polyline(line, x, y) for line in lines),
        "</svg>",
    ]
    return "".join(parts)


def _right(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _down(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _y_tick(axis: Axis, value: float) -> str:
    y = _down(axis, value)
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(axis.show(value))}</text>'
    )


def _x_tick(axis: Axis, value: float) -> str:
    x, base = _right(axis, value), HEIGHT - BOTTOM
    return (
        f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>'
        f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{escape(axis.show(value))}</text>'
    )


def _polyline(line: Line, x: Axis, y: Axis) -> str:
    points = " ".join(f"{_right(x, a):.1f},{_down(y, b):.1f}" for a, b in line.points)
    return (
        f'<polyline class="line {escape(line.style)}" points="{points}">'
        f"<title>{escape(line.title)}</title></polyline>"
    )


def _round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten, not below `about`."""
    if about <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or only the powers where these are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if high / low < 200 else (1,)
    candidates = (f * 10.0**power for power in range(first, last + 1) for f in factors)
    return [value for value in candidates if low * 0.999 <= value <= high * 1.001]
