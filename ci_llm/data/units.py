"""Pairs, rated and labelled rows, and prompts: in canonical form, as token ids whose branches lie end to end.

A branch is a prompt with one of its answers: a pair has two, the chosen one first, and a rated row has one. A labelled
row has one as well, in which nothing is learned, and so has a prompt alone. Classes that are whole numbers keep them,
from 0 on; classes with names are numbered in alphabetical order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import xxhash

from ci_llm.data.encoder import Example
from ci_llm.data.rows import Labelled, Pair, Prompted, Rated, Row, Rows, SingleRow
from ci_llm.errors import DataError

LEAST_SHARED: Final = 8  # fewer common tokens cost more in products of their own than their second pass does


@dataclass(frozen=True)
class Unit(Example):
    """A tokenised pair, rated or labelled row: `input_ids` and `supervised` [n] are those of its branches, end to end.

    Attributes:
        spans: for each branch where it begins, and where its answer begins.
        label: 1 for a good rated row, 0 for another; for a labelled row the number of its class, or what is to be
            predicted; of a pair its margin, 0 where it has none; of a prompt a digest of its row.
    """

    spans: tuple[tuple[int, int], ...]
    label: float = 0

    @cached_property
    def branches(self) -> list[Example]:
        """The branches as rows."""
        ends = [*(start for start, _ in self.spans[1:]), len(self.input_ids)]
        parts = (slice(start, end) for (start, _), end in zip(self.spans, ends, strict=True))
        return [Example(self.input_ids[part], self.supervised[part]) for part in parts]

    @property
    def is_prompt(self) -> bool:
        """True if it is a prompt alone."""
        return self.spans[-1][1] == len(self.input_ids)

    @property
    def prompts(self) -> list[int]:
        """Tokens of each branch before its answer."""
        return [answer - start for start, answer in self.spans]

    @property
    def shared(self) -> list[int]:
        """For each branch how many tokens at its beginning are those of all branches; 0 for the first, and if few.

        Every branch has at least one token more.
        """
        first, *others = (branch.input_ids for branch in self.branches)
        most = min(len(ids) for ids in (first, *others)) - 1
        alike = np.logical_and.reduce([first[:most] == ids[:most] for ids in others])
        shared = int(np.argmin([*alike, False])) if others else 0
        return [0] + [shared if shared >= LEAST_SHARED else 0] * len(others)

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


def unit_of(branches: Sequence[Example], label: float = 0, *, learn_prompt: bool = False) -> Unit:
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


def prompt_of(whole: Example, row: Prompted) -> Unit:
    """The unit of a prompt; its label is exact in fp64."""
    count = len(whole.input_ids)
    digest = xxhash.xxh32_intdigest(row.digest.encode())
    return Unit(whole.input_ids, whole.supervised, ((0, count),), digest)


def branches_of(row: Row) -> list[SingleRow]:
    """The rows that are encoded for a row: itself, unless it is a pair."""
    if isinstance(row, Pair):
        return [row.chosen, row.rejected]
    return [row.row] if isinstance(row, Rated | Labelled | Prompted) else [row]


def label_of(row: Row) -> float:
    """See `Unit.label`, of a row without classes."""
    if isinstance(row, Pair):
        return row.margin or 0
    return int(row.good) if isinstance(row, Rated) else 0


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


Label = str | float
#: More whole numbers than this are rather scores than classes, which a line says.
FEW_CLASSES: Final = 100
#: More classes than this are taken for numbers, or for texts in the wrong column.
MOST_CLASSES: Final = 1000


def labels_of(each: Iterable[Rows]) -> Iterator[Label]:
    """The labels of all rows that have one; rows that several agents share are read once."""
    for rows in {id(own): own for own in each}.values():
        yield from (row.label for row in rows if isinstance(row, Labelled))


def are_numbers(labels: Iterable[Label]) -> bool:
    """True if some label is a number and not a whole one: it is then to be predicted, and is not a class.

    CSV has numbers as text: texts count as numbers if all of them are.
    """
    given = [*labels]
    if all(isinstance(label, str) for label in given):
        with contextlib.suppress(ValueError):
            given = [float(label) for label in given]
    return any(isinstance(label, float) and math.isfinite(label) and not label.is_integer() for label in given)


def class_names(labels: Iterable[Label], num_labels: int | None, where: str) -> tuple[str, ...]:
    """The names of the classes, in the order of their numbers.

    Args:
        num_labels: how many there are, where labels are whole numbers of which some may be missing; None: as many as
            are found.

    Raises:
        DataError: there is only one, there are too many, or labels are out of range.
    """
    found = {name_of(label) for label in labels}
    numbered = all(name.isdecimal() for name in found)
    if numbered:
        most = max(map(int, found), default=0) + 1
        names = tuple(map(str, range(num_labels or min(most, MOST_CLASSES + 1))))
        if odd := sorted(found - {*names}, key=int):
            raise DataError(
                f"label {odd[0]} is out of range: {len(names)} classes have the labels 0 to {len(names) - 1}",
                where=f"{where}, label",
                hint=f"num_labels={most}, or repair the labels",
            )
    else:
        names = tuple(sorted(found))
    if len(found) < 2:
        raise DataError(
            f"all rows have the label {names[-1]}: nothing tells one class from another" if found else "no row is left",
            where=f"{where}, label",
            hint="give rows of at least two classes",
        )
    if len(names) > MOST_CLASSES or (num_labels or len(names)) != len(names):
        raise DataError(
            f"the rows have {'more than ' * numbered}{len(names)} different labels, such as {sorted(found)[0]!r}",
            where=f"{where}, label",
            hint=f"num_labels={len(names)}, if these are classes, of which there are at most {MOST_CLASSES};"
            " objective=regression predicts numbers; text_column= with answer_column= names another column",
        )
    return names


def name_of(label: Label) -> str:
    """The name of a class: 1, 1.0 and "1" are the same one."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def number_of(label: Label, classes: Sequence[str], place: str) -> float:
    """The number that stands for a label: that of its class, or the label itself where there are no classes.

    Args:
        place: the place of the row, for the error.

    Raises:
        DataError: it is none of the classes, or not a finite number.
    """
    if classes:
        name = name_of(label)
        if name in classes:
            return classes.index(name)
        known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        what = f"the label {name!r} is none of {len(classes)} classes: {known}"
        hint = "every class needs a row to train on, or num_labels=N where classes are numbers; or repair the row"
    else:
        with contextlib.suppress(ValueError):
            number = float(label)
            if math.isfinite(number):
                return number
        what = f"the label {str(label)[:60]!r} is not a finite number"
        hint = "objective=classification takes names; or repair the row"
    raise DataError(what, where=f"{place}, label", hint=hint)
