"""A request in the crowd's terms: who writes, after which token ids, and how tokens are chosen."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ci_llm.crowd.aggregators import AGGREGATORS, find_vote
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.decoding import Decoding
from ci_llm.data.prompts import Prompter
from ci_llm.errors import CiLlmError
from ci_llm.lora.layer import NOBODY
from ci_llm.serve.body import AnyBody, ApiProblem, ChatBody, CompletionBody, Message, Own, bad

#: The length of a completion without `max_tokens`, as at OpenAI; a chat may continue to the end of the context.
COMPLETION_TOKENS: Final = 16
BASE: Final = "base"


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
        has_base: whether the base is served too.
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
    def models(self) -> dict[str, int | None]:
        """The models by name, each with the number of its agent, None for all agents, or `NOBODY` for the base."""
        base = {BASE: NOBODY} if self.has_base else {}
        return {self.crowd: None, **{name: k for k, name in enumerate(self.names)}, **base}


@dataclass(frozen=True, eq=False)
class Call:
    """One request, as it was sent and in the crowd's terms.

    Attributes:
        body: the request as it was sent.
        who: the number of the agent that writes; None for the crowd, or `NOBODY` for the base alone.
        prompts: the token ids of each prompt.
        decoding: how tokens are chosen.
        own: the field `ci_llm`, with the server's defaults.
        id: the id of the answer.
        out: the events of the request's jobs, each with its job; used on the event loop.
    """

    body: AnyBody
    who: int | None
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
    def model(self) -> str:
        return self.body.model

    @property
    def only_echo(self) -> bool:
        return self.body.max_tokens == 0

    @property
    def votes(self) -> bool:
        """Whether the crowd decides between whole texts."""
        return self.who is None and find_vote(self.decoding.aggregator) is not None

    @property
    def decides_at_the_end(self) -> bool:
        """Whether nothing can be shown before the whole text is there."""
        return self.votes or self.own.minimum_confidence is not None


def call_of(body: AnyBody, served: Served) -> Call:
    """The call of a request.

    Raises:
        ApiProblem: it cannot be answered.
    """
    if body.model not in served.models:
        raise unknown_model(body.model, served)
    who, own = served.models[body.model], _own(body, served)
    prompts = [chat_ids(body.messages, served)] if isinstance(body, ChatBody) else _prompts(body, served)
    if (body.n + own.include_agents) * len(prompts) > served.choices:
        raise bad("n", f"one request may ask for at most {served.choices} answers")
    ends = frozenset() if body.ignore_eos else served.ends
    decoding = Decoding(
        max_new_tokens=_length(body, max(map(len, prompts)), served.context),
        ends=ends | served.prompter.ends_among(body.stop) | {*body.stop_token_ids},
        aggregator=own.aggregator or served.aggregators[0],
        do_sample=body.temperature > 0,  # without a temperature the most probable token, as `ci-llm generate`
        temperature=body.temperature or 1.0,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k > 0 else None,
        min_p=body.min_p,
        seed=torch.Generator().seed() if body.seed is None else body.seed,
    )
    kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    return Call(body, who, prompts, decoding, own, f"{kind}-{uuid.uuid4().hex}")


def unknown_model(name: str, served: Served) -> ApiProblem:
    """The error of a request for a model that is not served; it names those that are."""
    what = f"The model `{name}` does not exist; there are: {', '.join(served.models)}"
    return ApiProblem(404, what, "model", "model_not_found")


def chat_ids(messages: Sequence[Message], served: Served) -> list[int]:
    """The token ids of a chat. Raises ApiProblem if the chat template refuses it."""
    try:
        return served.prompter.ids([message.turn for message in messages])
    except CiLlmError as error:
        raise bad("messages", str(error)) from error


def _prompts(body: CompletionBody, served: Served) -> list[list[int]]:
    prompts = [served.prompter.plain_ids(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    if not all(prompts):
        raise bad("prompt", "a prompt is empty")
    if any(token >= served.vocabulary for prompt in prompts for token in prompt):
        raise bad("prompt", f"expected token ids below {served.vocabulary}", "invalid_type")
    return prompts


def _length(body: AnyBody, longest: int, context: int) -> int:
    """The limit of new tokens; a chat without one may continue to the end of the context."""
    is_chat, left = isinstance(body, ChatBody), context - longest
    least = 1 if body.wanted is None else body.wanted
    if least > left:
        what = (
            f"This model's maximum context length is {context} tokens. However, you requested {longest} in the prompt"
            f" and {body.wanted or 1} in the answer."
        )
        raise ApiProblem(400, what, "messages" if is_chat else "prompt", "context_length_exceeded")
    if body.wanted is None:
        return left if is_chat else min(COMPLETION_TOKENS, left)
    return max(1, body.wanted)


def _own(body: AnyBody, served: Served) -> Own:
    """The field `ci_llm` of a request, with the server's defaults for what it does not set."""
    said = body.ci_llm
    if served.models[body.model] is not None:
        if said != Own():
            raise bad("ci_llm", f"only {served.crowd} takes it: {body.model} answers alone")
        return said
    own = served.defaults.model_copy(update=said.model_dump(exclude_unset=True, exclude_none=True))
    name = own.aggregator or served.aggregators[0]
    reason = uncalibrated(served.calibration, name)
    if name not in served.aggregators:
        raise bad("ci_llm.aggregator", f"expected one of {', '.join(served.aggregators)}")
    if find_vote(name) and body.temperature:
        raise bad("ci_llm.aggregator", f"{name} is a vote: leave temperature out")
    if said.minimum_confidence is not None and reason:
        raise bad("ci_llm.minimum_confidence", reason, "no_calibration")
    if own.minimum_confidence is not None and reason:
        raise bad("ci_llm.aggregator", f"{reason}, as the server's own minimum_confidence needs it", "no_calibration")
    return own


def uncalibrated(calibration: Calibration | None, aggregator: str) -> str | None:
    """Why there is no calibrated probability for this aggregator; None if there is one."""
    if calibration is None:
        return "this crowd has no calibration: ci-llm evaluate RUN --calibrate makes one"
    if calibration.aggregator != aggregator:
        return f"the calibration is about the aggregator {calibration.aggregator}"
    return None
