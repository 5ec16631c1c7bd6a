"""How far a number can be trusted, on answers whose figures are known by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ci_llm.core.evaluation_file import Abstention
from ci_llm.crowd.judging import auroc, calibration_error
from ci_llm.crowd.uncertainty import Calibration, Logistic
from ci_llm.evaluation.predictions import sureness_lines, sureness_of_answers
from ci_llm.evaluation.saved_crowd import failed_rows

#: Right with the probability that the first signal is.
IDENTITY = Logistic((0.0, 0.0, 0.0, 0.0, 0.0), 0.0)


def row(confidence: float, right: bool, agents: list[bool], signal: float | None = None) -> dict[str, Any]:
    found = [math.log(confidence) if signal is None else signal, 0.0, 0.0, 0.0, 0.0]
    return {"confidence": confidence, "correct": right, "agents_correct": agents, "signals": found}


def test_the_chance_that_a_right_answer_is_surer() -> None:
    assert auroc([0.9, 0.8, 0.1], [True, True, False]) == 1
    assert auroc([0.9, 0.1, 0.1], [False, True, True]) == 0
    assert auroc([0.5, 0.5], [True, False]) == 0.5
    assert auroc([0.9, 0.5, 0.5], [True, True, False]) == 0.75
    assert math.isnan(auroc([0.9, 0.5], [True, True]))


def test_the_calibration_error_is_the_distance_of_bins() -> None:
    assert calibration_error([1.0, 1.0, 0.0], [True, True, False]) == 0
    assert calibration_error([0.75] * 4, [True, True, True, False]) == 0
    assert calibration_error([0.95, 0.95, 0.15, 0.15], [True, False, True, False]) == pytest.approx(0.4)


def test_the_record_of_answers() -> None:
    rows = [row(0.9, True, [True, False]), row(0.2, False, [False, False])]
    plain = sureness_of_answers(rows, None, "probability", abstain_below=0.5)
    assert (plain.by, plain.auroc) == ("confidence", 1)
    assert (plain.rows, plain.right) == (2, 1)
    assert plain.abstention == Abstention(0.5, 0.5, 1.0)
    none = sureness_of_answers(rows, None, "probability", abstain_below=0.95)
    assert none.abstention == Abstention(0.95, 0.0, None)


@pytest.mark.parametrize(("right", "wrong", "shown"), [(2, 1, False), (10, 9, False), (9, 10, False), (10, 10, True)])
def test_an_area_of_few_answers_is_not_shown(right: int, wrong: int, shown: bool) -> None:
    """`AUROC 1.000` was printed for three rows."""
    rows = [row(0.9, True, [True])] * right + [row(0.2, False, [False])] * wrong
    [line] = sureness_lines(sureness_of_answers(rows, None, "probability"))
    assert line.startswith(f"confidence, {right} right and {wrong} wrong: ")
    assert ("1.000 AUROC of wrong answers" in line) == shown
    assert ("no AUROC below 10 of each" in line) != shown


def test_long_answers_are_ranked_by_their_signal_where_confidence_underflows() -> None:
    """All confidences are written as 0, so that the first rows of the file were taken for the surest."""
    wrong = [row(0.0, False, [False], signal=-30.0 - number) for number in range(3)]
    right = [row(0.0, True, [True], signal=-20.0 - number) for number in range(7)]
    found = sureness_of_answers([*wrong, *right], None, "probability")
    assert found.auroc == 1
    assert failed_rows([wrong[1], right[0], wrong[2], wrong[0]]) == wrong


def test_a_calibration_of_another_aggregator_is_not_taken() -> None:
    made = Calibration(IDENTITY, 1, "probability", 4, "here")
    rows = [row(0.9, True, [False, False], signal=-5), row(0.9, False, [False, True], signal=5)]
    assert sureness_of_answers(rows, made, "probability").by == "probability_right"
    assert sureness_of_answers(rows, made, "logit").by == "confidence"
