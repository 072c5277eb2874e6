"""Charts: what is drawn is what was given."""

from __future__ import annotations

import html
import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from altup.studies.charts import (
    HEIGHT,
    TOP,
    Bar,
    Point,
    Series,
    bar_chart,
    line_chart,
    scatter_chart,
    spread,
    ticks,
)

numbers = st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-6)


def svg_of(chart: str) -> ET.Element:
    found = re.search(r"<svg.*</svg>", chart, re.DOTALL)
    assert found
    return ET.fromstring(found[0])


@given(numbers, numbers)
def test_ticks_are_round_and_enclose(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high)
    room = 1e-6 * max(high - low, abs(high), 1e-9)
    assert found[0] <= low + room
    assert found[-1] >= high - room
    assert len(found) <= 12
    if high - low > 1e-3 * abs(high):
        step = found[1] - found[0]
        digits = float(f"{step:.3e}".split("e")[0])
        assert digits in (1, 2, 2.5, 5)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_names_never_overlap(places: list[float]) -> None:
    moved = spread(places, 19, 0, 100)
    ordered = sorted(moved)
    assert all(b - a >= 19 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert all(
        moved[i] <= moved[j] for i in range(len(places)) for j in range(len(places)) if places[i] < places[j]
    )
    assert min(moved) >= -1e-9
    assert max(moved) <= 100 + 1e-9


def test_a_place_with_room_is_kept() -> None:
    assert spread([10, 80, 40], 19, 0, 100) == [10, 80, 40]


def test_a_line_goes_through_its_points() -> None:
    """Linear in both axes: equal steps give equal distances, higher values stand higher."""
    chart = svg_of(line_chart([Series("a", [(0, 1), (10, 2), (20, 3), (40, 1)], 0)], x_label="x", y_label="y"))
    path = next(e for e in chart.iter() if e.get("class") == "line c0").get("d") or ""
    points = [tuple(map(float, p.split())) for p in path.removeprefix("M").split("L")]
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) == pytest.approx((x3 - x2) / 2, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2
    assert y3 == y0
    ticks_drawn = {
        e.text: float(e.get("y", "")) - 5 for e in chart.iter() if e.get("text-anchor") == "end" and e.text
    }
    assert ticks_drawn["2.00"] == pytest.approx(y1, abs=0.2)


def test_a_bar_stands_around_its_point_and_fits_into_the_chart() -> None:
    series = Series("a", [(1, 1.0), (2, 2.0), (3, 3.0)], 1, errors=[0.5, 0.0, 2.0])
    chart = svg_of(line_chart([series], x_label="x", y_label="y"))
    path = next(e for e in chart.iter() if e.get("class") == "line c1").get("d") or ""
    points = [tuple(map(float, p.split())) for p in path.removeprefix("M").split("L")]
    bars = [
        [float(e.get(n, "")) for n in ("x1", "y1", "y2")] for e in chart.iter() if e.get("class") == "error c1"
    ]
    unit = points[0][1] - points[1][1]
    assert len(bars) == 2
    for (x, y), (across, low, high), error in zip((points[0], points[2]), bars, (0.5, 2.0), strict=True):
        assert (across, low - y, y - high) == pytest.approx((x, error * unit, error * unit), abs=0.2)
        assert TOP <= high < low <= HEIGHT


def test_hover_data_is_the_data() -> None:
    chart = line_chart([Series("a & b", [(1, 0.5), (2, 0.25)], 3)], x_label="step", y_label="loss")
    data = json.loads(html.unescape(re.search('data-hover="(.*?)"', chart)[1]))  # type: ignore[index]
    assert data["series"][0]["name"] == "a & b"
    assert data["series"][0]["colour"] == 3
    assert [p[2:] for p in data["series"][0]["points"]] == [["1", "0.50"], ["2", "0.25"]]


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0, 0)],
        [(5, 2.5)],
        [(1, 3.0), (2, 3.0)],
        [(1, -1e-9), (2, 1e-9)],
        [(1, 1e12), (2, -1e12)],
        [(1, 1.3395), (2, 1.3395 + 2e-16)],
    ],
)
def test_any_data_gives_a_drawing(points: list[tuple[float, float]]) -> None:
    chart = line_chart([Series("a", points, 0)], x_label="x", y_label="y")
    svg_of(chart)
    assert "nan" not in chart
    assert "inf" not in chart


def test_bars_are_as_long_as_their_values() -> None:
    svg = svg_of(bar_chart([Bar("a", 40, "40", 0), Bar("b", 20, "20", 1)], reference=10))
    widths = [float(e.get("width", "")) for e in svg.iter() if e.tag == "rect"]
    assert [w / widths[1] for w in widths] == pytest.approx([2, 1], abs=0.01)
    lines = [float(e.get("x1", "")) for e in svg.iter() if e.get("class") == "reference"]
    assert lines == pytest.approx([widths[1] / 2] * 2, abs=0.1)


def test_points_stand_where_their_values_are() -> None:
    points = [Point("a", 0.5, 10, 0, error=2), Point("b & c", 1.0, 20, 1), Point("d", 1.5, 15, 2)]
    chart = scatter_chart(points, x_label="speed", y_label="score", line=[(1.5, 15), (0.5, 10)], line_name="dense")
    svg = svg_of(chart)
    drawn = [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in svg.iter() if e.tag == "circle"]
    (xa, ya), (xb, yb), (xd, yd) = drawn
    assert xb - xa == pytest.approx(xd - xb, abs=0.2)
    assert yd == pytest.approx((ya + yb) / 2, abs=0.2)
    assert yb < ya
    bar = next(e for e in svg.iter() if e.get("class") == "error c0")
    assert float(bar.get("y1", "")) - float(bar.get("y2", "")) == pytest.approx(0.4 * (ya - yb), abs=0.2)
    line = next(e for e in svg.iter() if "frontier" in e.get("class", "")).get("d")
    assert line == f"M{xa} {ya}L{xd} {yd}"
    data = json.loads(html.unescape(re.search('data-points="(.*?)"', chart)[1]))  # type: ignore[index]
    assert [(p["name"], p["rows"][0][1], p["rows"][1][1]) for p in data] == [
        ("a", "0.50", "10.00 ± 2.00"), ("b & c", "1.00", "20.00"), ("d", "1.50", "15.00"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "points", [[], [(1.0, 1.0)], [(0.981, 3.0), (1.0, 3.0)], [(0.9999, 1e-4), (1.0001, 2e-4)]]
)
def test_ticks_of_points_can_be_told_apart(points: list[tuple[float, float]]) -> None:
    chart = svg_of(scatter_chart([Point("p", x, y, 0) for x, y in points], x_label="x", y_label="y"))
    for anchor in ("middle", "end"):
        ticks_drawn = [e.text for e in chart.iter() if e.get("class") == "tick" and e.get("text-anchor") == anchor]
        assert len(ticks_drawn) == len(set(ticks_drawn)) >= 1


@pytest.mark.parametrize("draw", ["points", "line"])
@pytest.mark.parametrize("span", [(0.86, 1.0), (12.5, 13.7), (4.9501, 4.9522), (12.5, 12.5)])
def test_ticks_stand_where_their_numbers_are(draw: str, span: tuple[float, float]) -> None:
    """A tick at 0.875 that says 0.88 would put every value beside it in the wrong place."""
    low, high = span
    if draw == "points":
        points = [Point("low", 0.0, low, 0), Point("high", 1.0, high, 1)]
        chart = svg_of(scatter_chart(points, x_label="x", y_label="y"))
    else:
        chart = svg_of(line_chart([Series("a", [(0, low), (9, high)], 0)], x_label="x", y_label="y"))
    marks = [e for e in chart.iter() if e.get("class") == "tick" and e.get("text-anchor") == "end"]
    values, heights = [float(e.text or "") for e in marks], [float(e.get("y", "")) for e in marks]
    steps = [b - a for a, b in itertools.pairwise(values)]
    gaps = [a - b for a, b in itertools.pairwise(heights)]
    assert len(marks) >= 3
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-6)
    assert gaps == pytest.approx([gaps[0]] * len(gaps), abs=0.3)


def test_names_of_points_stay_clear_of_the_axis() -> None:
    points = [Point("a", 0.2, 1.0, 0), Point("b", 0.9, 1.0, 1), Point("c", 0.5, 2.0, 2)]
    chart = svg_of(scatter_chart(points, x_label="x", y_label="y"))
    bottom = max(float(e.get("y2", "0")) for e in chart.iter() if e.get("class") == "rule")
    names = [e for e in chart.iter() if (e.get("class") or "").startswith("name")]
    assert all(float(e.get("y", "")) <= bottom - 4 for e in names)


def test_names_of_points_cover_neither_points_nor_each_other() -> None:
    """Three models at three times, whose seeds end close together; a name has some 8 × 14 pixels a letter."""
    ends = {
        "dense": (44.0, [4.123, 4.131, 4.118]),
        "Recycled": (46.5, [4.124, 4.112, 4.129]),
        "AltUp": (55.0, [4.09]),
    }
    points = [Point(f"{name}, seed {i}", x, y, 0) for name, (x, ys) in ends.items() for i, y in enumerate(ys)]
    chart = svg_of(scatter_chart(points, x_label="x", y_label="y"))
    boxes = []
    for e in chart.iter():
        if (e.get("class") or "").startswith("name"):
            width, start = 8 * len(e.text or ""), float(e.get("x", ""))
            left = start - width if e.get("text-anchor") == "end" else start
            boxes.append((left, left + width, float(e.get("y", "")) - 12, float(e.get("y", "")) + 2))
        if e.tag == "circle":
            x, y = float(e.get("cx", "")), float(e.get("cy", ""))
            boxes.append((x - 5, x + 5, y - 5, y + 5))
    assert len(boxes) == 2 * len(points)
    for one, other in itertools.combinations(boxes, 2):
        is_beside = one[1] <= other[0] or other[1] <= one[0]
        assert is_beside or one[3] <= other[2] or other[3] <= one[2], (one, other)


def test_steps_and_layers_have_whole_ticks() -> None:
    chart = svg_of(line_chart([Series("a", [(1, 1), (2, 2), (3, 1)], 0)], x_label="layer", y_label="y"))
    across = [e.text for e in chart.iter() if e.get("class") == "tick" and e.get("text-anchor") == "middle"]
    assert across == ["0", "1", "2", "3"]


def test_long_names_stay_inside_the_chart() -> None:
    name = "AltUp K=2 + experts"
    svg = svg_of(line_chart([Series(name, [(0, 1), (9, 2)], 0)], x_label="x", y_label="y"))
    start = next(float(e.get("x", "")) for e in svg.iter() if e.text == name)
    assert start + 7.5 * len(name) < 560
