"""Rows of files that `datasets` maps: some or all of them, read one after the other within bounded memory.

What was read of a mapped file stays resident until its mapping is closed. So rows are read in stretches, each of which
maps the files for itself.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from datasets import Dataset, concatenate_datasets

T = TypeVar("T", bound=Sequence[int])

#: Of the files, about so much is read through one mapping.
STRETCH_BYTES: Final = 32 << 20
#: Rows that are converted together, which takes a third of the time that one by one takes.
_ROWS_AT_ONCE: Final = 100


@dataclass(frozen=True)
class MappedRows:
    """Rows of a `datasets.Dataset` that is the whole of its files.

    Attributes:
        data: the columns that are read, of all rows.
        numbers: of the rows that are taken.
    """

    data: Dataset
    numbers: Sequence[int]

    @property
    def column_names(self) -> list[str]:
        return list(self.data.column_names)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self.data[self.numbers[number]]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for stretch in _pieces(self.numbers, self._rows_in_stretch):
            opened = _opened_anew(self.data)
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
        return replace(self, data=self.data.select_columns(list(names)))

    @property
    def _rows_in_stretch(self) -> int:
        size = sum(os.path.getsize(file["filename"]) for file in self.data.cache_files)
        return max(_ROWS_AT_ONCE, STRETCH_BYTES * len(self.data) // size)


def mapped(data: Dataset) -> MappedRows | Dataset:
    """A data set that is the whole of its files as `MappedRows`; one in memory, or a part of its files, as it is."""
    data = data.with_format(None)
    if not data.cache_files or data._indices is not None:  # they lie in another order, which may not be in a file
        return data
    opened = _opened_anew(data)
    same = len(opened) == len(data) and opened.features == data.features
    return MappedRows(data, range(len(data))) if same else data


def _opened_anew(data: Dataset) -> Dataset:
    """All rows of the files of a data set, with its columns, through mappings of their own."""
    files = [Dataset.from_file(file["filename"]) for file in data.cache_files]
    return concatenate_datasets(files).select_columns(data.column_names)


def _pieces(numbers: T, size: int) -> Iterator[Any]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))
