"""A second experiment in the folder of the first: the refusal names two ways, and nothing is lost on either."""

from __future__ import annotations

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
def test_another_setting_is_answered_with_ways_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = "num_agents=2"
    assert train(tmp_path / "run") == 0
    assert "optimizer AdamW, learning_rate 0.005, cosine" in capsys.readouterr().out
    assert train(tmp_path / "run", word) == 2
    shown = capsys.readouterr().err
    assert "has another crowd: num_agents was 1, is 2" in shown
    assert "overwrite_output_dir=true begins here and moves the old run aside" in shown
    assert "experiment_name=NAME begins a new run beside it" in shown
    assert train(tmp_path / "run", word, "experiment_name=two") == 0
    assert read_status(tmp_path / "run" / "two").status == "completed"
    assert read_status(tmp_path / "run").status == "completed"
    assert train(tmp_path / "run", word, "overwrite_output_dir=true") == 0
