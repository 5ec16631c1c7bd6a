"""JSON: a list of rows, or one row per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
from datasets import Dataset
from datasets.exceptions import DatasetsError

from ci_llm.data.formats import FileFormat, ending_of, with_builder


def _read(files: Sequence[Path]) -> Dataset:
    try:
        data = with_builder("json", files)
        data[:1]  # Arrow takes any bytes for text, and fails only when a row is read
    except (DatasetsError, UnicodeDecodeError):
        for file in files:
            _require_json(file)
        raise
    return data


def _require_json(file: Path) -> None:
    """Raises ValueError for text that is not UTF-8, and with the line that is no JSON.

    Arrow counts rows from where its last block begins."""
    with fsspec.open(str(file), "rt", encoding="utf-8-sig", compression="infer") as lines:
        if ending_of(file) == ".json" and _require_value(lines.read(), 1, file):
            return
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if line.strip():
                _require_value(line.rstrip("\r\n"), number, file)


def _require_value(text: str, number: int, file: Path) -> bool:
    """Whether this is one value of JSON, or several; raises ValueError if it is none."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:  # one row per line
            return False
        at = f"line {number + error.lineno - 1}, column {error.colno} of {file.name}"
        raise ValueError(f"{error.msg}: {at}") from None
    return True


format = FileFormat((".json", ".jsonl", ".ndjson"), _read)
