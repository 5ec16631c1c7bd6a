"""A data set as it was found: its rows of named values, its splits to evaluate on, and the error if it has no row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol

from ci_llm.errors import DataError

RawRow = Mapping[str, Any]

#: JSON as rows hold it. NaN is nothing: pandas writes it where a value is missing.
DECODER: Final = json.JSONDecoder(parse_constant=lambda name: None if name == "NaN" else float(name))

#: Names of splits to evaluate on, the first that exists is taken: whatever a run chooses by them, it leaves the test
#: rows for a last evaluation.
EVAL_SPLITS: Final = ("validation", "valid", "val", "dev", "eval", "test")


class RawRows(Protocol):
    """A data set: rows of named values, in an order that does not change."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def select(self, numbers: Sequence[int], /) -> RawRows: ...


@dataclass(frozen=True)
class ListedRows:
    """Rows in a list, which all have the same columns: the embedded ones need not load `datasets`."""

    rows: Sequence[Any]

    @property
    def column_names(self) -> list[str]:
        return [*self.rows[0]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def select(self, numbers: Sequence[int]) -> ListedRows:
        """Some of the rows."""
        return ListedRows([self.rows[number] for number in numbers])

    def select_columns(self, names: Sequence[str]) -> ListedRows:
        """All rows with these columns only."""
        return ListedRows([{name: row[name] for name in names} for row in self.rows])


@dataclass(frozen=True)
class JsonRows:
    """Rows that are kept as JSON: each value has the type that is written, whatever the other rows hold.

    Attributes:
        texts: rows whose only column is `TEXT`, an object in JSON.
        column_names: the columns that are read; what a row lacks is None.
    """

    TEXT: ClassVar = "row"

    texts: Any
    column_names: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._decoded(self.texts[number])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._decoded, self.texts)

    def select(self, numbers: Sequence[int]) -> JsonRows:
        """Some of the rows."""
        return replace(self, texts=self.texts.select(numbers))

    def select_columns(self, names: Sequence[str]) -> JsonRows:
        """All rows with these columns only."""
        return replace(self, column_names=tuple(names))

    def _decoded(self, kept: RawRow) -> dict[str, Any]:
        row = DECODER.decode(kept[self.TEXT])
        return {name: row.get(name) for name in self.column_names}


def kept(rows: RawRows, row: RawRow) -> RawRow:
    """A row without what is NaN, or a key that Arrow adds because other rows have it; JSON is kept as it is."""
    cleaned: RawRow = row if isinstance(rows, JsonRows | ListedRows) else without_nothing(row)
    return cleaned


def from_json(value: Any) -> Any:
    """The value of a string that holds a JSON list or object; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:  # a text that begins with a bracket
        return value


def without_nothing(value: Any) -> Any:
    """Without the keys that Arrow adds as null, because other rows have them, and without what is NaN."""
    if isinstance(value, Mapping):
        return {key: without_nothing(part) for key, part in value.items() if part is not None and part == part}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):  # not each of many token ids
        return [without_nothing(part) for part in value]
    return value


def empty(where: str) -> DataError:
    """The error for a data set without a row."""
    return DataError("The data set is empty.", where=where, hint="give one with rows, or another split")
