"""The labels of texts: which classes a data set has, and the number that stands for each label.

Classes that are whole numbers keep them, from 0 on; classes with names are numbered in alphabetical order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ci_llm.data.rows import Labelled, Rows
from ci_llm.errors import DataError

Label = str | float
#: More classes than this are taken for numbers, or for texts in the wrong column.
MOST_CLASSES: Final = 1000


def labels_of(each: Iterable[Rows]) -> Iterator[Label]:
    """The labels of all rows that have one; rows that several agents share are read once."""
    for rows in {id(own): own for own in each}.values():
        yield from (row.label for row in rows if isinstance(row, Labelled))


def are_numbers(labels: Iterable[Label]) -> bool:
    """Whether some label is a number and not a whole one: it is then to be predicted, and is not a class."""
    return any(isinstance(label, float) and not label.is_integer() for label in labels)


def class_names(labels: Iterable[Label], num_labels: int | None, where: str) -> tuple[str, ...]:
    """The names of the classes, in the order of their numbers.

    Args:
        num_labels: how many there are, where labels are whole numbers of which some may be missing; None: as many as
            are found.

    Raises:
        DataError: there is only one, there are too many, or labels are out of range.
    """
    found = {name_of(label) for label in labels}
    if numbered := all(name.isdecimal() for name in found):
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
            " objective=regression predicts numbers; label_column= names another column",
        )
    return names


def name_of(label: Label) -> str:
    """The name of a class: 1, 1.0 and "1" are the same one."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def number_of(label: Label, classes: Sequence[str], place: str) -> float:
    """The number that stands for a label: that of its class, or the label itself where there are no classes.

    Args:
        place: of the row, for the error.

    Raises:
        DataError: it is none of the classes, or not a finite number.
    """
    if classes:
        if (name := name_of(label)) in classes:
            return classes.index(name)
        known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        what, hint = f"the label {name!r} is none of {len(classes)} classes: {known}", "num_labels=, or repair the row"
    else:
        try:
            if math.isfinite(number := float(label)):
                return number
        except ValueError:
            pass
        what = f"the label {str(label)[:60]!r} is not a finite number"
        hint = "objective=classification takes names; or repair the row"
    raise DataError(what, where=f"{place}, label", hint=hint)
