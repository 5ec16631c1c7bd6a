"""Asynchronous saves hold the state at the call, whatever changes afterwards, and their errors are raised."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from ci_llm.checkpoints.async_saver import Arena, Copy
from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.checkpoints.layout import numbered_steps
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.state_files import entries_of
from ci_llm.errors import CheckpointError
from tests.support import bit_flips
from tests.support.log_lines import log_lines, on_log
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parents[2]


class Training:
    """A small model with a buffer that its forward pass moves, and everything that a loop keeps beside it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.history: list[float] = []
        self.counts = np.zeros(3, dtype=np.int64)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "history": self.history, "counts": self.counts}

    def forward_and_backward(self) -> None:
        loss = self.model(torch.randn(4, 8)).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.history.append(loss.item())
        self.counts += 1

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()


@pytest.fixture
def training() -> Training:
    made = Training()
    made.step()
    made.optimizer.zero_grad()
    return made


class Gate:
    """Holds the copy that is made behind until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.moved, finish = threading.Event(), threading.Event(), Copy.finish

        def gated(copy: Copy) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            assert self.opened.wait(DEADLINE_S)
            return finish(copy)

        monkeypatch.setattr(Copy, "finish", gated)

    def open_when_waited_for(self, manager: CheckpointManager, optimizer: torch.optim.Optimizer) -> None:
        """The copy begins when a caller waits for it, or else after the optimizer has changed the weights."""
        copied = manager.saver.behind._copied
        wait = copied.wait
        copied.wait = lambda *limit: (self.opened.set(), wait(*limit))[1]
        optimizer.register_step_post_hook(lambda *_: (self.moved.set(), self.opened.set()))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def contents(state: dict[str, Any]) -> Any:
    """The whole state as plain values, tensors as their bytes."""
    return plain({key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()})


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes(), value.dtype, value.shape
    if isinstance(value, np.ndarray):
        return value.tobytes(), value.dtype, value.shape
    if isinstance(value, dict):
        return sorted((repr(key), plain(item)) for key, item in value.items())
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_an_optimizer_waits_for_the_copy_and_the_state_is_that_of_the_call(
    training: Training, tmp_path: Path, gate: Gate
) -> None:
    with CheckpointManager(tmp_path, optimizers=[training.optimizer]) as manager:
        before = contents(training.state)
        assert manager.save(1, training.state)
        gate.open_when_waited_for(manager, training.optimizer)
        training.step()
        assert gate.moved.is_set()
        assert contents(training.state) != before
        assert contents(dict(manager.restore(1))) == before


def test_what_is_not_an_optimizers_may_change_at_once(training: Training, tmp_path: Path, gate: Gate) -> None:
    """Buffers, lists, arrays and numbers are copied at the call; weights and moments are copied in the thread."""
    with CheckpointManager(tmp_path, optimizers=[training.optimizer]) as manager:
        before = contents(training.state)
        manager.save(1, training.state)
        training.forward_and_backward()
        training.optimizer.param_groups[0]["lr"] = 0.5
        assert not manager.saver.behind._copied.is_set()
        gate.opened.set()
        assert contents(dict(manager.restore(1))) == before


def test_without_optimizers_the_state_is_copied_at_the_call(training: Training, tmp_path: Path, gate: Gate) -> None:
    with CheckpointManager(tmp_path) as manager:
        before = contents(training.state)
        manager.save(1, training.state)
        training.step()
        gate.opened.set()
        assert contents(dict(manager.restore(1))) == before


def test_weights_changed_during_the_copy_are_noticed(training: Training, tmp_path: Path, gate: Gate) -> None:
    with CheckpointManager(tmp_path, optimizers=[training.optimizer]) as manager:
        manager.save(1, training.state)
        with torch.no_grad():
            training.model[0].weight.mul_(2)
        gate.opened.set()
        training.step()  # an optimizer step is no place to raise
        with pytest.raises(CheckpointError, match=r"(?s)changed before it was copied.*wait_until_copied"):
            manager.wait_until_finished()
        assert manager.all_steps() == []
        manager.save(2, training.state)
        manager.wait_until_copied()
        with torch.no_grad():
            training.model[0].weight.mul_(2)
        assert manager.all_steps() == [2]


def test_the_optimizer_inside_accelerates_wrapper_is_watched(training: Training, tmp_path: Path, gate: Gate) -> None:
    optimizer = Accelerator(cpu=True).prepare_optimizer(training.optimizer)
    with CheckpointManager(tmp_path, optimizers=[optimizer]) as manager:
        before = contents(training.state)
        manager.save(1, training.state)
        gate.open_when_waited_for(manager, training.optimizer)
        training.forward_and_backward()
        assert not gate.opened.is_set()
        optimizer.step()
        assert gate.moved.is_set()
        assert contents(dict(manager.restore(1))) == before


def test_an_optimizer_made_later_is_watched_until_the_manager_closes(training: Training, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.watch(training.optimizer)
        manager.save(1, training.state)
        assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    assert not training.optimizer._optimizer_step_pre_hooks


def test_a_save_that_is_due_while_one_is_in_flight_waits_and_says_so(
    training: Training, tmp_path: Path, gate: Gate
) -> None:
    with (
        log_lines() as said,
        on_log(lambda line: gate.opened.set()),
        CheckpointManager(tmp_path, optimizers=[training.optimizer]) as manager,
    ):
        manager.save(1, training.state)
        manager.save(2, training.state)
        assert numbered_steps(manager.directory) == [1]
        assert said == ["saving step 2 waits for the save before it: saves are due faster than they are written"]
        assert manager.all_steps() == [1, 2]


def test_without_memory_for_a_copy_the_error_says_what_to_do(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def refuse(size: int, **options: Any) -> Any:
        if size:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(size, **options)

    with CheckpointManager(tmp_path, optimizers=[training.optimizer]) as manager:
        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.raises(CheckpointError, match=r"(?s)no memory.*async_save=False"):
            manager.save(1, training.state)
        monkeypatch.undo()
        training.step()
        assert manager.save(2, training.state)
        assert manager.all_steps() == [2]


def test_a_save_whose_thread_does_not_start_is_not_written_later(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps such a job and would run it with the next one: the new bytes under the old step."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ci_llm checkpoint"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                manager.save(1, training.state)
        training.step()
        assert manager.save(2, training.state)
        assert manager.all_steps() == [2]
        assert contents(dict(manager.restore(2))) == contents(training.state)


LEAVES = (
    f"DEADLINE_S = {DEADLINE_S}"
    + """
import sys, threading, torch
from pathlib import Path
from ci_llm.checkpoints.layout import numbered_steps
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.durable import Filesystem

last_line = threading.Event()

class Slow(Filesystem):
    def write(self, handle, data):
        assert threading.current_thread() is threading.main_thread() or last_line.wait(DEADLINE_S)
        return super().write(handle, data)

folder = Path(sys.argv[1])
weight = torch.nn.Parameter(torch.full((1000,), 7.0))
optimizer = torch.optim.SGD([weight], lr=0.1)
manager = CheckpointManager(folder, optimizers=[optimizer])
manager.store._disk = Slow()
manager.store.acquire_lease()
manager.save(1, {"weight": weight})
assert numbered_steps(manager.directory) == []
if "lose" in sys.argv:
    (folder / ".attempt-1").rename(folder / ".attempt-9")
last_line.set()
"""
)


def leave(*arguments: object) -> str:
    command = [sys.executable, "-c", LEAVES, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_S, capture_output=True, text=True).stderr


@pytest.mark.slow
def test_a_save_in_flight_at_the_exit_is_finished(tmp_path: Path) -> None:
    assert leave(tmp_path) == ""
    assert load_checkpoint(tmp_path / "checkpoint_step_1").state["weight"].tolist() == [7.0] * 1000


@pytest.mark.slow
def test_a_save_that_fails_at_the_exit_is_reported(tmp_path: Path) -> None:
    told = leave(tmp_path, "lose")
    assert told.startswith("the last checkpoint was not saved: ")
    assert "taken over" in told


@pytest.mark.slow
def test_bit_flips_in_asynchronous_saves_are_noticed(tmp_path: Path) -> None:
    assert bit_flips.noticed(bit_flips.write_behind, 30, 0, tmp_path / "run") == 30


def test_a_page_locked_block_is_freed_before_a_larger_one_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch caches page-locked memory, and a machine may not hold the state twice."""
    freed: list[str] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() > 0)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: freed.append("freed"), raising=False)
    arena = Arena()
    for size, times in ((8, 0), (8, 0), (4096, 1), (16, 1)):
        arena.reserve(entries_of({"w": torch.ones(size)}))
        assert len(freed) == times
