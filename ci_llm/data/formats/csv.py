"""Text files of columns with a separator: a comma, or what the ending or the header says.

Every value is the text that is written.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pandas  # type: ignore[import-untyped]
from datasets import Dataset, Features, Value

from ci_llm.data.formats import FileFormat, ending_of, with_builder

#: What separates the columns where it is not a comma.
_SEPARATORS = (";", "\t", "|")


def _read(files: Sequence[Path]) -> Dataset:
    separator = _separator(files[0])
    written: dict[str, Any] = {"sep": separator, "skipinitialspace": _has_spaces_behind(files[0], separator)}
    for file in files:
        _require_columns(file, separator)
    columns = pandas.read_csv(files[0], nrows=0, **written).columns
    # Left to itself, pandas reads 007 as 7, 1.50 as 1.5, and the words None and NA as missing values.
    as_text = {"features": Features({name: Value("string") for name in columns}), "keep_default_na": False}
    return with_builder("csv", files, na_values=[""], **written, **as_text)


def _require_columns(file: Path, separator: str) -> None:
    """Refuse a row longer than the header: pandas would take the first value of every row for its name."""
    spaced = _has_spaces_behind(file, separator)
    header, row = (*_first_rows(file, separator, 2, spaced=spaced), [], [])[:2]
    if len(row) > len(header):
        raise ValueError(f"the first row has {len(row)} values, and the header {len(header)} columns ({file.name})")


def _separator(file: Path) -> str:
    """A comma, unless the ending or a header without commas says otherwise."""
    if ending_of(file) == ".tsv":
        return "\t"
    columns = {mark: len(next(iter(_first_rows(file, mark, 1)), [])) for mark in (",", *_SEPARATORS)}
    return "," if columns[","] > 1 else max(columns, key=lambda mark: columns[mark])


def _has_spaces_behind(file: Path, separator: str) -> bool:
    """True if a space follows every separator of the header: then it belongs to no name, and to no value either."""
    others = next(iter(_first_rows(file, separator, 1)), [])[1:]
    return bool(others) and all(name.startswith(" ") for name in others)


def _first_rows(file: Path, separator: str, count: int, *, spaced: bool = False) -> list[list[str]]:
    """The first rows, the header among them; without blank lines, as pandas reads them.

    Args:
        spaced: see `_has_spaces_behind`.
    """
    limit = csv.field_size_limit(sys.maxsize)  # 131,072 characters by default; pandas has no limit
    try:
        with fsspec.open(
            str(file), "rt", encoding="utf-8-sig", errors="replace", compression="infer", newline=""
        ) as rows:
            return list(islice(filter(None, csv.reader(rows, delimiter=separator, skipinitialspace=spaced)), count))
    finally:
        csv.field_size_limit(limit)


format = FileFormat((".csv", ".tsv"), _read)
