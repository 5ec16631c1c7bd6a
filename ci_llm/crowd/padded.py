"""Generation by Transformers' own `generate`, for bases that do not read packed rows, and for whoever asks for it.

Every prompt stands in the batch once per agent, agent-major, as the stacked adapters expect it; where agents also
answer alone, or vote, once more for each of these texts. Transformers manages cache, positions and padding for every
family. One logits processor (`CrowdChoice`) replaces the K distributions of a row by the token that the crowd chose, so
that all K copies of the row go on with the same text.

Legend: K agents, R rows per agent, of which the first F are the agent's own, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ci_llm.crowd.aggregators import Learned
from ci_llm.crowd.choosing import choose
from ci_llm.crowd.decoder import Request
from ci_llm.crowd.decoding import TokenIds, free_positions
from ci_llm.crowd.model import CrowdModel
from ci_llm.lora.passes import distance, dtypes_of, tolerance

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
    """Replaces the K distributions of a row of the crowd by its choice, and that of an agent's own row by its token.

    Args:
        requests: of the texts, by number. What is chosen is added to their `chosen`, also after their ends.
    """

    def __init__(self, rows: LiveRows, requests: Sequence[Request], learned: Learned | None = None) -> None:
        self._rows, self._requests, self._learned = rows, requests, learned
        self._how = [request.row() for request in requests]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[rows, V] logits -> the same, with 0 at the chosen token and -inf elsewhere."""
        rows = self._rows
        own = rows.texts < rows.num_own
        if own.any():  # an agent with NaN writes anything
            scores[own] = self._forced(scores[own].nan_to_num(nan=0.0)[None], rows.texts[own])
        if not own.all():
            shared = scores[~own].unflatten(0, (rows.num_agents, -1))
            forced = self._forced(shared, rows.texts[~own][: shared.shape[1]])
            scores[~own] = forced.expand(rows.num_agents, -1, -1).flatten(0, 1)
        return scores

    def _forced(self, logits: Tensor, texts: Tensor) -> Tensor:
        """The choice from [K, n, V] for each of these texts [n]: 0 at the chosen token and -inf elsewhere, [n, V]."""
        listed = texts.tolist()
        ids = []
        for text, each in zip(listed, choose(logits, [self._how[text] for text in listed], self._learned), strict=True):
            if isinstance(each, Exception):
                raise each
            ids.append([each.id])
            self._requests[text].chosen.append(each)
        chosen = torch.tensor(ids, device=logits.device)
        return torch.full_like(logits[0], float("-inf")).scatter_(-1, chosen, 0.0)


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


@contextmanager
def as_in_generation(crowd: CrowdModel) -> Iterator[None]:
    """Evaluation mode and padded rows: packed attention has no cache of keys and values; the model's own has."""
    route, crowd.route = crowd.route, "padded"
    try:
        with crowd.evaluating():
            yield
    finally:
        crowd.route = route


def write_batch(
    crowd: CrowdModel,
    requests: Sequence[Request],
    agent: int | None,
    *,
    stop: Callable[[], bool],
    is_over: Callable[[TokenIds], bool] | None,
) -> None:
    """Write the texts of a batch of requests: each has its tokens then.

    Args:
        agent: writes alone, as a crowd of one.
        stop, is_over: as in `generate_ids`.
    """
    model, reading = crowd.model, crowd.agents.reading
    num_agents, learned = (crowd.num_agents, crowd.learned) if agent is None else (1, None)
    shared = [request for request in requests if request.who == agent]
    others = [request for request in requests if request.who != agent]
    own = [[request for request in others if request.who == k] for k in range(num_agents)]
    texts = [*chain(*own), *shared]
    prompts = [request.prompt for each in own for request in (*each, *shared)]
    ids, mask = (x.to(model.device) for x in _left_padded(prompts, crowd.pad_id))
    width, decoding = ids.shape[1], requests[0].decoding
    end = width + min(decoding.max_new_tokens, free_positions(model, prompts))
    cache = _selectable_cache(model)
    rows = LiveRows(num_agents, len(own[0]), len(shared))
    ends = TextEnds(rows, width, decoding.ends, is_over, stop, cache is not None)
    # The processor leaves one token per row, which also holds for sampling.
    how: Any = {"pad_token_id": crowd.pad_id, "do_sample": False, "use_cache": True}
    kept: Any = {} if cache is None else {"past_key_values": cache}
    choice, spans = LogitsProcessorList([CrowdChoice(rows, texts, learned)]), None
    with _blank_generation_config(model):
        while True:
            with reading.of(reading.agent, spans=spans):
                ids = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=GenerationConfig(max_new_tokens=end - ids.shape[1], **how),
                    logits_processor=choice,
                    stopping_criteria=StoppingCriteriaList([ends]),
                    synced_gpus=False,  # processes with a sharded base keep in step by themselves
                    **kept,
                )
            if cache is None or not ends.may_go_on or ids.shape[1] == end:
                break
            places = ends.leaving().to(ids.device)
            cache.batch_select_indices(places)
            ids, mask = ids[places], F.pad(mask[places], (0, ids.shape[1] - mask.shape[1]), value=1)
            spans = rows.spans  # one token of each row is read from here on
    ends.end(ids)
    for number, request in enumerate(texts):
        request.tokens = ends.texts[number]
        del request.chosen[len(request.tokens) :]


def _selectable_cache(model: PreTrainedModel) -> DynamicCache | None:
    """A cache of keys and values whose rows can be selected; None: this base has a state of another kind."""
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return cache if {*map(type, cache.layers)} <= {DynamicLayer, DynamicSlidingWindowLayer} else None


def is_padding_invariant(model: PreTrainedModel, num_agents: int, pad_id: int) -> bool:
    """Whether the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and raise no error.
    """
    short, long = [[1, 2, 3]], [[1, 2, 3, 4, 5, 6, 7]]
    alone, beside = (_scores(model, num_agents, rows, pad_id) for rows in (short, short + long))
    return distance(beside, alone) <= tolerance(*dtypes_of(model, alone))  # False if one of them holds NaN


def _scores(model: PreTrainedModel, num_agents: int, rows: Sequence[TokenIds], pad_id: int) -> Tensor:
    """Logits [V] of the second new token of the first row, which depend on a full pass and on a pass over the cache."""
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    wanted = GenerationConfig(
        max_new_tokens=2, pad_token_id=pad_id, use_cache=True, output_logits=True, return_dict_in_generate=True
    )
    with _blank_generation_config(model):
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=wanted, synced_gpus=False)
        return found.logits[1][0]  # type: ignore[no-any-return]


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
