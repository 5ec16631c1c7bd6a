"""The names that a run keeps for itself, which no other run may have; and how its small records are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.layout import FINAL, OVERWRITTEN, QUARANTINE, SUPERSEDED
from ci_llm.config import load_config
from ci_llm.core.run_folder import (
    METRICS_NAME,
    OF_A_RUN,
    PREDICTIONS,
    SEGMENTS,
    SWEEP,
    is_reserved,
    parsed,
    read_began,
    record_attempt,
)
from ci_llm.errors import BadInput, CheckpointError, CiLlmError, ConfigError
from ci_llm.logs import hardware, run_log
from ci_llm.mirror.head import TOKEN_FILE
from ci_llm.report import page
from ci_llm.run.step import requests

MOVED = {FINAL, QUARANTINE, SUPERSEDED, PREDICTIONS, hardware.FILE_NAME, page.NAME}
MOVED |= {run_log.LOG_NAME, METRICS_NAME, requests.FOLDER}
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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "this is not a note: "),
        ("{}", "this is not a note: it lacks 'text'"),
        ("[]", "this is not a note: list indices"),
        ('{"text": 3}', "this is not a note: 'int' object"),
    ],
)
@pytest.mark.parametrize("error", [BadInput, CheckpointError])
def test_a_record_that_is_not_of_this_program_is_one_error(
    content: str, told: str, error: type[CiLlmError], tmp_path: Path
) -> None:
    def upper(path: Path) -> Any:
        return json.loads(path.read_text())["text"].upper()

    (path := tmp_path / "note.json").write_text(content)
    with pytest.raises(error) as refusal:
        parsed(path, upper, "this is not a note", error=error)
    assert refusal.value.what.startswith(told)
    assert (refusal.value.where, refusal.value.hint) == (str(path), "move it away")
    path.write_text('{"text": "a"}')
    assert parsed(path, upper, "this is not a note") == "A"


def test_the_record_of_an_attempts_beginning_is_read_or_empty(tmp_path: Path) -> None:
    assert read_began(tmp_path, 1) == {}
    record_attempt(tmp_path, 1, 7, {"slurm_job": "12"})
    assert {"step": 7, "slurm_job": "12"}.items() <= read_began(tmp_path, 1).items()
    for damage in ("", "[]", "{"):
        (tmp_path / "attempts/1/began.json").write_text(damage)
        assert read_began(tmp_path, 1) == {}
