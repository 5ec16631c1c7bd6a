"""Rows of several data sets as one: all of them, or a choice that follows from weights and seed alone.

With weights a data set has its share of the rows, whatever its size: a small one is repeated, of a large one some
rows are left out. The number of rows stays that of all data sets together. Which rows are taken is computed by the
permutation of the order, so that every process and every attempt of a run makes the same choice.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from ci_llm.data.order import permute
from ci_llm.data.rows import ListedRows, Row, Rows
from ci_llm.errors import DataError


@dataclass(frozen=True)
class _Joined:
    """Rows of several data sets, one after the other, already in canonical form."""

    parts: tuple[Rows, ...]

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Row | None]:
        return chain.from_iterable(self.parts)

    def __getitem__(self, number: int) -> Row | None:
        part, row = self.locate(number)
        return part[row]

    def select(self, numbers: Sequence[int]) -> ListedRows:
        """Some of the rows."""
        return ListedRows([self[number] for number in numbers])

    def locate(self, number: int) -> tuple[Rows, int]:
        """The data set of a row, and its number there."""
        part = bisect_right(self._ends, number)
        return self.parts[part], number - self._ends[part] + len(self.parts[part])

    @cached_property
    def _ends(self) -> list[int]:
        return [*accumulate(map(len, self.parts))]


@dataclass(frozen=True)
class _MixedRows(Rows):
    """Rows whose source is one of several."""

    origin: _Joined | None = None

    def place(self, number: int) -> str:
        assert self.origin is not None
        part, row = self.origin.locate(self.numbers[number] if self.numbers else number)
        return part.place(row)

    def _read(self, number: int, row: Any) -> Row | None:
        return row  # type: ignore[no-any-return]  # its own data set has read it


def mix(parts: Sequence[Rows], weights: Sequence[float] | None, seed: int) -> Rows:
    """Several data sets as one, in the order of `parts`.

    Args:
        weights: of each data set, above 0, in any unit; None: every row of each, once.
        seed: of the choice of rows.

    Raises:
        DataError: a weight is so small that no row of its data set is taken.
    """
    counts = [len(part) for part in parts] if weights is None else _shares(parts, weights)
    chosen = (
        part.select(array("q", _choose(len(part), count, seed, number)))
        for number, (part, count) in enumerate(zip(parts, counts, strict=True))
    )
    origin = _Joined(tuple(chosen))
    lines = [line for part, count in zip(parts, counts, strict=True) for line in _described(part, count)]
    kind = "one after the other" if weights is None else "weighted"
    lines.insert(0, f"{len(origin)} rows of {len(parts)} data sets, {kind}")
    where = ", ".join(part.where for part in parts)
    are_of_test = any(part.are_of_test for part in parts)
    rows = _MixedRows(origin, parts[0].form, where, tuple(lines), are_of_test=are_of_test, origin=origin)
    return rows.evaluated_although_trained_on(sum(part.num_trained_on for part in parts))


def joined_sizes(rows: Rows) -> list[int]:
    """The number of rows of each data set in what `mix` returned; one number for other rows."""
    return [*map(len, rows.origin.parts)] if isinstance(rows, _MixedRows) and rows.origin else [len(rows)]


def _described(part: Rows, count: int) -> Iterator[str]:
    yield from part.description
    if count != len(part):
        yield f"its weight makes {count} rows of its {len(part)}: {count / len(part):.2f} times each"


def _shares(parts: Sequence[Rows], weights: Sequence[float]) -> list[int]:
    """Rows of each data set: its share of all rows; what rounding leaves goes to the largest fractions."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(len(part) for part in parts)
    wanted = [total * weight / sum(exact) for weight in exact]
    counts = [int(share) for share in wanted]
    by_fraction = sorted(range(len(parts)), key=lambda number: (counts[number] - wanted[number], number))
    for number in by_fraction[: total - sum(counts)]:
        counts[number] += 1
    for part, weight, count in zip(parts, weights, counts, strict=True):
        if not count:
            raise DataError(
                f"The weight {weight:g} takes no row of this data set, of {total} rows in all.",
                where=f"dataset_weights, {part.where}",
                hint="raise its weight, or leave the data set out",
            )
    return counts


def _choose(num_rows: int, count: int, seed: int, number: int) -> Iterator[int]:
    """`count` rows out of `num_rows`: all of them as often as they fit, then a random part of them, in order."""
    for _ in range(count // num_rows):
        yield from range(num_rows)
    yield from sorted(permute(at, num_rows, seed=seed, epoch=number) for at in range(count % num_rows))
