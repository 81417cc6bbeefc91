"""Small charts as SVG text: lines, dots, bars. Colours are classes `c0` to `c7` of the page. PURE."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexfloor.report.axes import Axis, padded, short, tick_labels
from flexfloor.report.markup import Markup, Part, join, number, tag

NUM_COLOURS = 8
WIDTH, HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 36, 44
_SMOOTH_FROM_POINTS = 40
_NAME_CHARS = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one run."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """The two axes of a chart."""

    x: Axis
    y: Axis

    @classmethod
    def over(
        cls, xs: tuple[float, float], ys: tuple[float, float], *, is_log: bool = False, log_x: bool = False
    ) -> "Plane":
        return cls(
            x=Axis(low=xs[0], high=xs[1], start=_LEFT, end=WIDTH - _RIGHT, is_log=is_log or log_x),
            y=Axis(low=ys[0], high=ys[1], start=HEIGHT - _BOTTOM, end=_TOP, is_log=is_log),
        )

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.x.at(point[0]), self.y.at(point[1])


def line_chart(title: str, series: Sequence[Series], *, x_label: str, floor: float | None = None) -> Markup:
    """A line a run; a long one is smoothed over the original in pale."""
    shown = [one for one in series if one.points]
    if not shown:
        return empty_chart(title, "no numbers on record")
    xs = [x for one in shown for x, _ in one.points]
    ys = [y for one in shown for _, y in one.points]
    plane = Plane.over((min(xs), max(xs)), padded(ys, floor=floor))
    lines = [part for one in shown for part in _line(plane, one)]
    return _chart(title, plane, lines, x_label=x_label, has_whole_x=True)


def dot_chart(
    title: str, series: Sequence[Series], *, x_label: str, y_label: str, is_log: bool = False
) -> Markup:
    """Dots on two axes of one range, with the diagonal where both are equal."""
    values = [value for one in series for point in one.points for value in point]
    values = [value for value in values if value > 0] if is_log else values
    if not values:
        return empty_chart(title, "no predictions on record")
    low, high = (min(values) / 1.2, max(values) * 1.2) if is_log else padded(values, floor=0.0)
    plane = Plane.over((low, high), (low, high), is_log=is_log)
    diagonal = _path("diagonal", [plane.at((low, low)), plane.at((high, high))])
    dots = [_dot(plane, point, one, _radius(one)) for one in series for point in one.points]
    return _chart(title, plane, [diagonal, *dots], x_label=x_label, y_label=y_label)


def pareto_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str) -> Markup:
    """A labelled dot a run and the front: the runs that no other beats on both axes."""
    shown = [one for one in series if one.points]
    if not shown:
        return empty_chart(title, "no numbers on record")
    points = [one.points[0] for one in shown]
    plane = Plane.over(*(_around_one([point[axis] for point in points]) for axis in (0, 1)))
    parts = [
        _path("guide", [(plane.x.at(1.0), _TOP), (plane.x.at(1.0), HEIGHT - _BOTTOM)]),
        _path("guide", [(_LEFT, plane.y.at(1.0)), (WIDTH - _RIGHT, plane.y.at(1.0))]),
        _path("front", [plane.at(point) for point in front(points)]),
    ]
    parts += [_dot(plane, one.points[0], one, 5.5) for one in shown]
    parts += _labels(plane, shown)
    return _chart(title, plane, parts, x_label=x_label, y_label=y_label)


def histogram(
    title: str, lengths: Sequence[int], truncated: Sequence[int], *, colour: int, x_range: tuple[float, float]
) -> Markup:
    """Lengths on a logarithmic axis; those that were cut at their cap are marked."""
    if not lengths:
        return empty_chart(title, "no finished responses on record")
    low, high = x_range
    num_bins = 32
    counts, cut = _binned(lengths, low, high, num_bins), _binned(truncated, low, high, num_bins)
    plane = Plane.over((low, high), (0.0, max(counts) * 1.08), log_x=True)
    bars = []
    for index, (count, num_cut) in enumerate(zip(counts, cut, strict=True)):
        edges = [low * (high / low) ** ((index + step) / num_bins) for step in (0, 1)]
        bars.append(_bar(plane, "bar", edges, 0, count, f"{short(edges[0])} to {short(edges[1])}: {count}"))
        bars.append(_bar(plane, "bar-cut", edges, 0, num_cut, f"{num_cut} of {count} truncated"))
    group = tag("g", *bars, class_=f"c{colour}")
    return _chart(title, plane, [group], x_label="response tokens", y_label="responses")


def empty_chart(title: str, why: str) -> Markup:
    told = tag("text", why, x=WIDTH / 2, y=HEIGHT / 2, text_anchor="middle")
    return _svg(title, [_title(title), told])


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points the more of both the better: those that no other dominates, from left to right."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Mean over a centred window that is cut at the ends."""
    half = width // 2
    windows = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _binned(values: Sequence[int], low: float, high: float, num_bins: int) -> list[int]:
    counts = [0] * num_bins
    for value in values:
        share = math.log(max(value, low) / low) / math.log(high / low)
        counts[min(num_bins - 1, int(share * num_bins))] += 1
    return counts


def _line(plane: Plane, series: Series) -> list[Markup]:
    points = sorted(series.points)
    kind, parts = "series", []
    if len(points) >= _SMOOTH_FROM_POINTS:
        parts.append(_path(f"series pale c{series.colour}", [plane.at(point) for point in points]))
        values = smoothed([y for _, y in points], len(points) // 12 | 1)
        points = [(x, value) for (x, _), value in zip(points, values, strict=True)]
    parts.append(_path(f"{kind} c{series.colour}", [plane.at(point) for point in points]))
    if len(points) < _SMOOTH_FROM_POINTS:
        parts += [_dot(plane, point, series, _radius(series)) for point in points]
    return parts


def _radius(series: Series) -> float:
    """Later runs lie on earlier ones: smaller, so that equal values show as rings."""
    return max(1.5, 3.3 - 0.6 * series.colour)


def _dot(plane: Plane, point: tuple[float, float], series: Series, radius: float) -> Markup:
    x, y = plane.at(point)
    told = tag("title", f"{series.name}: {short(point[0])}, {short(point[1])}")
    return tag("circle", told, class_=f"dot c{series.colour}", cx=x, cy=y, r=radius)


def _around_one(values: Sequence[float]) -> tuple[float, float]:
    """A range in which a difference of less than a few percent looks as small as it is."""
    low, high = padded([*values, 0.95, 1.05], 0.2)
    return max(0.0, low), high


def _labels(plane: Plane, series: Sequence[Series]) -> list[Markup]:
    """Names beside the dots, pushed apart where they would lie on each other."""
    taken: list[tuple[float, float, float]] = []
    labels = []
    for one in sorted(series, key=lambda one: -one.points[0][1]):
        x, y = plane.at(one.points[0])
        name = one.name if len(one.name) <= _NAME_CHARS else f"...{one.name[3 - _NAME_CHARS :]}"
        width = 7.0 * len(name)
        is_left = x + 10 + width > WIDTH
        left = x - 10 - width if is_left else x + 10
        y += 4
        while any(abs(y - other) < 13 and left < end and start < left + width for start, end, other in taken):
            y += 13
        taken.append((left, left + width, y))
        anchor = "end" if is_left else None
        labels.append(
            tag("text", name, class_="strong halo", x=x - 10 if is_left else x + 10, y=y, text_anchor=anchor)
        )
    return labels


def _bar(plane: Plane, kind: str, edges: Sequence[float], low: int, high: int, told: str) -> Markup:
    if high <= low:
        return Markup("")
    left, right = plane.x.at(edges[0]), plane.x.at(edges[1])
    top, base = plane.y.at(high), plane.y.at(low)
    size = {"x": left + 0.5, "y": top, "width": max(0.5, right - left - 1), "height": base - top}
    return tag("rect", tag("title", told), class_=kind, **size)


def _chart(
    title: str,
    plane: Plane,
    parts: Sequence[Markup],
    *,
    x_label: str,
    y_label: str | None = None,
    has_whole_x: bool = False,
) -> Markup:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    frame: list[Markup] = []
    y_ticks, x_ticks = plane.y.ticks(6), plane.x.ticks(7)
    for value, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = plane.y.at(value)
        frame.append(_path("grid", [(_LEFT, y), (right, y)]))
        frame.append(tag("text", label, x=_LEFT - 8, y=y + 4, text_anchor="end"))
    if has_whole_x:
        x_ticks = [value for value in x_ticks if value == int(value)]
    for value, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        x = plane.x.at(value)
        frame.append(_path("axis", [(x, bottom), (x, bottom + 4)]))
        frame.append(tag("text", label, x=x, y=bottom + 18, text_anchor="middle"))
    frame.append(_path("axis", [(_LEFT, bottom), (right, bottom)]))
    frame.append(tag("text", x_label, x=(_LEFT + right) / 2, y=HEIGHT - 8, text_anchor="middle"))
    if y_label:
        frame.append(tag("text", y_label, class_="y-label", x=right, y=_TOP - 6, text_anchor="end"))
    return _svg(title, [_title(title), *frame, *parts])


def _path(kind: str, points: Sequence[tuple[float, float]]) -> Markup:
    text = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return Markup(f'<path class="{kind}" d="M{text}"/>') if points else Markup("")


def _title(title: str) -> Markup:
    return tag("text", title, class_="strong", x=4, y=16)


def _svg(title: str, parts: Sequence[Part]) -> Markup:
    size = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", join(*parts), class_="ff chart", viewBox=size, role="img", aria_label=title)
