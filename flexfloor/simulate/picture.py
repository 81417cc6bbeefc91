"""Tokens per occupied worker time against throughput, drawn as SVG. PURE."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 760, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 44, 52
_COLOURS = {"elastic": "#1f6feb", "static": "#8b949e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    label: str
    throughput: float
    """Against the static group, as `occupied`."""
    occupied: float
    is_elastic: bool


def pareto_svg(points: Sequence[Point], title: str) -> str:
    """A point a run; further right is faster, further up holds workers for less time a token."""
    x_ticks = _ticks([point.throughput for point in points])
    y_ticks = _ticks([point.occupied for point in points])
    scale = _Scale(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, size=15),
        _text(_WIDTH - _RIGHT, 24, "workers leave", anchor="end", colour=_COLOURS["elastic"]),
        _text(_WIDTH - _RIGHT - 92, 24, "nobody leaves", anchor="end", colour=_COLOURS["static"]),
        *[_line(scale.x(tick), _TOP, scale.x(tick), _HEIGHT - _BOTTOM) for tick in x_ticks],
        *[_line(_LEFT, scale.y(tick), _WIDTH - _RIGHT, scale.y(tick)) for tick in y_ticks],
        *[_text(scale.x(tick), _HEIGHT - _BOTTOM + 18, f"{tick:g}", anchor="middle") for tick in x_ticks],
        *[_text(_LEFT - 8, scale.y(tick) + 4, f"{tick:g}", anchor="end") for tick in y_ticks],
        _text(_WIDTH / 2, _HEIGHT - 12, "throughput, static group = 1", anchor="middle"),
        f'<g transform="translate(16 {_HEIGHT / 2}) rotate(-90)">'
        f"{_text(0, 0, 'tokens per occupied worker time, static group = 1', anchor='middle')}</g>",
        *_marks(points, scale),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Scale:
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / (self.high_y - self.low_y)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers around the values and 1, at a distance of 1, 2 or 5 times a power of ten."""
    low, high = min([*values, 1.0]), max([*values, 1.0])
    rough = max(high - low, 0.1) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    return [round(index * step, 10) for index in range(first, last + 1)]


def _marks(points: Sequence[Point], scale: _Scale) -> list[str]:
    marks: list[str] = []
    labels: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda one: (-one.occupied, one.label)):
        x, y = scale.x(point.throughput), scale.y(point.occupied)
        colour = _COLOURS["elastic" if point.is_elastic else "static"]
        # Labels of near points are pushed down, so that none hides another.
        label_y = y + 4
        while any(abs(label_y - other) < 13 and abs(x - near) < 180 for near, other in labels):
            label_y += 13
        labels.append((x, label_y))
        is_right = x > _WIDTH * 0.72
        marks.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>')
        offset, anchor = (-10, "end") if is_right else (10, "start")
        marks.append(_text(x + offset, label_y, point.label, anchor=anchor, colour=colour))
    return marks


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#e5e7eb"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#24292f", size: int = 12
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">'
        f"{html.escape(text)}</text>"
    )
