"""Plots: round marks, gaps where a number is missing, and nothing outside the frame."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci_llm.report.drawings import Axis, Plot, legend

ENDS = st.floats(-1e9, 1e9).flatmap(
    lambda low: st.floats(1e-9, 1e9).map(lambda length: (low, low + max(length, 1e-6 * abs(low))))
)


def plot(across: Axis | None = None, up: Axis | None = None) -> Plot:
    return Plot(400, 200, "a & b", across or Axis(0, 10, "steps"), up or Axis(0, 1, "<share>"))


@pytest.mark.slow
@given(ENDS, st.integers(3, 12), st.booleans())
def test_marks_are_round_few_and_inside(ends: tuple[float, float], most: int, whole: bool) -> None:
    low, high = ends[0], max(ends[1], ends[0] + whole)
    marks, _ = Axis(low, high, whole=whole).marks(most)
    values = list(marks)
    assert len(values) <= most + 1
    assert len({*marks.values()}) == len(values), "no two marks have one label"
    slack = 1e-6 * (high - low)
    assert all(low - slack <= value <= high + slack for value in values)
    if whole:
        assert all(value == round(value) for value in values)
    else:
        assert len(values) >= most // 3
    steps = [b - a for a, b in pairwise(values)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3) for step in steps)


@pytest.mark.parametrize(
    ("axis", "labels", "power"),
    [
        (Axis(0, 1), "0.0 0.2 0.4 0.6 0.8 1.0", ""),
        (Axis(-2, 3), "−2 −1 0 1 2 3", ""),
        (Axis(0.37, 0.44), "0.38 0.40 0.42 0.44", ""),
        (Axis(0, 12_345), "0 2,500 5,000 7,500 10,000", ""),
        (Axis(0, 3e-4), "0.0 0.5 1.0 1.5 2.0 2.5 3.0", "×10⁻⁴"),
        (Axis(0, 4e7), "0 1 2 3 4", "×10⁷"),
        (Axis(0.9, 2.2, whole=True), "1 2", ""),
        (Axis(0, 1, names={0.2: "one", 0.8: "two"}), "one two", ""),
    ],
)
def test_labels_are_short(axis: Axis, labels: str, power: str) -> None:
    marks, taken_out = axis.marks(6)
    assert (" ".join(marks.values()), taken_out) == (labels, power)


@given(st.lists(st.floats(-1e38, 1e38) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=5))
def test_an_axis_shows_all_that_is_finite(values: list[float]) -> None:
    values = [value for value in values if not 0 < abs(value) < 1e-38]
    axis = Axis.around(values)
    assert axis.low < axis.high
    shown = [value for value in values if math.isfinite(value)]
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in shown)


def test_a_number_that_is_missing_is_a_gap_and_one_alone_a_dot() -> None:
    drawn = plot()
    drawn.line([(0, 0.1), (1, 0.2), (2, math.nan), (3, 0.3), (4, math.inf), (5, 0.1), (6, 0.1)], "crowd", "loss")
    svg = drawn.svg()
    assert len(re.findall(r"<path d=", svg)) == 2
    assert svg.count("<circle") == 1
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_drawing_is_xml_with_titles_and_labels() -> None:
    drawn = plot()
    drawn.line([(0, 0), (10, 1)], "agent0", "<agent> & co")
    drawn.bar(2, 4, 0.5, "kind-training", "training: 2 s", thickness=0.2)
    drawn.mark(3)
    (svg, *parts) = ElementTree.fromstring(drawn.svg()).iter()
    assert svg.get("aria-label") == "a & b"
    assert [each.text for each in parts if each.tag == "title"] == ["<agent> & co", "training: 2 s"]
    assert {"steps", "<share>"} <= {each.text for each in parts if each.tag == "text"}
    (line,) = (each.get("d", "") for each in parts if "agent0" in each.get("style", ""))
    places = [tuple(map(float, place.split())) for place in line[1:].split("L")]
    assert all(0 <= x <= 400 and 0 <= y <= 200 for x, y in places)
    assert places[0][0] < places[1][0]
    assert places[0][1] > places[1][1], "more is above"


def test_a_legend_escapes_names() -> None:
    assert "&lt;b&gt;" in legend({"<b>": "agent0", "crowd": "crowd"})
