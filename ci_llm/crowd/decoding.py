"""The rules by which the crowd chooses a token or ends a text: settings, and what Transformers' `generate` calls.

Legend: K agents, B prompts, R rows per agent, of which the first F are the agent's own, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.aggregators import AGGREGATORS, Learned, aggregate, find_vote, is_mean
from ci_llm.crowd.answers import TokenUncertainty, own_uncertainty, token_uncertainty, tokens_of
from ci_llm.errors import BadInput, ModelError


@dataclass(frozen=True)
class Decoding:
    """How the crowd chooses a token, and when it stops.

    Args:
        max_new_tokens: at most so many tokens per text.
        ends: token ids that end a text; they are not part of it.
        aggregator: a module of `ci_llm.crowd.aggregators`.
        do_sample: draw tokens; otherwise take the most probable one.
        temperature, top_k, top_p, min_p: applied to the crowd's distribution, in this order, if `do_sample`.
        seed: of sampling. Every prompt draws from a generator of its own, so that a sample does not depend on the
            prompts beside it.

    Raises:
        BadInput: a value out of range.
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
        }
        if broken := [text for text, holds in requirements.items() if not holds]:
            raise BadInput("; ".join(broken), where="generation settings", hint="change the values named")

    def warpers(self, temperature: float | None = None) -> LogitsProcessorList:
        """What changes a distribution before a token is drawn from it, in the order of application.

        Args:
            temperature: instead of `self.temperature`.
        """
        wanted = LogitsProcessorList([TemperatureLogitsWarper(temperature or self.temperature)])
        if self.top_k is not None:
            wanted.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            wanted.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            wanted.append(MinPLogitsWarper(self.min_p))
        return wanted


#: Rows leave a batch when they are at least this share of it: a batch that goes on costs a few milliseconds.
_LEAVING: Final = 0.25


class LiveRows:
    """The rows of a batch whose texts still grow, agent-major: of every agent its own rows, and then the crowd's.

    The K·F texts of the agents are numbered first, agent by agent, and then those of the crowd, each of which has a row
    under every agent.

    Args:
        num_agents: K.
        first: F, rows per agent that are the agent's own.
        shared: rows per agent that are the crowd's.

    Attributes:
        num_own: K·F.
        num_texts: of agents and crowd.
        agents, texts: the agent and the text of each row.
    """

    def __init__(self, num_agents: int, first: int, shared: int) -> None:
        self.num_agents, self.first, self.num_own = num_agents, first, num_agents * first
        self.num_texts = self.num_own + shared
        own = torch.arange(self.num_own).view(num_agents, first)
        crowd = torch.arange(self.num_own, self.num_texts).expand(num_agents, -1)
        self.texts = torch.cat([own, crowd], dim=1).flatten()
        self.agents = torch.arange(num_agents).repeat_interleave(first + shared)

    def keep(self, rows: Tensor) -> None:
        """Let the batch go on with these rows only."""
        self.texts, self.agents = self.texts[rows], self.agents[rows]

    @property
    def spans(self) -> list[slice]:
        """[K] the rows of each agent."""
        ends = self.agents.bincount(minlength=self.num_agents).cumsum(0).tolist()
        return [slice(start, end) for start, end in pairwise([0, *ends])]


class CrowdChoice(LogitsProcessor):  # type: ignore[misc]
    """Replaces the K distributions of a row of the crowd by its choice.

    In its own rows every agent takes its most probable token; or it draws, in the rows behind its first for each
    prompt.
    """

    def __init__(
        self,
        rows: LiveRows,
        decoding: Decoding,
        numbers: Sequence[int],
        *,
        uncertainty: bool = False,
        learned: Learned | None = None,
    ) -> None:
        self._rows, self._decoding, self._numbers = rows, decoding, numbers
        self._uncertainty, self._learned, self._vote = uncertainty, learned, find_vote(decoding.aggregator)
        self._recorded: list[Tensor] = []  # [4, K·F + B] for every token; 0 for texts that have ended
        self._generators: dict[str, list[torch.Generator]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[rows, V] logits -> the same, with 0 at the chosen token and -inf elsewhere in the rows that were chosen."""
        rows = self._rows
        own = rows.texts < rows.num_own
        found = scores.new_zeros(4, rows.num_texts)
        if own.any() and (self._uncertainty or self._vote):
            texts = rows.texts[own]
            scores[own], numbers = self._choose_for_agents(input_ids, scores[own], texts)
            found[:, texts] = numbers
        if not own.all():
            shared = scores[~own].unflatten(0, (rows.num_agents, -1))
            texts = rows.texts[~own][: shared.shape[1]]
            forced, numbers = self._choose_for_crowd(input_ids, shared, texts)
            scores[~own], found[:, texts] = forced.flatten(0, 1), numbers.to(found)
        if self._uncertainty:
            self._recorded.append(found)
        return scores

    def _choose_for_crowd(self, input_ids: Tensor, scores: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """The crowd's rows [K, B, V] with its choice, and how sure it is of it, [4, B]; without `uncertainty` 0."""
        finite, learned = without_nan(scores, self._learned)
        log_probs, how = finite.log_softmax(-1), self._decoding.aggregator
        crowd = aggregate(log_probs, how, learned)  # [B, V]
        chosen = crowd.argmax(-1)
        if self._decoding.do_sample:
            narrowed = self._decoding.warpers()(input_ids[: len(crowd)], crowd)
            places = (texts - self._rows.num_own).tolist()
            chosen = _draw(narrowed, self._generators_of("generate", places))
        forced = _forced(crowd, chosen).expand(self._rows.num_agents, -1, -1)
        if not self._uncertainty:
            return forced, torch.zeros(())
        return forced, token_uncertainty(log_probs, crowd, chosen, is_mean=is_mean(how))

    def _choose_for_agents(self, input_ids: Tensor, scores: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """The agents' own rows [n, V] with their choices, and how sure each is of its own, [4, n]."""
        finite = scores.nan_to_num(nan=0.0)  # an agent with NaN writes anything, and is not sure of it
        log_probs = finite.log_softmax(-1)
        chosen = finite.argmax(-1)  # not of the log-probabilities: rounding may make ties there
        if self._vote and self._vote.samples:
            first, prompts = self._rows.first, self._rows.first // (1 + self._vote.samples)
            drawn = texts % first >= prompts
            narrowed = self._decoding.warpers(self._vote.temperature)(input_ids[: len(texts)][drawn], log_probs[drawn])
            places = (texts // first * (first - prompts) + texts % first - prompts)[drawn].tolist()
            if generators := self._generators_of("vote", places, self._rows.num_agents * self._vote.samples):
                chosen[drawn] = _draw(narrowed, generators)
        return _forced(log_probs, chosen), own_uncertainty(log_probs, chosen)

    def recorded(self) -> list[list[TokenUncertainty]]:
        """How sure each of K·F texts of the agents and of B of the crowd was, token by token; [] if not wanted."""
        if not self._uncertainty:
            return []
        return [tokens_of(text) for text in torch.stack(self._recorded, dim=-1).unbind(1)]

    def _generators_of(self, what: str, places: Sequence[int], times: int | None = None) -> list[torch.Generator]:
        """The generators at these places: every text that is drawn has one, one for each prompt or `times` of them."""
        if what not in self._generators:
            keys = [(n,) if times is None else (n, time) for time in range(times or 1) for n in self._numbers]
            self._generators[what] = [generator_for(self._decoding.seed, what, *key) for key in keys]
        return [self._generators[what][place] for place in places]


def _draw(log_probs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One token per row, [R, V] -> [R], by inverse transform sampling, each row by its own generator.

    `torch.multinomial` would draw for the whole batch from one generator, and a sample would depend on its batch.
    """
    # fp64, because a cumulative sum over a large vocabulary in fp32 loses improbable tokens.
    probabilities = log_probs.double().softmax(-1)
    if torch.are_deterministic_algorithms_enabled():
        probabilities = probabilities.cpu()  # CUDA has no deterministic cumulative sum
    cumulative = probabilities.cumsum(-1)
    heights = torch.stack([torch.rand(1, generator=g) for g in generators])
    # The last sum differs from 1 by rounding, so the numbers are scaled to it.
    drawn = torch.searchsorted(cumulative, heights.to(cumulative) * cumulative[:, -1:], right=True).squeeze(-1)
    return drawn.to(log_probs.device)


def _forced(log_probs: Tensor, chosen: Tensor) -> Tensor:
    """0 at the chosen token [...] and -inf elsewhere, [..., V]."""
    return torch.full_like(log_probs, float("-inf")).scatter_(-1, chosen[..., None], 0.0)


def without_nan(per_agent: Tensor, learned: Learned | None) -> tuple[Tensor, Learned | None]:
    """The logits of the agents that have no NaN, [K, B, V] -> [K', B, V]: one agent's NaN would spread to the mean."""
    has_nan = per_agent.isnan().flatten(1).any(1)
    if not has_nan.any():
        return per_agent, learned
    if has_nan.all():
        raise ModelError(
            "the logits of every agent hold NaN",
            where="generation",
            hint="the base may make NaN of padded rows in its precision: give one prompt at a time, or another"
            " model_dtype",
        )
    return per_agent[~has_nan], learned and learned.only((~has_nan).tolist())


@dataclass(eq=False)
class TextEnds(StoppingCriteria):  # type: ignore[misc]
    """Keeps each text as soon as it has ended, and stops the batch where enough of its rows can leave it.

    Args:
        rows: of the batch.
        width: tokens of a prompt with its padding.
        ends: token ids that end a text.
        is_over: called with the new tokens of each text that has not ended, after each token; True ends it. None: only
            a token does.
        stop: called after every token; True ends all texts at that point.
        leave: whether rows can leave the batch.

    Attributes:
        texts: by number, the new tokens of those that have ended, with the end.
        may_go_on: whether the batch was stopped so that rows leave it.
    """

    rows: LiveRows
    width: int
    ends: frozenset[int]
    is_over: Callable[[Sequence[int]], bool] | None
    stop: Callable[[], bool]
    leave: bool
    texts: dict[int, list[int]] = field(default_factory=dict)
    may_go_on: bool = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        last, texts = input_ids[:, -1].tolist(), self.rows.texts.tolist()
        for text, row in {text: row for row, text in enumerate(texts) if text not in self.texts}.items():
            if last[row] in self.ends or (self.is_over and self.is_over(self._new(input_ids, row))):
                self.texts[text] = self._new(input_ids, row)
        ended = sum(text in self.texts for text in texts)
        stopped = self.stop()
        self.may_go_on = self.leave and not stopped and len(texts) > ended >= _LEAVING * len(texts)
        over = stopped or self.may_go_on or ended == len(texts)
        return torch.full((len(texts),), over, dtype=torch.bool, device=input_ids.device)

    def leaving(self) -> Tensor:
        """Take the rows of ended texts out of the batch; returns the places of those that stay."""
        [places] = torch.tensor([text not in self.texts for text in self.rows.texts.tolist()]).nonzero(as_tuple=True)
        self.rows.keep(places)
        return places

    def end(self, input_ids: Tensor) -> None:
        """End all texts where they are."""
        for row, text in enumerate(self.rows.texts.tolist()):
            self.texts.setdefault(text, self._new(input_ids, row))

    def _new(self, input_ids: Tensor, row: int) -> list[int]:
        return input_ids[row, self.width :].tolist()
