"""The records of attempts, and how the time of a run was spent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from ci_llm.core.durable import make_folders, write_json
from ci_llm.core.run_status import Status
from ci_llm.report.facts import RunFacts, seconds_by_kind
from tests.report.folders import NOW, leave_run, leave_status


def begin(folder: Path, attempt: int, step: int, launched: float) -> None:
    place = folder / "attempts" / str(attempt)
    make_folders(place)
    write_json(place / "began.json", {"step": step, "launched": launched})


def leave_attempt(folder: Path, attempt: int, status: str, step: int, began: float, ended: float) -> None:
    """The status that the next attempt has kept of this one."""
    known = Status(status, "signal:SIGTERM", step, attempt, 1, "here", "", began, ended)  # type: ignore[arg-type]
    write_json(folder / "attempts" / str(attempt) / "status.json", asdict(known))


def test_the_time_of_one_attempt_adds_up_to_its_parts(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    begin(folder, 1, 0, NOW - 3)
    facts = RunFacts(folder)
    seconds = seconds_by_kind(facts.attempts)
    assert sum(seconds.values()) == pytest.approx(facts.wall_s) == pytest.approx(63)
    # Two evaluations of half a second; the first step began a second before its line, 3 s after the launch.
    assert seconds["evaluation"] == pytest.approx(40.5), "with the final one"
    assert seconds["start-up"] == pytest.approx(3.0)
    assert seconds["training"] == pytest.approx(19.5)


def test_a_killed_attempt_costs_the_steps_that_were_lost_and_the_pause(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", steps=8)
    begin(folder, 1, 0, NOW)
    leave_attempt(folder, 1, "running", 11, NOW, NOW + 11)
    begin(folder, 2, 8, NOW + 31)
    leave_status(folder, "completed", 8, attempt=2, started=NOW + 33, heartbeat=NOW + 40)
    first, second = RunFacts(folder).attempts
    assert (first.outcome, first.last_step, first.redone_steps, second.first_step) == ("killed", 11, 3, 8)
    assert first.seconds["lost steps"] == pytest.approx(3)
    assert first.seconds["no process"] == pytest.approx(20)
    assert second.seconds["start-up"] == first.restart_s == pytest.approx(2)
    assert first.cost_s == pytest.approx(25)


def test_an_attempt_of_which_little_was_kept_has_its_log_and_lost_nothing_that_is_known(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", steps=5)
    (folder / "metrics.jsonl").write_text("")
    begin(folder, 1, 0, NOW)
    begin(folder, 2, 5, NOW + 30)
    (folder / "training.log").write_text(
        "2026-01-01 10:00:00 [1] attempt 1 on here, process 7\n"
        "2026-01-01 10:00:01 [1] step 1/5  20%  loss 1 (1 1)\n"
        "2026-01-01 10:00:30 [1] WARNING agent1    not finite in step 3, 1 in a row\n"
        "a line of a stack, without a head\n"
    )
    leave_status(folder, "completed", 5, attempt=2)
    first, second = RunFacts(folder).attempts
    assert first.log == ("attempt 1 on here, process 7", "WARNING agent1    not finite in step 3, 1 in a row")
    assert first.warnings == [first.log[1]]
    assert (first.outcome, second.outcome) == ("killed", "completed")
    assert (first.redone_steps, second.first_step) == (0, 5)
