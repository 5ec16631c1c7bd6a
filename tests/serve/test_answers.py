"""Answers over HTTP equal those of the crowd in process, whole or streamed, alone or beside other requests."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ci_llm.crowd.answering import Answer
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.generation import targets_of
from ci_llm.crowd.pretrained import open_base
from ci_llm.data.batches import pack
from ci_llm.embedded import rows
from ci_llm.serve import Options
from ci_llm.serve.app import of_run
from ci_llm.serve.engine import Job
from tests.serve.listening import QUESTION, Listening, chat
from tests.support.crowds import K, bits_in_company

pytestmark = pytest.mark.slow

QUESTIONS: list[str] = [row["question"] for row in rows("test")[:6]]
SHORT = {"max_new_tokens": 24}


def text_of(answer: dict[str, Any], number: int = 0) -> str:
    return str(answer["choices"][number]["message"]["content"])


@pytest.fixture(scope="module")
def at_home(crowd: Crowd) -> list[Answer]:
    return crowd.generate(QUESTIONS, details=True, **SHORT)


def test_crowd_agents_and_base_answer_as_in_process_whatever_else_is_served(
    served: Listening, crowd: Crowd, at_home: list[Answer]
) -> None:
    models = ["crowd", "agent0", "agent1", "agent2", "base"]
    asked = [(model, question) for question in QUESTIONS[:2] for model in models]
    with ThreadPoolExecutor(len(asked)) as clients:
        found = [*clients.map(lambda each: served.ask(each[1], model=each[0], max_tokens=24), asked)]
    with crowd.without_agents():
        alone = crowd.generate(QUESTIONS[:2], **SHORT)
    wanted = [[each.answer, *each.agents, base] for each, base in zip(at_home, alone, strict=False)]
    assert [text_of(each) for each in found] == [text for texts in wanted for text in texts]
    assert [each["model"] for each in found] == models * 2
    assert len({*wanted[0]}) > 2, "nothing would be told apart"


def test_an_answer_says_how_sure_the_crowd_is_and_on_request_what_each_agent_says(
    served: Listening, at_home: list[Answer]
) -> None:
    for question, wanted in zip(QUESTIONS, at_home, strict=True):
        [choice] = served.ask(question, max_tokens=24, ci_llm={"include_agents": True})["choices"]
        own = choice["ci_llm"]
        assert choice["message"]["content"] == wanted.answer
        assert own["confidence"] == pytest.approx(wanted.confidence, rel=1e-4)
        assert own["disagreement"] == pytest.approx(wanted.disagreement, abs=1e-4)
        assert own["answers"] == dict(zip(("agent0", "agent1", "agent2"), wanted.agents, strict=True))
        assert (own["agreement"], own["agents"], own["abstained"]) == (wanted.agreement, K, False)
        assert choice["finish_reason"] == ("stop" if wanted.complete else "length")
    [plain] = served.ask(QUESTIONS[0], max_tokens=24)["choices"]
    assert (plain["ci_llm"]["agreement"], "answers" in plain["ci_llm"]) == (None, False)


@pytest.mark.parametrize("aggregator", ["logit", "majority", "weighted_vote", "rerank"])
def test_a_request_chooses_the_aggregation(served: Listening, crowd: Crowd, aggregator: str) -> None:
    wanted = crowd.generate(QUESTIONS, aggregator=aggregator, details=True, **SHORT)
    for question, answer in zip(QUESTIONS, wanted, strict=True):
        [choice] = served.ask(question, max_tokens=24, ci_llm={"aggregator": aggregator})["choices"]
        assert choice["message"]["content"] == answer.answer
        assert choice["ci_llm"]["confidence"] == pytest.approx(answer.confidence, rel=1e-4)


def test_chunks_join_to_the_whole_answer_and_end_with_reason_and_usage(served: Listening) -> None:
    whole = served.ask(max_tokens=24)
    body = chat(max_tokens=24, stream=True, stream_options={"include_usage": True})
    first, *pieces, end, usage = served.stream("/v1/chat/completions", body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces) == text_of(whole)
    assert len(pieces) > 3
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")
    assert end["choices"][0]["ci_llm"] == whole["choices"][0]["ci_llm"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in (first, *pieces, end))
    assert len({chunk["id"] for chunk in (first, *pieces, end, usage)}) == 1


def test_samples_are_those_of_their_seed_and_differ_within_a_request(served: Listening, crowd: Crowd) -> None:
    drawing: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "top_k": 40}
    [wanted] = crowd.generate([QUESTION], do_sample=True, seed=11, **drawing, **SHORT)
    many = served.ask(seed=11, n=4, max_tokens=24, min_p=0.0, **drawing)
    texts = [text_of(many, number) for number in range(4)]
    assert texts[0] == wanted
    assert len({*texts}) > 1
    assert text_of(served.ask(seed=11, max_tokens=24, **drawing)) == texts[0]
    assert many["usage"]["prompt_tokens"] == served.ask(max_tokens=1)["usage"]["prompt_tokens"], "it is read once"
    assert text_of(served.ask(seed=11, max_tokens=24, temperature=1e-40)) == text_of(served.ask(max_tokens=24))
    sharp = served.ask(seed=11, max_tokens=24, temperature=2, min_p=1.0)
    assert text_of(sharp) == text_of(served.ask(max_tokens=24)), "only the most probable token is left"


def test_a_text_ends_before_its_stop_string_in_streams_too(served: Listening) -> None:
    whole = text_of(served.ask(max_tokens=24))
    mark = whole[4:6]
    cut = served.ask(max_tokens=24, stop=[mark, "never"])
    assert text_of(cut) == whole.partition(mark)[0]
    assert cut["choices"][0]["finish_reason"] == "stop"
    chunks = served.stream("/v1/chat/completions", chat(max_tokens=24, stop=mark, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text_of(cut)


def test_log_probabilities_are_those_of_the_crowd(served: Listening) -> None:
    [choice] = served.ask(max_tokens=24, logprobs=True, top_logprobs=3)["choices"]
    tokens = choice["logprobs"]["content"]
    assert math.exp(sum(each["logprob"] for each in tokens)) == pytest.approx(choice["ci_llm"]["confidence"], rel=1e-5)
    for each in tokens:
        best = each["top_logprobs"]
        assert len(best) == 3
        assert best[0]["logprob"] == each["logprob"], "greedy"
        assert [one["logprob"] for one in best] == sorted((one["logprob"] for one in best), reverse=True)
        assert bytes(each["bytes"]).decode() == each["token"]


@pytest.mark.parametrize("model", ["crowd", "agent1", "base"])
def test_an_echo_gives_the_log_probabilities_of_a_prompt(served: Listening, crowd: Crowd, model: str) -> None:
    ids = [5, 6, 7, 300, 8]
    row: Any = type("Row", (), {"input_ids": np.array(ids), "supervised": np.arange(len(ids)) > 0})()
    if model == "base":
        with crowd.without_agents():
            [(log_probs, targets)] = targets_of(crowd, [pack([row], [0])])
    else:
        [(log_probs, targets)] = targets_of(crowd, [pack([row], [0])])
    own = log_probs.exp().mean(0).log() if model == "crowd" else log_probs[1 if model == "agent1" else 0]
    wanted = own.gather(-1, targets[:, None]).squeeze(-1).tolist()
    body = {"model": model, "prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    [choice] = served.complete(**body)["choices"]
    first, *found, last = choice["logprobs"]["token_logprobs"]
    assert (first, found) == (None, pytest.approx(wanted, abs=1e-5))
    tops = choice["logprobs"]["top_logprobs"]
    assert [max(top.values()) for top in tops[1:-1]] == pytest.approx(own.max(-1).values.tolist(), abs=1e-5)
    assert last == pytest.approx(max(tops[-1].values()), abs=1e-6), "greedy"
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    own = {"ci_llm": {"include_agents": True}} if model == "crowd" else {}
    [only] = served.complete(**{**body, "max_tokens": 0, **own})["choices"]
    assert only["logprobs"]["token_logprobs"] == pytest.approx([None, *found], abs=1e-6)


def test_a_base_alone_has_no_agents_to_include() -> None:
    with Listening(of_run(Crowd.of(open_base("embedded")), Options())) as alone:
        [plain] = alone.ask(max_tokens=8)["choices"]
        for own in ({}, {"aggregator": "majority"}):
            [choice] = alone.ask(max_tokens=8, ci_llm={"include_agents": True, **own})["choices"]
            assert choice["message"] == plain["message"]
            assert (choice["ci_llm"]["agreement"], "answers" in choice["ci_llm"]) == (None, False)


def test_the_places_of_tokens_in_a_streamed_completion_are_those_in_the_whole_text(served: Listening) -> None:
    body = {"model": "crowd", "prompt": "Ann has", "max_tokens": 12, "logprobs": 1, "ignore_eos": True}
    whole = served.complete(**body)["choices"][0]["logprobs"]["text_offset"]
    chunks = served.stream("/v1/completions", {**body, "stream": True})
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [place for each in streamed if each for place in each["text_offset"]] == whole
    assert len({*whole}) > 3


def test_without_top_log_probabilities_neither_a_prompt_nor_an_answer_has_any(served: Listening) -> None:
    body = {"prompt": QUESTION, "echo": True, "max_tokens": 2, "logprobs": 0}
    logprobs = served.complete(**body)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] is None
    assert not any(logprobs["top_logprobs"])
    assert all(each is not None for each in logprobs["token_logprobs"][1:])


@bits_in_company
def test_developer_messages_and_text_parts_are_read_as_system_messages_and_texts(served: Listening) -> None:
    def ask(role: str, content: Any) -> dict[str, Any]:
        messages = [{"role": role, "content": "Be short."}, {"role": "user", "content": content}]
        answer = served.post("/v1/chat/completions", {"model": "crowd", "messages": messages, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        return {**answer.json(), "id": "", "created": 0}

    parts = [{"type": "text", "text": QUESTION[:9]}, {"type": "text", "text": QUESTION[9:]}]
    assert ask("developer", parts) == ask("system", QUESTION)


def test_a_streamed_answer_ends_before_the_texts_of_its_agents_do() -> None:
    main: Any = SimpleNamespace(
        error=None,
        finish="stop",
        chosen=[SimpleNamespace(id=7, log_probability=-0.5, top=())],
        detokenizer=SimpleNamespace(next_text=lambda: "the end"),
    )
    call: Any = SimpleNamespace(
        votes=False, body=SimpleNamespace(stream=True), own=SimpleNamespace(minimum_confidence=None)
    )
    job = Job(call, [1], 0, requests=[main, SimpleNamespace()])  # the second one still writes
    job.take(main)
    assert [event.text for _, event in job.outbox] == ["the end"]
