"""The profile of the first steps: the steps are the same, and the files can be opened."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from ci_llm.logs.profile import profiled


def multiply(steps: list[int]) -> None:
    for step in steps:
        torch.ones(8, 8) @ torch.full((8, 8), float(step))


def names_in(trace: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]


@pytest.mark.parametrize("count", [2, 4, 9])
def test_every_step_comes_once_and_the_first_are_in_the_trace(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ci_llm")
    seen = []
    for step in profiled(iter(range(4)), count, tmp_path, "attempt1_process0"):
        seen.append(step)
        multiply([step])
    assert seen == [0, 1, 2, 3]
    names = names_in(tmp_path / "profile/attempt1_process0.json.gz")
    traced = min(count, 4)
    assert [name for name in names if name.startswith("ci_llm step")] == [
        f"ci_llm step {number} of the attempt" for number in range(1, traced + 1)
    ]
    assert names.count("aten::mm") == traced
    assert "aten::mm" in (tmp_path / "profile/attempt1_process0.txt").read_text()
    assert "attempt1_process0.json.gz" in caplog.messages[0]
