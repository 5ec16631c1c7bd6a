"""Final answers are found in texts, votes are counted, and generated answers are scored row by row."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from ci_llm import embedded
from ci_llm.core.evaluation_file import Difference
from ci_llm.crowd.aggregators import majority
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.metrics import AnswerStyle, final_answer
from ci_llm.crowd.next_token import Decoding
from ci_llm.crowd.questions import Questions, score_answers
from ci_llm.crowd.scoring import AnswerScores, paired_gain
from ci_llm.data.encoder import Encoder, Example
from ci_llm.data.prompts import Prompter
from ci_llm.data.rows import Chat, Completion, Message
from tests.support.crowds import K
from tools.pretraining_text import KNOWN_VERBS

HOW: Any = {"max_new_tokens": 40, "aggregator": "probability"}


@pytest.mark.parametrize(
    ("text", "style", "answer"),
    [
        # As GSM8K writes it.
        ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "marked", "72"),
        ("#### 1,234", "marked", "1234"),
        ("#### $1,234.50.", "marked", "1234.5"),
        ("####18", "marked", "18"),
        ("####  -3 \nmore", "marked", "-3"),
        ("#### 18.00", "marked", "18"),
        ("#### 0.50%", "marked", "0.5"),
        ("#### 18 dollars", "marked", "18"),
        ("5*3=15\n#### 15\nQuestion: ... #### 7", "marked", "15"),
        ("#### 3/4", "marked", "3/4"),
        ("#### 1.5/2", "marked", "1.5/2"),
        ("#### 10-3", "marked", "10-3"),
        ("#### 5:30 PM", "marked", "5:30 PM"),
        ("#### the  blue\tone", "marked", "the blue one"),
        # The mark is forgotten.
        ("She has 3 apples and 14 pears, so 17.", "marked", "17"),
        ("10-3", "marked", "3"),
        ("it fell to -7 degrees", "marked", "-7"),
        ("-$5", "marked", "-5"),
        ("I do not know", "marked", ""),
        ("####", "marked", ""),
        ("", "marked", ""),
        # Numbers.
        ("The answer is 42.", "number", "42"),
        ("between 1,000,000 and .5", "number", "0.5"),
        ("1,2", "number", "2"),
        ("1,2345", "number", "2345"),
        ("007", "number", "7"),
        ("-0.0", "number", "0"),
        ("12345678901234567890.1230", "number", "12345678901234567890.123"),
        ("none", "number", ""),
        # Text: a number in it is not the answer.
        (" Denver\n Broncos ", "text", "Denver Broncos"),
        ("in 1990", "text", "in 1990"),
        ("", "text", ""),
    ],
)
def test_final_answer(text: str, style: AnswerStyle, answer: str) -> None:
    assert final_answer(text, style) == answer


@pytest.mark.parametrize(
    ("answers", "crowd", "winner"),
    [
        (["1", "2", "2"], "1", "2"),  # a majority needs no crowd
        (["1", "2", "3"], "3", "3"),  # the crowd breaks a tie
        (["1", "2", "2", "1"], "1", "1"),
        (["1", "2", "2", "1"], "9", "1"),  # the first agent among the tied, if the crowd answers neither
        (["3", "2", "2", "1", "1"], "3", "2"),
        (["", "", "4"], "5", "4"),  # no answer is no vote
        (["", ""], "5", ""),  # only agents vote
    ],
)
def test_majority(answers: list[str], crowd: str, winner: str) -> None:
    assert majority(answers, crowd) == winner


def test_the_gains_are_paired_over_rows() -> None:
    right = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0]]).bool()
    exact = AnswerScores(right).shares
    assert (exact.agents, exact.crowd, exact.vote) == ((0.25, 0.5), 0.75, 0.5)
    assert exact.crowd_minus_mean == Difference(pytest.approx(0.375), None), "of four rows"
    assert exact.crowd_minus_best == Difference(pytest.approx(0.25), None)
    assert exact.crowd_minus_vote == Difference(pytest.approx(0.25), None)


@pytest.mark.parametrize(
    ("difference", "interval"),
    [
        ([1.0], None),
        ([0.0, 0.0], None),
        ([1.0, 0.0] * 14, None),
        ([0.0] * 400, None),
        ([1.0, 0.0] * 50, 1.96 * 0.502519 / 10),
    ],
)
def test_an_interval_is_given_only_where_the_rows_define_one(difference: list[float], interval: float | None) -> None:
    gain = paired_gain(torch.tensor(difference), torch.zeros(len(difference)))
    assert gain.value == pytest.approx(sum(difference) / len(difference))
    assert gain.interval95 == (None if interval is None else pytest.approx(interval, rel=1e-4))


@pytest.fixture(scope="module")
def prompter(crowd: Crowd) -> Prompter:
    return crowd.prompter


def examples(prompter: Prompter, count: int) -> Iterator[Example]:
    encoder, random = Encoder(prompter.tokenizer), Random(5)
    kind = embedded.Kind((1,), "+-", KNOWN_VERBS, distraction=0, largest_start=20)
    for _ in range(count):
        question, answer = embedded.story(random, kind)
        yield encoder.encode(Chat((Message("user", question), Message("assistant", answer))))


@pytest.mark.slow
def test_every_generated_answer_is_scored(crowd: Crowd, prompter: Prompter) -> None:
    rows = list(examples(prompter, 6))
    test = Questions.of(rows, crowd, 99, max_seq_length=256)
    assert len(test) == 6
    assert test.ends == prompter.ends
    assert test.prompts[3] == rows[3].input_ids[: int(np.flatnonzero(rows[3].supervised)[0])].tolist()
    decoding = Decoding(max_new_tokens=40, ends=prompter.ends)
    batches = [[0, 1, 2], [3], [4, 5]]
    scores = score_answers(crowd, test, batches, **HOW)
    assert scores is not None
    assert scores.right.shape == (K + 2, 6)
    for number, prompt in enumerate(test.prompts):
        [generated] = crowd.generate_ids([prompt], decoding, include_agents=True)
        texts = [prompter.text(ids) for ids in (*generated.agents, generated.ids)]
        *agents, together = (final_answer(text, "marked") for text in texts)
        lines = [*agents, together, majority(agents, together)]
        assert scores.right[:, number].tolist() == [line == test.answers[number] for line in lines]
    assert 0 < scores.right[:K].double().mean() < 1, "all right or all wrong shows nothing"
    halves = [score_answers(crowd, test, [half], **HOW) for half in (range(3), range(3, 6))]
    joined = AnswerScores.joined(half for half in halves if half is not None)
    assert torch.equal(joined.right, scores.right)


@pytest.mark.slow
def test_scoring_can_be_interrupted(crowd: Crowd, prompter: Prompter) -> None:
    test = Questions.of(list(examples(prompter, 2)), crowd, 2, max_seq_length=256)
    requests = iter([False, False, True, True])
    assert score_answers(crowd, test, [[0, 1]], **HOW, stop=lambda: next(requests)) is None


def test_a_process_without_questions_takes_part(crowd: Crowd, prompter: Prompter) -> None:
    test = Questions.of(list(examples(prompter, 2)), crowd, 2, max_seq_length=256)
    scores = score_answers(crowd, test, [], **HOW)
    assert scores is not None
    assert scores.right.shape == (K + 2, 0)


def test_only_rows_with_a_question_and_a_complete_answer_are_used(crowd: Crowd, prompter: Prompter) -> None:
    encoder = Encoder(prompter.tokenizer)
    whole, other = examples(prompter, 2)
    cut = Example(whole.input_ids[:-2], whole.supervised[:-2])
    talk = Chat(tuple(Message(role, text) for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)))
    plain = encoder.encode(Completion(None, "Ann has 5 pens."))
    rows = [cut, plain, other, encoder.encode(talk)]
    test = Questions.of(rows, crowd, 9, max_seq_length=len(cut.input_ids))
    expected = [row for row in (other, encoder.encode(talk)) if len(row.input_ids) < len(cut.input_ids)]
    assert len(test) == len(expected) >= 1
    assert (test.left_out, test.too_long) == (4 - len(expected), 3 - len(expected)), "a text asks nothing"
    assert test.answers[-1] == "d"
    assert prompter.text(test.prompts[-1]) == "a\nbc\n"
    assert len(Questions.of([plain], crowd, 9, max_seq_length=256)) == 0
