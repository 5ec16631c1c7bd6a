"""The emergency save commits the last boundary: after a save that failed, and within a pass at other numbers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.async_saver import Copy
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.launch import Launch
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.lora.settings import LoraSettings
from ci_llm.run.attempt import Attempt
from ci_llm.run.emergency_save import EmergencySave
from ci_llm.run.exactness import fixed_batch, layer_digest
from tests.support.micro_steps import micro_step
from tools.testbed.disks import CachedDisk
from tools.testbed.events import DEADLINE_S
from tools.testbed.tiny import base


class BrokenOnce(CachedDisk):
    def __init__(self) -> None:
        self.broken = True

    def write(self, handle: int, data: Any) -> int:
        if self.broken:
            self.broken = False
            raise ZeroDivisionError("a bug")
        return super().write(handle, data)


def emergency_save(
    manager: CheckpointManager, contents: Callable[[], Any] = lambda: {"w": torch.ones(3)}
) -> EmergencySave:
    config: Any = SimpleNamespace(run_folder=manager.directory, interrupted_exit_code=75, mirror=None)
    attempt: Any = Attempt(config, Launch("python"), manager, SimpleNamespace())
    attempt.processes = SimpleNamespace(is_main_process=True, num_processes=1, device=torch.device("cpu"))
    other: Any = SimpleNamespace()  # what only a run that trains uses
    return EmergencySave(
        attempt, other, other, lambda: 7, lambda _: manager.saver.save_last(7, contents(), info={}) and None
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


def compared_with_its_start(crowd: Crowd) -> None:
    crowd.start = torch.zeros_like(crowd.storage.weights)
    (owned,) = fixed_batch(crowd, (5, 7), own_rows=False)
    crowd.reference(owned.agents, owned.batch)


def computed_on_fixed_numbers(crowd: Crowd) -> None:
    """As in a step of which memory has run out, when every agent takes a pass of its own from there on."""

    def train(batches: Any) -> Any:
        crowd.train().storage.begin_step(-1)
        return SimpleNamespace(sums=micro_step(crowd, NextToken(), batches[0], -1).task)

    layer_digest(crowd, fixed_batch(crowd, (5, 7), own_rows=False), train)


@pytest.mark.parametrize("compute", [compared_with_its_start, computed_on_fixed_numbers])
def test_a_save_within_a_pass_at_other_numbers_has_the_weights_of_the_boundary(
    compute: Callable[[Crowd], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in flight that is copied late, and an emergency save, both while the pass is under way."""
    crowd = Crowd(base("llama", torch.float32), LoraSettings(num_agents=2, rank=2, dropconnect=0.1), "toy").train()
    crowd.storage.weights.normal_()
    boundary, inside, copy = crowd.storage.weights.clone(), threading.Event(), Copy.finish

    def late(self: Copy) -> Any:
        assert inside.wait(DEADLINE_S)
        return copy(self)

    def contents() -> Any:
        return {agent.name: agent.state_dict() for agent in crowd.agents}

    def save(*_: object) -> None:
        if not inside.is_set():
            inside.set()
            manager.wait_until_finished()
            thread = threading.Thread(target=emergency_save(manager, contents)._save_boundary)
            thread.start()
            thread.join(DEADLINE_S)

    monkeypatch.setattr(Copy, "finish", late)
    with CheckpointManager(tmp_path / "run", optimizers=[torch.optim.SGD(crowd.storage.rows)]) as manager:
        assert manager.save(5, contents())
        with crowd.model.model.layers[0].register_forward_hook(save):
            compute(crowd)
        assert manager.all_steps() == [5, 7]
        for step in (5, 7):
            crowd.storage.weights.zero_()
            manager.restore(step, into=contents())
            assert torch.equal(crowd.storage.weights, boundary)


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


class Asked:
    """A lock that tells when the training thread asks for it."""

    def __init__(self, lock: Any, come: threading.Event) -> None:
        self._lock, self._come, self.release = lock, come, lock.release

    def acquire(self, **how: float) -> bool:
        if threading.current_thread() is threading.main_thread():
            self._come.set()
        return bool(self._lock.acquire(**how))


def test_a_run_that_fails_while_its_boundary_is_about_to_be_saved_leaves_the_word_to_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "_exit", done.append)
    attempt: Any = SimpleNamespace(
        config=SimpleNamespace(interrupted_exit_code=75),
        processes=SimpleNamespace(is_main_process=True, num_processes=1, device=torch.device("cpu")),
        finish_save_in_flight=lambda: None,
        interrupted=done.append,
        last_act=lambda: None,
        interrupts=SimpleNamespace(stop_reason="walltime", wait=lambda _: True),
        pace=SimpleNamespace(step_started=None),
        mirror=SimpleNamespace(flush_before_kill=lambda: None),
    )
    emergency = EmergencySave(attempt, attempt, attempt, lambda: 7, lambda _: None)
    held, come = threading.Event(), threading.Event()
    answers = iter([lambda: True, lambda: held.set() or come.wait(DEADLINE_S), *[lambda: False] * 1000])
    monkeypatch.setattr(emergency, "_killed_at", 0.0, raising=False)
    monkeypatch.setattr(emergency, "_is_due", lambda _: next(answers)())
    monkeypatch.setattr(emergency, "_hook", SimpleNamespace(remove=lambda: None), raising=False)
    monkeypatch.setattr(emergency, "_boundary_lock", Asked(emergency._boundary_lock, come))
    thread = threading.Thread(target=emergency._watch)
    thread.start()
    assert held.wait(DEADLINE_S)
    emergency.__exit__(RuntimeError, RuntimeError("the step under way failed"), None)
    done.append("left")
    come.set()
    thread.join(DEADLINE_S)
    assert done == ["walltime", 75, "left"]


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings and errors."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
