"""A request in the crowd's terms: who writes, after which token ids, and how tokens are chosen."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch

from ci_llm.crowd.aggregators import AGGREGATORS, find_vote
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.decoding import Decoding
from ci_llm.data.prompts import Prompter
from ci_llm.errors import CiLlmError
from ci_llm.lora.reading import NOBODY
from ci_llm.serve.body import AnyBody, ApiProblem, ChatBody, Message, Own, bad, tells_several

#: The length of a completion without `max_tokens`, as at OpenAI; a chat may continue to the end of the context.
COMPLETION_TOKENS: Final = 16
BASE: Final = "base"
#: Characters of a prompt that are tokenised at a time before it is known that it may fit, about 25 ms of work.
PIECE: Final = 1 << 14
#: Characters that a tokenizer may drop or join without limit, and how many of one are tried.
_ODD: Final = ("\U0010fffd", "\u0301", "\x01", " ", "\n", "a")
_TRIED: Final = 4096

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

    @cached_property
    def characters(self) -> int | None:
        """A prompt with more characters does not fit, as every token is at its longest; None if that is not known."""
        longest = max(map(len, self.prompter.tokenizer.get_vocab()))
        counts = [len(self.prompter.plain_ids(odd * _TRIED)) for odd in _ODD]
        return self.context * longest if min(counts) * longest >= _TRIED else None

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

    def require_choices(self, count: int) -> None:
        """Raises ApiProblem if one request may not ask for so many answers."""
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


def prompts_of(body: AnyBody, served: Served) -> Sequence[Prompt]:
    """The prompts of a request, of which none is tokenised yet.

    Raises:
        ApiProblem: the request cannot be answered, whatever they say.
    """
    if body.model not in served.models:
        raise unknown_model(body.model, served)
    prompts: Sequence[Prompt] = [body.messages] if isinstance(body, ChatBody) else body.prompt
    served.require_choices((body.n + _own(body, served).include_agents) * len(prompts))
    return prompts


def texts_of(prompt: Prompt, served: Served) -> list[str]:
    """What a prompt says as text: of a chat no thoughts and no space around messages, which templates may leave out.

    Raises:
        ApiProblem: it has too many characters to fit.
    """
    if isinstance(prompt, str):
        param, texts = "prompt", [prompt]
    else:
        said = [each.content for each in prompt if isinstance(each, Message)]
        param, texts = "messages", [each.rpartition("</think>")[2].strip() for each in said]
    most, count = served.characters, sum(map(len, texts))
    if most is not None and count > most:
        raise served.too_long(param, f"sent {count} characters, of which at most {most} fit")
    return texts


def pieces_of(texts: Sequence[str]) -> Iterator[str]:
    """Texts in pieces, each of which is tokenised in a moment."""
    return (text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE))


def ids_of(prompt: Prompt, served: Served) -> list[int]:
    """The token ids of a prompt. Raises ApiProblem if the chat template refuses it."""
    if isinstance(prompt, str):
        return served.prompter.plain_ids(prompt)
    said = [each.turn for each in prompt if isinstance(each, Message)]
    if not said:
        return [each for each in prompt if isinstance(each, int)]
    try:
        return served.prompter.ids(said)
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
    who, own = served.models[body.model], _own(body, served)
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
    )
    kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    return Call(body, who, prompts, decoding, own, f"{kind}-{uuid.uuid4().hex}")


def unknown_model(name: str, served: Served) -> ApiProblem:
    """The error of a request for a model that is not served; it names those that are."""
    what = f"The model `{name}` does not exist; there are: {', '.join(served.models)}"
    return ApiProblem(404, what, "model", "model_not_found")


def _length(body: AnyBody, longest: int, served: Served) -> int:
    """The limit of new tokens; a chat without one may continue to the end of the context."""
    is_chat, left = isinstance(body, ChatBody), served.context - longest
    least = 1 if body.wanted is None else body.wanted
    if least > left:
        what = f"requested {longest} in the prompt and {body.wanted or 1} in the answer"
        raise served.too_long("messages" if is_chat else "prompt", what)
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
