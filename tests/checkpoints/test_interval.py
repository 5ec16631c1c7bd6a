"""The best interval, by brute force too, and what a run knows of its failures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.policy import FIRST_S, PRIOR_S, BestInterval, FailureHistory, best_interval_s
from ci_llm.interrupts import Interrupts


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
