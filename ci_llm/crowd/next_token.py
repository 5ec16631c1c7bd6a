"""The choice of the next token: the options of a generation, its requests, and the next token of many texts.

`choose` depends on its arguments alone. If the choice fails for one text, it gets the error, and the others get tokens.

Legend: K agents, B prompts, n open texts, V vocabulary, m listed tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ci_llm.base.load import positions_of
from ci_llm.core.determinism import generator_for
from ci_llm.crowd.aggregators import AGGREGATORS, aggregate, is_mean
from ci_llm.crowd.detokenizer import IncrementalDetokenizer
from ci_llm.crowd.uncertainty import TokenUncertainty, token_uncertainty
from ci_llm.errors import BadInput, DataError, ModelError

TokenIds = Sequence[int]
#: The author of a text: all agents together, an agent by its number, or the base without agents.
Author = int | None
CROWD: Final = None
BASE_ALONE: Final = -1


@dataclass(frozen=True)
class Decoding:
    """The options of a generation, wherever it is asked for: how the crowd chooses a token, and when it stops.

    Args:
        max_new_tokens: the most tokens of a text.
        ends: token ids that end a text; they are not part of it.
        aggregator: one of `ci_llm.crowd.aggregators`.
        do_sample: draw tokens; otherwise take the most probable one.
        temperature, top_k, top_p, min_p: applied to the crowd's distribution, in this order, if `do_sample`.
        seed: the seed of sampling. Every prompt draws from its own generator, so that a sample does not depend on the
            prompts beside it.
        stop_strings: a text ends before the first of them.
        abstain_below: an answer that is right with a lower probability is not given; None to give every answer.

    Raises:
        BadInput: a value is out of range.
    """

    max_new_tokens: int = 256
    ends: frozenset[int] = frozenset()
    aggregator: str = "probability"
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    abstain_below: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):  # Transformers refuses a whole number
            object.__setattr__(self, name, float(getattr(self, name)))
        requirements = {
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            f"aggregator must be {' or '.join(AGGREGATORS)}": self.aggregator in AGGREGATORS,
            "temperature must be above 0, or 0 for the most probable token": self.temperature > 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k must be at least 1, or None": self.top_k is None or self.top_k >= 1,
            "min_p must be at least 0 and at most 1": 0 <= self.min_p <= 1,
            "abstain_below must be a probability, from 0 to 1": 0 <= (self.abstain_below or 0) <= 1,
        }
        if broken := [text for text, holds in requirements.items() if not holds]:
            raise BadInput("; ".join(broken), where="generation settings", hint="change the values named")

    def warpers(self) -> LogitsProcessorList:
        """The functions that change a distribution before a token is drawn, in the order of application."""
        wanted = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            wanted.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            wanted.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            wanted.append(MinPLogitsWarper(self.min_p))
        return wanted


@dataclass(frozen=True)
class Chosen:
    """A token that was chosen.

    Attributes:
        id: the token id.
        log_probability: the token's in the crowd's distribution, before temperature, `top_k`, `top_p` and `min_p`; in
            nats.
        uncertainty: how sure the crowd was of it; None if it was not asked for.
        top: the most probable tokens with their log-probabilities, the likeliest first.
    """

    id: int
    log_probability: float
    uncertainty: TokenUncertainty | None = None
    top: tuple[tuple[int, float], ...] = ()


def generate_key(number: int) -> tuple[int | str, ...]:
    """The key, beside the seed, of the samples of the crowd's text after prompt `number`."""
    return ("generate", number)


@dataclass(eq=False)
class Request:
    """A request to continue a prompt, with the text so far.

    Args:
        prompt: token ids, at least one.
        decoding: the settings of this text: length, ends, aggregator, sampling, seed.
        author: `CROWD`, the number of an agent, or `BASE_ALONE`.
        key: the key, beside the seed, of the samples: texts with the same key draw the same.
        uncertainty: compute the entropies of every token; with a large vocabulary they cost more than the choice.
        top: the number of most probable tokens to list with every token.
        tag: free for the caller.
        detokenizer: follows the text, which then ends at a stop string as well; None where neither is wanted.

    Attributes:
        generator: the generator of the samples; None if the most probable token is taken.
        tokens: the chosen ids, including an end.
        chosen: the same tokens with their probabilities.
        finish: the reason for its end: "stop" at one of `ends`, "stop_string", "length" by `max_new_tokens` or the
            base's positions, or "error"; None if it has not ended.
        error: the exception of the last choice, if it failed.
    """

    prompt: TokenIds
    decoding: Decoding
    author: Author = CROWD
    key: tuple[int | str, ...] = generate_key(0)
    uncertainty: bool = False
    top: int = 0
    tag: Any = None
    detokenizer: IncrementalDetokenizer | None = None
    generator: torch.Generator | None = field(init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    chosen: list[Chosen] = field(default_factory=list, init=False)
    finish: Literal["stop", "stop_string", "length", "error"] | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.generator = generator_for(self.decoding.seed, *self.key) if self.decoding.do_sample else None

    @property
    def ids(self) -> list[int]:
        """The text so far: the tokens without the end."""
        return self.tokens[:-1] if self.finish == "stop" else self.tokens

    @property
    def uncertainties(self) -> list[TokenUncertainty]:
        """The uncertainty of the author at every token; empty without `uncertainty`."""
        return [each.uncertainty for each in self.chosen if each.uncertainty is not None]

    def take(self, found: Chosen | Exception, limit: int) -> None:
        """Append the chosen token, or end with an error.

        Args:
            limit: the most tokens that prompt and text may have together.
        """
        if isinstance(found, Exception):
            self.finish = "error"
            self.error = found
            return
        self.tokens.append(found.id)
        self.chosen.append(found)
        count = len(self.tokens)
        if found.id in self.decoding.ends:
            self.finish = "stop"
        elif self.detokenizer is not None and self.detokenizer.update(self.tokens):
            self.finish = "stop_string"
        elif count >= self.decoding.max_new_tokens or len(self.prompt) + count >= limit:
            self.finish = "length"
        if self.finish is not None and self.detokenizer is not None:
            self.detokenizer.finish(self.ids)


@dataclass(frozen=True)
class Generated:
    """The texts after one prompt, as token ids without the end.

    Attributes:
        ids: the text of the crowd.
        has_ended: True if the crowd ended its text; False if it was cut.
        uncertainties: how sure the crowd was of every token of its text and of its end; empty if that was not asked
            for, and no vote computes it anyway.
        agents: [K] greedy texts of each agent alone; empty if they were not asked for.
        agents_ended: [K] whether an agent ended its text; False if the text was cut, or the agent's numbers failed.
    """

    ids: list[int]
    has_ended: bool
    uncertainties: list[TokenUncertainty]
    agents: list[list[int]]
    agents_ended: list[bool]


def num_positions(model: PreTrainedModel) -> int:
    """The largest number of tokens that the base can read; `sys.maxsize` if the family has no limit."""
    limit = positions_of(model.config)
    return sys.maxsize if limit is None else limit


def ends_of_base(model: PreTrainedModel) -> frozenset[int]:
    """The token ids that end a text by the base's generation settings, often more than the tokenizer's EOS."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def free_positions(model: PreTrainedModel, prompts: Sequence[Sized], what: str = "prompt", least: int = 1) -> int:
    """The number of new tokens for which the base has positions after the longest prompt.

    Args:
        what: the word for a prompt in an error.
        least: the new tokens that must fit.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
    """
    lengths = [len(prompt) for prompt in prompts]
    limit = num_positions(model)
    longest = max(lengths, default=0)
    if 0 in lengths:
        raise DataError(f"a {what} is empty", where=f"{what} {lengths.index(0)} (counted from 0)", hint="leave it out")
    if longest + least > limit:
        where = f"{what} {lengths.index(longest)} (counted from 0)"
        raise DataError(f"a {what} has {longest} tokens, and the base reads {limit}", where=where, hint="shorten it")
    return limit - longest


#: The numbers of a row before its listed tokens: the token, and the four of `token_uncertainty`.
_NUMBERS: Final = 5


def choose(logits: Tensor, rows: Sequence[Request]) -> list[Chosen | Exception]:
    """The next token of each of n texts.

    It waits for the device once. An agent whose logits hold NaN in a row is left out of that row.

    Args:
        logits: [K, n, V] the logits of the agents that write the texts.
        rows: [n] the texts; only their generators change.

    Returns:
        [n] the tokens, with an exception where a choice failed.
    """
    uniforms = [None if row.generator is None else torch.rand(1, generator=row.generator) for row in rows]
    width = max((row.top for row in rows), default=0)
    numbers: dict[int, Tensor] = {}
    for places in _alike([row.decoding.aggregator for row in rows]):
        own = logits if len(places) == logits.shape[1] else logits[:, places]
        try:
            found = _numbers(own, [rows[p] for p in places], [uniforms[p] for p in places], width)
        except Exception:  # noqa: BLE001 - an aggregator may be a user's code, and only its own rows must fail
            continue  # its rows are tried one by one
        numbers |= zip(places, found.unbind(0), strict=True)
    listed = torch.stack([*numbers.values()]).tolist() if numbers else []  # here the device is waited for
    values = dict(zip(numbers, listed, strict=True))
    return [
        _chosen(values[place], row, width)
        if place in values and not math.isnan(values[place][1])
        else _chosen_alone(logits[:, place], row, uniforms[place])
        for place, row in enumerate(rows)
    ]


def _numbers(logits: Tensor, rows: Sequence[Request], uniforms: Sequence[Tensor | None], width: int) -> Tensor:
    """The numbers [n, 5 + 2 m] fp64 of texts with one aggregator: `_NUMBERS` and the listed tokens.

    Args:
        uniforms: see `draw`; None for a text whose most probable token is taken.
        width: m.
    """
    how = rows[0].decoding.aggregator
    log_probs = logits.log_softmax(-1)
    crowd = aggregate(log_probs, how) if len(logits) > 1 else log_probs[0]
    # For one agent the logits are compared, as in its own `generate`: rounding may make ties of log-probabilities.
    chosen = (crowd if len(logits) > 1 else logits[0]).argmax(-1)
    hows = [row.decoding for row in rows]
    for places in _alike((each.do_sample, each.temperature, each.top_k, each.top_p, each.min_p) for each in hows):
        if hows[places[0]].do_sample:
            narrowed = hows[places[0]].warpers()(None, crowd[places])
            theirs = [uniform for place in places if (uniform := uniforms[place]) is not None]
            chosen[places] = draw(narrowed, theirs)
    sure = crowd.new_zeros(4, len(rows))
    sure[0] = crowd.gather(-1, chosen[:, None]).squeeze(-1)
    wanted = [place for place, row in enumerate(rows) if row.uncertainty]
    if wanted:
        mean = len(logits) == 1 or is_mean(how)
        own = slice(None) if len(wanted) == len(rows) else wanted
        sure[:, own] = token_uncertainty(log_probs[:, own], crowd[own], chosen[own], is_mean=mean)
    parts = [chosen[:, None].double(), sure.T.double()]
    if width:
        best = crowd.topk(min(width, crowd.shape[-1]))
        parts += [best.indices.double(), best.values.double()]
    return torch.cat(parts, dim=1)


def _alike(keys: Iterable[Any]) -> list[list[int]]:
    """Lists of the places that have equal keys."""
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())


def _chosen(values: Sequence[float], row: Request, width: int) -> Chosen:
    sure = values[1:_NUMBERS]
    listed = values[_NUMBERS:]
    width = min(width, len(listed) // 2)
    return Chosen(
        int(values[0]),
        sure[0],
        TokenUncertainty(math.exp(sure[0]), *sure[1:]) if row.uncertainty else None,
        tuple((int(listed[n]), listed[width + n]) for n in range(min(row.top, width))),
    )


def _chosen_alone(logits: Tensor, row: Request, uniform: Tensor | None) -> Chosen | Exception:
    """The choice for one row from the agents' logits [K, V], without the agents that have NaN."""
    try:
        [values] = _numbers(without_nan(logits[:, None]), [row], [uniform], row.top).tolist()
    except Exception as error:  # noqa: BLE001 - as in `choose`
        return error
    if math.isnan(values[1]):
        where = f"aggregator={row.decoding.aggregator}"
        return ModelError("the aggregator makes NaN of finite numbers", where=where)
    return _chosen(values, row, row.top)


def draw(log_probs: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
    """Draw one token per row, [n, V] -> [n], by inverse transform sampling.

    `torch.multinomial` would draw the whole batch from one generator, and a sample would depend on its batch.

    Args:
        uniforms: n uniform random numbers, tensors of shape [1], one for each row.
    """
    # fp64, because a cumulative sum over a large vocabulary in fp32 loses improbable tokens.
    probabilities = log_probs.double().softmax(-1)
    if torch.are_deterministic_algorithms_enabled():
        probabilities = probabilities.cpu()  # CUDA has no deterministic cumulative sum
    cumulative = probabilities.cumsum(-1)
    # The last sum differs from 1 by rounding, so the numbers are scaled to it.
    wanted = torch.stack(list(uniforms)).to(cumulative) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)
    return drawn.clamp_max(log_probs.shape[-1] - 1).to(log_probs.device)  # a row of NaN would have no place


def without_nan(per_agent: Tensor) -> Tensor:
    """The logits [K', B, V] of the agents that can be compared, as a mean would spread NaN.

    Minus infinity is a probability of zero. Infinity, as where fp16 overflows, makes NaN of all probabilities.

    Raises:
        ModelError: every agent has NaN or infinity.
    """
    has_nan = (per_agent.isnan() | per_agent.isposinf()).flatten(1).any(1)
    if not has_nan.any():
        return per_agent
    if has_nan.all():
        raise ModelError(
            "the logits of every agent hold NaN or infinity",
            where="generation",
            hint="the base may make NaN of padded rows in its precision: give one prompt at a time, or another"
            " model_dtype",
        )
    return per_agent[~has_nan]
