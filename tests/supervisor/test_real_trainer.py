"""The real trainer under the supervisor: a cut ends the fault that the trainer could not, and the run completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.core.run_folder import read_failures, read_recovery
from ci_llm.core.run_status import read_status
from tests.supervisor.terminal import ran
from tests.support.children import PYTHONPATH
from tests.support.faults import KEYS, Fault, fired, metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]

#: A script like train.py, with a fault that lasts until recovery.json asks for the cut that ends it.
SCRIPT = """
import json, sys
from pathlib import Path
from ci_llm.cli.main import main
from ci_llm.core.run_folder import read_recovery
from tests.support.faults import Fault, arm
fault, cut = Fault(**{fault}), {cut!r}
if getattr(read_recovery("run"), cut) in (None, 1.0):
    arm([fault])
sys.exit(main(["train", *sys.argv[1:]]))
"""


def supervise(folder: Path, fault: Fault, cut: str, **keys: object) -> str:
    """The log of a supervised run that has to complete."""
    values = {"kind": fault.kind, "steps": fault.steps, "agents": fault.agents}
    (folder / "train.py").write_text(SCRIPT.replace("{fault}", repr(values)).replace("{cut!r}", repr(cut)))
    (folder / "configs.yaml").touch()  # the defaults, and not the project's own
    words = [f"{key}={value}" for key, value in (KEYS | keys).items()]
    env = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    ran(folder, "--train-script", "train.py", *words, hasty=True, env=env)
    assert fired(folder)
    assert read_status(folder / "run").status == "completed"
    return (folder / "safe_train.log").read_text()


def test_nan_for_ever_ends_by_a_smaller_rate_from_an_older_checkpoint(tmp_path: Path) -> None:
    fault = Fault("nan output", steps=tuple(range(57, 199)), agents=(0, 1, 2))
    keys = {"save_steps": 4, "save_total_limit": "null", "max_train_steps": 64}
    log = supervise(tmp_path, fault, "learning_rate_factor", **keys)
    run = tmp_path / "run"
    assert "learning rate: 1 -> 0.667 of the schedule's" in log
    assert "going back to a checkpoint of step 7 or before" in log
    (failure,) = read_failures(run, 1)
    assert (failure.reason, failure.step) == ("nonfinite", 57)
    assert "step 4 of 64, verified" in (run / "training.log").read_text()
    assert (run / "superseded" / "checkpoint_step_8").is_dir()
    assert metrics(tmp_path)[-1]["train/learning_rate"] < KEYS["learning_rate"]
    assert len(read_recovery(run).because) == 1


def test_out_of_memory_outside_of_the_vote_ends_by_a_smaller_micro_batch(tmp_path: Path) -> None:
    fault = Fault("out of memory in the optimizer", steps=(5,))
    log = supervise(tmp_path, fault, "micro_batch_size", save_steps=2)
    assert "micro-batch: 4 -> 2, the effective batch holds" in log
    (failure,) = read_failures(tmp_path / "run", 1)
    assert failure.reason == "out_of_memory"
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["train/micro_batch_size"] == 2
    assert CheckpointStore(tmp_path / "run").all_steps()[-1] == 12
