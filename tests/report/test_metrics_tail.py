"""metrics.jsonl is read as it grows: only new lines, whole lines only, and all again after a run has cut it back."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ci_llm.core.durable import write_bytes
from ci_llm.report.status import MetricsTail


def line(step: int, **values: Any) -> str:
    return json.dumps({"step": step, "epoch": 0.1, "train/task_loss": 1 / step, "time": 100.0 + step} | values) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def steps(tail: MetricsTail) -> list[int]:
    tail.look()
    return [point.step for point in tail.points]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_file_that_grows_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    real = MetricsTail._take
    monkeypatch.setattr(MetricsTail, "_take", lambda self, line: (parsed.append(line), real(self, line)))
    append(path, "".join(map(line, range(1, 1001))))
    tail = MetricsTail(path)
    assert steps(tail) == [*range(1, 1001)]
    assert steps(tail)[-1] == 1000
    append(path, line(1001))
    assert steps(tail)[-2:] == [1000, 1001]
    assert len(parsed) == 1001


def test_a_line_counts_once_it_is_whole(path: Path) -> None:
    tail, text = MetricsTail(path), line(2)
    append(path, line(1) + text[:20])
    assert steps(tail) == [1]
    append(path, text[20:-1])
    assert steps(tail) == [1]
    append(path, "\n")
    assert steps(tail) == [1, 2]


def test_lines_that_are_not_records_are_skipped(path: Path) -> None:
    append(path, '{"step": 1, "ep\n[]\n{"step": "2"}\n\xff\n' + line(3))
    assert steps(MetricsTail(path)) == [3]


def test_a_resume_that_cuts_the_file_back_begins_it_again(path: Path) -> None:
    append(path, "".join(map(line, (1, 2, 3, 4))))
    tail = MetricsTail(path)
    assert steps(tail) == [1, 2, 3, 4]
    write_bytes(path, (line(1) + line(2)).encode())
    append(path, "".join(line(step, attempt=2) for step in (3, 4, 5, 6)))  # longer than it was
    assert steps(tail) == [1, 2, 3, 4, 5, 6]
    assert [point.attempt for point in tail.points] == [1, 1, 2, 2, 2, 2]


def test_a_file_that_is_cut_in_its_place_begins_again(path: Path) -> None:
    append(path, line(1) + line(2))
    tail = MetricsTail(path)
    tail.look()
    os.truncate(path, len(line(1)))
    assert steps(tail) == [1]


def test_a_folder_that_goes_and_comes_back(path: Path) -> None:
    tail = MetricsTail(path)
    assert steps(tail) == []
    append(path, line(1))
    assert steps(tail) == [1]
    shutil.rmtree(path.parent)
    assert (steps(tail), tail.training) == ([], {})
    path.parent.mkdir()
    append(path, line(7))
    assert steps(tail) == [7]


def test_only_the_end_of_a_long_file_is_read(path: Path) -> None:
    append(path, "".join(map(line, range(1, 10_001))))
    tail = MetricsTail(path, at_most=2000)
    read = steps(tail)
    assert read == [*range(read[0], 10_001)]
    assert 10 < len(read) < 100
    append(path, line(10_001))
    assert steps(tail)[-1] == 10_001


def test_the_latest_lines_of_each_kind_are_at_hand(path: Path) -> None:
    append(path, line(1) + '{"step": 1, "eval/crowd/nll": 0.5}\n' + line(2, **{"train/task_loss": "nan"}))
    tail = MetricsTail(path)
    tail.look()
    assert (tail.training["step"], tail.evaluation["step"]) == (2, 1)
    assert math.isnan(tail.points[-1].loss)
