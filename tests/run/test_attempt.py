"""How an interrupted attempt ends: which step is saved, also on a full disk, and the command that resumes."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import Deadline, expected_kill
from ci_llm.cluster.launch import Launch, read_launch
from ci_llm.config import Config
from ci_llm.core.run_status import RunStatus, read_status
from ci_llm.interrupts import Interrupts
from ci_llm.run import attempt


def attempt_at_its_end(folder: Path, steps: list[int], began_at: int = 0, trained: int = 0) -> attempt.Attempt:
    """An attempt that is about to end, of a run with checkpoints of these steps."""
    config: Any = SimpleNamespace(run_folder=folder, requeue="auto", mirror=None)
    store = SimpleNamespace(holds_lease=lambda: True)
    manager: Any = SimpleNamespace(all_steps=lambda: steps, store=store, wait_until_finished=lambda: None)
    log: Any = SimpleNamespace(end_progress=lambda: None)  # an interruption is reported by the loggers
    ending = attempt.Attempt(config, launch("python"), manager, log, log)
    ending.number, ending.began_at, ending.status = 1, began_at, RunStatus(folder, 1)
    ending.status.update(step=trained)
    return ending


def launch(launcher: str, command: tuple[str, ...] = ()) -> Launch:
    return Launch(launcher, 1, 0, 1, None, {}, launcher_command=command)


@pytest.mark.parametrize(
    ("steps", "began_at", "step", "where"),
    [
        ([3, 5], 3, 5, "step 5 is saved"),
        ([], 0, 0, "no step is saved"),
        ([], 50, 50, "step 50 is saved"),  # it resumed from a checkpoint elsewhere, and will do so again
    ],
)
def test_an_interruption_reports_the_step_that_is_saved(
    steps: list[int], began_at: int, step: int, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps lost by a second Ctrl-C or a full disk are trained again, so they are not the reported step."""
    caplog.set_level(logging.INFO, "ci_llm")
    attempt_at_its_end(tmp_path, steps, began_at, trained=60).interrupted("signal:SIGINT")
    assert read_status(tmp_path).step == step
    assert f"interrupted (signal:SIGINT): {where}; resume with: " in caplog.messages[0]


def test_a_full_disk_hides_no_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ci_llm")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ci_llm.core.run_status.write_json", full)
    monkeypatch.setattr(attempt, "requeue", lambda *_, **__: "SLURM job 7 is put back into the queue")
    ending = attempt_at_its_end(tmp_path, [5])
    ending.interrupted("signal:SIGTERM")
    ending.last_act()
    refused, ended, queued = caplog.messages
    assert "status.json cannot be written: [Errno 28]" in refused
    assert "interrupted (signal:SIGTERM): step 5 is saved" in ended
    assert "put back" in queued


def test_a_job_that_is_stopped_before_its_run_begins_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ci_llm")
    told: list[object] = []

    def put_back(*asked: object, without_progress: int) -> str:
        told.append((*asked, without_progress))
        return "SLURM job 7 is put back into the queue"

    monkeypatch.setattr(attempt, "requeue", put_back)
    for number in (1, 2):
        manager = CheckpointManager(tmp_path)
        config, interrupts = Config(output_dir=str(tmp_path)), Interrupts()
        assert attempt.Attempt(config, launch("python"), manager, interrupts).stopped_before_it_began("walltime") == 0
        assert told[-1] == ("auto", "walltime", number)
    assert read_status(tmp_path).status == "interrupted"
    assert "put back" in caplog.messages[-1]


# The command


PATH = {"python": "/usr/bin/python", "python3": "/usr/bin/python3", "torchrun": "/venv/bin/torchrun"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/python3", "/venv/bin/torchrun", "--nnodes=1", "train.py"], "torchrun --nnodes=1 train.py"),
        (["/usr/bin/python3", "-m", "torch.distributed.run", "train.py"], "python3 -m torch.distributed.run train.py"),
        (["/usr/bin/python3", "-u", "/venv/bin/torchrun", "train.py"], "python3 -u /venv/bin/torchrun train.py"),
        (["/usr/bin/python3", "/odd/bin/torchrun", "train.py"], "python3 /odd/bin/torchrun train.py"),
        ([], "python train.py"),  # no launcher was found
    ],
)
def test_the_command_that_resumes_is_that_of_the_launcher(
    command: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "train.py"])
    monkeypatch.setattr(shutil, "which", PATH.get)
    assert attempt.command_line(launch("torchrun", tuple(command))) == expected
    assert attempt.command_line(launch("python")) == "python train.py"
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    assert attempt.command_line(launch("python")) == "python train.py"
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", "/venv/bin/ci-llm", "train"])
    assert attempt.command_line(launch("python")) == "/venv/bin/ci-llm train"
    monkeypatch.setattr("shutil.which", lambda name: f"/venv/bin/{name}")
    assert attempt.command_line(launch("python")) == "ci-llm train"


def test_the_command_is_the_launchers_after_the_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM ends `accelerate launch` first: the parent is PID 1 by the time the run says how to resume."""
    command = ["/venv/bin/python", "/venv/bin/accelerate", "launch", "train.py"]
    monkeypatch.setattr("ci_llm.cluster.launch._parent_command", lambda *_: command)
    launched = read_launch({"ACCELERATE_MIXED_PRECISION": "no"})
    stranger = ["/sbin/supervise", "--token=of-a-stranger"]
    monkeypatch.setattr("ci_llm.cluster.launch._parent_command", lambda *_: stranger)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert attempt.command_line(launched) == " ".join(command)


@pytest.mark.parametrize(
    ("reason", "source", "called_at", "kills"),
    [
        ("callback", None, 5.0, False),
        ("walltime", "max_runtime", 5.0, False),
        ("walltime", "max_runtime", None, True),  # the process is the run, which is to be over then
        ("walltime", "the end of the job", 5.0, True),
        ("signal:SIGTERM", "max_runtime", 5.0, True),
    ],
)
def test_a_stop_requested_by_the_caller_never_ends_the_interpreter(
    reason: str, source: str | None, called_at: float | None, kills: bool
) -> None:
    """A step longer than the grace ended the caller's process with exit code 0."""
    interrupts: Any = SimpleNamespace(stop_requested_at=time.monotonic(), stop_reason=reason)
    asked = replace(launch("torchrun"), kill_delay_s=30.0, called_at=called_at)
    deadline = Deadline(time.time() + 20, source) if source else None
    left = expected_kill(interrupts, 3.0, asked, deadline) - time.monotonic()
    assert left < 30 if kills else left == math.inf
