"""When a save is due, and which checkpoints stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import MANIFEST, Manifest
from ci_llm.checkpoints.policy import RetentionPolicy, SavePolicy


@pytest.mark.parametrize(
    ("policy", "step", "newest", "elapsed_s", "due"),
    [
        (SavePolicy(every_steps=4), 8, 4, 0.0, True),
        (SavePolicy(every_steps=4), 9, 4, 1e9, False),
        (SavePolicy(every_steps=4), 4, 4, 0.0, False),  # nothing is saved twice
        (SavePolicy(every_steps=4), 4, 8, 0.0, False),
        (SavePolicy(None, 60.0), 9, None, 59.9, False),
        (SavePolicy(None, 60.0), 9, None, 60.0, True),
        (SavePolicy(None), 3, None, 1e9, False),
        (SavePolicy(100, 300.0), 100, 0, 1.0, True),
    ],
)
def test_when_a_save_is_due(policy: SavePolicy, step: int, newest: int | None, elapsed_s: float, due: bool) -> None:
    assert policy.due(step, newest=newest, elapsed_s=elapsed_s) is due


# What stays


def loss(metrics: dict[str, float]) -> float:
    return metrics["loss"]


def keeping(folder: Path, measured: dict[int, float | None], **options: Any) -> RetentionPolicy:
    """The retention of a folder with these steps and their losses."""
    for step, value in measured.items():
        info = {} if value is None else {"metrics": {"loss": value}}
        (folder / f"checkpoint_step_{step}").mkdir()
        (folder / f"checkpoint_step_{step}" / MANIFEST).write_bytes(Manifest(step, 1, 0.0, {}, {}, info).dump())
    return RetentionPolicy(**{"most": 2, **options})


@pytest.mark.parametrize(("mode", "kept"), [("min", {3, 4, 5}), ("max", {1, 2, 3})])
def test_the_best_steps_and_those_without_a_measure_are_kept(mode: str, kept: set[int], tmp_path: Path) -> None:
    keep = keeping(tmp_path, {1: 5.0, 2: 4.0, 3: None, 4: 2.0}, best_fn=loss, best_mode=mode)
    assert keep.spared(tmp_path, 5, {"loss": 1.0}) == kept
    assert keep.best_of(tmp_path, [1, 2, 3, 4]) == (4 if mode == "min" else 1)
    assert keep.best_of(tmp_path, [3]) == 3
    assert keep.best_of(tmp_path, []) is None
    for folder in tmp_path.iterdir():
        (folder / MANIFEST).unlink()
    assert keep.best_of(tmp_path, [1, 2, 3, 4]) == 4  # these folders tell nothing, and the newest is taken


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_the_worst_measure_and_the_newer_of_two_equal_steps_is_kept(mode: str, tmp_path: Path) -> None:
    keep = keeping(tmp_path, {1: math.nan, 2: 1.0, 3: 1.0}, most=1, best_fn=loss, best_mode=mode)
    assert keep.spared(tmp_path, 4, {"loss": math.nan}) == {3}
    assert keep.best_of(tmp_path, [1, 2, 3]) == 3


def saved(manager: CheckpointManager, steps: range) -> list[int]:
    return [step for step in steps if manager.save(step, {"step": step})]


def test_periods_are_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=RetentionPolicy(2, period=3)) as manager:
        saved(manager, range(8))
        assert manager.all_steps() == [0, 3, 6, 7]


@pytest.mark.parametrize("behind", [False, True])
def test_the_best_are_kept_and_the_newest(behind: bool, tmp_path: Path) -> None:
    losses = {0: 1.0, 1: 3.0, 2: 2.0, 3: 9.0, 4: math.nan}

    def open_manager() -> CheckpointManager:
        best = CheckpointManager.Retention(2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
        return CheckpointManager(tmp_path, max_to_keep=best, async_save=behind)

    with open_manager() as manager:
        for step, loss in losses.items():
            assert manager.save(step, {"step": step}, metrics={"loss": loss})
        assert manager.all_steps() == [0, 2, 4]
        assert (manager.best_step(), manager.latest_step()) == (0, 4)
        assert manager.metadata(2).info["metrics"] == {"loss": 2.0}
    with open_manager() as manager:  # which has to read what the one before has written
        manager.save(5, {"step": 5}, metrics={"loss": 0.5}, info={"epoch": 1})
        assert manager.all_steps() == [0, 5]
        assert manager.best_step() == 5
        assert manager.metadata(5).info == {"epoch": 1, "metrics": {"loss": 0.5}}
        manager.save(6, {"step": 6})
        manager.save(7, {"step": 7}, metrics={"loss": 0.7})
        assert manager.all_steps() == [5, 6, 7], "one without metrics is not judged"
    with CheckpointManager(tmp_path) as manager:
        assert manager.best_step() == 7, "the newest, without a measure"
        assert "metrics" not in manager.metadata(6).info
    assert CheckpointManager(tmp_path / "empty").best_step() is None
