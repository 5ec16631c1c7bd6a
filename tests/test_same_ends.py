"""tools.same_ends tells checkouts that end with the same bits from those that do not, on ones that train at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.same_ends import Cell, Checkout, compare

# Trains by writing the weight; the first run that has committed a step stands still until it is killed.
TRAIN = """
import pathlib, signal, sys
import numpy as np
from safetensors.numpy import save_file
keys = dict(word.split("=", 1) for word in sys.argv[3:])
run = pathlib.Path("run")
resumes = (run / "checkpoint_step_2").exists()
if resumes and {resumes}:
    print("resume    step 2 of 6")
elif pathlib.Path.cwd().name.endswith("2"):
    (run / "checkpoint_step_2").mkdir(parents=True, exist_ok=True)
    (run / "checkpoint_step_2/manifest.json").touch()
    {waits}
final = run / "final_checkpoint/agent0"
final.mkdir(parents=True)
tensors = {{"a": np.float32([float(keys["seed"]), {weight}]), "b": np.zeros(2, np.float32)}}
save_file(tensors, final / "adapter_model.safetensors")
"""


def checkout(folder: Path, weight: str = "0.0", waits: str = "signal.pause()", resumes: bool = True) -> Checkout:
    (folder / "ci_llm").mkdir(parents=True)
    (folder / "ci_llm/__init__.py").write_text("class Config: model_fields = ('seed',)")
    (folder / "train.py").write_text(TRAIN.format(weight=weight, waits=waits, resumes=resumes))
    return Checkout(folder)


@pytest.mark.slow
def test_trees_are_told_apart_by_one_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees = [checkout(tmp_path / "one"), checkout(tmp_path / "same"), checkout(tmp_path / "signed", weight="-0.0")]
    for number, tree in enumerate(trees):
        work = tmp_path / f"work{number}"
        work.mkdir()
        assert compare(trees[0], tree, {"cell": Cell({"seed": 7})}, work) == (number < 2)
    said = capsys.readouterr().out
    assert said.count("| cell | 2 of 2 | 2 of 2 |") == 2
    assert said.count("| cell | 1 of 2 | 1 of 2 |") == 1
    assert "does not have, and is not given: adam_beta1, " in said
