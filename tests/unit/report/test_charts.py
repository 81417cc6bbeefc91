"""Axes, markup and small charts."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.report.axes import Axis, log_ticks, short, tick_labels, ticks
from flexfloor.report.charts import Series, dot_chart, front, histogram, line_chart, pareto_chart, smoothed
from flexfloor.report.markup import Markup, escape, join, tag

NUMBERS = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


def test_what_is_not_markup_is_escaped() -> None:
    assert join("<a>", Markup("<b>")) == "&lt;a&gt;<b>"
    assert tag("p", "a&b", class_='x"y', hidden=True, id=None) == '<p class="x&quot;y" hidden>a&amp;b</p>'
    assert escape(escape("<")) == "&lt;"


@given(low=NUMBERS, width=st.floats(min_value=1e-6, max_value=1e6))
@settings(max_examples=60)
def test_ticks_are_few_even_and_inside(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-9 * max(1.0, abs(low)):
        return
    found = ticks(low, high, 6)
    assert 1 <= len(found) <= 8
    assert all(low - width * 1e-6 <= value <= high + width * 1e-6 for value in found)
    assert len(set(tick_labels(found))) == len(found)


def test_ticks_are_round() -> None:
    assert ticks(0.0, 30.0, 7) == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    assert tick_labels(ticks(0.95, 1.05, 5)) == ["0.950", "0.975", "1.000", "1.025", "1.050"]
    assert log_ticks(15.0, 3000.0, 8) == [20, 50, 100, 200, 500, 1000, 2000]
    assert ticks(3.0, 3.0) == [3.0]


def test_numbers_are_short() -> None:
    shown = [short(value) for value in (0.0117, 0.5, 3, 99.94, 1660.4, 12345, 2.5e6, math.nan)]
    assert shown == ["0.0117", "0.5", "3", "99.9", "1660", "12.3k", "2.5M", "-"]


def test_an_axis_maps_ends_to_ends() -> None:
    axis = Axis(low=1.0, high=100.0, start=0.0, end=50.0, is_log=True)
    assert [axis.at(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 25.0, 50.0])
    assert Axis(low=2.0, high=2.0, start=0.0, end=10.0).at(2.0) == 5.0
    with pytest.raises(ValueError, match="logarithmic axis from 0"):
        Axis(low=0.0, high=1.0, start=0.0, end=1.0, is_log=True)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12))
@settings(max_examples=60)
def test_the_front_is_what_nothing_dominates(points: list[tuple[float, float]]) -> None:
    def is_beaten(point: tuple[float, float]) -> bool:
        return any(p != point and p[0] >= point[0] and p[1] >= point[1] for p in points)

    assert front(points) == sorted({point for point in points if not is_beaten(point)})


def test_smoothing_keeps_a_line_and_its_length() -> None:
    assert smoothed([1.0, 2.0, 3.0, 4.0], 3) == [1.5, 2.0, 3.0, 3.5]


def test_a_histogram_counts_every_response_once() -> None:
    svg = ElementTree.fromstring(histogram("run", [1, 5, 5, 100, 100], [100], colour=0, x_range=(1.0, 100.0)))
    told = [title.text or "" for title in svg.iter("title")]
    counts = [int(text.rsplit(": ", 1)[1]) for text in told if " to " in text]
    assert sum(counts) == 5
    assert [text for text in told if "truncated" in text] == ["1 of 2 truncated"]


def test_charts_draw_what_they_get_and_say_when_there_is_nothing() -> None:
    series = [
        Series(name="a", colour=0, points=[(0.0, 1.0), (1.0, 2.0)]),
        Series(name="b", colour=1, points=[]),
    ]
    assert line_chart("t", series, x_label="x").count('class="series') == 1
    assert dot_chart("t", series, x_label="x", y_label="y").count("<circle") == 2
    assert "no predictions on record" in dot_chart("t", [], x_label="x", y_label="y")
    assert "no numbers on record" in pareto_chart("t", series[1:], x_label="x", y_label="y")


def test_names_of_near_runs_are_pushed_apart() -> None:
    series = [Series(name=f"run {i}", colour=i, points=[(1.0, 1.0 + 0.001 * i)]) for i in range(4)]
    svg = ElementTree.fromstring(pareto_chart("t", series, x_label="x", y_label="y"))
    heights = sorted(
        float(text.attrib["y"]) for text in svg.iter("text") if (text.text or "").startswith("run ")
    )
    assert len(heights) == 4
    assert min(high - low for low, high in pairwise(heights)) >= 12
