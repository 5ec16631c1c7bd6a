"""Runs side by side: what differs in settings and scores, with intervals only where they say something."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.core.evaluation_file import Evaluation
from ci_llm.core.measures import share_interval, unpaired_interval
from ci_llm.report.scores import comparable, differences
from tests.report.folders import ASKED, evaluation, leave_run, prediction


def test_wilsons_interval_is_that_of_the_tables() -> None:
    assert share_interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert share_interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert share_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_a_paired_interval_is_narrower_than_that_of_two_shares() -> None:
    """One run has the same 60 of 100 rows right and five more, which only a paired comparison shows."""
    one = [prediction(number, correct=number < 65) for number in range(100)]
    other = [prediction(number, correct=number < 60) for number in range(100)]
    scores = [Evaluation.from_dict(evaluation(2, 100, share, 10)) for share in (0.65, 0.6)]
    [paired], [unpaired] = differences(*scores, one, other), differences(*scores)
    assert paired.value == pytest.approx(0.05) == pytest.approx(unpaired.value)
    assert (paired.paired, paired.rows, unpaired.paired) == (True, 100, False)
    assert paired.interval95 == pytest.approx(1.959964 * (0.05 * 0.95 * 100 / 99 / 100) ** 0.5)
    assert unpaired.interval95 == unpaired_interval(0.65, 100, 0.6, 100)
    assert unpaired.interval95 > 2 * paired.interval95


def test_only_rows_that_both_have_answered_are_paired() -> None:
    one = [prediction(number, correct=True) for number in range(20)]
    other = [prediction(number, correct=False) for number in range(8, 40)]
    scores = [Evaluation.from_dict(evaluation(2, 40, share, 10)) for share in (1.0, 0.0)]
    assert next(differences(*scores, one, other)).rows == 12


@pytest.mark.parametrize(("right", "value"), [(20, "+0.000"), (0, "-1.000")])
def test_rows_that_all_differ_alike_give_no_interval(
    tmp_path: Path, right: int, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """evaluation.json has none either. With a width of 0 every other run would be "a difference"."""
    first = 40 if right == 0 else right
    runs = [
        leave_run(tmp_path / name, predictions=[prediction(n, correct=n < count) for n in range(40)], right=count / 40)
        for name, count in (("one", first), ("other", right))
    ]
    assert main(["compare", *map(str, runs)]) == 0
    assert f"crowd B - crowd A: {value} exact match (the same in each of 40 rows)\n" in capsys.readouterr().out


def test_scores_of_different_tasks_or_measures_are_not_subtracted() -> None:
    one = Evaluation.from_dict(evaluation(2, 40, 0.5, 10))
    assert comparable(one, one) is None
    other = replace(one, data=("gsm8k",))
    assert comparable(one, other) == "different data sets: embedded and gsm8k"
    assert "teacher_forcing" in str(comparable(one, replace(one, measured_by="teacher_forcing")))


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    rows = [[prediction(number, correct=number < right) for number in range(40)] for right in (20, 30)]
    one = leave_run(tmp_path / "one", learning_rate=1e-3, predictions=rows[0], experiment_name="one")
    other = leave_run(tmp_path / "other", learning_rate=2e-3, predictions=rows[1], experiment_name="other", right=0.75)
    return [str(one), str(other)]


def test_settings_scores_and_curves_are_shown(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"A  {two[0]}: completed, step 20, attempt 1\nB  {two[1]}: completed")
    assert re.search(r"^learning_rate +0.001 +0.002$", said, re.MULTILINE)
    assert "experiment_name" not in said, "that says where a run lies"
    assert re.search(r"^crowd +0.500 \(0.5000\)  0.750 \(0.5000\)$", said, re.MULTILINE)
    assert "crowd B - crowd A: +0.250 ± 0.136 exact match (95 %, paired over 40 rows): a difference" in said


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("key", [None, *ASKED])
def test_answers_of_something_else_than_the_scores_are_not_paired(
    two: list[str], tmp_path: Path, key: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ci-llm evaluate RUN --data other.jsonl` leaves them where those of the run's own rows would be."""
    rows = [prediction(number, correct=number < 30) for number in range(40)]
    run = leave_run(tmp_path / "run", predictions=rows, right=0.75)
    if key is not None:
        source = run / "predictions.source.json"
        source.write_text(json.dumps(json.loads(source.read_text()) | {key: "another"}))
    assert main(["compare", two[0], str(run)]) == 0
    assert (", unpaired, " in capsys.readouterr().out) is (key is not None)


def test_json_says_the_same(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["configuration"] == {"learning_rate": [1e-3, 2e-3]}
    (gain,) = told["differences"]
    assert (gain["run"], gain["minus"], gain["value"], gain["paired"], gain["rows"]) == (1, 0, 0.25, True, 40)
    assert [run["scores"][-1]["exact_match"] for run in told["runs"]] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["one"], "a comparison takes 2 to 26 runs, not 1"), (["one", "nowhere"], "there is no such folder")],
)
def test_a_bad_call_is_one_message(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_run(tmp_path / "one")
    assert main(["compare", *(str(tmp_path / word) for word in words)]) == 2
    told = capsys.readouterr()
    assert (told.out, message in told.err, "Traceback" in told.err) == ("", True, False)
