"""The examples do what they say: a plain Accelerate loop on two processes is the loop on one, gradient by gradient."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from examples import accelerate_loop
from tests.forkserver import ForkServer

STEPS = 4
ROWS_PER_STEP = 8


def watched_loop(folder: str, rows_per_process: int) -> int:
    """In a process of its own: the example, and what the optimizer was given at every step."""
    seen: dict[str, Tensor] = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen[f"gradient{len(seen):02}"] = torch.cat([p.grad.flatten() for p in parameters])

    torch.set_num_threads(1)
    register_optimizer_step_pre_hook(look)
    losses = torch.tensor(accelerate_loop.train(rows_per_process, STEPS, Path(folder, "cache")))
    gradients = torch.stack(list(seen.values()))
    index = os.environ.get("RANK", "0")
    save_file({"losses": losses, "gradients": gradients}, Path(folder, f"process{index}.safetensors"))
    return 0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(__name__) as started:
        yield started


def told(server: ForkServer, folder: Path, processes: int) -> list[dict[str, Tensor]]:
    """What each process of a world saw."""
    folder.mkdir()
    codes = server.run(
        watched_loop, folder / "log", ranks=processes, folder=str(folder), rows_per_process=ROWS_PER_STEP // processes
    )
    assert codes == [0] * processes, (folder / "log").read_text()
    return [load_file(folder / f"process{index}.safetensors") for index in range(processes)]


def test_two_processes_under_ddp_have_the_gradients_of_the_union_batch(server: ForkServer, tmp_path: Path) -> None:
    (alone,) = told(server, tmp_path / "one", 1)
    zero, one = told(server, tmp_path / "two", 2)
    assert torch.equal(zero["gradients"], one["gradients"])
    assert alone["gradients"].shape[0] == STEPS
    assert float(alone["gradients"].norm(dim=1).min()) > 0
    for ours, theirs in zip(zero["gradients"], alone["gradients"], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4  # Adam turns a rounded sign into a full step
    torch.testing.assert_close(zero["losses"], alone["losses"], rtol=1e-5, atol=0)
    assert alone["losses"][-1] < alone["losses"][0]
