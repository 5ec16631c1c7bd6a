"""Curves in characters: lines for a terminal, a file and a mail; braille dots for a panel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

HEIGHT: Final = 11
LABEL: Final = 9  # columns of a number beside the curve
LABELLED_ROWS: Final = (0, HEIGHT // 2, HEIGHT - 1)

Points = Sequence[tuple[int, float]]


def draw_curves(curves: Mapping[str, Points], width: int) -> str:
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
    drawn = {mark: _means(points, first, last, columns) for mark, points in curves.items()}
    values = [value for means in drawn.values() for value in means.values()]
    low, high = min(values), max(values)
    canvas = [[" "] * columns for _ in range(HEIGHT)]
    for mark, means in drawn.items():
        for column, value in means.items():
            row = round((high - value) / (high - low) * (HEIGHT - 1)) if high > low else HEIGHT // 2
            canvas[row][column] = mark if canvas[row][column] == " " else "*"
    return "\n".join([*_rows(canvas, low, high), *_axis(first, last, columns)])


def _means(points: Points, first: int, last: int, columns: int) -> dict[int, float]:
    """The mean of the points that fall into a column, by the column."""
    by_column: dict[int, list[float]] = {}
    for step, value in points:
        by_column.setdefault((step - first) * (columns - 1) // (last - first), []).append(value)
    return {column: sum(values) / len(values) for column, values in by_column.items()}


def _rows(canvas: Sequence[Sequence[str]], low: float, high: float) -> list[str]:
    lines = []
    for number, row in enumerate(canvas):
        value = f"{high - (high - low) * number / (HEIGHT - 1):.3g} ┤" if number in LABELLED_ROWS else "│"
        lines.append(f"{value:>{LABEL}}{''.join(row)}".rstrip())
    return lines


def _axis(first: int, last: int, columns: int) -> list[str]:
    return [f"{'└':>{LABEL}}{'─' * columns}", f"{'':{LABEL}}{first}{last:>{max(columns - len(str(first)), 1)}}"]


_MARGIN: Final = 8  # for the values at the left
_BRAILLE: Final = 0x2800
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of each dot: two columns of four


def draw_curve(
    points: Sequence[tuple[float, float]], width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """Lines of text with the curve of `points`, and its highest and its lowest value at the left.

    The curve is drawn in braille dots, or with `ascii_only` in stars.

    Args:
        points: (x, y) by rising x. Values that are not finite are left out.
        width, height: of the drawing in characters, with the values.

    Returns:
        `height` lines; none where there are fewer than two points to draw, or no room.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    across, down = (1, 1) if ascii_only else (2, 4)
    columns = width - _MARGIN
    if len(finite) < 2 or finite[0][0] == finite[-1][0] or columns < 4 or height < 2:
        return []
    values = _resampled(finite, columns * across)
    low, high = min(values), max(values)
    levels = [round((high - value) / ((high - low) or 1.0) * (height * down - 1)) for value in values]
    rows = _stars(levels, height) if ascii_only else _braille(levels, columns, height)
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    return [f"{label:>{_MARGIN - 1}} {row}".rstrip() for label, row in zip(labels, rows, strict=True)]


def _resampled(points: Sequence[tuple[float, float]], count: int) -> list[float]:
    """The curve at `count` places from the first x to the last: means of the points there, lines between them."""
    first, last = points[0][0], points[-1][0]
    binned: dict[int, list[float]] = {}
    for x, y in points:
        binned.setdefault(round((x - first) / (last - first) * (count - 1)), []).append(y)
    values: list[float] = []
    for place, ys in sorted(binned.items()):
        mean, gap = sum(ys) / len(ys), place - len(values) + 1
        before = values[-1] if values else mean
        values += [before + (mean - before) * step / gap for step in range(1, gap + 1)]
    return values


def _spans(levels: Sequence[int]) -> list[range]:
    """For each place the rows that its dots cover, so that they join those of the place before."""
    return [
        range(before + 1, level + 1) if level > before else range(level, max(before, level + 1))
        for before, level in zip([levels[0], *levels], levels, strict=False)
    ]


def _braille(levels: Sequence[int], columns: int, height: int) -> list[str]:
    cells = [[0] * columns for _ in range(height)]
    for x, span in enumerate(_spans(levels)):
        for y in span:
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in row) for row in cells]


def _stars(levels: Sequence[int], height: int) -> list[str]:
    return ["".join("*" if y in span else " " for span in _spans(levels)) for y in range(height)]
