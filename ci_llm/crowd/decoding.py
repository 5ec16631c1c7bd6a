"""The rules by which the crowd chooses a token or ends a text: settings, and what Transformers' `generate` calls.

Legend: K agents, B prompts, R rows per agent, of which the first F are the agent's own, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
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
        temperature, top_k, top_p: applied to the crowd's distribution, in this order, if `do_sample`.
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

    def __post_init__(self) -> None:
        requirements = {
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            f"aggregator must be {' or '.join(AGGREGATORS)}": self.aggregator in AGGREGATORS,
            "temperature must be above 0 (do_sample=False takes the most probable token)": self.temperature > 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k must be at least 1, or None": self.top_k is None or self.top_k >= 1,
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
        return wanted


class CrowdChoice(LogitsProcessor):  # type: ignore[misc]
    """Replaces the K distributions of a row by the crowd's choice, except in the first `first` rows of every agent.

    In those, every agent takes its most probable token; or it draws, in the rows behind its first for each prompt.
    """

    def __init__(
        self,
        num_agents: int,
        first: int,
        decoding: Decoding,
        numbers: Sequence[int],
        *,
        uncertainty: bool = False,
        learned: Learned | None = None,
    ) -> None:
        self._num_agents, self._first, self._decoding, self._numbers = num_agents, first, decoding, numbers
        self._uncertainty, self._learned, self._vote = uncertainty, learned, find_vote(decoding.aggregator)
        self._recorded: list[Tensor] = []  # [4, K·F + B] for every token
        self._generators: dict[str, list[torch.Generator]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[K·R, V] logits -> [K·R, V], with 0 at the chosen token and -inf elsewhere in the rows that were chosen."""
        per_agent = scores.view(self._num_agents, -1, scores.shape[-1])  # [K, R, V]
        own, shared = per_agent[:, : self._first], per_agent[:, self._first :]
        numbers: list[Tensor] = []
        if self._first and (self._uncertainty or self._vote):
            own, number = self._choose_for_agents(input_ids, own)
            numbers.append(number)
        if shared.shape[1]:
            shared, number = self._choose_for_crowd(input_ids, shared)
            numbers.append(number)
        if self._uncertainty:
            self._recorded.append(torch.cat(numbers, dim=1))
        return torch.cat([own, shared], dim=1).view_as(scores)

    def _choose_for_crowd(self, input_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The crowd's rows [K, B, V] with its choice, and how sure it is of it, [4, B]."""
        finite, learned = without_nan(scores, self._learned)
        log_probs, how = finite.log_softmax(-1), self._decoding.aggregator
        crowd = aggregate(log_probs, how, learned)  # [B, V]
        chosen = crowd.argmax(-1)
        if self._decoding.do_sample:
            narrowed = self._decoding.warpers()(input_ids[: len(crowd)], crowd)
            chosen = _draw(narrowed, self._generators_of("generate", len(crowd)))
        forced = _forced(crowd, chosen).expand(self._num_agents, -1, -1)
        if not self._uncertainty:
            return forced, chosen
        return forced, token_uncertainty(log_probs, crowd, chosen, is_mean=is_mean(how))

    def _choose_for_agents(self, input_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The agents' own rows [K, F, V] with their choices, and how sure each is of its own, [4, K·F]."""
        finite = scores.nan_to_num(nan=0.0)  # an agent with NaN writes anything, and is not sure of it
        log_probs = finite.log_softmax(-1)
        chosen = finite.argmax(-1)  # not of the log-probabilities: rounding may make ties there
        if self._vote and self._vote.samples:
            prompts = self._first // (1 + self._vote.samples)
            rows = log_probs[:, prompts:].flatten(0, 1)
            narrowed = self._decoding.warpers(self._vote.temperature)(input_ids[: len(rows)], rows)
            drawn = _draw(narrowed, self._generators_of("vote", prompts, times=len(rows) // prompts))
            chosen[:, prompts:] = drawn.view(self._num_agents, -1)
        return _forced(log_probs, chosen), own_uncertainty(log_probs, chosen).flatten(1)

    def recorded(self) -> list[list[TokenUncertainty]]:
        """How sure each of K·F texts of the agents and of B of the crowd was, token by token; [] if not wanted."""
        if not self._uncertainty:
            return []
        return [tokens_of(text) for text in torch.stack(self._recorded, dim=-1).unbind(1)]

    def _generators_of(self, what: str, prompts: int, times: int | None = None) -> list[torch.Generator]:
        """A generator for every text that is drawn: one for each prompt, or `times` of them."""
        if what not in self._generators:
            numbers = self._numbers[:prompts]
            keys = [(n,) for n in numbers] if times is None else [(n, time) for time in range(times) for n in numbers]
            self._generators[what] = [generator_for(self._decoding.seed, what, *key) for key in keys]
        return self._generators[what]


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


class StopOnRequest(StoppingCriteria):  # type: ignore[misc]
    """Ends every row as soon as `stop` returns True."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return torch.full((len(input_ids),), self._stop(), dtype=torch.bool, device=input_ids.device)


class EndWhenOver(StoppingCriteria):  # type: ignore[misc]
    """Ends every text that `is_over` says is over, and remembers how long it was.

    Args:
        num_agents: K.
        first: number of rows per agent that are the agent's own; a row behind them is the crowd's, and the same
            under every agent.
        width: tokens of a prompt with its padding.
        ends: token ids that end a text.
        is_over: called with the new tokens of each text that has not ended, after each token.
    """

    def __init__(
        self, num_agents: int, first: int, width: int, ends: frozenset[int], is_over: Callable[[Sequence[int]], bool]
    ) -> None:
        self._num_agents, self._first, self._width, self._ends, self._is_over = num_agents, first, width, ends, is_over
        self._lengths: dict[tuple[int, int], int] = {}  # by agent and row

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        new = input_ids[:, self._width :].unflatten(0, (self._num_agents, -1)).tolist()
        over = [
            [self._has_ended(k, row, tokens) for row, tokens in enumerate(agent[: self._first])]
            for k, agent in enumerate(new)
        ]
        # The crowd's rows are the same under every agent: `is_over` may decode a text, so it is asked once.
        crowd = [self._has_ended(0, row, tokens) for row, tokens in enumerate(new[0][self._first :], self._first)]
        return torch.tensor([own + crowd for own in over], device=input_ids.device).flatten()

    def cut(self, agent: int, row: int, tokens: list[int]) -> list[int]:
        """A text up to the token with which it was over; all of it, if it never was."""
        return tokens[: self._lengths.get(self._key(agent, row))]

    def _has_ended(self, agent: int, row: int, tokens: list[int]) -> bool:
        key = self._key(agent, row)
        if key not in self._lengths and (tokens[-1] in self._ends or self._is_over(tokens)):
            self._lengths[key] = len(tokens)
        return key in self._lengths

    def _key(self, agent: int, row: int) -> tuple[int, int]:
        return (0 if row >= self._first else agent), row
