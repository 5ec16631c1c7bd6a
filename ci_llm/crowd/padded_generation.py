"""Texts of bases that do not read packed rows: by Transformers' own `generate`, for one author after the other.

Transformers manages cache, positions and padding. A text of the crowd is in the batch once per agent, agent-major as
the stacked adapters expect. A logits processor replaces the K distributions of a row by the token that the crowd chose,
so that all K copies of the row continue with the same text. A batch ends with its longest text.

Legend: K agents, n texts of one author, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import CROWD, Author, Chosen, Request, TokenIds, choose, free_positions
from ci_llm.lora.passes import distance, dtypes_of, tolerance


@contextmanager
def padded_rows(crowd: CrowdModel) -> Iterator[None]:
    """Evaluation mode and padded rows inside, because only the model's own attention has a cache."""
    route = crowd.base_model.route
    crowd.base_model.route = "padded"
    try:
        with crowd.evaluating():
            yield
    finally:
        crowd.base_model.route = route


def write_batch(crowd: CrowdModel, groups: Sequence[list[Request]], stop: Callable[[], bool]) -> None:
    """Write the texts of these groups, each of which has one prompt; all wait for the longest one."""
    base = crowd.base_model
    with padded_rows(crowd):
        if base.padding_invariant is None and len({len(requests[0].prompt) for requests in groups}) > 1:
            base.padding_invariant = is_padding_invariant(crowd)
        size = 1 if base.padding_invariant is False else len(groups)
        for at in range(0, len(groups), size):
            together = [request for requests in groups[at : at + size] for request in requests]
            for author in dict.fromkeys(request.author for request in together):
                _write_texts(crowd, author, [one for one in together if one.author == author], stop)


def _write_texts(crowd: CrowdModel, author: Author, requests: Sequence[Request], stop: Callable[[], bool]) -> None:
    """Write n texts of one author."""
    prompts = [request.prompt for request in requests]
    free = free_positions(crowd.model, prompts)
    copies = crowd.num_agents if author is CROWD else 1

    def choice(_: Tensor, scores: Tensor) -> Tensor:
        """Logits [K·n, V] in the same shape, with 0 at the chosen token of each row and -inf elsewhere."""
        tokens = list[int]()
        for request, found in zip(requests, choose(scores.unflatten(0, (copies, -1)), requests), strict=True):
            tokens.append(found.id if isinstance(found, Chosen) else crowd.base_model.pad_id)
            if request.finish is None:
                request.take(found, len(request.prompt) + free)
        chosen = torch.tensor(tokens * copies, device=scores.device)[:, None]
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)

    def have_ended(ids: Tensor, _: Tensor, **__: object) -> Tensor:
        """True if all texts have ended, once for every row."""
        is_over = stop() or all(request.finish is not None for request in requests)
        return torch.full((len(ids),), is_over, device=ids.device)

    longest = min(free, max(request.decoding.max_new_tokens for request in requests))
    with crowd.base_model.active_agent(author):
        _generate(crowd, prompts * copies, longest, choice, have_ended)


def _generate(crowd: CrowdModel, prompts: Sequence[TokenIds], longest: int, *steps: Callable[..., Tensor]) -> None:
    """Let Transformers generate after prompts, padded on the left, so that all rows end at the same column.

    Args:
        steps: a logits processor, which leaves one token per row where it chooses, and a stopping criterion if any.
    """
    model, pad_id = crowd.model, crowd.base_model.pad_id
    ids = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    rows = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side="left")
    how = GenerationConfig(max_new_tokens=longest, pad_token_id=pad_id, do_sample=False, use_cache=True)
    # Transformers takes every missing value from the base's own settings.
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.generate(
            input_ids=rows.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=how,
            logits_processor=LogitsProcessorList(steps[:1]),
            stopping_criteria=StoppingCriteriaList(steps[1:]),
            synced_gpus=False,  # processes with a sharded base keep in step by themselves
        )
    finally:
        model.generation_config = kept


def is_padding_invariant(crowd: CrowdModel) -> bool:
    """True if the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and raise no error.
    """

    def second(prompts: Sequence[TokenIds]) -> Tensor:
        """The logits [V] of the first row's second new token, which depend on a full pass and on one with the cache."""
        seen = list[Tensor]()

        def keep(_: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores[0])
            return scores

        _generate(crowd, [*prompts] * crowd.num_agents, 2, keep)
        return seen[1]

    alone, beside = second([[1, 2, 3]]), second([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]])
    return distance(beside, alone) <= tolerance(*dtypes_of(crowd.model, alone))  # False if one of them holds NaN
