"""The fields of a request: their names in OpenAI's API, the values that they take, and those that are refused.

An unknown field is refused: a typo in `minimum_confidence` would let wrong answers through. Known fields without effect
on an answer are accepted, because clients send them unasked.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json
from starlette.responses import JSONResponse

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
    """Whether the field `prompt` is a list of prompts, and not a string or token ids."""
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
    stream_options: StreamOptions | None = None
    ci_llm: Own = Own()

    @model_validator(mode="after")
    def _stream_options_belong_to_a_stream(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", "only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


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
        return self

    @property
    def top(self) -> int | None:
        """How many of the most probable tokens come with each token; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted(self) -> int | None:
        """The limit of new tokens; None if the request does not set it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


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

    @property
    def wanted(self) -> int | None:
        """As in `ChatBody`."""
        return self.max_tokens


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
    kind, place = str(first["type"]), [part for part in first["loc"] if part not in _BRANCHES]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if kind == "extra_forbidden":
        told = f"Unrecognized request argument supplied: {param}{_REMOVED.get(param, '')}"
        return ApiProblem(400, told, param, "unknown_parameter")
    if param in ("model", "messages") and kind != "missing":
        return bad(param, first["msg"], "missing_required_parameter" if len(place) == 1 else "invalid_value")
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
