"""The page of a sweep: its trials, those that went furthest first."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ci_llm.cli.main import main
from ci_llm.report.page import write_report
from ci_llm.report.scores import read_trials
from ci_llm.sweep.successive_halving import HalvingPlan, Standings, Trial
from tests.report.folders import leave_status


def trial(id: int, scores: list[float | None], status: str = "pruned", **settings: Any) -> dict[str, Any]:
    last = scores[-1] if scores else None
    return {
        "id": id,
        "settings": settings,
        "scores": scores,
        "rung": len(scores),
        "score": last,
        "status": status,
        "segment": id // 2,
    }


def leave(folder: Path, metric: str) -> Path:
    trials = [
        trial(0, [0.5], learning_rate=1e-3),
        trial(1, [None], "failed", learning_rate=1e9),
        trial(2, [0.4, 0.3], "completed", learning_rate=2e-3, lora_target_modules=["q_proj", "v_proj"]),
        trial(3, [0.6], learning_rate=4e-3),
        trial(4, [], "running", learning_rate=8e-3),
        trial(5, [0.45, None], "failed", learning_rate=3e-3),
    ]
    record = {"plan": {"metric": metric, "steps": [4, 16]}, "trials": trials, "best": 2}
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def standings(folder: Path) -> Standings:
    record = json.loads((folder / "sweep.json").read_text())
    plan = HalvingPlan((4, 16), trials=6, per_pass=6, keep=0.5, metric=record["plan"]["metric"])
    scores = [tuple(math.nan if score is None else score for score in each["scores"]) for each in record["trials"]]
    return Standings(plan, tuple(Trial(id, {}, each) for id, each in enumerate(scores)))


@pytest.mark.parametrize(("metric", "order"), [("nll", [2, 0, 3, 1, 5]), ("exact_match", [2, 3, 0, 1, 5])])
def test_trials_that_went_further_come_first_and_failed_ones_last(
    metric: str, order: list[int], tmp_path: Path
) -> None:
    board = read_trials(leave(tmp_path, metric))
    assert board is not None
    assert [int(row[0]) for row in board.rows] == order
    assert order == [each.id for each in standings(tmp_path).leaderboard], "the terminal shows the same"
    assert board.rows[0] == ("2", "completed", "16", "0.3000", "0.002", "q_proj, v_proj")
    assert board.columns[-2:] == ("learning_rate", "lora_target_modules")


def test_the_page_of_a_sweep_has_a_table_of_its_trials(tmp_path: Path) -> None:
    leave_status(leave(tmp_path / "run", "nll"), "completed", 12)
    page = write_report(tmp_path / "run").read_text()
    [table] = re.findall(r'<h2 id="trials">.*?</table>', page, re.DOTALL)
    assert [*re.findall(r"<tr[^>]*><td>(\d+)</td><td>(\w+)</td>", table)][:2] == [("2", "completed"), ("0", "pruned")]
    assert "Agents and crowd are evaluated" not in page
    for untrue in ("No step has been logged", "Every step was finite", "first checkpoint", "Goodput", "OTHER_RUN"):
        assert untrue not in page, "its runs log, and not the sweep"
    assert f"ci-llm report {tmp_path / 'run/segments/1'}" in page


def test_compare_shows_the_trials_of_one_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = leave(tmp_path / "sweep", "nll")
    assert main(["compare", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["trial", "status", "step", "nll", "learning_rate", "lora_target_modules"]
    assert lines[1].split() == ["2", "completed", "16", "0.3000", "0.002", "q_proj,", "v_proj"]
    assert lines[-1].startswith(f"best: trial 2, trained last in {sweep / 'segments/1'}, ")
    assert main(["compare", str(sweep), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == 2


@pytest.mark.parametrize("words", [["compare", "run"], ["report"]], ids=["beside a run", "without a status"])
def test_commands_that_refuse_a_sweep_name_the_one_that_takes_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_status(Path("run"), "completed", 12)
    leave(Path("sweep"), "nll")
    assert main([*words, "sweep"]) == 2
    told = capsys.readouterr().err
    assert "ci-llm compare sweep" in told
    assert ("give sweep/segments/1, the run of the best trial so far" in told) == (words[0] == "compare")
