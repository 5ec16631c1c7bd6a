"""Columns with a separator: a comma, or what the ending or the header says."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
from datasets import Dataset

from ci_llm.data.formats import FileFormat, ending_of, with_builder

#: What separates the columns where it is no comma.
_SEPARATORS = (";", "\t", "|")


def _read(files: Sequence[Path]) -> Dataset:
    return with_builder("csv", files, sep=_separator(files[0]))


def _separator(file: Path) -> str:
    """A comma, unless the ending or a header without commas says otherwise."""
    if ending_of(file) == ".tsv":
        return "\t"
    with fsspec.open(str(file), "rt", encoding="utf-8-sig", errors="replace", compression="infer", newline="") as lines:
        header = next(iter(lines), "")
    columns = {mark: len(next(csv.reader([header], delimiter=mark), [])) for mark in (",", *_SEPARATORS)}
    return "," if columns[","] > 1 else max(columns, key=lambda mark: columns[mark])


format = FileFormat((".csv", ".tsv"), _read)
