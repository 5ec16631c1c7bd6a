"""The table of scores: the base above the agents, a crowd that adds nothing, and free text without exact matches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ci_llm.cli.main import main
from ci_llm.core.evaluation_file import Evaluation
from ci_llm.report.page import write_report
from ci_llm.report.scores import notes, table
from ci_llm.run.evaluation import result_metrics
from tests.report.folders import evaluation, leave_run, prediction
from tests.report.test_page import text_of


def record(nll: list[float], crowd: float, over_best: float = 0.1, half: float = 0.02, **more: Any) -> dict[str, Any]:
    """evaluation.json of generated answers to 40 rows; all 40 are teacher-forced as well."""
    found = evaluation(len(nll), 40, 0.5, 10)
    gain = {"value": over_best, "interval95": half}
    found["exact_match"] |= {"crowd_minus_mean": {"value": 0.1, "interval95": 0.02}, "crowd_minus_best": gain}
    nats = {"value": crowd - min(nll), "interval95": 0.01}
    found["nll"] = {"agents": nll, "crowd": crowd, "crowd_minus_mean": nats, "crowd_minus_best": nats}
    return found | {"base": {"exact_match": 0.05, "nll": 3.25}} | more


read = Evaluation.from_dict
SETS = [
    {
        "rows": "one set",
        "n": 20,
        "rows_trained_on": "none",
        "measured_by": "teacher_forcing",
        "agents": [0],
        "exact_match": {"agents": [0.1, 0.2], "crowd": 0.3},
        "nll": {"agents": [0.6, 0.7], "crowd": 0.9},
    }
]
FREE = {"judged_by": "nll", "measured_by": "teacher_forcing"}


def test_the_base_stands_above_the_agents() -> None:
    lines = [*table(read(record([0.6, 0.7], 0.5)), "run")]
    assert lines[1].split() == ["base", "0.050", "0.014", "to", "0.165", "3.2500"]
    assert [line.split()[0] for line in lines[2:4]] == ["agent0", "agent1"]
    assert result_metrics(read(record([0.6, 0.7], 0.5)), ["agent0", "agent1"])["final/base/nll"] == 3.25


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (record([0.6, 0.7], 0.5), None),
        (
            record([1.3, 1.5, 2.0], 1.547),
            "the crowd adds nothing: 1.5470 nats per token, agent0 1.3000, over 40 rows; agent0 alone costs 1/3:"
            " ci-llm export my/run --agent agent0 --to agent0",
        ),
        (
            record([0.6, 0.7], 0.5, over_best=0.01),
            "the crowd adds nothing sure in exact match: +0.010 ± 0.020 over the best agent, over 40 rows;"
            " agent0 alone costs 1/2: ci-llm export my/run --agent agent0 --to agent0",
        ),
        (record([0.6, 0.7], 0.5, over_best=0.01, n=9), None),
        (record([0.6, 0.7], 0.595, **FREE), "the crowd adds nothing sure in nats per token: -0.0050 ± 0.0100 over the"),
        (record([0.6, 0.7], 0.5, over_best=0.0, **FREE), None),
        (record([0.6, 0.7], 0.9, sets=SETS), None),
        (record([0.6, float("nan")], 0.9), None),
        (record([0.6], 0.7), None),
    ],
)
def test_notes_name_the_agent_to_serve_where_the_crowd_adds_nothing(found: dict[str, Any], told: str | None) -> None:
    said = [*notes(read(found), "my/run")]
    assert (said == []) if told is None else (len(said) == 1 and said[0].startswith(told)), said


OWN = {"learning_rates": [1e-4, 1e-3], "best_agent": {"agent": 1, "next": 0, "rows_better": 9, "rows_worse": 2}}


def test_the_best_of_agents_with_their_own_settings_leads_them() -> None:
    lines = [*table(read(record([0.7, 0.6], 0.5, **OWN)), "run")]
    assert lines[0].endswith("learning rate")
    assert [line[:14].strip() for line in lines[1:5]] == ["base", "best agent", "agent0", "agent1"]
    assert (lines[2].split()[-2:], lines[3].split()[-2:]) == (["0.6000", "0.001"], ["0.7000", "0.0001"])
    assert "best agent: agent1; 11 rows tell it from agent0, 9 for it and 2 against" in lines


def test_in_the_folder_of_the_agents_no_agent_is_exported_to_where_it_is() -> None:
    [told] = notes(read(record([1.3, 1.5, 2.0], 1.547)), None)
    assert told.endswith("agent0 alone costs 1/3: the PEFT folder agent0")


def rated(auroc: float, margin: float) -> dict[str, Any]:
    figures = {
        name: {"agents": [value, value], "crowd": value} for name, value in (("auroc", auroc), ("margins", margin))
    }
    return record([0.6, 0.7], 0.5, **FREE, preferences={"n": 9, **figures})


def test_why_a_figure_is_not_known() -> None:
    alike = "not known, for all rows that were evaluated are good, or all are bad"
    assert [*notes(read(rated(math.nan, math.nan)), "run")] == [
        f"AUROC of the ratings: {alike}",
        f"margin of the rewards: {alike}",
    ]
    _, margin = notes(read(rated(0.5, math.nan)), "run")
    assert margin == "margin of the rewards: not known, for numbers of the agents are not finite"
    numbers = record([0.6, 0.7], 0.5, judged_by="nll", measured_by="heads")
    found = read(numbers | {"numbers": {"n": 9, "mse": {"agents": [math.nan, 0.5], "crowd": math.nan}}})
    assert [*notes(found, "run")] == ["mean squared error: not known, for numbers of the agents are not finite"]


def test_json_for_scripts_has_null_for_a_number_that_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = leave_run(tmp_path / "run", asked=record([0.6, 0.7], math.nan, **FREE))
    assert main(["compare", str(run), str(run), "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["runs"][0]["scores"][-1]["nll"] is None


def test_the_page_of_heads_has_the_words_of_heads(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", asked=record([0.6, 0.7], 0.5, measured_by="heads"))
    (run / "final_checkpoint").mkdir()
    page = write_report(run).read_text()
    for word in ("Held-out accuracy", "nats per row", "ci-llm score"):
        assert word in page
    for word in ("exact match", "nats per token", "ci-llm chat", "--failed"):
        assert word not in page


def test_free_text_has_no_exact_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = record([0.6, 0.7], 0.5, **FREE)
    said = "\n".join(table(read(free), "run"))
    assert "match" not in said
    assert "majority vote" not in said
    assert "crowd - the best agent: -0.1000 ± 0.0100" in said
    assert "free text, judged by NLL, over 40" in said
    answers = [prediction(number, correct=True) | {"correct": None, "base": "before"} for number in range(3)]
    run = leave_run(tmp_path / "run", asked=free, predictions=answers)
    told = text_of(write_report(run))
    assert "crowd 0.5000" in told
    assert "Answers" in told
    assert not [word for word in ("exact match", "Failed", "Solved", "answered right") if word in told]
    assert "base: before" in told
    assert main(["compare", str(run), str(run)]) == 0
    compared = capsys.readouterr().out
    assert "crowd                         - (0.5000)" in compared
    assert "crowd B - crowd A: +0.0000 nats per token" in compared
