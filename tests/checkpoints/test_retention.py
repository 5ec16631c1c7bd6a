"""Which checkpoints stay, by period and by measure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.policy import RetentionPolicy, metrics_of


def loss(metrics: dict[str, float]) -> float:
    return metrics["loss"]


def keeping(folder: Path, measured: dict[int, float | None], **options: Any) -> RetentionPolicy:
    """The retention of a folder with these steps and their losses."""
    keep = RetentionPolicy(**{"most": 2, "period": None, "best_fn": None, "best_mode": "min", **options})
    for step, value in measured.items():
        (folder / f"checkpoint_step_{step}").mkdir()
        keep._known[step] = None if value is None else {"loss": value}
    return keep


def test_only_the_newest_are_kept_without_a_period_or_a_measure(tmp_path: Path) -> None:
    assert keeping(tmp_path, {1: None, 2: None}).spared(tmp_path, 3, None) == set()
    assert RetentionPolicy(None, 2, loss, "min").spared(tmp_path, 3, None) == set()
    assert [RetentionPolicy(most, None, None, "min").newest for most in (None, 0, 1, 5)] == [None, 0, 1, 5]
    assert [RetentionPolicy(most, None, loss, "min").newest for most in (None, 0, 1, 5)] == [None, 0, 1, 1]


def test_multiples_of_the_period_are_kept(tmp_path: Path) -> None:
    keep = keeping(tmp_path, {3: None, 4: None, 6: None}, period=3)
    assert keep.spared(tmp_path, 10, None) == {3, 6}
    assert keep.spared(tmp_path, 12, None) == {3, 6, 12}


@pytest.mark.parametrize(("mode", "kept"), [("min", {3, 4, 5}), ("max", {1, 2, 3})])
def test_the_best_steps_and_those_without_a_measure_are_kept(mode: str, kept: set[int], tmp_path: Path) -> None:
    keep = keeping(tmp_path, {1: 5.0, 2: 4.0, 3: None, 4: 2.0}, best_fn=loss, best_mode=mode)
    assert keep.spared(tmp_path, 5, {"loss": 1.0}) == kept
    assert keep.best_of(tmp_path, [1, 2, 3, 4, 5]) == (5 if mode == "min" else 1)
    assert keep.best_of(tmp_path, [3]) == 3
    assert keep.best_of(tmp_path, []) is None
    keep.forget()
    assert keep.best_of(tmp_path, [1, 2, 3, 4]) == 4  # these folders tell nothing, and the newest is taken


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_the_worst_measure_and_the_newer_of_two_equal_steps_is_kept(mode: str, tmp_path: Path) -> None:
    keep = keeping(tmp_path, {1: math.nan, 2: 1.0, 3: 1.0}, most=1, best_fn=loss, best_mode=mode)
    assert keep.spared(tmp_path, 4, {"loss": math.nan}) == {3}
    assert keep.best_of(tmp_path, [1, 2, 3]) == 3


def test_a_step_whose_manifest_cannot_be_read_has_no_metrics(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(1, {"a": 1}, metrics={"loss": 2.0})
        manager.save(2, {"a": 1})
    assert [metrics_of(tmp_path, step) for step in (1, 2)] == [{"loss": 2.0}, None]
    (tmp_path / "checkpoint_step_1" / "manifest.json").write_text("{")
    assert metrics_of(tmp_path, 1) is None
