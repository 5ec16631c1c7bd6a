"""metrics.jsonl as it grows: each look reads only what was written since the look before."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

Record: TypeAlias = Mapping[str, Any]

_AT_MOST_BYTES: Final = 8 << 20  # of a file that is there already: thousands of lines, parsed in a tenth of a second


@dataclass(frozen=True)
class Point:
    """One line about training: step, unix seconds, number of the attempt, and the mean loss of the agents."""

    step: int
    time: float
    attempt: int
    loss: float


@dataclass
class MetricsTail:
    """What the lines of one metrics.jsonl say so far.

    The last line may be half written: it is read once it is whole. A run that resumes replaces the file by a shorter
    one, and a folder may vanish or appear: then everything begins anew.

    Attributes:
        path: of the file.
        at_most: bytes that are read of a file that is there already: its end.
        training, evaluation: the latest line of each kind; empty before the first.
        points: of the lines about training, in order.
    """

    path: Path
    at_most: int = _AT_MOST_BYTES
    training: Record = field(default_factory=dict)
    evaluation: Record = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    _file: tuple[int, int] | None = None  # device and inode
    _offset: int = 0

    def look(self) -> None:
        """Take in the lines that are new."""
        try:
            with self.path.open("rb") as file:
                self._find_place(file)
                new = file.read()
        except OSError:  # there is none yet, or no more
            self._begin_anew()
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _find_place(self, file: BinaryIO) -> None:
        """Stand behind the last line that was taken in."""
        about = os.fstat(file.fileno())
        if (about.st_dev, about.st_ino) != self._file or about.st_size < self._offset:
            self._begin_anew()
            self._file = about.st_dev, about.st_ino
            if about.st_size > self.at_most:
                file.seek(about.st_size - self.at_most)
                self._offset = about.st_size - self.at_most + len(file.readline())
        file.seek(self._offset)

    def _begin_anew(self) -> None:
        self.training, self.evaluation, self.points = {}, {}, []
        self._file, self._offset = None, 0

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:  # torn by a crash or a full disk
            return
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            return
        if "eval/crowd/nll" in record:
            self.evaluation = record
        if "epoch" in record:
            self.training = record
            loss = number(record.get("train/task_loss"))
            self.points.append(Point(record["step"], number(record.get("time")), record.get("attempt", 1), loss))


def number(value: object) -> float:
    """A value of metrics.jsonl, where "nan" and "inf" are words; NaN for one that is none."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
