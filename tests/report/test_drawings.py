"""Plots: round marks, gaps where a number is missing, no spike lost, and nothing outside the frame."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci_llm.report.page import BOTTOM, LEFT, RIGHT, TOP, lay_out, round_values, thinned

ENDS = st.floats(-1e9, 1e9).flatmap(
    lambda low: st.floats(1e-9, 1e9).map(lambda length: (low, low + max(length, 1e-6 * abs(low))))
)


@given(ENDS, st.booleans())
def test_marks_are_round_few_and_inside(ends: tuple[float, float], whole: bool) -> None:
    low, high = ends[0], max(ends[1], ends[0] + whole)
    values = round_values(low, high, least=float(whole))
    slack = 1e-6 * (high - low)
    assert len(values) <= 6
    assert all(low - slack <= value <= high + slack for value in values)
    assert all(value == round(value) for value in values) if whole else len(values) >= 2
    steps = [b - a for a, b in pairwise(values)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3) for step in steps)


@pytest.mark.parametrize(
    ("values", "labels"),
    [([0.37, 0.44], "0.38 0.4 0.42 0.44"), ([0, 12_345], "0 5000 10000"), ([1e-5, 3e-4], "0 0.0001 0.0002 0.0003")],
)
def test_labels_are_short(values: list[float], labels: str) -> None:
    plot = lay_out("a", {"loss": [*enumerate(values)]})
    assert " ".join(label for _, label in plot.rows) == labels


@given(st.lists(st.floats(-1e38, 1e38) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=5))
def test_all_that_is_finite_lies_in_the_frame(values: list[float]) -> None:
    values = [value for value in values if not 0 < abs(value) < 1e-38] or [0.0]
    [(_, _, path)] = lay_out("a", {"loss": [*enumerate(values)]}).paths
    places = [tuple(map(float, place)) for place in re.findall(r"[ML](\S+) ([\d.]+)", path)]
    assert len(places) == sum(map(math.isfinite, values))
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in places)


def test_a_number_that_is_missing_is_a_gap_and_more_is_above() -> None:
    points = [(0, 0.1), (1, 0.2), (2, math.nan), (3, 0.3), (4, math.inf), (5, 0.1), (6, 0.1)]
    [(name, colour, path)] = lay_out("a", {"crowd": points}).paths
    assert (name, colour, path.count("M"), path.count("L")) == ("crowd", "crowd", 3, 2)
    assert "nan" not in path
    assert "inf" not in path
    first, second = re.findall(r"[ML]\S+ ([\d.]+)", path)[:2]
    assert float(first) > float(second)


def test_agents_beyond_the_colours_share_an_entry_and_a_single_line_has_none() -> None:
    curves = {**{f"agent{k}": [(0, float(k)), (1, 0.0)] for k in range(9)}, "crowd": [(0, 1.0), (1, 2.0)]}
    assert lay_out("a", curves).legend == [("9 agents", "agent0"), ("crowd", "crowd")]
    assert lay_out("a", {"agent0": curves["agent0"]}).legend == []
    assert lay_out("a", curves, dotted=[0.5, 7]).dotted == [(LEFT + RIGHT) / 2], "only those inside"


def test_thinning_a_curve_keeps_its_ends_of_range() -> None:
    points = [(step, 1.0 + step % 7) for step in range(10_000)]
    points[5000] = (5000, 99.0)
    points[6000] = (6000, float("nan"))
    kept = thinned(points)
    assert len(kept) <= 420
    assert (5000, 99.0) in kept
    assert kept == sorted(kept)
    assert thinned(points[:100]) == points[:100]
