"""evaluation.json: what is written is read again, its form stays, and one file alone writes and reads it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ci_llm.core.evaluation_file import (
    NOBODY,
    AnsweredQuestions,
    BaseScores,
    Best,
    BestSteps,
    Difference,
    Ending,
    Evaluation,
    Figure,
    Intervals,
    Judgement,
    RowSet,
    TeacherForced,
    read_evaluation,
    write_evaluation,
)
from ci_llm.errors import BadInput
from tests.test_architecture import ROOT, texts

GAIN = Difference(0.1, None)
EXACT = Figure((0.25, 0.5), 0.75, vote=0.5, crowd_minus_mean=GAIN, crowd_minus_best=GAIN, crowd_minus_vote=GAIN)
NLL = Figure((0.5, math.inf), 0.25, crowd_minus_mean=Difference(-0.125, 0.5), crowd_minus_best=GAIN)
FULL = Evaluation(
    task="embedded",
    data=("one", "other"),
    rows_trained_on="none",
    aggregator="probability",
    n=4,
    measured_by="generation",
    judged_by="exact_match",
    exact_match=EXACT,
    nll=NLL,
    step=3,
    teacher_forced=TeacherForced(8, Figure((0.0, 0.5), 0.5)),
    answered=AnsweredQuestions("a1", "exact_match", 64),
    base=BaseScores(0.0, 3.5),
    preferences=Judgement(9, accuracies=Figure((1.0, 0.5), 0.5, intervals95=Intervals(((0, 1), (0, 1)), (0.25, 0.75)))),
    sets=(RowSet("one", 4, "none", "teacher_forcing", (0,), EXACT, NLL),),
    of_rows={"nll": ((0.5, 1.5), (0.25, 2.5))},
    dropped=(1,),
    ending=Ending(4, 8, True, BestSteps("nll", Best(3, 0.25), (None, Best(2, 0.5))), None),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_evaluation(tmp_path) is None
    write_evaluation(tmp_path, FULL, None)
    assert read_evaluation(tmp_path) == FULL
    plain = replace(FULL, answered=None, ending=None, teacher_forced=None)
    assert Evaluation.from_dict(plain.to_dict()) == plain
    assert {"questions", "last_step", "teacher_forced", "names", "tokens"}.isdisjoint(plain.to_dict())


def test_a_number_that_is_none_comes_back_from_every_place(tmp_path: Path) -> None:
    sick = Figure((math.nan, math.inf), 1.0)
    rows = RowSet("one", 4, "none", "teacher_forcing", (0,), sick, sick)
    found = replace(
        FULL,
        preferences=None,
        nll=sick,
        exact_match=sick,
        sets=(rows,),
        of_rows={"nll": ((math.nan, 1.0), (math.inf, 2.0))},
    )
    write_evaluation(tmp_path, found, None)
    for again in (read_evaluation(tmp_path), Evaluation.from_dict(found.to_dict())):
        assert repr(again) == repr(found)


def test_a_number_that_is_not_known_is_null_in_the_file_and_nan_here(tmp_path: Path) -> None:
    unknown = Figure((math.nan, 1.0), math.nan, crowd_minus_mean=Difference(math.nan, None))
    write_evaluation(tmp_path, replace(FULL, nll=unknown), None)
    file = tmp_path / "evaluation.json"
    nothing = {"value": None, "interval95": None}
    assert json.loads(file.read_text())["nll"] == {"agents": [None, 1.0], "crowd": None, "crowd_minus_mean": nothing}
    found = read_evaluation(tmp_path)
    assert found
    assert repr(found.nll) == repr(unknown)
    older = file.read_text().replace('"crowd": null', '"crowd": {"$float": "nan"}', 1)
    file.write_text(older)
    assert repr(read_evaluation(tmp_path)) == repr(found), "as earlier versions wrote it"
    assert Evaluation.from_dict(replace(FULL, nll=NOBODY).to_dict()).nll == NOBODY


def test_the_file_has_its_form() -> None:
    found = FULL.to_dict()
    assert {"answered", "ending"}.isdisjoint(found)
    assert (found["questions"], found["metric"], found["max_new_tokens"]) == ("a1", "exact_match", 64)
    assert (found["last_step"], found["stopped_early"], found["warning"]) == (4, True, None)
    assert found["best"] == {
        "metric": "nll",
        "crowd": {"step": 3, "value": 0.25},
        "agents": [None, {"step": 2, "value": 0.5}],
    }
    gain = {"value": 0.1, "interval95": None}
    over = {"crowd_minus_mean": gain, "crowd_minus_best": gain, "crowd_minus_vote": gain}
    assert found["exact_match"] == {"agents": [0.25, 0.5], "crowd": 0.75, "vote": 0.5, **over}
    assert found["preferences"]["accuracies"]["intervals95"] == {"agents": [[0, 1], [0, 1]], "crowd": [0.25, 0.75]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nll": {"agents": [1.0]}}, "it lacks 'nll.crowd'"),
        ({"n": "many"}, "n: Input should be a valid integer"),
        ({"judged_by": "taste"}, "judged_by: Input should be 'exact_match' or 'nll'"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    from ci_llm.core.durable import write_json

    write_json(tmp_path / "evaluation.json", FULL.to_dict() | change)
    with pytest.raises(BadInput, match=told.replace(".", r"\.")):
        read_evaluation(tmp_path)


def test_objectives_are_told_by_their_figures() -> None:
    assert [*FULL.objective_figures] == ["rewards/accuracies"]
    assert {*FULL.figures} == {"nll", "exact_match", "rewards/accuracies"}
    assert FULL.figures["nll"] == NLL
    rated = replace(FULL, preferences=Judgement(9, auroc=NLL))
    assert [*rated.objective_figures] == ["rewards/auroc"]
    heads = replace(FULL, measured_by="heads")
    assert (FULL.measures.loss, heads.measures.loss) == ("nats per token", "nats per pair")
    assert replace(heads, preferences=None).measures.right == "accuracy"
    assert replace(heads, preferences=None, judged_by="nll").measures.loss == "squared error"


#: Keys that only an evaluation has: who takes one out of a mapping reads the file.
KEYS = ("teacher_forced", "measured_by", "of_rows", "crowd_minus_mean", "crowd_minus_best")
KEY = f"""["'](?:{"|".join(KEYS)})["']"""
#: Code that makes the path of the file, or takes a key of the record out of a mapping.
OPENS_OR_PICKS = re.compile(
    r"""/ (?:run_folder\.)?(?:EVALUATION\b|["']evaluation\.json["'])|"""
    rf"\[{KEY}\]|\.(?:get|pop)\({KEY}|{KEY} (?:not )?in "
)
OWNER = "core/evaluation_file.py"


def second_hands(files: dict[str, str]) -> set[str]:
    """The files beside the owner that write or read an evaluation."""
    return {file for file, text in files.items() if file != OWNER and OPENS_OR_PICKS.search(text)}


def test_one_file_writes_and_reads_the_record() -> None:
    assert {field.name for kind in (Evaluation, Figure) for field in fields(kind)} >= {*KEYS}
    around = [path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert second_hands(texts() | {str(path): path.read_text() for path in around}) == set()


@pytest.mark.parametrize(
    "code",
    ["folder / 'evaluation.json'", "folder / EVALUATION", "x['measured_by']", "x.get('of_rows')", "'of_rows' in x"],
)
def test_a_second_writer_or_reader_is_found(code: str) -> None:
    assert second_hands({"report/scores.py": code}) == {"report/scores.py"}
