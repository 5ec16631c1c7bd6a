"""The last boundary is committed, whatever became of the save before it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.run import emergency_save
from tests.support.disks import CachedDisk


class BrokenOnce(CachedDisk):
    def __init__(self) -> None:
        self.broken = True

    def write(self, handle: int, data: Any) -> int:
        if self.broken:
            self.broken = False
            raise ZeroDivisionError("a bug")
        return super().write(handle, data)


def boat(manager: CheckpointManager, said: list[str], monkeypatch: pytest.MonkeyPatch) -> emergency_save.EmergencySave:
    state = {"w": torch.ones(3)}
    for name, answer in {"contents": state, "describe": {}, "kept_steps": ()}.items():
        monkeypatch.setattr(emergency_save, name, lambda *_, answer=answer: answer)
    run = SimpleNamespace(
        state=SimpleNamespace(step=7),
        processes=SimpleNamespace(is_main=True, count=1),
        log=SimpleNamespace(say=said.append),
        manager=manager,
        interrupts=SimpleNamespace(stop_reason="signal:SIGTERM"),
        config=SimpleNamespace(interrupted_exit_code=75),
    )
    return emergency_save.EmergencySave(run, 1, SimpleNamespace())  # type: ignore[arg-type]


def test_a_save_in_flight_that_failed_is_said_and_the_boundary_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with CheckpointManager(tmp_path / "run") as manager:
        manager.acquire_lease()
        manager._store._disk = BrokenOnce()
        assert manager.save(5, {"w": torch.zeros(3)})
        boat(manager, said, monkeypatch)._save_boundary()
        assert manager.all_steps() == [7]
    assert said[1:] == ["the save in flight has failed: ZeroDivisionError: a bug"]


def test_whatever_keeps_the_boundary_from_being_saved_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.acquire_lease()
        manager._store._disk = BrokenOnce()
        boat(manager, said, monkeypatch)._go()
    assert said[1:] == ["the last boundary could not be saved: ZeroDivisionError: a bug"]
    assert codes == [1]
