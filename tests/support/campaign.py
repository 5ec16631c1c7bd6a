"""How much runs: of a campaign a sample in `make test`, and all in `make campaign`; of a test some in `make check`.

A campaign repeats one proof with other values. Whatever kind of proof it is, the sample has it.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
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


def drawn(everything: Iterable[Any], count: int, seed: int = 0) -> list[Any]:
    """As `sampled` or `sampled_cases`, of a sample of `count` that is drawn by a seed; another seed covers others."""
    cases = list(everything)
    sample = random.Random(seed).sample(cases, count)
    return sampled_cases(cases, sample) if isinstance(cases[0], tuple) else sampled(cases, sample)


def first_fast(cases: Sequence[Any], count: int = 1) -> list[Any]:
    """The parameters of a test, or tuples of several: the first ones are fast, the others run in `make test`."""
    more = [case if isinstance(case, tuple) else (case,) for case in cases[count:]]
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.slow) for case in more)]


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Of a test with the marker `fast_cases(n)` n cases are fast, evenly spread over all, and the others slow."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        left_out = {"slow", "campaign"} & {mark.name for mark in item.iter_markers()}
        if item.get_closest_marker("fast_cases") and not left_out:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        mark = of_one[0].get_closest_marker("fast_cases")
        assert mark is not None
        fast = {number * len(of_one) // mark.args[0] for number in range(mark.args[0])}
        for number, item in enumerate(of_one):
            if number not in fast:
                item.add_marker(pytest.mark.slow)


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
