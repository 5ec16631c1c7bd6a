"""Runs that appear, continue and end: what is looked at, when it is over, and with which exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ci_llm.cluster.slurm import QueuedJob
from ci_llm.core.run_folder import record_attempt
from ci_llm.report.status import Reading
from ci_llm.report.watch import Absent, JobQueue, Scene
from tests.report.folders import leave_run, leave_status


class Squeue:
    """A squeue that lists the jobs of the test."""

    def __init__(self) -> None:
        self.listed: dict[str, QueuedJob] = {}

    def __call__(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
        return {job: found for job, found in self.listed.items() if job in ids}


def scene_of(*words: Path | str, squeue: Squeue | None = None, **options: Any) -> Scene:
    queue = JobQueue(squeue or Squeue(), is_there=squeue is not None)
    scene = Scene([str(word) for word in words], queue, **options)
    scene.look(wait_for_squeue=True)
    return scene


def statuses(scene: Scene) -> list[str]:
    scene.look(wait_for_squeue=True)
    return [look.status.status if isinstance(look, Reading) else look.why for look in scene.looks]


@pytest.mark.parametrize(
    ("states", "ended", "code"),
    [
        (["completed"], True, 0),
        (["running"], False, 3),
        (["interrupted"], True, 75),
        (["failed"], True, 1),
        (["completed", "running"], False, 3),
        (["completed", "interrupted", "running"], False, 75),
        (["interrupted", "failed", "completed"], True, 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst(states: list[str], ended: bool, code: int, tmp_path: Path) -> None:
    for number, state in enumerate(states):
        leave_run(tmp_path / str(number), status=state)
    scene = scene_of(tmp_path)
    assert [scene.has_ended(), scene.exit_code()] == [ended, code]


def test_a_run_that_begins_later_is_waited_for(tmp_path: Path) -> None:
    scene = scene_of(tmp_path / "later")
    assert statuses(scene) == ["no run has begun here yet"]
    assert (scene.has_ended(), scene.exit_code()) == (False, 3)
    leave_status(tmp_path / "later", "running", 0)
    assert statuses(scene) == ["running"]
    leave_status(tmp_path / "later", "completed", 5)
    assert statuses(scene) == ["completed"]
    assert scene.has_ended()


def test_runs_that_begin_in_a_folder_take_its_place(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    assert statuses(scene) == ["no run has begun here yet"]
    leave_status(tmp_path / "a", "running", 0)
    leave_status(tmp_path / "b", "completed", 0)
    assert statuses(scene) == ["running", "completed"]


def test_a_run_whose_folder_goes_away_stays_in_the_picture_for_a_while(tmp_path: Path) -> None:
    now = [time.time()]
    leave_status(tmp_path / "a", "running", 0)
    leave_status(tmp_path / "b", "completed", 0)
    scene = scene_of(tmp_path, clock=lambda: now[0])
    shutil.rmtree(tmp_path / "a")
    assert sorted(statuses(scene)) == ["completed", "the run is not here any more"]
    assert (scene.has_ended(), scene.exit_code()) == (False, 1)
    now[0] += 1000
    statuses(scene)
    assert (scene.has_ended(), scene.exit_code()) == (True, 1)


def test_a_status_that_cannot_be_read_says_why_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("[]")
    scene = scene_of(tmp_path)
    [look] = scene.looks
    assert isinstance(look, Absent)
    assert "not the status of a run" in look.why
    assert not scene.has_ended()
    leave_status(tmp_path, "completed", 1)
    assert statuses(scene) == ["completed"]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Within the block root, who may read everything, becomes another user."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_that_may_not_be_read_says_why() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be entered by its user alone
        Path(folder).chmod(0o755)
        leave_status(Path(folder, "a"), "running", 1)
        Path(folder, "a/status.json").chmod(0)
        with as_nobody():
            [look] = scene_of(Path(folder, "a")).looks
    assert isinstance(look, Absent)
    assert "Permission denied" in look.why


def test_an_interrupted_run_whose_job_waits_in_the_queue_has_not_ended(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", status="interrupted")
    record_attempt(tmp_path / "run", 1, 0, {"slurm_job": "7"})
    squeue = Squeue()
    squeue.listed["7"] = QueuedJob("PENDING", "BeginTime", "1:00:00")
    waits = scene_of(tmp_path / "run", squeue=squeue)
    assert waits.jobs["7"].state == "PENDING"
    assert not waits.has_ended()
    squeue.listed.clear()
    assert scene_of(tmp_path / "run", squeue=squeue).has_ended()
    assert scene_of(tmp_path / "run").has_ended(), "without squeue nothing is known of the job"


def test_a_completed_run_has_ended_whatever_its_job_does(tmp_path: Path) -> None:
    leave_run(tmp_path / "run")
    record_attempt(tmp_path / "run", 1, 0, {"slurm_job": "7"})
    squeue = Squeue()
    squeue.listed["7"] = QueuedJob("RUNNING", "None", "1:00:00")
    scene = scene_of(tmp_path / "run", squeue=squeue)
    assert scene.has_ended()
    assert scene.jobs == {}


def test_a_failed_run_under_a_supervisor_is_waited_for(tmp_path: Path) -> None:
    leave_status(tmp_path, "failed", 3, heartbeat=time.time())
    record_attempt(tmp_path, 1, 0, {"supervised": True})
    assert not scene_of(tmp_path).has_ended()
    leave_status(tmp_path, "failed", 3, heartbeat=time.time() - 500)
    assert scene_of(tmp_path).has_ended()
