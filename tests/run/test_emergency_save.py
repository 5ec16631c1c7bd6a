"""The emergency save commits the last boundary also after a save that failed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.launch import Launch
from ci_llm.run.attempt import Attempt
from ci_llm.run.emergency_save import EmergencySave
from tools.testbed.disks import CachedDisk


class BrokenOnce(CachedDisk):
    def __init__(self) -> None:
        self.broken = True

    def write(self, handle: int, data: Any) -> int:
        if self.broken:
            self.broken = False
            raise ZeroDivisionError("a bug")
        return super().write(handle, data)


def emergency_save(manager: CheckpointManager) -> EmergencySave:
    config: Any = SimpleNamespace(run_folder=manager.directory, interrupted_exit_code=75, mirror=None)
    attempt: Any = Attempt(config, Launch("python"), manager, SimpleNamespace())
    attempt.processes = SimpleNamespace(is_main_process=True, num_processes=1, device=torch.device("cpu"))
    other: Any = SimpleNamespace()  # what only a run that trains uses
    return EmergencySave(
        attempt, other, other, lambda: 7, lambda _: manager.saver.save_last(7, {"w": torch.ones(3)}, info={}) and None
    )


def test_a_save_in_flight_that_failed_is_reported_and_the_boundary_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ci_llm")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.store.acquire_lease()
        manager.store._disk = BrokenOnce()
        assert manager.save(5, {"w": torch.zeros(3)})
        emergency_save(manager)._save_boundary()
        assert manager.all_steps() == [7]
    assert reported(caplog) == ["the save in flight has failed: ZeroDivisionError: a bug"]


def test_an_error_of_the_emergency_save_is_reported_before_the_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.store.acquire_lease()
        manager.store._disk = BrokenOnce()
        emergency_save(manager)._save_and_exit()
    assert reported(caplog) == ["the last boundary could not be saved: ZeroDivisionError: a bug"]
    assert codes == [1]


@pytest.mark.parametrize("unreachable", [False, True])
def test_the_job_is_requeued_after_everything_was_sent(monkeypatch: pytest.MonkeyPatch, unreachable: bool) -> None:
    """The job is requeued also when nothing could be sent."""
    done: list[object] = []

    def send() -> None:
        done.append("sent")
        if unreachable:
            raise OSError

    monkeypatch.setattr(os, "_exit", done.append)
    attempt: Any = SimpleNamespace(
        config=SimpleNamespace(interrupted_exit_code=75),
        processes=SimpleNamespace(is_main_process=True, num_processes=1, device=torch.device("cpu")),
        finish_save_in_flight=lambda: None,
        interrupted=done.append,
        last_act=lambda: done.append("put back"),
        interrupts=SimpleNamespace(stop_reason="walltime"),
        pace=SimpleNamespace(),
        mirror=SimpleNamespace(flush_before_kill=send),
    )
    other: Any = SimpleNamespace()
    EmergencySave(attempt, other, other, lambda: 7, lambda _: None)._save_and_exit()
    assert done == ["walltime", "sent", "put back", 75]


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings and errors."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
