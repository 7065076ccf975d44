"""Geometry of the page's charts: values to SVG. Colours, fonts and line widths are the style sheet's, by class.

Invariants: all charts of a page have the same width and margins, so one x position means one moment in all of them; a
chart has at most :data:`MAX_POINTS` points of one line, the highest of each stretch among them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from .text import MIB, MINUS, tick

WIDTH, LEFT, RIGHT = 1040.0, 62.0, 10.0
MAX_POINTS = 1200
MIN_SPAN = 4.0 * MIB
"""The least that a close-up shows from top to bottom: the grain of allocators must not look like mountains."""

X = Callable[[float, int], float]
"""Seconds since the epoch, and the index of an event, to a horizontal position."""


def time_axis(start: float, end: float) -> X:
    """Positions by time."""
    scale = (WIDTH - LEFT - RIGHT) / max(end - start, 1e-3)
    return lambda at, index: LEFT + (at - start) * scale


def event_axis(count: int) -> X:
    """Positions by index: every event gets the same room."""
    scale = (WIDTH - LEFT - RIGHT) / max(count - 1, 1)
    return lambda at, index: LEFT + index * scale


@dataclass(frozen=True)
class Scale:
    """Vertical positions of values between ``low`` and ``high``."""

    low: float
    high: float
    top: float
    bottom: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)

    def ticks(self, count: int) -> list[float]:
        """Round values in MB (of 2^20), at most about ``count``."""
        step = nice((self.high - self.low) / MIB / count) * MIB
        first = ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, floor(self.high / step + 1e-9) + 1)]


def close_up(values: Sequence[float], top: float, bottom: float) -> Scale:
    """A scale around ``values``, not from zero."""
    low, high = min(values), max(values)
    room = max(MIN_SPAN - (high - low), 0.16 * (high - low)) / 2
    return Scale(max(0.0, low - room), high + room, top, bottom)


def nice(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, …, at or above ``value``."""
    power = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def thinned(values: Sequence[float], most: int = MAX_POINTS) -> list[int]:
    """Indices of at most ``most`` values: the first, the last, and the largest of each stretch between."""
    if len(values) <= most:
        return list(range(len(values)))
    edges = [1 + (len(values) - 2) * part // (most - 2) for part in range(most - 1)]
    kept = [max(range(a, b), key=values.__getitem__) for a, b in pairwise(edges) if b > a]
    return [0, *kept, len(values) - 1]


def line(points: Iterable[tuple[float, float]]) -> str:
    """The ``d`` of a path through ``points``."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def band(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    """The ``d`` of the area between two lines over the same positions."""
    return line([*upper, *reversed(lower)]) + "Z"


def path(d: str, kind: str) -> str:
    """An SVG path of class ``kind``."""
    return f'<path class="{kind}" d="{d}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """An SVG rectangle of class ``kind``."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}">{inner}</rect>'


def label(x: float, y: float, content: str, kind: str) -> str:
    """Text of class ``kind``."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def y_axis(scale: Scale, count: int = 6, *, sign: bool = False) -> str:
    """Grid lines and their values in MB."""
    parts = []
    for value in scale.ticks(count):
        y = scale(value)
        text = f"{value / MIB:{'+' if sign and value else ''},g}".replace("-", MINUS)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(label(LEFT - 8, y + 4, text, "tick end"))
    return "".join(parts)


def time_ticks(start: float, end: float, y: float) -> str:
    """Time since the start of the record, below a chart."""
    total = max(end - start, 1e-3)
    step = next((s for s in _TIME_STEPS if s >= total / 8), nice(total / 8))
    at = time_axis(start, end)
    count = floor(total / step + 1e-9)
    return "".join(
        label(at(start + number * step, 0), y, tick(number * step) if number else "start", _anchor(number))
        for number in range(count + 1)
    )


def event_ticks(first: int, count: int, y: float) -> str:
    """Numbers of events, below a chart."""
    step = max(1, round(nice(count / 8)))
    at = event_axis(count)
    return "".join(
        label(
            at(0.0, index), y, f"event {first + index}" if not index else str(first + index), _anchor(index)
        )
        for index in range(0, count, step)
    )


def svg(name: str, height: float, inner: str, description: str, *, dense: bool = False) -> str:
    """The element around a chart; ``description`` is for those who cannot see it, ``dense`` calls for finer lines."""
    return (
        f'<svg class="chart{" dense" if dense else ""}" data-chart="{name}" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(description)}">'
        f'{inner}<line class="cross" visibility="hidden" y1="0" y2="{height:g}"/></svg>'
    )


def _anchor(position: int) -> str:
    return "tick" if position == 0 else "tick mid"


_TIME_STEPS = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    21600,
    43200,
    86400,
)
