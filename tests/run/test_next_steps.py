"""What a completed run suggests: commands that can be typed as they stand, each key once, on a base that can learn."""

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
def suggested(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, list[str]]]:
    """The words behind train.py in the suggestions of a run that was started with these, in the project's folder."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(shutil, "which", lambda _: None)

    def suggest(*words: str) -> dict[str, list[str]]:
        monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *words])
        launch = Launch("python", 1, 0, 0, 1, None, {}, arguments=words)
        config = load_config("configs.yaml", [word for word in words if word != "--continue"])
        lines = next_steps(config, launch)
        commands = {line[:10].strip(): shlex.split(line[11:].split("   ")[0]) for line in lines if "train.py" in line}
        return {name: command[command.index("train.py") + 1 :] for name, command in commands.items()}

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
    words: list[str], suggested: Callable[..., dict[str, list[str]]]
) -> None:
    """Suggested keys that the command already had were refused as `given twice`."""
    said = suggested(*words)
    assert set(said) == {"longer", "own data"}
    for command in said.values():
        keys = [word.partition("=")[0] for word in command if not word.startswith("--")]
        assert len({*keys}) == len(keys)
    own = load_config(None, [word for word in said["own data"] if word != "--continue"])
    assert (own.dataset_name, own.experiment_name, own.max_train_samples) == ("my.jsonl", "mine", None)
    assert (own.dataset_split, own.eval_split, own.resume_from_checkpoint) == ("train", None, "latest")
    assert own.model_name == "Qwen/Qwen2.5-0.5B", "the toy base gives way"
    *rest, last = said["longer"]
    assert last == "max_train_steps=..."
    assert load_config("configs.yaml", [*(word for word in rest if word != "--continue"), "max_train_steps=9"])
