"""Clients that people have: openai, LangChain, curl, lm-evaluation-harness."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from ci_llm.embedded import BASE_FOLDER, rows
from ci_llm.integrations.lm_eval import CrowdLM
from tests.serve.listening import QUESTION, Listening, chat

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:langchain")]

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def client(served: Listening) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(served: Listening) -> str:
    return str(served.ask()["choices"][0]["message"]["content"])


def test_openai_lists_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["crowd", "agent0", "agent1", "agent2", "base"]
    assert client.models.retrieve("agent1").owned_by == "ci-llm"


def test_openai_asks_with_our_fields_and_reads_them(client: openai.OpenAI, answer: str) -> None:
    own = {"ci_llm": {"include_agents": True}}
    found = client.chat.completions.create(
        model="crowd", messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body=own
    )
    [choice] = found.choices
    assert (choice.message.content, choice.finish_reason) == (answer, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert found.usage is not None
    assert found.usage.completion_tokens == len(choice.logprobs.content)
    assert choice.model_extra is not None
    assert len(choice.model_extra["ci_llm"]["answers"]) == 3


def test_openai_streams(client: openai.OpenAI, answer: str) -> None:
    with client.chat.completions.stream(
        model="crowd", messages=MESSAGES, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == answer == final.choices[0].message.content
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(deltas) - 1, "the first one is empty"
    pieces = client.completions.create(model="agent0", prompt="Ann has", max_tokens=5, stream=True)
    whole = client.completions.create(model="agent0", prompt="Ann has", max_tokens=5, logprobs=2, n=2)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text == whole.choices[1].text
    assert whole.choices[0].logprobs is not None


def test_openai_asks_many_at_once_and_waits_where_the_queue_is_full(served: Listening, answer: str) -> None:
    async def ask(retries: int) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=retries) as client:
            each = (client.chat.completions.create(model="crowd", messages=MESSAGES) for _ in range(24))
            return await asyncio.gather(*each, return_exceptions=True)

    refusals = [found for found in asyncio.run(ask(0)) if isinstance(found, Exception)]
    assert 0 < len(refusals) <= 12
    for refusal in refusals:
        assert isinstance(refusal, openai.RateLimitError)
        assert refusal.code == "rate_limit_exceeded"
        assert 1 <= int(refusal.response.headers["retry-after"]) <= 60
    assert {found.choices[0].message.content for found in asyncio.run(ask(20))} == {answer}


def test_openai_raises_its_own_errors(client: openai.OpenAI, served: Listening) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="crowd", messages=MESSAGES, temperature=9)
    stranger = client.with_options(api_key="another")
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        stranger.models.list()


def test_langchain_invokes_streams_and_batches(served: Listening, answer: str) -> None:
    model = ChatOpenAI(model="crowd", base_url=f"{served.url}/v1", api_key=lambda: str(served.key), temperature=0)
    found = model.invoke(QUESTION)
    assert found.content == answer
    assert found.usage_metadata is not None
    assert "".join(str(piece.content) for piece in model.stream(QUESTION)) == answer
    assert [each.content for each in model.batch([QUESTION, QUESTION])] == [answer, answer]
    with pytest.raises(openai.BadRequestError, match="tools"):
        model.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(QUESTION)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl; apt-get install curl")
def test_curl_asks_without_a_content_type(served: Listening, answer: str) -> None:
    key = ["-H", f"Authorization: Bearer {served.key}"]
    address = f"{served.url}/v1/chat/completions"
    asked = ["curl", "--silent", "--noproxy", "*", *key, address, "-d", json.dumps(chat())]
    told = subprocess.run(asked, capture_output=True, check=True, text=True).stdout
    assert json.loads(told)["choices"][0]["message"]["content"] == answer
    asked[-1] = json.dumps(chat(stream=True))
    assert subprocess.run(asked, capture_output=True, check=True, text=True).stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("model", "agent"), [("crowd", "crowd"), ("agent1", 1)])
def test_lm_eval_scores_over_http_as_at_home(
    served: Listening, saved: Path, model: str, agent: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", str(served.key))
    over_http = LocalCompletionsAPI(
        model=model, base_url=f"{served.url}/v1/completions", tokenizer=str(BASE_FOLDER), max_length=512, batch_size=3
    )
    at_home = CrowdLM(str(saved), agent=agent, batch_size=3, device="cpu")
    pairs = [(row["question"] + "\n", row["answer"]) for row in rows("test")[:5]]
    tokens = [
        (pair, at_home.tok_encode(pair[0], add_special_tokens=False), at_home.tok_encode(pair[1])) for pair in pairs
    ]
    wanted = at_home._loglikelihood_tokens(tokens)
    found = over_http._loglikelihood_tokens(tokens, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in wanted], abs=1e-5)
    asked = [Instance("generate_until", {}, (row["question"], {"until": ["="], "max_gen_toks": 8}), at)
             for at, row in enumerate(rows("test")[:3])]  # fmt: skip
    assert over_http.generate_until(asked, disable_tqdm=True) == at_home.generate_until(asked)
