"""The records of attempts: progress is counted over them, and failures survive the disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci_llm.core.run_folder import (
    PEER_LOST,
    Failure,
    attempts_without_progress,
    earliest_failure,
    read_failures,
    record_attempt,
    write_failure,
)


def failure(reason: str, when: float, process_index: int = 0) -> Failure:
    return Failure(reason, "it broke", process_index, when)


def test_attempts_without_progress_are_counted(tmp_path: Path) -> None:
    for attempt, step in enumerate([0, 40, 80, 80, 80], start=7):  # 7..11: by number, not by name
        record_attempt(tmp_path, attempt, step, {"slurm_job": "7"})
    assert attempts_without_progress(tmp_path, 120) == 0
    assert attempts_without_progress(tmp_path, 80) == 3
    record_attempt(tmp_path, 12, 40)  # went back to an older checkpoint
    assert attempts_without_progress(tmp_path, 80) == 0
    assert attempts_without_progress(tmp_path, 40) == 1
    assert attempts_without_progress(tmp_path / "none", 0) == 0


def test_a_damaged_record_of_an_attempt_ends_the_count_and_nothing_else(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        record_attempt(tmp_path, attempt, 5)
    (tmp_path / "attempts" / "2" / "began.json").write_text("[]")
    (tmp_path / "attempts" / "3").rename(tmp_path / "attempts" / "4")
    shutil.copytree(tmp_path / "attempts" / "4", tmp_path / "attempts" / "4.bak")  # by a person
    assert attempts_without_progress(tmp_path, 5) == 1


def test_a_failure_survives_the_disk_and_the_first_of_a_process_stays(tmp_path: Path) -> None:
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        first = Failure.of(error, "error:ValueError", process_index=1, step=4)
    write_failure(tmp_path, 2, 1, first)
    write_failure(tmp_path, 2, 1, failure(PEER_LOST, time.time(), 1))
    assert read_failures(tmp_path, 2) == [first]
    assert read_failures(tmp_path, 1) == []
    assert first.traceback is not None
    assert "no such thing" in first.traceback


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["out_of_memory", "error:X", PEER_LOST]), st.floats(0, 10))))
def test_a_lost_peer_is_a_cause_only_without_any_other_failure(told: list[tuple[str, float]]) -> None:
    cause = earliest_failure(failure(reason, when) for reason, when in told)
    own = [when for reason, when in told if reason != PEER_LOST]
    if not told:
        assert cause is None
    elif own:
        assert cause is not None
        assert (cause.reason != PEER_LOST, cause.time) == (True, min(own))
    else:
        assert cause is not None
        assert cause.time == min(when for _, when in told)
