"""What is known about a run from its files, and what is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.core.run_folder import last_records
from ci_llm.report import status
from ci_llm.report.status import Reading, lines, progress, scores, speed, time_left
from tests.report.folders import NOW, leave_run, leave_status, metrics


def running(folder: Path, *, agents: int = 2, total: int | None = 60, **fields: Any) -> Path:
    leave_run(folder, steps=20, agents=agents, status="running")
    leave_status(folder, "running", 20, total_steps=total, **fields)
    return folder


def log(folder: Path, *records: Mapping[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_run_that_trains(tmp_path: Path) -> None:
    found = Reading(running(tmp_path / "run"))
    assert (found.losses, found.loss) == ([0.1, 0.2], 0.1)
    assert (found.training["step"], found.tokens_per_s, found.steps_per_s) == (20, 100.0, 1.0)
    assert found.left_s == 40.0
    assert progress(found) == "20 of 60 steps, 33 %"
    assert (speed(found), time_left(found)) == ("1 steps/s, 100 tokens/s", "0:00:40 left")


def test_the_step_of_a_run_that_trains_is_that_of_its_losses(tmp_path: Path) -> None:
    """`step 0 ... 0 of 400 steps, 41.8 steps/s` stood there until the next heartbeat."""
    folder = running(tmp_path / "run")
    leave_status(folder, "running", 0, total_steps=60)
    found = Reading(folder)
    assert (found.status.step, found.training["step"], found.left_s) == (20, 20, 40.0)
    leave_status(folder, "running", 0, attempt=2, total_steps=60)
    assert Reading(folder).status.step == 0, "the lines of an earlier attempt may be taken again"
    leave_status(folder, "interrupted", 12, total_steps=60)
    assert Reading(folder).status.step == 12, "what is saved"


def test_the_speed_is_of_the_present_attempt(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", total=30)
    later = [
        line | {"time": line["time"] + 5000 + 3 * line["step"]} for line in metrics(24, 2, attempt=2) if "epoch" in line
    ]
    log(folder, *later[20:21])
    leave_status(folder, "running", 21, attempt=2, total_steps=30)
    assert Reading(folder).steps_per_s == 1.0  # its only line says how long its steps took
    log(folder, *later[21:])
    leave_status(folder, "running", 24, attempt=2, total_steps=30)
    found = Reading(folder)
    assert (found.steps_per_s, found.left_s) == (0.25, 24.0)
    assert speed(found).startswith("4 s/step")


def test_the_last_evaluation_and_then_the_result(tmp_path: Path) -> None:
    folder = running(tmp_path / "run")
    exact = {f"eval/{who}/exact_match": value for who, value in (("agent0", 0.2), ("agent1", 0.4), ("crowd", 0.5))}
    log(folder, {"step": 20, "eval/crowd/nll": 0.25, **exact})
    assert scores(Reading(folder)) == "evaluation after step 20: crowd nll 0.25, exact match 0.500 (agents 0.300)"
    done = Reading(leave_run(tmp_path / "done"))
    assert scores(done) == "result, step 20: crowd nll 0.5, exact match 0.500 (agents 0.400)"


def test_free_text_is_shown_by_its_nll(tmp_path: Path) -> None:
    """The exact match of free text is recorded too, but has no meaning."""
    folder = running(tmp_path / "run", judged_by="nll")
    names = ("agent0", "agent1", "crowd")
    line = {f"eval/{who}/{each}": 0.25 for who in names for each in ("nll", "exact_match")}
    log(folder, {"step": 20, **line, "eval/agent1/nll": 0.75})
    assert scores(Reading(folder)) == "evaluation after step 20: crowd nll 0.25 (agents 0.5)"
    assert Reading(folder).record()["evaluation"]["measure"] == "nll"
    done = leave_run(tmp_path / "done")
    record = json.loads((done / "evaluation.json").read_text())
    (done / "evaluation.json").write_text(json.dumps({**record, "judged_by": "nll"}))
    assert scores(Reading(done)).startswith("result, step 20: crowd nll 0.5 (agents ")


def test_other_objectives_are_shown_by_their_own_figures(tmp_path: Path) -> None:
    pairs = running(tmp_path / "pairs", objective="dpo")
    heads = running(tmp_path / "heads", objective="classification")
    numbers = running(tmp_path / "numbers", objective="regression", judged_by="nll")
    values = {"agent0": 0.25, "agent1": 0.75, "crowd": 0.875}
    line = {f"eval/{who}/{name}": x for who, x in values.items() for name in ("nll", "exact_match", "mse")}
    ranked = {f"eval/{who}/rewards/accuracies": value / 2 for who, value in values.items()}
    for folder in (pairs, heads, numbers):
        log(folder, {"step": 20, **line, **ranked})
    told = "evaluation after step 20: crowd"
    assert scores(Reading(pairs)) == f"{told} nll 0.875, pairs ranked right 0.438 (agents 0.250)"
    assert Reading(pairs).record()["evaluation"]["measure"] == "rewards/accuracies"
    assert scores(Reading(heads)) == f"{told} nats per row 0.875, accuracy 0.875 (agents 0.500)"
    assert scores(Reading(numbers)) == f"{told} squared error 0.875 (agents 0.5)"
    done = leave_run(
        tmp_path / "done", asked={"preferences": {"n": 40, "auroc": {"agents": [0.5, 0.75], "crowd": 0.75}}}
    )
    status = json.loads((done / "status.json").read_text())
    (done / "status.json").write_text(json.dumps(status | {"objective": "kto"}))
    assert scores(Reading(done)) == "result, step 20: crowd nll 0.5, AUROC of the ratings 0.750 (agents 0.625)"


@pytest.mark.parametrize("content", ["", "[]", '{"nll": {}}', '{"exact_match": {"agents": []}, "nll": {"crowd": 1}}'])
def test_a_result_that_cannot_be_read_is_not_told(tmp_path: Path, content: str) -> None:
    folder = leave_run(tmp_path / "run")
    (folder / "evaluation.json").write_text(content)
    assert Reading(folder).scores is None


@pytest.mark.parametrize(
    ("agents", "told"),
    [(1, "loss 0.1"), (4, "loss 0.1 (0.1 0.2 0.3 0.4)"), (16, "loss 0.1 (0.1 to 1.6, 16 agents)")],
)
def test_losses_are_listed_or_there_is_their_range(agents: int, told: str, tmp_path: Path) -> None:
    assert told in lines(Reading(running(tmp_path / "run", agents=agents)))


@pytest.mark.parametrize(("age", "told"), [(3.4, "3 s"), (119, "1 min 59 s"), (7300, "2 h 1 min")])
def test_the_age_of_the_heartbeat(age: float, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: NOW))
    leave_status(tmp_path, "running", 1, heartbeat=NOW - age)
    assert f"attempt 1 on here, heartbeat {told} ago" in lines(Reading(tmp_path))


@pytest.mark.parametrize("torn", [b"", b'{"step": 21, "ep', b'{"step": "21"}\n[]\n\xff\n'])
def test_only_the_end_of_a_long_file_is_read_and_torn_lines_are_left_out(tmp_path: Path, torn: bytes) -> None:
    text = "".join(json.dumps(line) + "\n" for line in metrics(1000, 2))
    (tmp_path / "metrics.jsonl").write_bytes(text.encode() + torn)
    found = [record for record in last_records(tmp_path, 3000) if "epoch" in record]
    assert 5 < len(found) < 50
    assert [record["step"] for record in found] == [*range(1001 - len(found), 1001)]
    assert last_records(tmp_path / "nowhere", 3000) == []
