"""Rows of files that `datasets` maps: some or all of them, read one after the other within bounded memory.

What was read of a mapped file stays resident until its mapping is closed. So rows are read in stretches, each of which
maps the files for itself.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeVar

from datasets import Dataset, concatenate_datasets

from ci_llm.data.rows import JsonRows

T = TypeVar("T", bound=Sequence[int])

#: Of the files, about so much is read through one mapping.
STRETCH_BYTES: Final = 32 << 20
#: Rows that are converted together, which takes a third of the time that one by one takes.
_ROWS_AT_ONCE: Final = 100


@dataclass(frozen=True)
class MappedRows:
    """Rows of files of `datasets`. The files are mapped while rows are read, and not before.

    Attributes:
        files: Arrow files, in order.
        column_names: the columns that are read.
        numbers: of the rows that are taken, in the files together.
        rows_in_stretch: how many are read through one mapping.
    """

    files: tuple[str, ...]
    column_names: tuple[str, ...]
    numbers: Sequence[int]
    rows_in_stretch: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self._opened[self.numbers[number]]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for stretch in _pieces(self.numbers, self.rows_in_stretch):
            opened = _open(self.files, self.column_names)
            for numbers in _pieces(stretch, _ROWS_AT_ONCE):
                columns = opened[[*numbers]]
                for values in zip(*columns.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))
            del opened  # before the next one is opened

    def select(self, numbers: Sequence[int]) -> MappedRows:
        """Some of the rows."""
        return replace(self, numbers=array("q", (self.numbers[number] for number in numbers)))

    def select_columns(self, names: Sequence[str]) -> MappedRows:
        """All rows with these columns only."""
        return replace(self, column_names=tuple(names))

    @cached_property
    def _opened(self) -> Dataset:
        return _open(self.files, self.column_names)


def mapped(data: Dataset | JsonRows) -> MappedRows | Dataset | JsonRows:
    """A data set that is the whole of its files as `MappedRows`; one in memory, or a part of its files, as it is."""
    if isinstance(data, JsonRows):
        return replace(data, texts=mapped(data.texts))
    data = data.with_format(None)
    files = tuple(file["filename"] for file in data.cache_files)
    if not files or data._indices is not None:  # they lie in another order, which may not be in a file
        return data
    opened = _open(files, data.column_names)
    if len(opened) != len(data) or opened.features != data.features:
        return data
    rows_in_stretch = STRETCH_BYTES * len(data) // max(1, sum(map(os.path.getsize, files)))
    return MappedRows(files, tuple(data.column_names), range(len(data)), max(_ROWS_AT_ONCE, rows_in_stretch))


def _open(files: Sequence[str], columns: Sequence[str]) -> Dataset:
    """All rows of the files, through mappings of their own."""
    return concatenate_datasets([Dataset.from_file(file) for file in files]).select_columns(list(columns))


def _pieces(numbers: T, size: int) -> Iterator[Any]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))
