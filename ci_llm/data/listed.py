"""Rows in a list, with what this package asks of a `datasets.Dataset`: the embedded rows need not load `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ListedRows:
    """Rows that all have the same columns."""

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
