"""The lines that stay on the terminal: where rows are from, an evaluation, and a solved example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from ci_llm.config import Config
from ci_llm.crowd.scoring import AnswerScores, Scores, Solved
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.rows import ListedRows
from ci_llm.data.sources import load_rows, recognised
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.embedded import BASE_FOLDER
from ci_llm.run.start.loading import describe_rows
from ci_llm.run.step.evaluation import Evaluator, describe_example, describe_scores
from tests.support.crowds import disturbed_crowd
from tests.support.log_lines import log_lines


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "9 rows of question + answer from embedded, split test"),
        ({"val_set_size": 50}, "9 rows of question + answer from embedded, split train, held out"),
        ({"eval_dataset_name": "val.csv"}, "2 rows of text from val.csv, split train, 1 left out"),
    ],
)
def test_the_log_says_where_evaluation_rows_are_from(
    settings: dict[str, Any], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("val.csv").write_text("text,id\nonce upon,1\n,2\na time,3\n")
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    config = Config(eval_samples=9, max_train_samples=2, **settings)
    rows, evaluated = (
        tokenize(load_rows(config, split), tokenizer, max_seq_length=500, cache_folder=tmp_path)
        for split in ("train", "eval")
    )
    with log_lines() as lines:
        describe_rows(config, [rows], EvaluationRows.of([evaluated]))
    assert lines[-1] == f"data      to evaluate on: {source}"


@pytest.mark.parametrize(
    ("keys", "choice"),
    [
        ({"early_stopping_patience": 3}, "the best step"),
        ({"load_best_model_at_end": True}, "the best step"),
        ({"early_stopping_patience": 3, "val_set_size": 9}, None),
        ({"early_stopping_patience": 3, "dataset_split": "test", "val_set_size": 9}, None),
        ({}, None),
    ],
)
def test_the_log_warns_where_something_is_chosen_by_test_rows(
    keys: dict[str, Any], choice: str | None, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    config = Config(eval_samples=9, **keys)
    evaluated = tokenize(load_rows(config, "eval"), tokenizer, max_seq_length=500, cache_folder=tmp_path)
    with log_lines() as lines:
        describe_rows(config, [], EvaluationRows.of([evaluated]))
    said = [line for line in lines if "chosen" in line]
    assert [line.split(";")[0] for line in said] == (
        [f"data      {choice} is chosen on the rows of split test"] if choice else []
    )


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ("mine.jinja", "mine.jinja"),
        ("{{ messages }}", "the text that the configuration gives"),
        (None, "the tokenizer's own"),
    ],
)
def test_the_log_says_where_a_chat_template_is_from(wanted: str | None, named: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    raw = ListedRows([{"question": "1+1?", "answer": "2"}])
    rows = tokenize(recognised(raw, "here"), tokenizer, max_seq_length=40, cache_folder=tmp_path)
    with log_lines() as lines:
        describe_rows(Config(chat_template=wanted), [rows], EvaluationRows.of([rows]))
    assert f"data      chat template: {named}" in lines


def test_rows_to_evaluate_on_that_are_cut_are_counted(tmp_path: Path) -> None:
    with log_lines() as lines:
        describe_rows(Config(), [], EvaluationRows.of([some_of_length(40, tmp_path)]))
    assert lines[-1] == "data      to evaluate on: 3 rows of question + answer from here, 2 cut at max_seq_length"


def test_blocks_of_a_text_are_not_counted_as_rows_left_out(tmp_path: Path) -> None:
    raw = ListedRows([{"text": "Ann has 3 pens. " * 20}, {"text": ""}])
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    rows = tokenize(recognised(raw, "here"), tokenizer, max_seq_length=20, long_rows="split", cache_folder=tmp_path)
    assert len(rows) > 2
    with log_lines() as lines:
        describe_rows(Config(), [], EvaluationRows.of([rows]))
    assert lines[-1] == f"data      to evaluate on: {len(rows)} rows of text from here, 1 left out"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("length", "counted", "warned"), [(40, 2, False), (9, 3, True), (400, 0, False)])
def test_rows_that_leave_no_place_for_an_answer_are_counted_and_none_left_is_warned_about(
    length: int, counted: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = EvaluationRows.of([some_of_length(length, tmp_path)])
    unused: Any = None
    evaluator = Evaluator(Config(max_seq_length=length), disturbed_crowd(), rows, unused, unused)
    monkeypatch.setattr(evaluator, "_score_answers", lambda *_: None)  # as if a stop was asked for
    with log_lines() as lines:
        assert evaluator.answers(1, 1) is None
    told = f"evaluate  not asked: {counted} rows, no place for a whole answer within {length} tokens"
    assert [line for line in lines if "not asked" in line] == ([told] if counted else [])
    assert any("no answers are generated, as no row is left to ask" in line for line in lines) == warned


def some_of_length(length: int, folder: Path) -> TokenizedRows:
    """One short answer and two long ones."""
    raw = [{"question": "1+1?", "answer": "1+1=2\n" * count} for count in (1, 20, 30)]
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    return tokenize(recognised(ListedRows(raw), "here"), tokenizer, max_seq_length=length, cache_folder=folder)


def test_an_evaluation_gives_the_crowd_and_the_mean_of_its_agents() -> None:
    right = torch.tensor([[True, False], [False, False], [True, True]])
    nll = torch.tensor([[1.0, 3.0], [3.0, 5.0], [0.5, 1.5]], dtype=torch.float64)
    scores = Scores(right, nll, torch.tensor([1, 3]))
    assert describe_scores(1200, scores) == (
        "evaluate  step 1200, on 2 rows: crowd nll 0.500, exact 1.000; agents nll 1.500, exact 0.250"
    )


def test_a_right_answer_is_shown_with_the_agents_that_have_it() -> None:
    solved = Solved("1+1?\n", "1+1=2\n#### 2", "2", (True, False, True, True))
    assert describe_example(solved).splitlines() == [
        "question  1+1?",
        "answer    1+1=2⏎#### 2",
        "          right; of 2 agents alone, 1 answer right",
    ]


def test_a_wrong_answer_is_shown_beside_the_right_one_and_long_texts_by_their_end() -> None:
    solved = Solved("x" * 1000 + " how many?", "", "2", (False, False, False, False))
    question, answer, verdict = describe_example(solved).splitlines()
    assert question == f"question  ... {('x' * 1000 + ' how many?')[-400:]}"
    assert answer.strip() == "answer"
    assert verdict == "          wrong: 2 is right; of 2 agents alone, 0 answer right"


def test_one_agent_is_not_compared_with_itself() -> None:
    [*_, verdict] = describe_example(Solved("1+1?", "#### 2", "2", (True, True, True))).splitlines()
    assert verdict.strip() == "right"


def test_the_example_of_the_first_process_that_has_one_is_shown() -> None:
    example = Solved("q", "a", "a", (True, True, True))
    nothing, some = AnswerScores(torch.zeros(3, 0).bool()), AnswerScores(torch.ones(3, 1).bool(), example)
    assert AnswerScores.joined([nothing, some, AnswerScores(some.right)]).example == example
    assert AnswerScores.joined([nothing]).example is None
