"""The lines that stay on the terminal: where rows are from, an evaluation, and a solved example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from ci_llm.config import Config
from ci_llm.crowd.answer_scores import AnswerScores, Solved
from ci_llm.crowd.scoring import Scores
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import tokenize
from ci_llm.embedded import BASE_FOLDER
from ci_llm.run.evaluation import describe_example, describe_scores
from ci_llm.run.loading import describe_rows
from tests.support.log_lines import log_lines


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "9 rows of question + answer from embedded, split test"),
        ({"val_set_size": 50}, "9 rows of question + answer from embedded, split train, held out"),
        ({"eval_dataset_name": "val.csv"}, "2 rows of text from val.csv, split train, 1 left out"),
    ],
)
def test_it_is_said_where_the_rows_to_evaluate_on_are_from(
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


def test_an_evaluation_gives_the_crowd_and_the_mean_of_its_agents() -> None:
    right = torch.tensor([[True, False], [False, False], [True, True]])
    nll = torch.tensor([[1.0, 3.0], [3.0, 5.0], [0.5, 1.5]], dtype=torch.float64)
    scores = Scores(right, nll, torch.tensor([1, 3]))
    assert describe_scores(1200, scores) == "evaluate  step 1200: crowd nll 0.500, exact 1.000; agents 1.500, 0.250"


def test_a_right_answer_and_who_else_has_it() -> None:
    solved = Solved("1+1?\n", "1+1=2\n#### 2", "2", (True, False, True, True))
    assert describe_example(solved).splitlines() == [
        "question  1+1?",
        "answer    1+1=2⏎#### 2",
        "          right; of 2 agents alone, 1 answer right",
    ]


def test_a_wrong_answer_beside_the_right_one_and_of_a_long_text_the_end() -> None:
    solved = Solved("x" * 1000 + " how many?", "", "2", (False, False, False, False))
    question, answer, verdict = describe_example(solved).splitlines()
    assert question == f"question  ... {('x' * 1000 + ' how many?')[-400:]}"
    assert answer.strip() == "answer"
    assert verdict == "          wrong: 2 is right; of 2 agents alone, 0 answer right"


def test_one_agent_is_not_compared_with_itself() -> None:
    [*_, verdict] = describe_example(Solved("1+1?", "#### 2", "2", (True, True, True))).splitlines()
    assert verdict.strip() == "right"


def test_of_all_processes_the_example_of_the_first_that_has_one_is_shown() -> None:
    example = Solved("q", "a", "a", (True, True, True))
    nothing, some = AnswerScores(torch.zeros(3, 0).bool()), AnswerScores(torch.ones(3, 1).bool(), example)
    assert AnswerScores.joined([nothing, some, AnswerScores(some.right)]).example == example
    assert AnswerScores.joined([nothing]).example is None
