"""`use_gradient_checkpointing: auto`: layers are recomputed where their activations would not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.cli.main import main
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.distributed import processes
from ci_llm.run.start.cost_model import passes_without_estimate
from tests.support import small_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_as_they_were")]
WORDS = ["use_gradient_checkpointing=auto", *small_run.WORDS]
Train = Callable[..., int]


@pytest.mark.parametrize(
    ("keys", "device", "becomes"),
    [
        ({}, "cpu", True),
        ({}, "cuda", None),
        ({"deterministic": True}, "cuda", True),
        ({"base_sharding": "layers"}, "cpu", False),
        ({"base_sharding": "layers", "deterministic": True}, "cuda", False),  # K passes would gather K times
        ({"base_sharding": "layers", "pass_per_agent": True}, "cpu", True),
        ({"diversity": "swd", "deterministic": True}, "cpu", False),
    ],
)
def test_auto_of_pass_per_agent_resolves_by_settings(keys: dict[str, Any], device: str, becomes: bool | None) -> None:
    assert passes_without_estimate(Config(**keys), torch.device(device))[0] is becomes


@pytest.fixture
def train_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A run on a machine with so many bytes free."""

    def train(free: int, steps: int, *words: str) -> int:
        monkeypatch.setattr(processes, "free_memory", lambda _: (free, free))
        return main(["train", *WORDS, f"max_train_steps={steps}", f"output_dir={tmp_path / 'run'}", *words])

    return train


def test_a_run_decides_by_the_free_memory_where_it_begins_and_keeps_it(
    train_with: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enabled = []
    enable = Crowd.gradient_checkpointing_enable
    monkeypatch.setattr(Crowd, "gradient_checkpointing_enable", lambda self: (enabled.append(1), enable(self)))
    assert train_with(10**6, 2) == 0
    assert "memory    use_gradient_checkpointing=true: by estimate agents 0.00 GB" in capsys.readouterr().out
    assert "use_gradient_checkpointing: true" in (tmp_path / "run/checkpoint_step_2/config.yaml").read_text()
    assert len(enabled) == 1
    assert train_with(10**12, 4) == 0
    said = capsys.readouterr().out
    assert "use_gradient_checkpointing true: as this run began" in said
    assert "exactness: bitwise" in said
    assert len(enabled) == 2
    assert train_with(10**12, 6, "use_gradient_checkpointing=false") == 0
    assert len(enabled) == 2, "what is said plainly is done"


def test_a_run_with_room_recomputes_nothing(train_with: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_with(10**12, 1) == 0
    assert "use_gradient_checkpointing=false: by estimate" in capsys.readouterr().out
