"""The server with the clients openai, LangChain, curl and lm-evaluation-harness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.generation import continuation
from ci_llm.crowd.scoring import score
from ci_llm.data.batches import pack
from ci_llm.embedded import BASE_FOLDER, rows
from tests.serve.listening import QUESTION, Listening
from tests.support.crowds import K

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:langchain")]

#: Tokens that the embedded base reads.
CONTEXT = 512
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


def test_openai_sends_and_reads_our_fields(client: openai.OpenAI, answer: str) -> None:
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


def test_langchain_invokes_streams_and_batches(served: Listening, answer: str) -> None:
    model = ChatOpenAI(model="crowd", base_url=f"{served.url}/v1", api_key=lambda: str(served.key), temperature=0)
    found = model.invoke(QUESTION)
    assert found.content == answer
    assert found.usage_metadata is not None
    assert "".join(str(piece.content) for piece in model.stream(QUESTION)) == answer
    assert [each.content for each in model.batch([QUESTION, QUESTION])] == [answer, answer]
    with pytest.raises(openai.BadRequestError, match="tools"):
        model.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(QUESTION)


@pytest.fixture
def harness(served: Listening, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LocalCompletionsAPI]:
    """The client of lm-eval for a model that is served."""
    monkeypatch.setenv("OPENAI_API_KEY", str(served.key))
    address, tokenizer = f"{served.url}/v1/completions", str(BASE_FOLDER)
    return lambda name: LocalCompletionsAPI(
        model=name, base_url=address, tokenizer=tokenizer, max_length=CONTEXT, batch_size=3
    )


def nats(crowd: Crowd, who: int, ids: Sequence[int], first: int) -> float:
    """The log-likelihood of the tokens from `first` on, by the crowd in this process."""
    found = score(crowd, [pack([continuation(ids[:first], ids[first:])], [0])], "probability")
    assert found is not None
    return -float(found.nll[who, 0])


@pytest.mark.parametrize(("model", "who"), [("crowd", K), ("agent1", 1)])
def test_lm_eval_scores_over_http_as_in_process(
    harness: Callable[[str], LocalCompletionsAPI], crowd: Crowd, model: str, who: int
) -> None:
    over_http = harness(model)
    pairs = [(row["question"] + "\n", row["answer"]) for row in rows("test")[:5]]
    asked = [(pair, *(over_http.tok_encode(text, add_special_tokens=False) for text in pair)) for pair in pairs]
    found = over_http._loglikelihood_tokens(asked, disable_tqdm=True)
    wanted = [nats(crowd, who, [*question, *answer], len(question)) for _, question, answer in asked]
    assert [each for each, _ in found] == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == 5


def test_lm_eval_reads_a_text_longer_than_the_context_in_windows_and_each_token_once(
    harness: Callable[[str], LocalCompletionsAPI], crowd: Crowd
) -> None:
    over_http = harness("crowd")
    text = " ".join(row["question"] for row in rows("test")[:40])
    ids = over_http.tok_encode(text)
    assert len(ids) > 2 * CONTEXT
    [found] = over_http.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    size = CONTEXT - 2  # one place for the token before the first, one for the new token that its API asks for
    wanted = nats(crowd, K, [over_http.prefix_token_id, *ids[:size]], 1)
    for end in (*range(2 * size, len(ids), size), len(ids)):
        begin, known = max(0, end - size - 1), (end - 1) // size * size
        wanted += nats(crowd, K, ids[begin:end], known - begin)
    assert found == pytest.approx(wanted, abs=1e-4)


def test_lm_eval_lets_the_crowd_answer(harness: Callable[[str], LocalCompletionsAPI], served: Listening) -> None:
    asked = [
        Instance("generate_until", {}, (row["question"], {"until": ["="], "max_gen_toks": 8}), at)
        for at, row in enumerate(rows("test")[:3])
    ]
    wanted = [
        served.complete(prompt=row["question"], max_tokens=8, stop="=")["choices"][0]["text"]
        for row in rows("test")[:3]
    ]
    assert harness("crowd").generate_until(asked, disable_tqdm=True) == wanted
