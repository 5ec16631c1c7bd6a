"""A second experiment in the folder of the first: nothing is lost, and the refusal is a line to paste."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.core.run_status import read_status
from tests.run.test_job import CONFIG, SMALL

pytestmark = pytest.mark.usefixtures("threads_as_they_were")
FEW = ["num_agents=1", "max_train_steps=2", "eval_steps=null", "generation_eval_samples=0", "eval_samples=1"]


def train(folder: Path, *words: str) -> int:
    return main(["train", "--config", str(CONFIG), *SMALL, *FEW, f"output_dir={folder}", *words])


@pytest.mark.slow
def test_another_setting_is_answered_with_a_command_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word, said, name = "num_agents=2", "has another crowd: num_agents was 1, is 2", "num_agents2"
    assert train(tmp_path / "run") == 0
    assert "optimizer AdamW, learning_rate 0.005, cosine" in capsys.readouterr().out
    assert train(tmp_path / "run", word) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "overwrite_output_dir=true begins here and moves the old run aside" in shown
    command = re.search(r"`(.*)` begins a new run beside it", shown)
    assert command is not None
    words = shlex.split(command[1])
    assert words[-1] == f"experiment_name={name}"
    assert main(words[words.index("train") :]) == 0
    assert read_status(tmp_path / "run" / name).status == "completed"
    assert read_status(tmp_path / "run").status == "completed"
    assert train(tmp_path / "run", word, "overwrite_output_dir=true") == 0
