"""The files that an attempt appends to: training.log, a line per message, and metrics.jsonl, a JSON record per line.

A run is worth more than its files: a disk that refuses a line is reported once, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ci_llm.core.durable import write_bytes

logger = logging.getLogger(__name__)


class AppendedFile:
    """A text file to which an attempt appends whole lines.

    A crash or a full disk may have cut the last line. The next line then begins on a line of its own.

    Attributes:
        path: of the file.
        still_held: called before each write. Once it returns False, another attempt owns the folder, and nothing is
            written any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.still_held: Callable[[], bool] = lambda: True
        self._may_be_cut, self._failing = True, False

    def append(self, line: str) -> None:
        """Write `line` and a newline at the end of the file."""
        if not self.still_held():
            return
        try:
            start = "\n" if self._may_be_cut and _is_cut(self.path) else ""
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                # Again, because the open may take long, for example while the machine sleeps.
                if self.still_held():
                    file.write(f"{start}{line}\n")
        except OSError as error:
            self._may_be_cut = True
            if not self._failing:
                self._failing = True  # before the warning, which may come to this file as well
                logger.warning(f"{self.path.name} cannot be written, the run goes on: {error}")
        else:
            self._may_be_cut = self._failing = False


class MetricsFile(AppendedFile):
    """metrics.jsonl: records of numbers by optimizer step."""

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append a record of `values`. JSON has no NaN: a number that is not finite becomes "nan", "inf" or "-inf"."""
        record = {"step": step, **values, "time": round(time.time(), 3)}
        self.append(json.dumps({key: _json_value(value) for key, value in record.items()}, allow_nan=False))

    def truncate(self, step: int, staging: Path | None = None) -> None:
        """Remove the records past `step`, and lines that a crash has cut; -1 removes all.

        Args:
            staging: of the folder's owner, for the unfinished file (`durable.write_bytes`).
        """
        if self.still_held() and self.path.exists():
            kept = [line for line in self._lines() if (record := _record(line)) and record["step"] <= step]
            write_bytes(self.path, b"".join(line + b"\n" for line in kept), staging=staging)

    def read(self, step: int) -> dict[str, Any]:
        """All values that the file holds for `step`; of a name that comes twice, the later value."""
        records = (record for record in map(_record, self._lines()) if record and record["step"] == step)
        return {name: value for record in records for name, value in record.items()}

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a number, in order."""
        records = [record for record in map(_record, self._lines()) if record]
        return [(record["step"], record[name]) for record in records if isinstance(record.get(name), float | int)]

    def last(self) -> dict[str, Any]:
        """`step` and `time` of the last whole record; empty if there is none."""
        record = next(filter(None, map(_record, reversed(self._lines()))), {})
        return {name: value for name, value in record.items() if name in ("step", "time")}

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines() if self.path.exists() else []


def _is_cut(path: Path) -> bool:
    """Whether the last line has no newline: a crash or a full disk has cut it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _json_value(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None for a line that is none, because a crash has cut it."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None
