"""metrics.jsonl, the numbers of a run by optimizer step: the one way to read it.

A crash or a full disk may have torn a line, and JSON has no NaN: the words "nan", "inf" and "-inf" stand for numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

Record: TypeAlias = Mapping[str, Any]

METRICS_NAME: Final = "metrics.jsonl"


def record_of(line: bytes) -> Record | None:
    """The record in a line, which has a step; None for a line that a crash has torn."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    return value if isinstance(value.get("time", 0), int | float) else None


def read_records(run_folder: Path) -> tuple[list[Record], int]:
    """All records in order, and the number of torn lines; no records without a file."""
    path = run_folder / METRICS_NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [record for record in map(record_of, lines) if record is not None]
    return records, len(lines) - len(records)


def last_records(run_folder: Path, at_most: int) -> list[Record]:
    """The records in the last `at_most` bytes, in order; none without a file."""
    try:
        with (run_folder / METRICS_NAME).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - at_most))
            return [*filter(None, map(record_of, file.read().splitlines()))]
    except OSError:  # the file does not exist yet, or no longer
        return []


def metrics_of(run_folder: Path, step: int) -> dict[str, object]:
    """All values that the file has for `step`; of a name that comes twice, the later value."""
    records = [record for record in read_records(run_folder)[0] if record["step"] == step]
    return {name: value for record in records for name, value in record.items()}


def number(value: object) -> float:
    """A value of a record as a number; NaN for a value that is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def finite_numbers(record: Record) -> Iterator[tuple[str, float]]:
    """(name, value) of the numbers in a record that are finite."""
    return ((name, each) for name, each in record.items() if isinstance(each, int | float) and math.isfinite(each))
