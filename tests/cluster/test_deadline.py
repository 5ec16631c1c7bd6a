"""The deadline of a run: its sources, the time that a run needs before it, and the request to stop in time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from ci_llm.cluster.deadline import (
    MARGIN_S,
    MEASUREMENTS,
    Deadline,
    Pace,
    Walltime,
    find_deadline,
    seconds_until_stop,
    upper_quantile,
)
from ci_llm.cluster.launch import Launch
from ci_llm.interrupts import Interrupts
from tests.support.clock import Clock
from tools.testbed.events import DEADLINE_S

# Who names the end


def test_the_earlier_deadline_counts_and_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Launch("python", called_at=500.0)
    assert find_deadline(None, called) is None
    assert find_deadline(60.0, called) == Deadline(560.0, "max_runtime")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert find_deadline(None, called, lambda job: 550.0) == Deadline(550.0, "the end of the job")
    assert find_deadline(60.0, called, lambda job: 550.0) == Deadline(550.0, "the end of the job")
    assert find_deadline(60.0, called, lambda job: 650.0) == Deadline(560.0, "max_runtime")


def test_max_runtime_counts_from_the_start_of_the_process() -> None:
    found = find_deadline(3600.0, Launch("python"))
    assert found is not None
    assert found.at - 3600 == psutil.Process().create_time()


# What is needed


def test_the_upper_quantile_ignores_few_outliers_of_many_measurements() -> None:
    assert upper_quantile([]) == 0.0
    assert upper_quantile([3.0, 9.0, 1.0]) == 9.0
    assert upper_quantile([1.0] * 95 + [50.0] * 5) == 1.0
    assert upper_quantile([1.0] * 94 + [50.0] * 6) == 50.0


def test_the_time_for_a_step_and_a_save_is_reserved() -> None:
    assert seconds_until_stop(100.0, [], []) == 100.0 - MARGIN_S
    assert seconds_until_stop(100.0, [2.0, 5.0], [7.0]) == 100.0 - 5.0 - 7.0 - MARGIN_S


def test_the_pace_keeps_the_latest_steps_and_each_save_once() -> None:
    clock = Clock()
    pace = Pace(clock)
    save = SimpleNamespace(seconds=4.0)
    for step in range(MEASUREMENTS + 20):
        pace.begin_step()
        assert pace.step_started == clock.now
        clock.now += step
        pace.end_step(save)
        clock.now += 1000.0  # what lies between two steps, an evaluation for instance, belongs to neither
    assert pace.steps_s == tuple(range(20, MEASUREMENTS + 20))
    assert pace.saves_s == (4.0,)
    pace.end_step(SimpleNamespace(seconds=4.0))
    assert (pace.saves_s, len(pace.steps_s), pace.step_started) == ((4.0, 4.0), MEASUREMENTS, None)


# The clock speaks


@pytest.fixture
def interrupts() -> Interrupts:
    return Interrupts(announce=lambda _line: None)


def test_the_run_is_asked_to_stop_when_a_step_and_a_save_still_fit(interrupts: Interrupts) -> None:
    clock, pace = Clock(), Pace()
    pace.steps_s, pace.saves_s = (3.0,), (2.0,)
    looked = threading.Event()

    def refresh() -> Deadline | None:
        looked.set()
        return None

    at = 100.0
    clock.now = at - MARGIN_S - 5.0 - 0.2
    with Walltime(Deadline(at, "a test"), pace, interrupts, refresh=refresh, clock=clock):
        assert interrupts.stop_reason is None
        clock.now += 0.3
        assert interrupts.wait(DEADLINE_S)
    assert (interrupts.stop_reason, looked.is_set()) == ("walltime", True)


def test_a_job_whose_limit_is_extended_keeps_training(interrupts: Interrupts) -> None:
    ends = [Deadline(1e6, "prolonged")]
    said_twice = threading.Event()

    def refresh() -> Deadline:
        if ends:
            return ends.pop()
        said_twice.set()
        return Deadline(1e6, "prolonged")

    clock = Clock()
    walltime = Walltime(Deadline(1.0, "a test"), Pace(), interrupts, refresh=refresh, clock=clock)
    with walltime:
        while ends:
            threading.Event().wait(0.001)
        assert interrupts.stop_reason is None
    assert walltime.deadline == Deadline(1e6, "prolonged")
    clock.now = 1e6
    with Walltime(walltime.deadline, Pace(), interrupts, refresh=refresh, clock=clock):
        assert interrupts.wait(DEADLINE_S)
    assert said_twice.is_set()


def test_without_a_deadline_nothing_is_watched_and_the_exit_waits_for_nothing(interrupts: Interrupts) -> None:
    def watchers() -> int:
        return [thread.name for thread in threading.enumerate()].count("ci_llm walltime")

    with Walltime(None, Pace(), interrupts):
        assert watchers() == 0
    with Walltime(Deadline(time.time() + 1e6, "a test"), Pace(), interrupts):
        assert watchers() == 1
    assert watchers() == 0
    assert interrupts.stop_reason is None
