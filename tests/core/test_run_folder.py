"""The names that a run keeps for itself: all that it writes into its folder, and that no other run may have."""

from __future__ import annotations

import pytest

from ci_llm.checkpoints.folders import FINAL, OVERWRITTEN, QUARANTINE, SUPERSEDED
from ci_llm.config import load_config
from ci_llm.core.run_folder import OF_A_RUN, SEGMENTS, SWEEP, is_reserved
from ci_llm.errors import ConfigError
from ci_llm.evaluation.loading import PREDICTIONS
from ci_llm.logs import hardware, profile, run_log
from ci_llm.mirror.head import TOKEN_FILE
from ci_llm.report import page
from ci_llm.run.step import members

MOVED = {FINAL, QUARANTINE, SUPERSEDED, PREDICTIONS, hardware.FILE_NAME, profile.FOLDER, page.NAME}
MOVED |= {run_log.LOG_NAME, run_log.METRICS_NAME, members.FOLDER}
BESIDE = {OVERWRITTEN, TOKEN_FILE, SEGMENTS, SWEEP}


def test_the_names_of_the_code_are_among_them() -> None:
    assert {*OF_A_RUN} >= MOVED
    assert all(map(is_reserved, MOVED | BESIDE))


@pytest.mark.parametrize(
    "name", ["status.json", "attempts", "checkpoint_step_5", ".attempt-1", ".mine", "Quarantine", "segments"]
)
def test_no_experiment_may_have_one(name: str) -> None:
    with pytest.raises(ConfigError, match="gives to a part of its own") as refusal:
        load_config(None, [f"experiment_name={name}"])
    assert str(refusal.value.where) == "command line"
    suggested = str(refusal.value.hint).split()[3]
    assert load_config(None, [f"experiment_name={suggested}"]).experiment_name == suggested


@pytest.mark.parametrize("name", ["checkpoint", "status", "attempt_2", "my.attempts", "lr0.01"])
def test_other_names_are_free(name: str) -> None:
    assert load_config(None, [f"experiment_name={name}"]).experiment_name == name
