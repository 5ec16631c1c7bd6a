"""The lines that stay on the terminal: an evaluation, and a solved example."""

from __future__ import annotations

import torch

from ci_llm.crowd.answer_scores import AnswerScores, Solved
from ci_llm.crowd.scoring import Scores
from ci_llm.run.evaluation import describe_example, describe_scores


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
