"""The tokenised rows of each agent: those that it trains on, in their order, those that score it, and their lengths.

The agents take their steps together: step s of a run is step s of each order, and one of fewer rows begins more epochs.
The memory and the time of a step follow from the lengths of rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import xxhash

from ci_llm.data.encoder import Example
from ci_llm.data.order import Plan
from ci_llm.data.rows import TrainedOn
from ci_llm.data.tokens import TokenizedRows
from ci_llm.data.units import Unit

T = TypeVar("T")
U = TypeVar("U")


def once_each(items: Sequence[T], make: Callable[[T], U]) -> list[U]:
    """The result of `make` for every item; it is called once for items that are one object."""
    made = {number: make(item) for number, item in {id(item): item for item in items}.items()}
    return [made[id(item)] for item in items]


@dataclass(frozen=True, eq=False)
class OrderedRows:
    """Rows to train on, and their order."""

    rows: TokenizedRows
    plan: Plan


@dataclass(frozen=True)
class TrainingRows:
    """The rows to train on of all agents.

    Attributes:
        each: those of every agent; agents with the same rows in the same order have one object.
    """

    each: tuple[OrderedRows, ...]

    @cached_property
    def different(self) -> list[tuple[tuple[int, ...], OrderedRows]]:
        """All different ones, each with the places of its agents."""
        agents: dict[int, list[int]] = {}
        for k, ordered in enumerate(self.each):
            agents.setdefault(id(ordered), []).append(k)
        return [(tuple(own), self.each[own[0]]) for own in agents.values()]

    @property
    def are_own(self) -> bool:
        """True if agents have different ones."""
        return len(self.different) > 1

    @property
    def plans(self) -> list[Plan]:
        """The order of all different ones."""
        return [ordered.plan for _, ordered in self.different]

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch of the agent with the most rows."""
        return max(plan.steps_per_epoch for plan in self.plans)

    def rows_of_step(self, step: int) -> list[int]:
        """The rows of a 0-based step, plan after plan; a number counts in the data set of its own plan."""
        return [row for plan in self.plans for row in plan.rows(step)]

    def num_rows_of(self, step: int) -> int:
        """The number of rows that all plans take together."""
        return sum(plan.num_rows_of(step) for plan in self.plans)

    def epoch(self, step: int) -> float:
        """Epochs done by the agent with the most rows, which has done the fewest."""
        return min(plan.epoch(step) for plan in self.plans)

    def epochs(self, step: int) -> list[float]:
        """Epochs done by every agent."""
        return [ordered.plan.epoch(step) for ordered in self.each]


def fingerprint_of(each: Sequence[TokenizedRows]) -> str:
    """A digest of what all agents learn from: that of the rows where all have the same ones, in whatever order."""
    prints = [rows.fingerprint for rows in each]
    return prints[0] if len({*prints}) == 1 else str(xxhash.xxh3_128_hexdigest(" ".join(prints).encode()))


@dataclass(frozen=True)
class EvaluationRows:
    """The rows to evaluate on: one set for all agents, or several sets with the agents that each belongs to.

    Every agent answers all of them, as the crowd does; a score of an agent is that of its own set.

    Attributes:
        sets: different sets.
        of_agent: the number of each agent's set.
    """

    sets: tuple[TokenizedRows, ...]
    of_agent: tuple[int, ...]

    @classmethod
    def of(cls, each: Sequence[TokenizedRows]) -> EvaluationRows:
        """From the rows of every agent; equal ones are one set."""
        prints = [rows.fingerprint for rows in each]
        sets = {}
        for rows in sorted(each, key=lambda rows: rows.rows.num_trained_on):
            sets[rows.fingerprint] = rows  # of equal ones that of which most is trained on
        found = [*dict.fromkeys(prints)]
        return cls(tuple(sets[each] for each in found), tuple(map(found.index, prints)))

    def of_agents(self, places: Sequence[int]) -> EvaluationRows:
        """These rows for the agents at these places; no set is left out: scores of the crowd stay comparable."""
        return EvaluationRows(self.sets, tuple(self.of_agent[place] for place in places))

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    @property
    def are_common(self) -> bool:
        """True if one set scores all agents."""
        return len(self.sets) == 1

    @property
    def trained_on(self) -> TrainedOn:
        """The share of these rows that are rows of the training of their agents: none, some or all."""
        kinds: set[TrainedOn] = {rows.rows.trained_on for rows in self.sets}
        return kinds.pop() if len(kinds) == 1 else "some"


#: Rows that are looked at where a look at all would take long.
SAMPLED = 64


def sampled(each: Iterable[TokenizedRows]) -> list[Example]:
    """About `SAMPLED` rows of every data set, evenly spread; each data set once."""
    different = {id(rows): rows for rows in each}.values()
    return [rows[number] for rows in different for number in range(0, len(rows), -(-len(rows) // SAMPLED))]


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row; of a pair each branch is one.

    Attributes:
        mean, std: their mean and standard deviation.
        learned: share of them that is learned.
        sampled: true if rows were tokenised as the run will do it; else this is an upper bound.
        branches: rows of a pass for each row of the data set: two for a pair, and of a prompt its completions.
    """

    mean: float
    std: float
    longest: int
    learned: float
    sampled: bool = True
    branches: int = 1

    @classmethod
    def of(cls, rows: Sequence[Example]) -> Lengths:
        """The lengths of these rows."""
        passed = [each for row in rows for each in (row.branches if isinstance(row, Unit) else [row])]
        tokens, learned = [len(row.input_ids) for row in passed], sum(int(row.supervised.sum()) for row in passed)
        mean, std = statistics.mean(tokens), statistics.pstdev(tokens)
        return cls(mean, std, max(tokens), learned / sum(tokens), branches=len(passed) // len(rows))

    def with_completions(self, count: int, tokens: int) -> Lengths:
        """The lengths at worst where agents draw `count` completions of each prompt, of at most `tokens` tokens."""
        learned = tokens / (self.mean + tokens)
        return replace(self, mean=self.mean + tokens, longest=self.longest + tokens, learned=learned, branches=count)

    def longest_in_batch(self, rows: int) -> int:
        """Tokens per row to expect of the longest among thousands of micro-batches of `rows` rows."""
        return math.ceil(min(self.longest, self.mean + 4 * self.std / math.sqrt(rows)))

    def learned_of(self, tokens: int) -> int:
        """The number of tokens of a row that are learned, at least one; the first never is."""
        return max(1, min(tokens - 1, round(self.learned * tokens)))
