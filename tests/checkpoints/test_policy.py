"""When a save is due, at which interval the least time is lost, by brute force too, and which checkpoints stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import MANIFEST, Manifest
from ci_llm.checkpoints.policy import (
    FIRST_S,
    PRIOR_S,
    BestInterval,
    FailureHistory,
    RetentionPolicy,
    SavePolicy,
    best_interval_s,
)
from ci_llm.interrupts import Interrupts


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


# The interval


def time_to_work(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Daly's complete model: seconds on the clock per second of work, failures being Poisson."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


@pytest.mark.parametrize("cost_s", [0.01, 1.0, 30.0, 600.0])
@pytest.mark.parametrize("mtbf_s", [1800.0, 86400.0])
def test_no_other_interval_is_noticeably_better(cost_s: float, mtbf_s: float) -> None:
    told = best_interval_s(cost_s, mtbf_s)
    cost_of_it = time_to_work(told, cost_s, mtbf_s)
    best = min(time_to_work(told * 1.02**power, cost_s, mtbf_s) for power in range(-150, 151))
    assert cost_of_it <= best * 1.0005
    if cost_s < mtbf_s / 1000:
        assert told == pytest.approx(math.sqrt(2 * cost_s * mtbf_s), rel=0.03)  # Young's


def test_the_interval_is_the_time_between_failures_where_a_save_costs_more() -> None:
    assert best_interval_s(100.0, 50.0) == 50.0


def test_the_interval_follows_what_is_measured_and_says_so(said: list[str]) -> None:
    now = [0.0]
    interval = BestInterval(lambda: now[0])
    assert interval.seconds == FIRST_S
    interval.measured(0.02, 0.5)
    assert interval.seconds == pytest.approx(best_interval_s(0.02, PRIOR_S))
    interval.measured(0.02, 0.5)
    assert len(said) == 1
    assert "saves every 59 s from here" in said[0]
    assert "0.02 s and is durable after 0.5 s; 0 failures in " in said[0]
    for _ in range(20):
        interval.measured(0.02, 30.0)  # the disk became slow: no more than a tenth of the time is spent writing
    assert interval.seconds == 300.0
    assert len(said) == 2  # when it had more than doubled, and not at every step of the way
    assert "saves every 2 min 32 s" in said[1]


def live(folder: Path, step: int, *, lived_s: float, stopped: bool = False, finished: bool = False) -> FailureHistory:
    """Run an attempt that saves one step after `lived_s` seconds; returns what it wrote about failures so far."""
    now = [0.0]
    interrupts = Interrupts()

    class Timed(CheckpointManager):
        clock = staticmethod(lambda: now[0])

    with Timed(folder, save_interval_steps=None, save_interval_seconds="auto", interrupts=interrupts) as manager:
        now[0] += lived_s
        if stopped:
            interrupts.request_stop("signal:SIGTERM")
        assert manager.save(step, {"step": step}, force=finished)
        if finished:
            manager.saver.finish()
        return FailureHistory(**manager.verify(step).info["endurance"])  # type: ignore[arg-type]


def test_attempts_hand_on_how_long_they_lived_and_which_of_them_failed(tmp_path: Path) -> None:
    assert live(tmp_path, 1, lived_s=100.0) == FailureHistory(100.0, 0, False)
    assert live(tmp_path, 2, lived_s=50.0, stopped=True) == FailureHistory(150.0, 1, True)  # the first just died
    assert live(tmp_path, 3, lived_s=70.0) == FailureHistory(220.0, 1, False)  # the second left in peace
    for _ in range(2):  # two more that die before they save anything
        with CheckpointManager(tmp_path) as manager:
            manager.store.acquire_lease()
    assert live(tmp_path, 4, lived_s=80.0, finished=True) == FailureHistory(300.0, 4, False)
    assert live(tmp_path, 5, lived_s=60.0) == FailureHistory(360.0, 4, False)  # the one before had come to its end
    assert FailureHistory(360.0, 4).mtbf_s == (PRIOR_S + 360.0) / 5


def test_a_manager_saves_at_the_first_interval_and_then_as_often_as_is_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved = [0.0], []
    monkeypatch.setattr(CheckpointManager, "clock", lambda _: now[0])
    with CheckpointManager(tmp_path, save_interval_steps=None, save_interval_seconds="auto") as manager:
        for step in range(20):
            now[0] += 10.0
            if manager.save(step, {"step": step}):
                saved.append(step)
                manager.wait_until_finished()
                manager.saver._interval._stalls, manager.saver._interval._saves = [0.0], [3.0]
    assert saved == [5, 8, 11, 14, 17]


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
