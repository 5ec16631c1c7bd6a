"""Curves in characters: they fit their place, run from the first to the last point, and have no gaps."""

from __future__ import annotations

import math

import pytest

from ci_llm.core.text_curves import draw_curve


@pytest.mark.fast_cases(31)
@pytest.mark.parametrize("width", [14, 35, 160])
@pytest.mark.parametrize("height", [2, 3, 12])
@pytest.mark.parametrize("count", [2, 7, 2000])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_curve_fills_its_place_and_no_more(width: int, height: int, count: int, ascii_only: bool) -> None:
    drawn = draw_curve([(x, 3 * math.exp(-x / count)) for x in range(count)], width, height, ascii_only=ascii_only)
    assert len(drawn) == height
    assert max(map(len, drawn)) == width
    columns = [{row[x : x + 1] or " " for row in drawn} - {" "} for x in range(8, width)]
    assert all(columns), "a gap"
    assert all(row.isascii() for row in drawn) == ascii_only


def test_the_highest_and_the_lowest_value_stand_at_the_left() -> None:
    falling = draw_curve([(0, 2.5), (10, 0.25)], 20, 4, ascii_only=True)
    assert falling[0].split() == ["2.5", "***"] or falling[0].startswith("    2.5 *")
    assert falling[-1].startswith("   0.25 ")
    assert falling[-1].endswith("*")
    rising = draw_curve([(0, 0.25), (10, 2.5)], 20, 4, ascii_only=True)
    assert rising[0].endswith("*")
    assert rising[-1].startswith("   0.25 *")


def test_a_steep_fall_is_one_line() -> None:
    drawn = draw_curve([(0, 1.0), (1, 1.0), (2, 0.0), (3, 0.0)], 12, 5, ascii_only=True)
    assert all("*" in row for row in drawn)


def test_a_level_curve_is_a_level_line() -> None:
    drawn = draw_curve([(0, 1.0), (5, 1.0)], 12, 3, ascii_only=True)
    assert [row.count("*") for row in drawn] == [4, 0, 0]


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, math.nan), (2, 1.0)], [(3, 1.0), (3, 2.0)]], ids=str)
def test_without_two_points_there_is_no_curve(points: list[tuple[float, float]]) -> None:
    assert draw_curve(points, 40, 4) == []


def test_values_that_are_not_finite_are_left_out() -> None:
    points = [(0, 1.0), (1, math.nan), (2, math.inf), (3, 0.5)]
    assert draw_curve(points, 40, 4) == draw_curve([(0, 1.0), (3, 0.5)], 40, 4)
