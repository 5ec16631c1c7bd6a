"""Generation by the crowd: all agents read the same text, and each next token is chosen once for all of them.

Every prompt stands in the batch once per agent, agent-major, as the stacked adapters expect it. Transformers' own
`generate` manages cache, positions and padding for every family. One logits processor replaces the K distributions of a
row by the token that the crowd chose, so that all K copies of the row go on with the same text.

Legend: K agents, B prompts, R rows per agent (B, or 2·B with the agents' own texts), T tokens, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.aggregators import AGGREGATORS, aggregate
from ci_llm.crowd.base import positions_of
from ci_llm.crowd.endings import EndWhenOver, StopOnRequest
from ci_llm.crowd.numerics import distance, tolerance
from ci_llm.crowd.uncertainty import TokenUncertainty, token_uncertainty
from ci_llm.errors import BadInput, DataError, ModelError

TokenIds = Sequence[int]


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

    def warpers(self) -> LogitsProcessorList:
        """What changes the crowd's distribution before a token is drawn from it, in the order of application."""
        wanted = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            wanted.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            wanted.append(TopPLogitsWarper(self.top_p))
        return wanted


@dataclass(frozen=True)
class Generated:
    """What follows each of the B prompts: token ids without the end.

    Attributes:
        crowd: [B] texts of the crowd.
        agents: [K][B] greedy texts of each agent alone; empty without `include_agents`.
        tokens: [B] how sure the crowd was of every token of its text, and of the end if it chose one; empty without
            `uncertainty`.
    """

    crowd: list[list[int]]
    agents: list[list[list[int]]]
    tokens: list[list[TokenUncertainty]] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[Generated]) -> Generated:
        """The texts of all parts, in order; every part has the same agents."""
        return cls(
            crowd=[text for part in parts for text in part.crowd],
            agents=[[text for part in parts for text in part.agents[k]] for k in range(len(parts[0].agents))],
            tokens=[tokens for part in parts for tokens in part.tokens],
        )


def generate_ids(
    model: PreTrainedModel,
    num_agents: int,
    prompts: Sequence[TokenIds],
    decoding: Decoding,
    *,
    pad_id: int,
    include_agents: bool = False,
    uncertainty: bool = False,
    first_prompt: int = 0,
    stop: Callable[[], bool] = lambda: False,
    is_over: Callable[[TokenIds], bool] | None = None,
) -> Generated:
    """Continue every prompt by the crowd, and on request also by each agent alone, all in one batch.

    All texts end when the longest prompt has used up the base's positions.

    Args:
        model: in evaluation mode, with its own attention; its rows are agent-major.
        num_agents: K, the agents that `model` carries.
        prompts: B lists of token ids.
        pad_id: token id that fills the left side of shorter prompts.
        include_agents: also continue every prompt by each agent alone, greedily.
        uncertainty: also return how sure the crowd was of each token, from the distributions of this same pass.
        first_prompt: number of the first prompt in a longer list that is generated in parts; it keys the generators.
        stop: called before every token; True ends all texts at that point.
        is_over: called with each text that has not ended, after each of its tokens; True ends this text there.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
        ModelError: every agent's logits hold NaN.
    """
    free = free_positions(model, prompts, first_prompt)
    # With the agents' own texts every prompt stands twice: first for each agent alone, then for the crowd.
    rows = [*prompts, *prompts] if include_agents else list(prompts)
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    first = len(rows) - len(prompts)
    choice = _CrowdChoice(num_agents, first, decoding, first_prompt, uncertainty=uncertainty)
    over = EndWhenOver(num_agents, first, ids.shape[1], decoding.ends, is_over or (lambda text: False))
    with _blank_generation_config(model):
        everything = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=min(decoding.max_new_tokens, free),
                eos_token_id=sorted(decoding.ends) or None,
                pad_token_id=pad_id,
                do_sample=False,  # the processor leaves one token per row, which also holds for sampling
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([StopOnRequest(stop), *([over] if is_over else [])]),
            synced_gpus=False,  # processes with a sharded base keep in step by themselves
        )
    new = everything[:, ids.shape[1] :].unflatten(0, (num_agents, len(rows))).tolist()
    whole = [[over.cut(k, row, tokens) for row, tokens in enumerate(agent)] for k, agent in enumerate(new)]
    return _generated(whole, first, decoding.ends, choice)


def is_padding_invariant(model: PreTrainedModel, num_agents: int, pad_id: int) -> bool:
    """Whether the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and raise no error.
    """
    short, long = [[1, 2, 3]], [[1, 2, 3, 4, 5, 6, 7]]
    alone, beside = (_scores(model, num_agents, rows, pad_id) for rows in (short, short + long))
    return distance(beside, alone) <= tolerance(alone.dtype, model.dtype)  # False if one of them holds NaN


def _scores(model: PreTrainedModel, num_agents: int, rows: Sequence[TokenIds], pad_id: int) -> Tensor:
    """Logits [V] of the second new token of the first row, which depend on a full pass and on a pass over the cache."""
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    wanted = GenerationConfig(
        max_new_tokens=2, pad_token_id=pad_id, use_cache=True, output_logits=True, return_dict_in_generate=True
    )
    with _blank_generation_config(model):
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=wanted, synced_gpus=False)
        return found.logits[1][0]  # type: ignore[no-any-return]


def num_positions(model: PreTrainedModel) -> int:
    """The largest number of tokens that the base can read; `sys.maxsize` if its family has no limit."""
    limit = positions_of(model.config)
    return sys.maxsize if limit is None else limit


def free_positions(model: PreTrainedModel, prompts: Sequence[TokenIds], first_prompt: int = 0) -> int:
    """How many new tokens the base has positions for after the longest prompt.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
    """
    lengths, limit = [len(prompt) for prompt in prompts], num_positions(model)
    longest = max(lengths)

    def where(length: int) -> str:
        return f"prompt {first_prompt + lengths.index(length)} (counted from 0)"

    if not min(lengths):
        raise DataError("a prompt is empty", where=where(0), hint="leave it out")
    if longest >= limit:
        raise DataError(
            f"a prompt has {longest} tokens, and the base reads {limit}", where=where(longest), hint="shorten it"
        )
    return limit - longest


class _CrowdChoice(LogitsProcessor):  # type: ignore[misc]
    """Replaces the K distributions of a row by the crowd's choice, except in the first `first` rows of every agent."""

    def __init__(
        self, num_agents: int, first: int, decoding: Decoding, first_prompt: int, *, uncertainty: bool = False
    ) -> None:
        self._num_agents, self._first, self._decoding, self._first_prompt = num_agents, first, decoding, first_prompt
        self._uncertainty = uncertainty
        self._recorded: list[Tensor] = []  # [4, B] for every token
        self._warpers = decoding.warpers()
        self._generators: list[torch.Generator] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[K·R, V] logits -> [K·R, V], with 0 at the chosen token and -inf elsewhere in the crowd's rows."""
        per_agent = scores.view(self._num_agents, -1, scores.shape[-1])  # [K, R, V]
        own, shared = per_agent[:, : self._first], per_agent[:, self._first :]
        log_probs = _without_nan(shared).log_softmax(-1)
        crowd = aggregate(log_probs, self._decoding.aggregator)  # [B, V]
        chosen = self._draw(input_ids, crowd) if self._decoding.do_sample else crowd.argmax(-1)
        if self._uncertainty:
            self._recorded.append(token_uncertainty(log_probs, crowd, chosen))
        forced = torch.full_like(crowd, float("-inf")).scatter_(-1, chosen[:, None], 0.0)
        return torch.cat([own, forced.expand(self._num_agents, -1, -1)], dim=1).view_as(scores)

    def recorded(self, counts: Sequence[int]) -> list[list[TokenUncertainty]]:
        """How sure the crowd was of the first `counts[b]` tokens of each of the B texts; [] if that was not wanted."""
        if not self._uncertainty:
            return []
        log_probs, *entropies = torch.stack(self._recorded, dim=-1).double().cpu()  # 4 x [B, T]
        numbers = torch.stack([log_probs.exp(), *entropies], dim=-1).tolist()  # [B][T][4]
        return [[TokenUncertainty(*token) for token in text[:n]] for text, n in zip(numbers, counts, strict=True)]

    def _draw(self, input_ids: Tensor, crowd: Tensor) -> Tensor:
        """One token per row, [B, V] -> [B], by inverse transform sampling.

        `torch.multinomial` would draw for the whole batch from one generator, and a sample would depend on its batch.
        """
        # fp64, because a cumulative sum over a large vocabulary in fp32 loses improbable tokens.
        cumulative = self._warpers(input_ids[: len(crowd)], crowd).double().softmax(-1).cumsum(-1)
        heights = torch.stack([torch.rand(1, generator=g) for g in self._own_generators(len(crowd))])
        # The last sum differs from 1 by rounding, so the numbers are scaled to it.
        return torch.searchsorted(cumulative, heights.to(cumulative) * cumulative[:, -1:], right=True).squeeze(-1)

    def _own_generators(self, prompts: int) -> list[torch.Generator]:
        if not self._generators:
            numbers = range(self._first_prompt, self._first_prompt + prompts)
            self._generators = [generator_for(self._decoding.seed, "generate", n) for n in numbers]
        return self._generators


def _without_nan(per_agent: Tensor) -> Tensor:
    """The logits of the agents that have no NaN, [K, B, V] -> [K', B, V]: one agent's NaN would spread to the mean."""
    has_nan = per_agent.isnan().flatten(1).any(1)
    if has_nan.all():
        raise ModelError(
            "the logits of every agent hold NaN",
            where="generation",
            hint="the base may make NaN of padded rows in its precision: give one prompt at a time, or another"
            " model_dtype",
        )
    return per_agent[~has_nan]


def _generated(
    whole: Sequence[Sequence[list[int]]], first: int, ends: frozenset[int], choice: _CrowdChoice
) -> Generated:
    """Sort the new tokens [K][R], ends included: the first `first` rows are the agent's own, the others the crowd's."""
    texts = [[_until(ends, tokens) for tokens in agent] for agent in whole]
    # The crowd's rows are equal under every agent, so those of the first agent are taken.
    crowd = texts[0][first:]
    counts = [min(len(text) + 1, len(tokens)) for text, tokens in zip(crowd, whole[0][first:], strict=True)]
    return Generated(crowd, [agent[:first] for agent in texts] if first else [], choice.recorded(counts))


@contextmanager
def _blank_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the base's own generation settings: Transformers fills every value that is not given from them."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def _left_padded(rows: Sequence[TokenIds], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, each [R, T]; pads stand to the left, so that all rows end at the same column."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, length - len(row) :] = torch.as_tensor(row)
        mask[number, length - len(row) :] = 1
    return ids, mask


def _until(ends: frozenset[int], tokens: list[int]) -> list[int]:
    """The tokens before the first end."""
    end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]
