"""The real trainer under the supervisor: a cut ends the fault that the trainer could not, and the run completes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.core.attempts import read_failures
from ci_llm.core.recovery import read_recovery
from ci_llm.core.run_status import read_status
from tests.support.faults import KEYS, Fault, fired, metrics, said, train
from tests.support.supervised import supervise_forks
from tools.testbed.forkserver import ForkServer

pytestmark = pytest.mark.slow


def supervise(server: ForkServer, folder: Path, fault: Fault, cut: str, **keys: object) -> str:
    """The log of a supervised run that has to complete: its fault goes on until recovery.json asks for the cut."""
    run, log = folder / "run", folder / "safe_train.log"

    def attempt(environment: Mapping[str, str]) -> list[int]:
        goes_on = getattr(read_recovery(run), cut) in (None, 1.0)
        return train(server, folder, *[fault] * goes_on, environment=environment, **keys)

    words = [f"{key}={value}" for key, value in (KEYS | keys | {"output_dir": run}).items()]
    assert supervise_forks(words, log, attempt) == 0, said(folder)
    assert fired(folder)
    assert read_status(run).status == "completed"
    return log.read_text()


def test_nan_for_ever_ends_by_a_smaller_rate_from_an_older_checkpoint(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("nan output", steps=tuple(range(7, 99)), agents=(0, 1, 2))
    keys = {"good_after_steps": 3, "save_steps": 2, "save_total_limit": "null", "max_consecutive_nonfinite": 2}
    log = supervise(server, tmp_path, fault, "learning_rate_factor", **keys)
    run = tmp_path / "run"
    assert "learning rate: 1 -> 0.667 of the schedule's" in log
    assert "going back to a checkpoint of step 4 or before" in log
    (failure,) = read_failures(run, 1)
    assert (failure.reason, failure.step) == ("nonfinite", 7)
    assert "step 4 of 12, verified" in (run / "training.log").read_text()
    assert (run / "superseded" / "checkpoint_step_6").is_dir()
    assert metrics(tmp_path)[-1]["train/learning_rate"] < KEYS["learning_rate"]
    assert len(read_recovery(run).because) == 1


def test_out_of_memory_outside_of_the_vote_ends_by_a_smaller_micro_batch(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("out of memory in the optimizer", steps=(5,))
    log = supervise(server, tmp_path, fault, "micro_batch_size", save_steps=2)
    assert "micro-batch: 4 -> 2, the effective batch holds" in log
    (failure,) = read_failures(tmp_path / "run", 1)
    assert failure.reason == "out_of_memory"
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["train/micro_batch_size"] == 2
    assert CheckpointStore(tmp_path / "run").all_steps()[-1] == 12
