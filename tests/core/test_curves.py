"""Curves in characters show what they are given, and fit their place."""

from __future__ import annotations

import math

import pytest

from ci_llm.core.curves import HEIGHT, draw_curves


def test_a_curve_falls_from_its_first_to_its_last_value() -> None:
    lines = draw_curves({"o": [(step, 10.0 - step) for step in range(1, 10)], "x": [(5, 2.0)]}, 60).splitlines()
    assert len(lines) == HEIGHT + 2
    assert lines[0] == "      9 ┤o"
    assert lines[HEIGHT - 1] == "      1 ┤        o"
    assert [line.index("o") for line in lines if "o" in line] == [*range(9, 18)]
    assert [line.index("x") for line in lines if "x" in line] == [13]
    assert lines[-1].split() == ["1", "9"]


@pytest.mark.parametrize("width", [20, 35, 160])
@pytest.mark.parametrize("height", [4, 5, 12])
@pytest.mark.parametrize("count", [2, 7, 2000])
def test_a_curve_fits_its_place(width: int, height: int, count: int) -> None:
    points = [(x, 3 * math.exp(-x / count)) for x in range(count)]
    lines = draw_curves({"o": points}, width, height).splitlines()
    assert len(lines) == height + 2
    assert max(map(len, lines)) <= width
    assert 2.8 < float(lines[0].split()[0]) <= 3, "a column shows a mean"
    assert lines[0].endswith("o")
    assert lines[height - 1].endswith("o")
