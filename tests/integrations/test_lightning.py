"""Lightning's Trainer with our callback: killed or told to stop at a batch, it resumes and ends with the same bits.

What imports Lightning does so in the test: pytest imports this file for every choice of tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ci_llm
from ci_llm.errors import ConfigError, ForeignCheckpoint
from tests.support.campaign import sampled_cases
from tests.support.loops import ends_twice
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import interfere

pytestmark = pytest.mark.slow

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def trained(folder: str, changes: Mapping[str, Any], sent: str | None = None, step: int = 0) -> int:
    """In a process of its own: the example, which sends itself a signal when a step is done."""
    from examples import lightning_trainer  # Lightning is slow to import

    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        os.environ |= {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": os.environ["RANK"], "GROUP_RANK": "0"}
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    if sent is not None:
        place = "ci_llm.checkpoints.manager.CheckpointManager.reached_preemption"
        interfere(place, step, lambda: os.kill(os.getpid(), signal.Signals[sent]))
    reason = lightning_trainer.train(Path(folder), **QUIET, **changes)
    return 75 if reason else 0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer("examples.lightning_trainer") as started:
        yield started


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "accumulation": ({}, 1),
    "ends within an epoch": ({"max_steps": 33, "max_epochs": None, "accumulate_grad_batches": 1}, 1),
    "workers": ({"workers": 2}, 1),
    "validated by epoch": ({"val_check_interval": 1.0}, 1),
    "two processes": ({"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 1}, 2),
}


@pytest.mark.parametrize(
    ("case", "at"),
    sampled_cases([(case, at) for case in CASES for at in (12, 13, 14)], [("workers", 14), ("two processes", 13)]),
)
def test_a_run_ends_with_the_same_bits(case: str, at: int, server: ForkServer, tmp_path: Path) -> None:
    changes, processes = CASES[case]
    ends_twice(
        lambda folder, **told: server.run(
            trained, folder / "log", folder=str(folder), ranks=processes, changes=changes, **told
        ),
        tmp_path,
        kill_at=at,
        stop_after=8,
    )


def fit(
    folder: Path,
    *others: Any,
    resume: bool = True,
    module: Any = None,
    loader: Any = None,
    evaluated: Any = None,
    **changes: Any,
) -> Any:
    import lightning

    from examples import lightning_trainer

    checkpoints = ci_llm.LightningCheckpoints(folder / "run")
    how = {"max_steps": 6, "enable_checkpointing": False, "logger": False, **QUIET, **changes}
    trainer = lightning.Trainer(callbacks=[checkpoints, *others], default_root_dir=folder, **how)
    rows = DataLoader(TensorDataset(torch.ones(16, 8), torch.ones(16, 1)), 4)
    place = checkpoints.resume() if resume else None
    trainer.fit(module or lightning_trainer.Net(), loader or rows, evaluated or rows, ckpt_path=place)
    return trainer


def test_a_training_that_would_begin_again_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(ConfigError, match="would not resume from its newest checkpoint"):
        fit(tmp_path, resume=False, max_steps=8)


def test_another_loop_or_model_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(ForeignCheckpoint, match="accumulate_grad_batches was 1, is 2"):
        fit(tmp_path, accumulate_grad_batches=2)
    fewer = DataLoader(TensorDataset(torch.ones(16, 8), torch.ones(16, 1)), 8)
    with pytest.raises(ForeignCheckpoint, match="batches was 4, is 2"):
        fit(tmp_path, loader=fewer, max_steps=9)
    from examples import lightning_trainer

    frozen = lightning_trainer.Net()
    frozen.layers[0].weight.requires_grad = False
    with pytest.raises(ForeignCheckpoint, match="frozen weights was"):
        fit(tmp_path, module=frozen)


def test_a_run_that_has_stopped_early_is_over(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    def patience() -> Any:
        return EarlyStopping("loss", patience=1, min_delta=1e9)

    assert fit(tmp_path, patience(), max_steps=99).global_step == 8
    assert fit(tmp_path, patience(), max_steps=99).global_step == 8


def test_a_backend_for_which_every_process_needs_the_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only process 0 has the state"):
        ci_llm.LightningCheckpoints(tmp_path, checkpoint_backend="distributed")


def test_handlers_and_plugins_are_given_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    trainer = fit(tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"
    assert isinstance(trainer.train_dataloader, DataLoader)


def test_without_lightning_the_error_is_one_line() -> None:
    code = "import sys; sys.modules['lightning'] = None; import ci_llm; ci_llm.LightningCheckpoints"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert "Lightning is not installed" in done.stderr
