"""The courses of agents: the rows that each trains on, in their order.

Agents that train on the same rows in the same order have one course. The agents take their steps together: step s of a
run is step s of each course, and one with fewer rows begins more epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from ci_llm.data.order import Plan
from ci_llm.data.tokens import TokenizedRows


@dataclass(frozen=True, eq=False)
class Course:
    """Rows to train on, and their order."""

    rows: TokenizedRows
    plan: Plan


@dataclass(frozen=True)
class Courses:
    """The courses of all agents.

    Attributes:
        each: the course of every agent; agents that share one have one object.
    """

    each: tuple[Course, ...]

    @cached_property
    def different(self) -> list[tuple[tuple[int, ...], Course]]:
        """Every course once, with the places of its agents."""
        agents: dict[int, list[int]] = {}
        for k, course in enumerate(self.each):
            agents.setdefault(id(course), []).append(k)
        return [(tuple(own), self.each[own[0]]) for own in agents.values()]

    @property
    def are_own(self) -> bool:
        """Whether agents have different ones."""
        return len(self.different) > 1

    @property
    def plans(self) -> list[Plan]:
        """The order of every different course."""
        return [course.plan for _, course in self.different]

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch of the agent with the most rows."""
        return max(plan.steps_per_epoch for plan in self.plans)

    def rows_of_step(self, step: int) -> list[int]:
        """The rows of a 0-based step, one course after the other; a number is one of the course's own data set."""
        return [row for plan in self.plans for row in plan.rows(step)]

    def num_rows_of(self, step: int) -> int:
        """How many rows all courses take together."""
        return sum(plan.num_rows_of(step) for plan in self.plans)

    def epoch(self, step: int) -> float:
        """Epochs done by the agent with the most rows, which has done the fewest."""
        return min(plan.epoch(step) for plan in self.plans)

    def epochs(self, step: int) -> list[float]:
        """Epochs done by every agent."""
        return [course.plan.epoch(step) for course in self.each]


def fingerprint_of(each: Sequence[TokenizedRows]) -> str:
    """A digest of what all agents learn from: that of the rows where all have the same ones, in whatever order."""
    prints = [rows.fingerprint for rows in each]
    return prints[0] if len({*prints}) == 1 else str(xxhash.xxh3_128_hexdigest(" ".join(prints).encode()))
