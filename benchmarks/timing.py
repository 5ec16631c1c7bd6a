"""Paired timing: the variants take turns on the same inputs, and ratios are taken input by input.

On a machine that others use as well, two variants measured one after the other see two machines. Here each input
goes through all variants before the next one comes, and the one that begins rotates. CPU time of the process is the
figure to trust; wall time stands beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Name = TypeVar("Name")


@dataclass(frozen=True)
class Cost:
    """One call: CPU seconds of this process, all threads together, and seconds on the clock."""

    cpu_s: float
    wall_s: float


Costs = dict[str, list[Cost]]


def take_turns(variants: Mapping[Name, Callable[[T], object]], inputs: Sequence[T]) -> dict[Name, list[Cost]]:
    """The cost of every variant on every input, in the order of the inputs."""
    names = list(variants)
    costs: dict[Name, list[Cost]] = {name: [] for name in variants}
    for number, item in enumerate(inputs):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            costs[name].append(_timed(variants[name], item))
    return costs


def _timed(call: Callable[[T], object], item: T) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    call(item)
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Medians of both clocks, each on its own."""
    return Cost(statistics.median(c.cpu_s for c in costs), statistics.median(c.wall_s for c in costs))


def cpu_ratios(slow: Sequence[Cost], fast: Sequence[Cost]) -> list[float]:
    """How many times the CPU time of `fast` the other takes, one figure per input, in ascending order."""
    return sorted(one.cpu_s / other.cpu_s for one, other in zip(slow, fast, strict=True))
