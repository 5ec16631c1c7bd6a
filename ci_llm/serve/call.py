"""A request as the crowd will answer it: who is asked, for which token ids, and how tokens are chosen."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ci_llm.crowd.aggregators import AGGREGATORS, find_vote
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.decoding import Decoding
from ci_llm.data.prompts import Prompter
from ci_llm.errors import CiLlmError
from ci_llm.lora.layer import NOBODY
from ci_llm.serve.body import ChatBody, CompletionBody, Own
from ci_llm.serve.problem import ApiProblem, bad

#: Tokens of a completion that says no length, as at OpenAI; a chat goes on to the end of the context.
COMPLETION_TOKENS: Final = 16
BASE: Final = "base"


@dataclass(frozen=True)
class Served:
    """What is served, and what requests may ask of it.

    Attributes:
        names: of the agents, which are models of their own.
        crowd: the name of the model that is all of them together.
        context: tokens of a prompt with its answer.
        vocabulary: token ids are below.
        ends: token ids that end an answer.
        choices: texts that one request may ask for.
        aggregators: that answers may be made by, the default first.
        defaults: of requests to the crowd that say nothing else.
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
        """Every name with its agent; None: all of them, `NOBODY`: the base alone."""
        base = {BASE: NOBODY} if self.has_base else {}
        return {self.crowd: None, **{name: k for k, name in enumerate(self.names)}, **base}


@dataclass(frozen=True, eq=False)
class Call:
    """One request.

    Attributes:
        who: the agent that is asked; None: the crowd, `NOBODY`: the base alone.
        prompts: token ids of each.
        each: texts for each prompt.
        logprobs: how many of the most probable tokens come with each token; None: no log-probabilities at all.
        echo: the prompt comes back before the answer, with its own log-probabilities.
        is_greedy: no token is drawn.
    """

    is_chat: bool
    model: str
    who: int | None
    prompts: Sequence[Sequence[int]]
    decoding: Decoding
    stop: tuple[str, ...]
    each: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    echo: bool
    only_echo: bool
    token_ids: bool
    own: Own
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def votes(self) -> bool:
        """Whether the crowd decides between whole texts."""
        return self.who is None and find_vote(self.decoding.aggregator) is not None

    @property
    def decides_at_the_end(self) -> bool:
        """Whether nothing can be shown before the whole text is there."""
        return self.votes or self.own.minimum_confidence is not None or self.own.agents_per_prompt is not None


def chat_call(body: ChatBody, served: Served) -> Call:
    """Read a chat.

    Raises:
        ApiProblem: it cannot be answered.
    """
    who = _who(body.model, served)
    try:
        prompt = served.prompter.ids([message.turn for message in body.messages])
    except CiLlmError as error:  # the chat template refuses it
        raise bad("messages", str(error)) from error
    return Call(
        is_chat=True,
        prompts=[prompt],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        echo=False,
        only_echo=False,
        token_ids=False,
        id=f"chatcmpl-{uuid.uuid4().hex}",
        **_shared(body, served, who, [prompt], body.max_completion_tokens or body.max_tokens),
    )


def completion_call(body: CompletionBody, served: Served) -> Call:
    """Read prompts that are continued as they are.

    Raises:
        ApiProblem: they cannot be continued.
    """
    who = _who(body.model, served)
    prompts = [text_ids(prompt, served) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    if not all(prompts):
        raise bad("prompt", "a prompt is empty")
    if any(token >= served.vocabulary for prompt in prompts for token in prompt):
        raise bad("prompt", f"expected token ids below {served.vocabulary}", "invalid_type")
    wanted = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None:
        wanted = max(1, min(wanted, served.context - max(map(len, prompts))))
    return Call(
        is_chat=False,
        prompts=prompts,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        only_echo=wanted == 0,
        token_ids=bool(body.return_token_ids),
        id=f"cmpl-{uuid.uuid4().hex}",
        **_shared(body, served, who, prompts, wanted),
    )


def text_ids(text: str, served: Served) -> list[int]:
    """Token ids of a plain text, with the token that begins texts if the tokenizer has one."""
    tokenizer = served.prompter.tokenizer
    begin = tokenizer.bos_token or ""
    whole = text if text.startswith(begin) else begin + text
    return list(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])


def _who(model: str, served: Served) -> int | None:
    if model not in served.models:
        raise ApiProblem(404, f"The model `{model}` does not exist", "model", "model_not_found")
    return served.models[model]


def _shared(
    body: ChatBody | CompletionBody,
    served: Served,
    who: int | None,
    prompts: Sequence[Sequence[int]],
    wanted: int | None,
) -> dict[str, Any]:
    """The fields of a `Call` that chats and completions share."""
    longest, each, stop = max(map(len, prompts)), body.n or 1, tuple(body.stop or ())
    if longest + max(1, wanted or 0) - (wanted == 0) > served.context:
        raise ApiProblem(
            400,
            f"This model's maximum context length is {served.context} tokens. However, you requested {longest} in the"
            f" prompt and {wanted or 1} in the answer.",
            "messages" if isinstance(body, ChatBody) else "prompt",
            "context_length_exceeded",
        )
    if each * len(prompts) > served.choices:
        raise bad("n", f"one request may ask for at most {served.choices} answers")
    own = _own(body, served, who)
    ends = frozenset() if body.ignore_eos else served.ends
    decoding = Decoding(
        max_new_tokens=max(1, served.context - longest if wanted is None else wanted),
        ends=ends | served.prompter.ends_among(stop) | {*(body.stop_token_ids or ())},
        aggregator=own.aggregator or served.aggregators[0],
        **_drawing(body),
    )
    return {
        "model": body.model,
        "who": who,
        "decoding": decoding,
        "stop": stop,
        "each": each,
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "own": own,
    }


def _drawing(body: ChatBody | CompletionBody) -> Mapping[str, Any]:
    """How tokens are drawn; without a temperature the most probable one is taken, as by `ci-llm generate`."""
    if not body.temperature:
        return {}
    return {
        "do_sample": True,
        "temperature": float(body.temperature),
        "top_p": float(1.0 if body.top_p is None else body.top_p),
        "top_k": body.top_k if (body.top_k or 0) > 0 else None,  # 0 and -1 are vLLM's words for all of them
        "min_p": float(body.min_p or 0.0),
        "seed": torch.Generator().seed() if body.seed is None else body.seed,
    }


def _own(body: ChatBody | CompletionBody, served: Served, who: int | None) -> Own:
    """What is asked of the crowd: what the request says, else what the server was started with."""
    said = body.ci_llm or Own()
    if who is not None:
        if said != Own():
            raise bad("ci_llm", f"only {served.crowd} takes it: {body.model} answers alone")
        return said
    own = served.defaults.model_copy(update=said.model_dump(exclude_unset=True, exclude_none=True))
    if body.temperature and said.agents_per_prompt is None:
        own = own.model_copy(update={"agents_per_prompt": None})
    name = own.aggregator or served.aggregators[0]
    if name not in served.aggregators:
        raise bad("ci_llm.aggregator", f"expected one of {', '.join(served.aggregators)}")
    if find_vote(name) and body.temperature:
        raise bad("ci_llm.aggregator", f"{name} is a vote: leave temperature out")
    if own.agents_per_prompt is not None and body.temperature:
        raise bad("ci_llm.agents_per_prompt", "takes the most probable tokens: leave temperature out")
    for field_name in ("minimum_confidence", "agents_per_prompt"):
        if getattr(own, field_name) is not None and (reason := uncalibrated(served.calibration, name)):
            raise bad(f"ci_llm.{field_name}", reason, "no_calibration")
    return own


def uncalibrated(calibration: Calibration | None, aggregator: str) -> str | None:
    """Why it is not known how probably an answer is right; None: it is."""
    if calibration is None:
        return "this crowd has no calibration: ci-llm evaluate RUN --calibrate makes one"
    if calibration.aggregator != aggregator:
        return f"the calibration is about the aggregator {calibration.aggregator}"
    return None
