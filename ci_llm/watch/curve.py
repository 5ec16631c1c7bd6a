"""A curve in characters: braille dots, or stars where a terminal has only ASCII."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_MARGIN: Final = 8  # for the values at the left
_BRAILLE: Final = 0x2800
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of each dot: two columns of four


def draw_curve(
    points: Sequence[tuple[float, float]], width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """Lines of text with the curve of `points`, and its highest and its lowest value at the left.

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
