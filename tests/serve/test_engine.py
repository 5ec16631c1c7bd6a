"""`--engine URL`: agents on another server vote as agents in this process do; an engine that cannot is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from ci_llm.crowd.crowd import Crowd
from ci_llm.embedded import rows
from ci_llm.errors import BadInput, CiLlmError, ModelError
from ci_llm.serve import Options
from ci_llm.serve.remote import of_engine
from tests.serve.listening import Listening, chat
from tests.support.asking_http import JsonHandler, answering

pytestmark = pytest.mark.slow

QUESTIONS: list[str] = [row["question"] for row in rows("test")[:6]]


@pytest.fixture(scope="module")
def voting(served: Listening, saved: Path) -> Iterator[Listening]:
    """Our own server is the engine."""
    with Listening(of_engine(Options(run=str(saved), engine=served.url, engine_key=served.key))) as listening:
        yield listening


@pytest.mark.parametrize("aggregator", ["rerank", "weighted_vote", "majority"])
def test_votes_over_an_engine_are_those_in_process(voting: Listening, crowd: Crowd, aggregator: str) -> None:
    wanted = crowd.generate(QUESTIONS, aggregator=aggregator, details=True, max_new_tokens=24)
    for question, answer in zip(QUESTIONS, wanted, strict=True):
        own = {"aggregator": aggregator, "include_agents": True}
        [choice] = voting.ask(question, max_tokens=24, ci_llm=own)["choices"]
        assert list(choice["ci_llm"]["answers"].values()) == [*answer.agents]
        assert choice["ci_llm"]["agreement"] is not None
        if aggregator == "majority":  # ties are broken by the agents' own probabilities: one request less for each
            assert choice["message"]["content"] in answer.agents
            assert choice["ci_llm"]["confidence"] is None
        else:
            assert choice["message"]["content"] == answer.answer
            assert choice["ci_llm"]["confidence"] == pytest.approx(answer.confidence, rel=1e-4)


def test_agents_and_base_are_passed_through_and_streams_hold_the_whole_text(
    voting: Listening, served: Listening
) -> None:
    for model in ("agent1", "base"):
        asked = chat(model=model, max_tokens=12, stream=True)
        *_, piece, end = voting.stream("/v1/chat/completions", asked)
        [wanted] = served.ask(model=model, max_tokens=12)["choices"]
        assert piece["choices"][0]["delta"]["content"] == wanted["message"]["content"]
        assert end["choices"][0]["finish_reason"] == wanted["finish_reason"]
    drawn = voting.ask(model="agent0", n=3, seed=4, temperature=1.5, max_tokens=24)["choices"]
    assert len({choice["message"]["content"] for choice in drawn}) > 1


# A stand-in that speaks vLLM's API

MODELS = ["some/base", "agent0", "agent1", "agent2"]


class StandIn(JsonHandler):
    """Every agent writes a text of its own; `agent2` the one that both others find most probable."""

    models: list[str] = MODELS
    echoes = True
    status = 200
    choices = 99  # at most so many are sent back
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:  # noqa: N802 - the name of the standard library
        self.reply({"data": [{"id": name, "max_model_len": 64} for name in self.models]})

    def do_POST(self) -> None:  # noqa: N802 - the name of the standard library
        body = self.body()
        self.asked.append(body)
        if self.status != 200:
            self.reply({"error": {"message": "no room"}}, self.status)
            return
        number = int(body["model"][-1]) if body["model"].startswith("agent") else 9
        found = [self.choice(index, prompt, number, body) for index, prompt in enumerate(body["prompt"])]
        self.reply({"choices": found[: self.choices]})

    def choice(self, index: int, prompt: list[int], number: int, body: dict[str, Any]) -> dict[str, Any]:
        if not body.get("echo"):
            written = {"text": f"{number}", "token_ids": [20 + number, 2], "finish_reason": "stop"}
            return {"index": index, **written, "logprobs": {"token_logprobs": [-1.0 - number, 0.0]}}
        given = [-0.1 if token == 22 else -2.0 for token in prompt]
        logprobs = {"token_logprobs": [None, *given[1:], -0.5]} if self.echoes else None
        return {"index": index, "text": "", "finish_reason": "length", "logprobs": logprobs}


@pytest.fixture
def stand_in() -> Iterator[tuple[str, type[StandIn]]]:
    kind = type("OneStandIn", (StandIn,), {"asked": []})
    with answering(kind) as url:
        yield url, kind


def test_a_vote_takes_2k_requests_and_a_majority_k(stand_in: tuple[str, type[StandIn]], saved: Path) -> None:
    url, engine = stand_in
    with Listening(of_engine(Options(run=str(saved), engine=f"{url}/", name="mine"))) as voting:
        models = [model["id"] for model in voting.http.get("/v1/models").json()["data"]]
        assert models == ["mine", "agent0", "agent1", "agent2", "base"]
        engine.asked.clear()
        [choice] = voting.ask(model="mine")["choices"]
        assert (choice["message"]["content"], len(engine.asked)) == ("2", 6)
        assert {len(body["prompt"]) for body in engine.asked[3:]} == {3}, "three distinct texts, in one request"
        engine.asked.clear()
        voting.ask(model="mine", ci_llm={"aggregator": "majority"})
        assert len(engine.asked) == 3
        assert voting.ask(model="base")["choices"][0]["message"]["content"] == "9"
        assert engine.asked[-1]["model"] == "some/base"
        engine.status = 500
        answer = voting.post("/v1/chat/completions", chat(model="mine"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")
        engine.status = 429
        assert voting.post("/v1/chat/completions", chat(model="mine")).headers["retry-after"] == "1"
        voting.wait_for((0, 0))


def test_ignore_eos_is_the_engine_s_too(stand_in: tuple[str, type[StandIn]], saved: Path) -> None:
    url, engine = stand_in
    with Listening(of_engine(Options(run=str(saved), engine=url))) as voting:
        engine.asked.clear()
        voting.ask(model="agent0", ignore_eos=True)
        voting.ask(model="agent0")
    assert [body.get("ignore_eos") for body in engine.asked] == [True, None]


def test_a_text_of_full_length_can_be_scored(stand_in: tuple[str, type[StandIn]], saved: Path) -> None:
    """Scoring asks for one token more, which has to fit into the engine's context as well."""
    url, engine = stand_in
    choice = engine.choice

    def full(self: StandIn, index: int, prompt: list[int], number: int, body: dict[str, Any]) -> dict[str, Any]:
        if len(prompt) + body["max_tokens"] > 64:
            self.status = 400
        if body.get("echo"):
            return choice(self, index, prompt, number, body)
        ids = [20 + number] * body["max_tokens"]
        written = {"text": f"{number}", "token_ids": ids, "finish_reason": "length"}
        return {"index": index, **written, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}

    def answered(self: StandIn) -> None:
        body = self.body()
        number = int(body["model"][-1])
        found = [self.choice(index, prompt, number, body) for index, prompt in enumerate(body["prompt"])]
        self.reply({"choices": found}, self.status)

    engine.choice = full  # type: ignore[method-assign]
    engine.do_POST = answered  # type: ignore[method-assign]
    for limit in (None, 64):
        with Listening(of_engine(Options(run=str(saved), engine=url, context=limit))) as voting:
            [given] = voting.ask("2 + 2?")["choices"]
            assert (given["message"]["content"], given["finish_reason"]) == ("2", "length")


def test_a_malformed_answer_of_an_engine_becomes_an_error(stand_in: tuple[str, type[StandIn]], saved: Path) -> None:
    url, engine = stand_in
    with Listening(of_engine(Options(run=str(saved), engine=url))) as voting:
        engine.choices = 1  # of three texts to be scored

        def is_refused() -> bool:
            answer = voting.http.post("/v1/chat/completions", json=chat())
            return (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")

        assert is_refused()
        engine.choices = 99
        engine.choice = lambda self, index, *_: {"index": index, "logprobs": []}  # type: ignore[method-assign]
        assert is_refused()
        voting.wait_for((0, 0))


def test_an_engine_that_lacks_something_is_refused_at_the_start(
    stand_in: tuple[str, type[StandIn]], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it is asked for a name six times
    url, engine = stand_in
    engine.echoes = False
    with pytest.raises(BadInput, match="gives no log-probabilities of a prompt"):
        of_engine(Options(run=str(saved), engine=url))
    engine.models = MODELS[:3]
    with pytest.raises(BadInput, match="has no model agent2") as refusal:
        of_engine(Options(run=str(saved), engine=url))
    assert "--lora-modules" in str(refusal.value.hint)
    engine.do_GET = lambda self: self.reply({"data": ["a name"]})  # type: ignore[method-assign]
    with pytest.raises(CiLlmError, match="does not list its models"):
        of_engine(Options(run=str(saved), engine=url))
    with pytest.raises(CiLlmError, match="does not answer") as silent:
        of_engine(Options(run=str(saved), engine="http://127.0.0.1:9"))
    assert silent.value.exit_code == 1
    with pytest.raises(ModelError, match="nowhere"):
        of_engine(Options(run=str(saved), engine=url, base_model="nowhere"))
