"""Pairs, rated and labelled rows: in canonical form, and as token ids whose branches lie end to end.

A branch is a prompt with one of its answers: a pair has two, the chosen one first, and a rated row has one. A labelled
row has one as well, in which nothing is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ci_llm.data.encoder import Example
from ci_llm.data.rows import Labelled, Pair, Rated, Row, SingleRow

UNRATED: Final = -1  # the label of a pair


@dataclass(frozen=True)
class Unit(Example):
    """A tokenised pair, rated or labelled row: `input_ids` and `supervised` [n] are those of its branches, end to end.

    Attributes:
        spans: of each branch where it begins, and where its answer begins.
        label: of a rated row 1 if it is good, else 0; of a labelled one the number of its class, or what is to be
            predicted; `UNRATED` for a pair.
    """

    spans: tuple[tuple[int, int], ...]
    label: float = UNRATED

    @cached_property
    def branches(self) -> list[Example]:
        """The branches as rows."""
        ends = [*(start for start, _ in self.spans[1:]), len(self.input_ids)]
        parts = (slice(start, end) for (start, _), end in zip(self.spans, ends, strict=True))
        return [Example(self.input_ids[part], self.supervised[part]) for part in parts]

    @property
    def prompts(self) -> list[int]:
        """Tokens of each branch before its answer."""
        return [answer - start for start, answer in self.spans]

    @property
    def num_learned(self) -> int:
        """Targets of the preferred branch, which is the first."""
        return int(self.branches[0].supervised.sum())

    def with_answer_of(self, other: Unit, limit: int) -> Unit:
        """This rated row with the answer of another one, at most `limit` tokens of it."""
        begin, start = self.prompts[0], other.prompts[0]
        ids = np.concatenate([self.input_ids[:begin], other.input_ids[start:]])[:limit]
        learned = np.concatenate([self.supervised[:begin], other.supervised[start:]])[:limit]
        return Unit(ids, learned, self.spans, self.label)


def unit_of(branches: Sequence[Example], label: float = UNRATED, *, learn_prompt: bool = False) -> Unit:
    """The unit of these branches, in each of which a token is learned, unless it is a labelled row.

    Args:
        learn_prompt: learn all tokens of the first branch; where its answer begins stays known.
    """
    begins = [int(branch.supervised.argmax()) for branch in branches]
    starts = np.cumsum([0, *(len(branch.input_ids) for branch in branches)]).tolist()
    learned = [branch.supervised for branch in branches]
    if learn_prompt:
        learned[0] = np.arange(len(learned[0])) > 0
    spans = tuple((start, start + begin) for start, begin in zip(starts, begins, strict=False))
    return Unit(np.concatenate([b.input_ids for b in branches]), np.concatenate(learned), spans, label)


def branches_of(row: Row) -> list[SingleRow]:
    """The rows that are encoded for a row: itself, unless it is a pair."""
    if isinstance(row, Pair):
        return [row.chosen, row.rejected]
    return [row.row] if isinstance(row, Rated | Labelled) else [row]


def label_of(row: Row) -> int:
    """See `Unit.label`, of a row without classes."""
    return int(row.good) if isinstance(row, Rated) else UNRATED


def without_end(example: Example, token: int | None) -> Example:
    """The row up to its last token that is another one; a row of nothing else keeps its first.

    The classes of Transformers for sequences pool at the last token that is not the pad token, and padding may be done
    with the token that ends a row.
    """
    if token is None:
        return example
    others = np.flatnonzero(example.input_ids != token)
    end = int(others[-1]) + 1 if len(others) else 1
    return Example(example.input_ids[:end], example.supervised[:end])
