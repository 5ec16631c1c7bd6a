"""A bad request gets OpenAI's status and an error that names the field, and other requests are not affected."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci_llm.data.prompts import Prompter
from ci_llm.serve.request import ApiProblem, ChatBody, CompletionBody, checked, parsed
from tests.serve.listening import Listening, chat
from tests.support import campaign

T = TypeVar("T")
MESSAGE = {"role": "user", "content": "Hello"}


def says(content: Any, role: str = "user") -> dict[str, Any]:
    return chat(messages=[{"role": role, "content": content}])


LAST = [MESSAGE, {"role": "assistant", "content": "x"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
TOOL = [{"type": "function", "function": {"name": "f"}}]

#: What is sent, and the status, code and param that come back.
CHATS: dict[str, tuple[Any, int, str | None, str | None]] = {
    "no body": (b"", 400, None, None),
    "broken JSON": (b"{bad", 400, None, None),
    "NaN in JSON": (b'{"model": "crowd", "temperature": NaN}', 400, None, None),
    "not UTF-8": (b'{"model": "\xff"}', 400, None, None),
    "deep nesting": (b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None, None),
    "half a surrogate pair": (json.dumps(says("\ud83d")).encode(), 400, None, None),
    "half a pair as a name": (b'{"model": "crowd", "\\ud83d": 1}', 400, None, None),
    "a list": (b"[]", 400, "invalid_type", None),
    "no model": ({"messages": [MESSAGE]}, 400, "missing_required_parameter", "model"),
    "model a number": (chat(model=3), 400, "invalid_type", "model"),
    "unknown model": (chat(model="gpt-5"), 404, "model_not_found", "model"),
    "{}": ({"model": "crowd"}, 400, "missing_required_parameter", "messages"),
    "messages empty": (chat(messages=[]), 400, "invalid_value", "messages"),
    "messages a string": (chat(messages="hi"), 400, "invalid_type", "messages"),
    "a message a string": (chat(messages=["hi"]), 400, "invalid_type", "messages[0]"),
    "unknown role": (says("x", "king"), 400, "invalid_value", "messages[0].role"),
    "no content": (chat(messages=[{"role": "user"}]), 400, "missing_required_parameter", "messages[0].content"),
    "content a number": (says(3), 400, "invalid_type", "messages[0].content"),
    "an image": (says(IMAGE), 400, "unsupported_value", "messages[].content"),
    "the assistant last": (chat(messages=LAST), 400, "invalid_value", "messages"),
    "too long": (says("7 pens " * 1000), 400, "context_length_exceeded", "messages"),
    "too long with its answer": (chat(max_tokens=511), 400, "context_length_exceeded", "messages"),
    "max_tokens 0": (chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    "max_tokens -1": (chat(max_tokens=-1), 400, "invalid_value", "max_tokens"),
    "max_tokens 1.5": (chat(max_tokens=1.5), 400, "invalid_type", "max_tokens"),
    "max_tokens huge": (chat(max_tokens=10**30), 400, "invalid_value", "max_tokens"),
    "temperature 3": (chat(temperature=3), 400, "invalid_value", "temperature"),
    "temperature text": (chat(temperature="hot"), 400, "invalid_type", "temperature"),
    "temperature true": (chat(temperature=True), 400, "invalid_type", "temperature"),
    "top_p 0": (chat(top_p=0), 400, "invalid_value", "top_p"),
    "n 0": (chat(n=0), 400, "invalid_value", "n"),
    "n 1000": (chat(n=1000), 400, "invalid_value", "n"),
    "n above what fits": (chat(n=13), 400, "invalid_value", "n"),
    "five stops": (chat(stop=list("abcde")), 400, "array_above_max_length", "stop"),
    "an empty stop": (chat(stop=[""]), 400, "invalid_value", "stop[0]"),
    "seed text": (chat(seed="x"), 400, "invalid_type", "seed"),
    "top_logprobs alone": (chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    "top_logprobs 21": (chat(logprobs=True, top_logprobs=21), 400, "invalid_value", "top_logprobs"),
    "stream_options alone": (chat(stream_options={}), 400, "invalid_value", "stream_options"),
    "stream a word": (chat(stream="yes"), 400, "invalid_type", "stream"),
    "tools": (chat(tools=TOOL), 400, "unsupported_parameter", "tools"),
    "json mode": (chat(response_format={"type": "json_object"}), 400, "unsupported_parameter", "response_format"),
    "a penalty": (chat(presence_penalty=0.5), 400, "unsupported_parameter", "presence_penalty"),
    "logit_bias": (chat(logit_bias={"5": 1}), 400, "unsupported_parameter", "logit_bias"),
    "a typo": (chat(agents_per_promt=2), 400, "unknown_parameter", "agents_per_promt"),
    "a typo of ours": (chat(ci_llm={"agregator": "x"}), 400, "unknown_parameter", "ci_llm.agregator"),
    "a field that left": (
        chat(ci_llm={"agents_per_prompt": 2}), 400, "unknown_parameter", "ci_llm.agents_per_prompt",
    ),
    "unknown aggregator": (chat(ci_llm={"aggregator": "x"}), 400, "invalid_value", "ci_llm.aggregator"),
    "a vote that draws": (
        chat(temperature=1, ci_llm={"aggregator": "majority"}), 400, "invalid_value", "ci_llm.aggregator",
    ),
    "no calibration": (
        chat(ci_llm={"minimum_confidence": 0.5}), 400, "no_calibration", "ci_llm.minimum_confidence",
    ),
    "an agent has no crowd": (chat(model="agent0", ci_llm={"include_agents": True}), 400, "invalid_value", "ci_llm"),
    "3 MiB": (b'{"model": "' + b"x" * (3 << 20) + b'"}', 413, "request_too_large", None),
}  # fmt: skip
COMPLETIONS: dict[str, tuple[Any, int, str | None, str | None]] = {
    "a token id out of range": ({"prompt": [10**6]}, 400, "invalid_type", "prompt"),
    "a token id below 0": ({"prompt": [-1]}, 400, "invalid_type", "prompt[0]"),
    "prompts of mixed kinds": ({"prompt": [1, "x"]}, 400, "invalid_type", "prompt[0]"),
    "no prompt": ({}, 400, "missing_required_parameter", "prompt"),
    "texts of agents above what fits": (
        {"prompt": ["x"] * 7, "ci_llm": {"include_agents": True}}, 400, "invalid_value", "n",
    ),
    "an empty list": ({"prompt": []}, 400, "invalid_value", "prompt"),
    "an empty prompt": ({"prompt": [[]]}, 400, "invalid_value", "prompt"),
    "an echo in pieces": ({"prompt": "x", "echo": True, "stream": True}, 400, "unsupported_value", "echo"),
    "an echo of a vote": (
        {"prompt": "x", "echo": True, "ci_llm": {"aggregator": "majority"}}, 400, "invalid_value", "ci_llm.aggregator",
    ),
    "no tokens": ({"prompt": "x", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    "a suffix": ({"prompt": "x", "suffix": "y"}, 400, "unsupported_parameter", "suffix"),
}  # fmt: skip


def refused(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return answer.status_code, error["code"], error["param"]


@pytest.mark.slow
def test_each_bad_input_is_refused_with_the_field_that_is_wrong(
    served: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ci_llm")
    found = {}
    for name, (body, *_) in CHATS.items():
        found[name] = refused(served.post("/v1/chat/completions", body))
    for name, (body, *_) in COMPLETIONS.items():
        found[name] = refused(served.post("/v1/completions", {"model": "crowd", **body}))
    assert found == {name: tuple(wanted) for name, (_, *wanted) in {**CHATS, **COMPLETIONS}.items()}
    assert served.http.get("/healthz").json() == {"status": "ok"}
    assert served.metric("request_refused_total") >= len(found)
    assert "POST /v1/chat/completions 400 invalid_request_error 0." in caplog.text  # of an error without a code


@pytest.mark.slow
def test_wrong_paths_methods_and_keys_are_refused(served: Listening) -> None:
    http = served.http
    assert refused(http.post("/v1/responses", json={})) == (404, "unknown_url", None)
    assert refused(http.get("/v1/chat/completions")) == (405, "method_not_allowed", None)
    assert refused(http.get("/v1/models/gpt-5")) == (404, "model_not_found", "model")
    for key in ("", "Bearer x", "Bearer ä"):
        raw = {"Authorization": key.encode("utf-8")}
        for path in ("/v1/models", "/v1/chat/completions"):
            answer = http.request("GET" if path.endswith("models") else "POST", path, headers=raw, json=chat())
            assert refused(answer)[:2] == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/metrics", "/"):
        assert http.get(path, headers={"Authorization": ""}).status_code == 200, "they need no key"


@pytest.mark.slow
def test_a_body_without_a_length_is_limited_while_it_arrives(served: Listening) -> None:
    sent = []

    def endless() -> Any:
        while len(sent) < 1000:
            sent.append(1)
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.TransportError):  # the connection was closed before the client has read
        assert refused(served.http.post("/v1/chat/completions", content=endless())) == (413, "request_too_large", None)
    assert len(sent) < 100
    assert served.http.get("/healthz").status_code == 200


# Prompts that are too long


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that the prompter of a server was given."""
    sizes: list[int] = []
    plain_ids, ids = Prompter.plain_ids, Prompter.ids

    def text(self: Prompter, text: str) -> list[int]:
        sizes.append(len(text))
        return plain_ids(self, text)

    def turns(self: Prompter, prompt: Any) -> list[int]:
        sizes.append(len(prompt) if isinstance(prompt, str) else sum(len(turn["content"]) for turn in prompt))
        return ids(self, prompt)

    monkeypatch.setattr(Prompter, "plain_ids", text)
    monkeypatch.setattr(Prompter, "ids", turns)
    return sizes


@pytest.mark.slow
def test_what_cannot_fit_is_refused_before_it_is_tokenised(served: Listening, tokenised: list[int]) -> None:
    text = "7 pens " * 100_000
    said = [{"role": "user", "content": ""}] * 50_000
    bodies: dict[str, tuple[str, Any, tuple[int, str, str]]] = {
        "a text": ("completions", {"prompt": text}, (400, "context_length_exceeded", "prompt")),
        "a chat": ("chat/completions", says(text), (400, "context_length_exceeded", "messages")),
        "messages": ("chat/completions", chat(messages=said), (400, "context_length_exceeded", "messages")),
        "{}": (
            "chat/completions",
            chat(messages=[{}] * 100_000),
            (400, "context_length_exceeded", "messages"),
        ),
        "prompts": ("completions", {"prompt": ["x"] * 100_000}, (400, "invalid_value", "n")),
        "ids": ("completions", {"prompt": [1] * 100_000}, (400, "context_length_exceeded", "prompt")),
        "lists of ids": ("completions", {"prompt": [[1], [1] * 99_999]}, (400, "context_length_exceeded", "prompt")),
    }
    served.complete(prompt="x", max_tokens=1)  # the longest token is known
    tokenised.clear()
    for name, (path, body, wanted) in bodies.items():
        assert refused(served.post(f"/v1/{path}", {"model": "crowd", **body})) == wanted, name
    assert tokenised == []
    assert served.complete(prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1


# Bodies that nobody thought of

NAMES = st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "user", "top_kk"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["crowd", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "aggregator"]), inner)
    ),
    max_leaves=6,
)
FIELDS = st.dictionaries(NAMES, VALUES, max_size=4)


@settings(max_examples=campaign.size(60, 1000))
@given(FIELDS, st.booleans())
def test_any_fields_are_parsed_or_refused(fields: dict[str, Any], is_chat: bool) -> None:
    whole = {"model": "crowd", **({"messages": [MESSAGE]} if is_chat else {"prompt": "x"}), **fields}
    kind: type[ChatBody] | type[CompletionBody] = ChatBody if is_chat else CompletionBody
    found = problem_or(lambda: checked(kind, parsed(json.dumps(whole).encode())))
    if isinstance(found, ApiProblem):
        assert found.status == 400
        assert found.error["message"]
    else:
        assert {name for name in fields if name not in kind.model_fields} <= {"tools", "user"}
        assert found.n is None or 1 <= found.n <= 128


def problem_or(function: Callable[[], T]) -> T | ApiProblem:
    try:
        return function()
    except ApiProblem as problem:
        return problem


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    found = problem_or(lambda: parsed(raw))
    assert isinstance(found, dict) or found.status == 400
