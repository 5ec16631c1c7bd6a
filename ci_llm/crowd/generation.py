"""The crowd writes: all agents read the same text in lock-step, and every next token is chosen for all of them at once.

Every prompt stands in the batch once per agent, agent-major, as the stacked adapters want it. Transformers' own
`generate` carries cache, positions and padding, for every family it knows; one logits processor makes K opinions one.

Legend: K agents, B prompts, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.aggregators import AGGREGATORS, aggregate
from ci_llm.crowd.base import positions_of
from ci_llm.crowd.numerics import distance, tolerance
from ci_llm.errors import BadInput, DataError, ModelError

TokenIds = Sequence[int]


@dataclass(frozen=True)
class Decoding:
    """How the crowd chooses a token, and when it stops.

    Args:
        ends: token ids that end a text; they are not part of it.
        temperature, top_k, top_p: applied to the crowd's distribution, in this order, if `do_sample`.
        seed: every prompt draws from a generator of its own, whichever prompts stand beside it.

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
        asked = {
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            f"aggregator must be {' or '.join(AGGREGATORS)}": self.aggregator in AGGREGATORS,
            "temperature must be above 0 (do_sample=False takes the likeliest token)": self.temperature > 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k must be at least 1, or None": self.top_k is None or self.top_k >= 1,
        }
        if wrong := [words for words, right in asked.items() if not right]:
            raise BadInput("; ".join(wrong), where="how to generate", hint="change the values named")

    def warpers(self) -> LogitsProcessorList:
        """What narrows a distribution before a token is drawn from it."""
        wanted = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            wanted.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            wanted.append(TopPLogitsWarper(self.top_p))
        return wanted


@dataclass(frozen=True)
class Written:
    """What follows each of the B prompts: token ids without the end.

    Attributes:
        together: [B], written by the crowd.
        alone: [K][B], each agent's own greedy text; empty where nobody asked for it.
    """

    together: list[list[int]]
    alone: list[list[list[int]]]


def write(
    model: PreTrainedModel,
    num_agents: int,
    prompts: Sequence[TokenIds],
    decoding: Decoding,
    *,
    pad_id: int,
    alone: bool = False,
    first_prompt: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Written:
    """Continue every prompt, by the crowd, and with `alone` also by each agent on its own, all in one batch.

    All texts end where the longest prompt has used up the base's positions.

    Args:
        model: in evaluation mode, with its own attention; its rows are agent-major.
        first_prompt: number of the first prompt, where a longer list comes in parts; it keys the generators.
        stop: asked before every token; True ends all texts where they stand.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
    """
    room = _room(model, prompts, first_prompt)
    rows = [*prompts, *prompts] if alone else list(prompts)
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    voice = _OneVoice(num_agents, len(rows) - len(prompts), decoding, first_prompt)
    with _nothing_inherited(model):
        everything = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=min(decoding.max_new_tokens, room),
                eos_token_id=sorted(decoding.ends) or None,
                pad_token_id=pad_id,
                do_sample=False,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([voice]),
            stopping_criteria=StoppingCriteriaList([_Asked(stop)]),
        )
    new = everything[:, ids.shape[1] :].view(num_agents, len(rows), -1).tolist()
    texts = [[_until(decoding.ends, row) for row in agent] for agent in new]
    own = [agent[: len(prompts)] for agent in texts] if alone else []
    return Written(together=texts[0][-len(prompts) :], alone=own)


def is_padding_invariant(model: PreTrainedModel, num_agents: int, pad_id: int) -> bool:
    """Whether the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and say nothing.
    """
    short, long = [[1, 2, 3]], [[1, 2, 3, 4, 5, 6, 7]]
    alone, beside = (_scores(model, num_agents, rows, pad_id) for rows in (short, short + long))
    return distance(beside, alone) <= tolerance(alone.dtype, model.dtype)  # not with NaN in it


def _scores(model: PreTrainedModel, num_agents: int, rows: Sequence[TokenIds], pad_id: int) -> Tensor:
    """[V] of the second token that follows the first row: after a full pass, and one over the cache."""
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    wanted = GenerationConfig(
        max_new_tokens=2, pad_token_id=pad_id, use_cache=True, output_logits=True, return_dict_in_generate=True
    )
    with _nothing_inherited(model):
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=wanted).logits[1][0]  # type: ignore[no-any-return]


def num_positions(model: PreTrainedModel) -> int:
    """Tokens that the base was made to read; no limit where its family has none."""
    limit = positions_of(model.config)
    return sys.maxsize if limit is None else limit


class _OneVoice(LogitsProcessor):  # type: ignore[misc]
    """Puts one choice in place of the K opinions on a row, from row `first` of every agent on; the others stay."""

    def __init__(self, num_agents: int, first: int, decoding: Decoding, first_prompt: int) -> None:
        self._num_agents, self._first, self._decoding, self._first_prompt = num_agents, first, decoding, first_prompt
        self._warpers = decoding.warpers()
        self._generators: list[torch.Generator] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[K·rows, V] logits -> the same, the crowd's rows with 0 at the token chosen and -inf elsewhere."""
        opinions = scores.view(self._num_agents, -1, scores.shape[-1])
        own, shared = opinions[:, : self._first], opinions[:, self._first :]
        crowd = aggregate(_healthy(shared).log_softmax(-1), self._decoding.aggregator)
        chosen = self._draw(input_ids, crowd) if self._decoding.do_sample else crowd.argmax(-1)
        voice = torch.full_like(crowd, float("-inf")).scatter_(-1, chosen[:, None], 0.0)
        return torch.cat([own, voice.expand(self._num_agents, -1, -1)], dim=1).view_as(scores)

    def _draw(self, input_ids: Tensor, crowd: Tensor) -> Tensor:
        """One token per row [B, V] -> [B], by the inverse of the distribution function: one number per row."""
        steps = self._warpers(input_ids[: len(crowd)], crowd).double().softmax(-1).cumsum(-1)
        heights = torch.stack([torch.rand(1, generator=g) for g in self._own_generators(len(crowd))])
        return torch.searchsorted(steps, heights.to(steps) * steps[:, -1:], right=True).squeeze(-1)

    def _own_generators(self, prompts: int) -> list[torch.Generator]:
        if not self._generators:
            numbers = range(self._first_prompt, self._first_prompt + prompts)
            self._generators = [generator_for(self._decoding.seed, "generate", n) for n in numbers]
        return self._generators


def _healthy(opinions: Tensor) -> Tensor:
    """The opinions of the agents that have numbers: one agent's NaN must not silence all others."""
    silent = opinions.isnan().flatten(1).any(1)
    if silent.all():
        raise ModelError(
            "every agent answers NaN",
            where="generation",
            hint="the base may not bear padded rows in its precision: one prompt at a time, or another model_dtype",
        )
    return opinions[~silent]


class _Asked(StoppingCriteria):  # type: ignore[misc]
    """Ends every row once somebody asks to stop."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return torch.full((len(input_ids),), self._stop(), dtype=torch.bool, device=input_ids.device)


@contextmanager
def _nothing_inherited(model: PreTrainedModel) -> Iterator[None]:
    """A base's own generation settings (sampling, repetition penalty, ...) would fill in whatever we leave open."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def _room(model: PreTrainedModel, prompts: Sequence[TokenIds], first_prompt: int) -> int:
    """New tokens for which the base has positions, beside the longest prompt."""
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


def _left_padded(rows: Sequence[TokenIds], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [rows, T]; pads stand to the left, so that all rows end at the same column."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, length - len(row) :] = torch.as_tensor(row)
        mask[number, length - len(row) :] = 1
    return ids, mask


def _until(ends: frozenset[int], tokens: list[int]) -> list[int]:
    end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]
