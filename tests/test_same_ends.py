"""tools.same_ends tells checkouts that end with the same bits from those that do not, on ones that train at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tools import same_ends
from tools.same_ends import Cell, Checkout, RunFailedError, compare, compared

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
        assert compare(trees[0], tree, {"cell": Cell({"seed": 7}, template=True)}, work) == (number < 2)
    said = capsys.readouterr().out
    assert said.count("| cell | yes | 2 of 2 | 2 of 2 |") == 2
    assert said.count("| cell | yes | 1 of 2 | 1 of 2 |") == 1
    assert "does not have, and is not given: adam_beta1, " in said


def test_a_tensor_that_one_run_lacks_counts(tmp_path: Path) -> None:
    for name, tensors in {"one": ["a", "b"], "other": ["b", "c"]}.items():
        folder = tmp_path / name / "final_checkpoint/agent0"
        folder.mkdir(parents=True)
        save_file({each: np.ones(1, np.float32) for each in tensors}, folder / "adapter_model.safetensors")
    assert compared(tmp_path / "one", tmp_path / "other") == (1, 3)
    with pytest.raises(RunFailedError, match="has adapters"):
        compared(tmp_path, tmp_path)


def test_every_cell_gives_its_rows_and_what_decides_bits(tmp_path: Path) -> None:
    same_ends.write_rows(tmp_path)
    for name, cell in same_ends.CELLS.items():
        keys = same_ends.KEYS | cell.keys
        names = [keys["dataset_name"], *(own["dataset_name"] for own in keys.get("agents", ()))]
        assert all(file == "embedded" or (tmp_path / file).stat().st_size for file in names), name
        assert cell.template == (keys["dataset_name"] in ("embedded", "pairs.jsonl")), name
