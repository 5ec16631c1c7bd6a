"""What a completed run suggests for a longer run: a command that can be typed as it stands, each key once."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ci_llm.cluster.launch import Launch
from ci_llm.config import load_config
from ci_llm.run.end.result import next_steps

ROOT = Path(__file__).parents[2]
PRESET = "configs/qwen2.5_0.5b_gsm8k.yaml"


@pytest.fixture
def suggested(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The words behind train.py in the suggestion of a run that was started with these, in the project's folder."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(shutil, "which", lambda _: None)

    def suggest(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *words])
        launch = Launch("python", 1, 0, 0, 1, None, {}, arguments=words)
        config = load_config("configs.yaml", [word for word in words if word != "--continue"])
        [line] = [line for line in next_steps(config, launch) if "train.py" in line]
        command = shlex.split(line.removeprefix("longer").split("   continues")[0])
        return command[command.index("train.py") + 1 :]

    return suggest


WORDS = [
    [],
    ["max_train_steps=5", "--samples", "20", "dataset=embedded", "--model", "embedded", "--exp_name=a"],
    ["--epochs", "7", "--auto_resume", "--debug_subset_size=3", "seed=2", "--continue"],
    ["--config", "configs.yaml", "eval_split=validation", "resume_from_checkpoint=somewhere"],
    ["--config", PRESET, "dataset_name=openai/gsm8k", "dataset_subset=main", "max_train_steps=9"],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_suggestion_is_a_command_that_the_trainer_takes(
    words: list[str], suggested: Callable[..., list[str]]
) -> None:
    """Suggested keys that the command already had were refused as `given twice`."""
    said = suggested(*words)
    *rest, last = said
    keys = [word.partition("=")[0] for word in said if not word.startswith("--")]
    assert len({*keys}) == len(keys)
    assert last == "max_train_steps=..."
    assert load_config("configs.yaml", [*(word for word in rest if word != "--continue"), "max_train_steps=9"])
