"""What a calibration adds: the probability that an answer is right, and answers that are withheld."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ci_llm.crowd.answering import Answer
from ci_llm.crowd.crowd import Crowd
from ci_llm.embedded import rows
from ci_llm.errors import BadInput
from ci_llm.serve import Options
from ci_llm.serve.app import of_run
from tests.crowd.test_calibration import calibration_of
from tests.serve.listening import Listening, chat
from tests.support.crowds import disturbed_crowd

pytestmark = pytest.mark.slow

QUESTIONS: list[Any] = [row["question"] for row in rows("test")[:6]]
SHORT: Any = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def calibrated() -> Crowd:
    crowd = disturbed_crowd()
    crowd.calibration = calibration_of(crowd.generate(QUESTIONS, details=True, **SHORT))
    return crowd


@pytest.fixture(scope="module")
def answers(calibrated: Crowd) -> list[Answer]:
    return calibrated.generate(QUESTIONS, details=True, **SHORT)


@pytest.fixture(scope="module")
def sure(calibrated: Crowd) -> Iterator[Listening]:
    served = disturbed_crowd()
    served.calibration = calibrated.calibration
    with Listening(of_run(served, Options())) as listening:
        yield listening


def test_confidence_is_the_calibrated_probability_of_a_right_answer(sure: Listening, answers: list[Answer]) -> None:
    for question, wanted in zip(QUESTIONS, answers, strict=True):
        own = sure.ask(question, max_tokens=24)["choices"][0]["ci_llm"]
        assert own["confidence"] == pytest.approx(wanted.probability_right, abs=1e-4)
        assert own["calibrated"]
    other = sure.ask(max_tokens=24, ci_llm={"aggregator": "logit"})["choices"][0]["ci_llm"]
    assert not other["calibrated"], "the calibration is about another aggregator"


def test_an_answer_below_the_minimum_is_withheld(sure: Listening, answers: list[Answer]) -> None:
    rights = sorted(answer.probability_right or 0 for answer in answers)
    minimum = (rights[2] + rights[3]) / 2
    withheld = 0
    for question, wanted in zip(QUESTIONS, answers, strict=True):
        own = {"minimum_confidence": minimum, "include_agents": True}
        [choice] = sure.ask(question, max_tokens=24, ci_llm=own)["choices"]
        below = (wanted.probability_right or 0) < minimum
        assert choice["ci_llm"]["abstained"] == below
        assert choice["message"]["content"] == ("" if below else wanted.answer)
        assert choice["finish_reason"] == ("stop" if wanted.complete else "length")
        chunks = sure.stream("/v1/chat/completions", chat(question, max_tokens=24, ci_llm=own, stream=True))
        told = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert told == choice["message"]["content"], "nothing was shown before it was decided"
        withheld += below
    hidden = {"logprobs": True, "max_tokens": 24, "ci_llm": {"minimum_confidence": 1.0}}
    assert sure.ask(QUESTIONS[0], **hidden)["choices"][0]["logprobs"] is None, "they would spell it"
    assert withheld == 3


def test_the_server_s_own_minimum_holds_where_a_request_says_nothing(calibrated: Crowd) -> None:
    served = disturbed_crowd()
    with pytest.raises(BadInput, match="no calibration"):
        of_run(served, Options(minimum_confidence=0.5))
    served = disturbed_crowd()
    served.calibration = calibrated.calibration
    with Listening(of_run(served, Options(minimum_confidence=1.0))) as strict:
        assert strict.ask(QUESTIONS[0], max_tokens=24)["choices"][0]["ci_llm"]["abstained"]
        free = strict.ask(QUESTIONS[0], max_tokens=24, ci_llm={"minimum_confidence": 0.0})
        assert not free["choices"][0]["ci_llm"]["abstained"]
        assert strict.ask(QUESTIONS[0], model="agent0", max_tokens=24)["choices"][0]["message"]["content"]
