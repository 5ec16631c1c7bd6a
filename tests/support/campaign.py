"""How much of a campaign runs: a sample in `make test`, all of it in `make campaign`.

A campaign repeats one proof with other values. Whatever kind of proof it is, the sample has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

in_full = False  # set by conftest.py before a test file is imported


def size(sample: int, full: int) -> int:
    """How many examples, points or rounds a test takes."""
    return full if in_full else sample


def sampled(everything: Sequence[T], sample: Collection[T]) -> list[Any]:
    """The parameters of a test: what is not in the sample runs only in a campaign."""
    return [one if one in sample else pytest.param(one, marks=pytest.mark.campaign) for one in everything]


def sampled_cases(everything: Sequence[tuple[Any, ...]], sample: Collection[tuple[Any, ...]]) -> list[Any]:
    """As `sampled`, for a test of several parameters."""
    return [case if case in sample else pytest.param(*case, marks=pytest.mark.campaign) for case in everything]


def every_pair(cells: Sequence[T]) -> list[T]:
    """Few of these dataclass instances in which each two values of two fields that meet in all of them meet."""
    open_pairs = {pair for cell in cells for pair in _pairs(cell)}
    chosen: list[T] = []
    while open_pairs:
        chosen.append(max(cells, key=lambda cell: len(open_pairs & _pairs(cell))))
        open_pairs -= _pairs(chosen[-1])
    return chosen


def _pairs(cell: Any) -> set[tuple[tuple[str, Any], ...]]:
    values = [(field.name, getattr(cell, field.name)) for field in fields(cell)]
    return set(itertools.combinations(values, 2))
