"""How long rows are: what the memory and the time of a step follow from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ci_llm.data.encoder import Example
from ci_llm.data.tokens import TokenizedRows

#: Rows that are looked at where a look at all would take long.
SAMPLED = 64


def sampled(each: Iterable[TokenizedRows]) -> list[Example]:
    """About `SAMPLED` rows of every data set, evenly spread; each data set once."""
    different = {id(rows): rows for rows in each}.values()
    return [rows[number] for rows in different for number in range(0, len(rows), -(-len(rows) // SAMPLED))]


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row.

    Attributes:
        mean, spread: their mean and standard deviation.
        learned: share of them that is learned.
        sampled: whether rows were tokenised as the run will do it; else this is an upper bound.
    """

    mean: float
    spread: float
    longest: int
    learned: float
    sampled: bool = True

    @classmethod
    def of(cls, rows: Sequence[Example]) -> Lengths:
        """The lengths of these rows."""
        tokens = [len(row.input_ids) for row in rows]
        learned = sum(int(row.supervised.sum()) for row in rows)
        return cls(statistics.mean(tokens), statistics.pstdev(tokens), max(tokens), learned / sum(tokens))

    def longest_in_batch(self, rows: int) -> int:
        """Tokens per row to expect of the longest among thousands of micro-batches of `rows` rows."""
        return math.ceil(min(self.longest, self.mean + 4 * self.spread / math.sqrt(rows)))

    def learned_of(self, tokens: int) -> int:
        """How many of the tokens of a row are learned, at least one; the first never is."""
        return max(1, min(tokens - 1, round(self.learned * tokens)))
