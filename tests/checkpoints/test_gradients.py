"""Saves between two optimizer steps: accumulated gradients are restored, and the run ends with the same bits."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ci_llm.checkpoints.checkpoint import Checkpoint, compare, load_checkpoint
from ci_llm.checkpoints.gradients import KEY
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.errors import ForeignCheckpoint
from tools.testbed.forkserver import ForkServer

MICRO_STEPS, WINDOW = 14, 4


def ingredients() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(micro_step: int, process: int = 0) -> torch.Tensor:
    return torch.sin(torch.arange(12.0).reshape(3, 4) * (micro_step + 1) + process)


def loop(folder: str, style: str, kill_at: int | None = None) -> int:
    """In a process of its own: windows of four micro-steps, each saved; killed when the save of one is durable."""
    torch.set_num_threads(1)
    model, optimizer = ingredients()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW) if style == "accelerate" else None
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    rank = accelerator.process_index if accelerator is not None else 0
    inner = model if accelerator is None else accelerator.unwrap_model(model)
    objects: dict[str, Any] = {"model": inner, "optimizer": optimizer}
    manager = CheckpointManager(Path(folder, "run"), accelerator=accelerator)
    start = 0
    if (latest := manager.latest_step()) is not None:
        manager.restore(latest, into=objects)
        start = latest + 1
    for at in range(start, MICRO_STEPS):
        if accelerator is not None:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(at, rank)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        else:
            (model(batch(at)).square().mean() / WINDOW).backward()
            if (at + 1) % WINDOW == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=style != "zeros")
        manager.save(at, objects)
        manager.wait_until_finished()
        if at == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def last(folder: Path) -> Checkpoint:
    return load_checkpoint(folder / "run" / f"checkpoint_step_{MICRO_STEPS - 1}")


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Checkpoint]:
    """The last checkpoint of an undisturbed loop."""

    @functools.cache
    def run(style: str, processes: int) -> Checkpoint:
        folder = tmp_path_factory.mktemp("straight")
        codes = server.run(loop, folder / "log", ranks=processes, folder=str(folder), style=style)
        assert codes == [0] * processes, (folder / "log").read_text()
        return last(folder)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "processes", "kill_at"),
    [
        ("plain", 1, 1),  # in the first window
        ("plain", 1, 6),
        ("plain", 1, 7),  # at the end of the second
        ("zeros", 1, 7),  # where gradients are set to zero, and are there
        ("accelerate", 1, 6),
        ("accelerate", 2, 6),
    ],
)
def test_a_loop_killed_between_two_optimizer_steps_ends_with_the_same_bits(
    style: str,
    processes: int,
    kill_at: int,
    server: ForkServer,
    straight: Callable[[str, int], Checkpoint],
    tmp_path: Path,
) -> None:
    how: dict[str, Any] = {"folder": str(tmp_path), "style": style, "ranks": processes}
    log = tmp_path / "log"
    assert server.run(loop, log, kill_at=kill_at, **how)[0] == -signal.SIGKILL, log.read_text()
    held = load_checkpoint(tmp_path / "run" / f"checkpoint_step_{kill_at}").state
    assert (KEY in held) is ((kill_at + 1) % WINDOW != 0 or style == "zeros")
    assert server.run(loop, log, **how) == [0] * processes, log.read_text()
    undisturbed = straight(style, processes)
    assert len(undisturbed.state[KEY]) == processes, "the run ends inside a window"
    assert compare(undisturbed, last(tmp_path)).identical


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int, *, clear_first: bool) -> None:
    if clear_first:
        optimizer.zero_grad()
    model(batch(at)).square().mean().backward()
    optimizer.step()
    if not clear_first:
        optimizer.zero_grad()


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("clear_first", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_gradients_left_over_from_a_step_are_not_saved(clear_first: bool, told: bool, tmp_path: Path) -> None:
    model, optimizer = ingredients()
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, optimizers=[optimizer] if told else []) as manager:
        for at in range(4):
            step(model, optimizer, at, clear_first=clear_first)
            manager.save(at, objects)
        assert [at for at in range(4) if KEY in manager.restore(at)] == []


@pytest.mark.parametrize("told", [True, False])
def test_a_loop_that_clears_before_its_saves_may_save_its_last_step_before(told: bool, tmp_path: Path) -> None:
    model, optimizer = ingredients()
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, optimizers=[optimizer] if told else []) as manager:
        for at in range(3):
            step(model, optimizer, at, clear_first=False)
            manager.save(at, objects)
        step(model, optimizer, 3, clear_first=True)  # stopped between the step and `zero_grad`
        manager.save(3, objects)
        assert KEY not in manager.restore(3)


def test_going_back_drops_the_gradients_that_wait_now(tmp_path: Path) -> None:
    model, optimizer = ingredients()
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path) as manager:
        step(model, optimizer, 0, clear_first=False)
        manager.save(0, objects)
        model(batch(1)).sum().backward()
        manager.restore(0, into=objects)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_a_missing_model_are_refused(tmp_path: Path) -> None:
    model, optimizer = ingredients()
    model(batch(0)).sum().backward()
    with CheckpointManager(tmp_path, optimizers=[optimizer]) as manager:
        manager.save(0, {"model": model, "moments": optimizer.state_dict()})
        # This optimizer had its gradients already when the manager first saw it, and saved them no more.
        assert KEY not in manager.restore(0)
        model(batch(1)).sum().backward()
        manager.save(1, {"model": model, "moments": optimizer.state_dict()})
        assert KEY in manager.restore(1)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    with CheckpointManager(tmp_path) as reader:
        with pytest.raises(ForeignCheckpoint, match="inside an accumulation window"):
            reader.restore(1, into={"model": model, "moments": {}})
        assert not model[0].weight.any(), "nothing is touched"
        # Who takes plain values is not asked for the optimizer.
        found = reader.restore(1)
        assert KEY in found
        assert torch.equal(found["model"]["0.weight"], before)


def test_a_gradient_of_zeros_comes_back_as_one_and_takes_no_bytes(tmp_path: Path) -> None:
    model, optimizer = ingredients()
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, optimizers=[optimizer]) as manager:
        step(model, optimizer, 0, clear_first=True)
        optimizer.zero_grad(set_to_none=False)
        model[2](torch.ones(1, 8)).sum().backward()  # the first layer has no part in it
        before = [parameter.grad.clone() for parameter in model.parameters()]
        manager.save(0, objects)
        saved = manager.restore(0)[KEY]["process0"]["gradients"]["optimizer"]
        assert [isinstance(saved[number], torch.Tensor) for number in range(4)] == [False, False, True, True]
        optimizer.zero_grad()
        manager.restore(0, into=objects)
        assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], before))


def test_the_accumulation_step_of_accelerate_is_restored(tmp_path: Path) -> None:
    model, optimizer = ingredients()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model, optimizer = accelerator.prepare(model, optimizer)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, accelerator=accelerator) as manager:
        for at in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(at)).square().mean())
        manager.save(2, objects)
        accelerator.step = 0
        manager.restore(2, into=objects)
        assert accelerator.step == 3
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients, "the fourth ends the window"
