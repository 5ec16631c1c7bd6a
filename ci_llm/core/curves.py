"""Curves over steps, drawn in characters after an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

HEIGHT: Final = 11
LABEL: Final = 9  # columns of a number beside the curve

Points = Sequence[tuple[int, float]]


def draw_curves(curves: Mapping[str, Points], width: int, height: int = HEIGHT) -> str:
    """The curves over one another, each with a character of its own.

        1.53 ┤o
             │ o
             │  o
        0.80 ┤   oo
             │     ooo     x
        0.07 ┤        oooooooo
             └────────────────
              10           260

    A column shows the mean of the points that fall into it; `*` stands where several curves meet.

    Args:
        curves: (step, value) by the curve's character.
        width: columns in all, the numbers included.
        height: rows, the axis below them not included.

    Returns:
        lines; none if there are fewer than two different steps.
    """
    curves = {mark: [point for point in points if math.isfinite(point[1])] for mark, points in curves.items()}
    steps = [step for points in curves.values() for step, _ in points]
    columns = width - LABEL - 1
    if len({*steps}) < 2 or columns < 2:
        return ""
    first, last = min(steps), max(steps)
    columns = min(columns, last - first + 1)
    by_column = {mark: _means(points, first, last, columns) for mark, points in curves.items()}
    values = [value for means in by_column.values() for value in means.values()]
    low, high = min(values), max(values)
    canvas = [[" "] * columns for _ in range(height)]
    for mark, means in by_column.items():
        for column, value in means.items():
            row = round((high - value) / (high - low) * (height - 1)) if high > low else height // 2
            canvas[row][column] = mark if canvas[row][column] == " " else "*"
    return "\n".join([*_rows(canvas, low, high), *_axis(first, last, columns)])


def _means(points: Points, first: int, last: int, columns: int) -> dict[int, float]:
    """The mean of the points that fall into a column, by the column."""
    by_column: dict[int, list[float]] = {}
    for step, value in points:
        by_column.setdefault((step - first) * (columns - 1) // (last - first), []).append(value)
    return {column: sum(values) / len(values) for column, values in by_column.items()}


def _rows(canvas: Sequence[Sequence[str]], low: float, high: float) -> list[str]:
    lines, last = [], len(canvas) - 1
    for number, row in enumerate(canvas):
        value = f"{high - (high - low) * number / last:.3g} ┤" if number in (0, len(canvas) // 2, last) else "│"
        lines.append(f"{value:>{LABEL}}{''.join(row)}".rstrip())
    return lines


def _axis(first: int, last: int, columns: int) -> list[str]:
    return [f"{'└':>{LABEL}}{'─' * columns}", f"{'':{LABEL}}{first}{last:>{max(columns - len(str(first)), 1)}}"]
