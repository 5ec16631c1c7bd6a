"""Generation by Transformers' own `generate`, for bases that do not read packed rows.

Every prompt is in the batch once per agent, agent-major as the stacked adapters expect, and once more for each text
that an agent writes alone. Transformers manages cache, positions and padding for every family. A logits processor
replaces the K distributions of a row by the token that the crowd chose, so that all K copies of the row continue with
the same text. A batch ends with its longest text.

Legend: K agents, F rows that each agent writes alone, S rows of the crowd, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from ci_llm.crowd.decoding import Chosen, Request, TokenIds, choose, free_positions
from ci_llm.crowd.model import CrowdModel
from ci_llm.lora.passes import distance, dtypes_of, tolerance


@contextmanager
def as_in_generation(crowd: CrowdModel) -> Iterator[None]:
    """Evaluation mode and padded rows inside, because only the model's own attention has a cache."""
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
    """Write the texts of a batch of requests, of which every agent has the same number.

    Args:
        agent: the only writer, as a crowd of one; None for the crowd.
        stop, is_over: as in `Wanted`.
    """
    model = crowd.model
    shared = [request for request in requests if request.who == agent]
    others = [request for request in requests if request.who != agent]
    own = [[request for request in others if request.who == k] for k in range(crowd.num_agents if agent is None else 1)]
    rows = [request for each in own for request in (*each, *shared)]
    prompts = [request.prompt for request in rows]
    free, open_ = free_positions(model, prompts), [*requests]

    def choice(_: Tensor, scores: Tensor) -> Tensor:
        """Logits [K·(F + S), V] in the same shape, with 0 at the chosen token of each row and -inf elsewhere."""
        logits, tokens = scores.unflatten(0, (len(own), -1)), dict[Request, int]()
        of_agents, of_crowd = logits[:, : len(own[0])].flatten(0, 1)[None], logits[:, len(own[0]) :]
        for asked, given in (([*chain(*own)], of_agents), (shared, of_crowd)):
            for request, found in zip(asked, choose(given, asked, crowd.learned) if asked else [], strict=True):
                tokens[request] = found.id if isinstance(found, Chosen) else crowd.pad_id
                if request in open_:
                    request.take(found, len(request.prompt) + free)
        chosen = torch.tensor([[tokens[request]] for request in rows], device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)

    def have_ended(ids: Tensor, _: Tensor, **__: object) -> Tensor:
        """True if all texts have ended, once for every row."""
        over = [each for each in open_ if each.finish is not None or (is_over and is_over(each.tokens))]
        open_[:] = [request for request in open_ if request not in over]
        return torch.full((len(ids),), stop() or not open_, device=ids.device)

    ids, mask = (x.to(model.device) for x in _left_padded(prompts, crowd.pad_id))
    # The processor leaves one token per row, which also holds for sampling.
    longest = min(free, max(request.decoding.max_new_tokens for request in requests))
    how = GenerationConfig(max_new_tokens=longest, pad_token_id=crowd.pad_id, do_sample=False, use_cache=True)
    with _blank_generation_config(model):
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=how,
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([have_ended]),
            synced_gpus=False,  # processes with a sharded base keep in step by themselves
        )


def is_padding_invariant(model: PreTrainedModel, num_agents: int, pad_id: int) -> bool:
    """True if the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and raise no error.
    """
    short, long = [[1, 2, 3]], [[1, 2, 3, 4, 5, 6, 7]]
    alone, beside = (_scores(model, num_agents, rows, pad_id) for rows in (short, short + long))
    return distance(beside, alone) <= tolerance(*dtypes_of(model, alone))  # False if one of them holds NaN


def _scores(model: PreTrainedModel, num_agents: int, rows: Sequence[TokenIds], pad_id: int) -> Tensor:
    """The logits [V] of the first row's second new token, which depend on a full pass and on one with the cache."""
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    wanted = GenerationConfig(
        max_new_tokens=2, pad_token_id=pad_id, use_cache=True, output_logits=True, return_dict_in_generate=True
    )
    with _blank_generation_config(model):
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=wanted, synced_gpus=False)
        return found.logits[1][0]  # type: ignore[no-any-return]


@contextmanager
def _blank_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the base's generation settings inside, because Transformers takes every missing value from them."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def _left_padded(rows: Sequence[TokenIds], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, each [R, T]; pads are on the left, so that all rows end at the same column."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, length - len(row) :] = torch.as_tensor(row)
        mask[number, length - len(row) :] = 1
    return ids, mask
