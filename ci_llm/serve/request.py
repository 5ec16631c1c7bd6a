"""A request: its fields in OpenAI's API, with the values that are taken and refused, and what it asks of the crowd.

An unknown field is refused: a typo in `minimum_confidence` would let wrong answers through. Known fields without effect
on an answer are accepted, because clients send them unasked. A `Call` is the request in the crowd's terms: who writes,
after which token ids, and how tokens are chosen.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.responses import JSONResponse

from ci_llm.crowd.aggregators import AGGREGATORS, find_vote
from ci_llm.crowd.next_token import BASE_ALONE, CROWD, Author, Decoding
from ci_llm.crowd.uncertainty import Calibration, uncalibrated
from ci_llm.data.prompts import Prompter
from ci_llm.errors import CiLlmError

#: Accepted, and without effect on an answer.
HARMLESS: Final = {
    *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "store", "user"),
    *("reasoning_effort", "safety_identifier", "service_tier", "verbosity"),
}
#: Fields that are not supported, with the values that have no effect and are accepted.
REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": (1,),
}
#: Fields that there were, and what to use instead.
_REMOVED: Final = {"ci_llm.agents_per_prompt": "; all agents answer, and a single one as the model agent0"}
MOST_STOPS: Final = 4

#: pydantic's types of errors with OpenAI's codes; other types are errors of a value.
_CODES: Final = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "too_long": "array_above_max_length",
    "int_from_float": "invalid_type",
    "invalid_type": "invalid_type",
}
_LARGEST: Final = (1 << 63) - 1
Id = Annotated[int, Field(ge=0)]
T = TypeVar("T", bound=BaseModel)


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _zero_if_tiny(temperature: float) -> float:
    """0 for temperatures by which logits may overflow in fp32; vLLM takes the most probable token as well."""
    return temperature if temperature >= 1e-5 else 0.0


def _text_of(content: Any) -> Any:
    """Content that is a list of text parts, as one string."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise bad("messages[].content", "only parts of the type text are read", "unsupported_value")
    texts = [part.get("text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None  # which is refused


def tells_several(given: Any) -> bool:
    """True if the field `prompt` is a list of prompts, and not a string or token ids."""
    return isinstance(given, list) and (not given or isinstance(given[0], str | list))


def _prompts(given: Any) -> Any:
    """One prompt as a list of one: a string, or token ids."""
    return given if tells_several(given) or not isinstance(given, str | list) else [given]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Message(_Strict):
    """One turn; newer clients call the role `system` `developer`.

    Unknown fields that are null are ignored, because clients send answers back with all their fields.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}

    @property
    def turn(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # of OpenAI, against listeners on the line


class Own(_Strict):
    """The field `ci_llm`, with the options that only a crowd has.

    Attributes:
        minimum_confidence: an answer that is right with a lower probability is not given.
        aggregator: how the agents' distributions or answers become the crowd's.
        include_agents: also return each agent's own answer, and the share of agents that give the crowd's answer.
    """

    minimum_confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    aggregator: str | None = None
    include_agents: bool = False


class Body(_Strict):
    """The fields that chats and completions share."""

    model: str
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_zero_if_tiny)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] = 0  # of vLLM, as min_p; 0 and -1 are all of them
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS), BeforeValidator(_as_list)
    ] = []
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] = []
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-_LARGEST - 1, le=_LARGEST)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ci_llm: Own = Own()

    @model_validator(mode="after")
    def _stream_options_belong_to_a_stream(self) -> Body:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise bad("stream_options", "only allowed with stream: true")
        return self


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: ClassVar[bool] = False
    return_token_ids: ClassVar[bool] = False

    @model_validator(mode="after")
    def _fits(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs", "only allowed with logprobs: true")
        if self.messages[-1].role != "user":
            raise bad("messages", "the last message must be the user's")
        if self.max_tokens == 0:
            raise bad("max_tokens", "expected at least 1")
        if self.max_completion_tokens is not None:  # the newer name of the same limit
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def top(self) -> int | None:
        """The number of the most probable tokens that come with each token; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str] | list[list[Id]], Field(min_length=1), BeforeValidator(_prompts)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False  # of vLLM

    @model_validator(mode="after")
    def _fits(self) -> CompletionBody:
        if self.echo and self.stream:
            raise bad("echo", "not together with stream", "unsupported_value")
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens", "expected at least 1; 0 with echo: true")
        return self

    @property
    def top(self) -> int | None:
        """As in `ChatBody`."""
        return self.logprobs


AnyBody = ChatBody | CompletionBody


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        ApiProblem: the body is not a JSON object.
    """
    try:
        found = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiProblem(400, f"the body of the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise bad(None, "the body of the request is not a JSON object", "invalid_type")
    return found


def checked(kind: type[T], given: dict[str, Any]) -> T:
    """The checked fields of a body; null means that a field is missing.

    Raises:
        ApiProblem: a field is wrong; it names the first one.
    """
    for name, nothing in REFUSED.items():
        value = given.get(name)
        if value is not None and not any(value == each and type(value) is not bool for each in nothing):
            raise bad(name, "this server does not support it", "unsupported_parameter")
    without = HARMLESS | REFUSED.keys() | {name for name in kind.model_fields if given.get(name) is None}
    try:
        return kind.model_validate({name: value for name, value in given.items() if name not in without})
    except ValidationError as error:
        raise _problem(error) from error


def _problem(error: ValidationError) -> ApiProblem:
    """The problem of the first error."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    kind = str(first["type"])
    place = [part for part in first["loc"] if part not in _BRANCHES]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if kind == "extra_forbidden":
        told = f"Unrecognized request argument supplied: {param}{_REMOVED.get(param, '')}"
        return ApiProblem(400, told, param, "unknown_parameter")
    code = _CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    return bad(param, first["msg"], code)


#: Names of a union's branches, which pydantic puts into the places of errors.
_BRANCHES: Final = {"list[str]", "list[list[constrained-int]]"}


class ApiProblem(Exception):
    """An error in OpenAI's form as the answer to a request.

    Args:
        status: the HTTP status. OpenAI's client retries after 408, 409, 429 and from 500 on.
        message: the message for people.
        param: the field in question, as `messages[0].content`.
        code: the error code for programs.
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status, headers=self.headers)


def bad(param: str | None, message: str, code: str = "invalid_value") -> ApiProblem:
    """The problem of a field that has to change."""
    return ApiProblem(400, f"{param}: {message}" if param else message, param, code)


# The call

#: The length of a completion without `max_tokens`, as at OpenAI; a chat may continue to the end of the context.
COMPLETION_TOKENS: Final = 16
BASE: Final = "base"

#: A text, token ids, or a chat.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Served:
    """The models that are served, and the limits of requests.

    Attributes:
        names: the names of the agents, each of which is a model.
        crowd: the name of the model of all agents together.
        context: how many tokens a prompt and its answer may have together.
        vocabulary: the number of token ids.
        ends: the token ids that end an answer.
        choices: how many texts one request may ask for.
        calibration: the crowd's calibration, if any.
        aggregators: the aggregators that a request may name, the default first.
        defaults: the field `ci_llm` of requests to the crowd that do not set it.
        has_base: true if the base is served too.
    """

    prompter: Prompter
    names: Sequence[str]
    crowd: str
    context: int
    vocabulary: int
    ends: frozenset[int]
    choices: int
    calibration: Calibration | None = None
    aggregators: Sequence[str] = AGGREGATORS
    defaults: Own = field(default_factory=Own)
    has_base: bool = True

    @property
    def models(self) -> dict[str, Author]:
        """The models by name, each with the author of its texts."""
        base = {BASE: BASE_ALONE} if self.has_base else {}
        return {self.crowd: CROWD, **{name: k for k, name in enumerate(self.names)}, **base}

    @cached_property
    def characters(self) -> int:
        """The most characters of a prompt, whatever a tokenizer may join or drop: as if each token were the longest."""
        return self.context * max(map(len, self.prompter.tokenizer.get_vocab()))

    def require_few(self, given: dict[str, Any]) -> None:
        """Refuse more prompts, messages or token ids than fit, before they are looked at: that alone takes seconds.

        Args:
            given: the fields of a body, which may hold anything.

        Raises:
            ApiProblem: they are too many.
        """
        prompts = given["prompt"] if tells_several(given.get("prompt")) else [given.get("prompt")]
        self.require_choices(len(prompts))
        for name, each in [*(("prompt", each) for each in prompts), ("messages", given.get("messages"))]:
            if isinstance(each, list) and len(each) > self.context:
                raise self.too_long(name, f"sent {len(each)} {'messages' if name == 'messages' else 'tokens'}")

    def require_short(self, param: str, texts: Sequence[str]) -> None:
        """Refuse texts with more characters than fit, before they are tokenised. Raises ApiProblem."""
        count = sum(map(len, texts))
        if count > self.characters:
            raise self.too_long(param, f"sent {count} characters, of which at most {self.characters} fit")

    def require_choices(self, count: int) -> None:
        """Raises ApiProblem if a request asks for more answers than it may."""
        if count > self.choices:
            raise bad("n", f"one request may ask for at most {self.choices} answers")

    def too_long(self, param: str, what: str) -> ApiProblem:
        """The error of a prompt that does not fit."""
        told = f"This model's maximum context length is {self.context} tokens. However, you {what}."
        return ApiProblem(400, told, param, "context_length_exceeded")


@dataclass(frozen=True, eq=False)
class Call:
    """One request, as it was sent and in the crowd's terms.

    Attributes:
        body: the request as it was sent.
        author: the number of the agent that writes, `CROWD` or `BASE_ALONE`.
        prompts: the token ids of each prompt.
        decoding: how tokens are chosen.
        own: the field `ci_llm`, with the server's defaults.
        id: the id of the answer.
        out: the events of the request's jobs, each with its job; used on the event loop.
    """

    body: AnyBody
    author: Author
    prompts: Sequence[Sequence[int]]
    decoding: Decoding
    own: Own
    id: str
    out: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def votes(self) -> bool:
        """True if the crowd decides between whole texts."""
        return self.author is CROWD and find_vote(self.decoding.aggregator) is not None


def prompts_of(body: AnyBody, served: Served) -> Sequence[Prompt]:
    """The prompts of a request, of which none is tokenised yet.

    Raises:
        ApiProblem: the request cannot be answered, whatever they say.
    """
    if body.model not in served.models:
        raise unknown_model(body.model, served)
    prompts: Sequence[Prompt] = [body.messages] if isinstance(body, ChatBody) else body.prompt
    served.require_choices(body.n * (1 + _own(body, served).include_agents) * len(prompts))
    return prompts


def ids_of(prompt: Prompt, served: Served) -> list[int]:
    """The token ids of a prompt.

    Raises:
        ApiProblem: it has too many characters to fit, or the chat template refuses it.
    """
    if isinstance(prompt, str):
        served.require_short("prompt", [prompt])
        return served.prompter.plain_ids(prompt)
    said = [each for each in prompt if isinstance(each, Message)]
    if not said:
        return [each for each in prompt if isinstance(each, int)]
    # Templates may leave out thoughts, and the space around messages.
    served.require_short("messages", [each.content.rpartition("</think>")[2].strip() for each in said])
    try:
        return served.prompter.ids([each.turn for each in said])
    except CiLlmError as error:
        raise bad("messages", str(error)) from error


def call_of(body: AnyBody, prompts: Sequence[Sequence[int]], served: Served) -> Call:
    """The call of a request whose prompts are these token ids.

    Raises:
        ApiProblem: it cannot be answered.
    """
    if not all(prompts):
        raise bad("prompt", "a prompt is empty")
    if any(token >= served.vocabulary for prompt in prompts for token in prompt):
        raise bad("prompt", f"expected token ids below {served.vocabulary}", "invalid_type")
    own = _own(body, served)
    ends = frozenset() if body.ignore_eos else served.ends
    decoding = Decoding(
        max_new_tokens=_length(body, max(map(len, prompts)), served),
        ends=ends | served.prompter.ends_among(body.stop) | {*body.stop_token_ids},
        aggregator=own.aggregator or served.aggregators[0],
        do_sample=body.temperature > 0,  # without a temperature the most probable token, as `ci-llm generate`
        temperature=body.temperature or 1.0,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k > 0 else None,
        min_p=body.min_p,
        seed=torch.Generator().seed() if body.seed is None else body.seed,
        stop_strings=tuple(body.stop),
    )
    kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    return Call(body, served.models[body.model], prompts, decoding, own, f"{kind}-{uuid.uuid4().hex}")


def unknown_model(name: str, served: Served) -> ApiProblem:
    """The error of a request for a model that is not served; it names those that are."""
    what = f"The model `{name}` does not exist; there are: {', '.join(served.models)}"
    return ApiProblem(404, what, "model", "model_not_found")


def _length(body: AnyBody, longest: int, served: Served) -> int:
    """The limit of new tokens; a chat without one may continue to the end of the context."""
    is_chat = isinstance(body, ChatBody)
    left = served.context - longest
    wanted = body.max_tokens
    if (1 if wanted is None else wanted) > left:
        what = f"requested {longest} in the prompt and {wanted or 1} in the answer"
        raise served.too_long("messages" if is_chat else "prompt", what)
    if wanted is None:
        return left if is_chat else min(COMPLETION_TOKENS, left)
    return max(1, wanted)


def _own(body: AnyBody, served: Served) -> Own:
    """The field `ci_llm` of a request, with the server's defaults for what it does not set."""
    said = body.ci_llm
    if served.models[body.model] is not None:
        if said != Own():
            raise bad("ci_llm", f"only {served.crowd} takes it: {body.model} answers alone")
        return said
    changes = said.model_dump(exclude_unset=True, exclude_none=True)
    if not served.names:  # a base alone has no agents to include
        changes["include_agents"] = False
    own = served.defaults.model_copy(update=changes)
    name = own.aggregator or served.aggregators[0]
    reason = uncalibrated(served.calibration, name)
    if name not in served.aggregators:
        raise bad("ci_llm.aggregator", f"expected one of {', '.join(served.aggregators)}")
    if find_vote(name) and (body.temperature or body.echo):
        raise bad("ci_llm.aggregator", f"{name} is a vote: leave temperature and echo out")
    if said.minimum_confidence is not None and reason:
        raise bad("ci_llm.minimum_confidence", reason, "no_calibration")
    if own.minimum_confidence is not None and reason:
        raise bad("ci_llm.aggregator", f"{reason}, as the server's own minimum_confidence needs it", "no_calibration")
    return own
