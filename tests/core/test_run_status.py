"""The status of a run: the main process keeps it current, and readers find runs that have vanished."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ci_llm.core.durable import Filesystem
from ci_llm.core.run_folder import PEER_LOST, Failure, read_failures, write_failure
from ci_llm.core.run_status import VANISHED_AFTER_S, RunStatus, Status, pid_space, read_status
from ci_llm.errors import BadInput
from tests.support.children import DEADLINE_S, Child

NOW = 1_800_000_000.0
RUNNING = Status("running", None, 7, 2, os.getpid(), "here", pid_space(), NOW - 500, NOW)


def leave(folder: Path, status: Status) -> Path:
    (folder / "status.json").write_text(json.dumps(asdict(status)))
    return folder


def failure(reason: str, when: float, process_index: int = 0) -> Failure:
    return Failure(reason, "it broke", process_index, when)


def content(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return value


# Writing


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    run = RunStatus(tmp_path, attempt=3)
    run.update(next_command="python train.py again")
    run.start(step=10)
    status = read_status(tmp_path)
    assert (status.status, status.step, status.attempt, status.pid) == ("running", 10, 3, os.getpid())
    assert status.next_command == "python train.py again", "a process that is killed cannot write it any more"
    run.update(step=12)
    assert run.finish("interrupted", "signal:SIGTERM", "python train.py")
    assert (
        content(tmp_path).items()
        >= {
            "status": "interrupted",
            "reason": "signal:SIGTERM",
            "step": 12,
            "attempt": 3,
            "next_command": "python train.py",
        }.items()
    )
    assert set(threading.enumerate()) <= before


def test_the_heartbeat_writes_the_current_step(tmp_path: Path) -> None:
    beaten = threading.Event()
    run = RunStatus(tmp_path, 1, interval_s=0.001, still_held=lambda: run.current.step < 5 or not beaten.set())
    run.start()
    run.update(step=5)
    assert beaten.wait(DEADLINE_S)
    first = read_status(tmp_path).heartbeat
    run.finish("completed")
    assert content(tmp_path)["step"] == 5
    assert read_status(tmp_path).heartbeat >= first


def test_an_attempt_that_lost_its_folder_writes_nothing_more(tmp_path: Path) -> None:
    mine = [True, True, False, True]
    run = RunStatus(tmp_path, 1, interval_s=1e9, still_held=lambda: mine.pop(0))
    run.start()
    later = RunStatus(tmp_path, 2, interval_s=1e9)
    later.start()
    mine.pop(0)
    assert not run.finish("failed", "error:late")
    assert not run.finish("failed", "error:later")  # once lost, never asked again
    assert (content(tmp_path)["attempt"], mine) == (2, [True])
    later.finish("completed")


def test_a_write_that_a_takeover_overtakes_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    staging, sync = tmp_path / "mine", Filesystem.sync
    staging.mkdir()
    run = RunStatus(tmp_path, 1, interval_s=1e9, still_held=staging.is_dir, staging=staging)
    run.start()
    later = RunStatus(tmp_path, 2, interval_s=1e9)

    def overtaken(disk: Filesystem, handle: int) -> None:
        monkeypatch.undo()
        staging.rename(tmp_path / "taken-over")
        later.start()
        sync(disk, handle)

    monkeypatch.setattr(Filesystem, "sync", overtaken)
    assert not run.finish("interrupted", "signal:SIGTERM")
    assert (content(tmp_path)["attempt"], content(tmp_path)["status"]) == (2, "running")
    assert not caplog.messages
    later.finish("completed")


def test_a_disk_that_refuses_a_heartbeat_is_reported_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = RunStatus(folder, 1)
    run.start()
    folder.rename(tmp_path / "elsewhere")
    for step in (1, 2, 3):
        run.note(step=step)
    with pytest.raises(OSError, match="No such file"):
        run.finish("completed")
    assert len(caplog.messages) == 1


# Reading


@pytest.mark.parametrize(
    ("age_s", "status"), [(0.0, "running"), (VANISHED_AFTER_S, "running"), (VANISHED_AFTER_S + 1, "vanished")]
)
def test_an_old_heartbeat_means_vanished(tmp_path: Path, age_s: float, status: str) -> None:
    leave(tmp_path, RUNNING)
    assert read_status(tmp_path, now=NOW + age_s).status == status


def test_a_dead_process_of_this_machine_means_vanished_at_once(tmp_path: Path) -> None:
    with Child.python("") as child:
        child.wait()
        leave(tmp_path, replace(RUNNING, pid=child.pid))
        judged = read_status(tmp_path, now=NOW)
        assert (judged.status, judged.reason, judged.exit_code) == ("vanished", "its process is gone", 1)
        leave(tmp_path, replace(RUNNING, pid=child.pid, pid_space="another machine"))
        assert read_status(tmp_path, now=NOW).status == "running"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"status": "running"}'),
        lambda path: (path.unlink(), path.mkdir()),  # as it may not be read: no OSError either
    ],
)
def test_a_missing_or_damaged_status_is_refused(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    spoil(leave(tmp_path, RUNNING) / "status.json")
    with pytest.raises(BadInput) as caught:
        read_status(tmp_path)
    assert caught.value.where == str(tmp_path / "status.json")


# Failures


def test_the_earliest_failure_is_the_reason_whatever_the_main_process_wrote(tmp_path: Path) -> None:
    """Process 1 runs out of memory; its launcher terminates process 0 for it."""
    write_failure(tmp_path, 2, 1, failure("out_of_memory", NOW - 2, 1))
    write_failure(tmp_path, 2, 0, failure("error:RuntimeError", NOW - 1, 0))
    for status, reason in (("failed", "error:RuntimeError"), ("interrupted", "signal:SIGTERM")):
        leave(tmp_path, replace(RUNNING, status=status, reason=reason))  # type: ignore[arg-type]
        judged = read_status(tmp_path, now=NOW)
        assert (judged.status, judged.reason) == ("failed", "out_of_memory")
    leave(tmp_path, RUNNING)
    assert read_status(tmp_path, now=NOW).status == "running"
    assert read_status(tmp_path, now=NOW + 100).reason == "out_of_memory"


@pytest.mark.parametrize("late", [failure("error:OSError", NOW + 1), failure(PEER_LOST, NOW - 1)])
def test_a_clean_interruption_stays_one(tmp_path: Path, late: Failure) -> None:
    """Errors after the interruption, and a peer that left, are not recorded as its cause."""
    write_failure(tmp_path, 2, 0, late)
    leave(tmp_path, replace(RUNNING, status="interrupted", reason="signal:SIGTERM"))
    assert read_status(tmp_path, now=NOW).exit_code == 75


def test_a_failure_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    path = write_failure(tmp_path, 2, 3, failure("out_of_memory", NOW))
    path.write_text("{}")
    [found] = read_failures(tmp_path, 2)
    assert (found.reason, found.process_index, found.time) == ("unreadable", 3, path.stat().st_mtime)
    assert str(path) in found.message
    leave(tmp_path, RUNNING)
    assert read_status(tmp_path, now=NOW + 100).reason == "unreadable"
