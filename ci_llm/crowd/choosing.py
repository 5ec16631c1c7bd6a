"""The choice of the next token of many texts, each by settings of its own, from the distributions of K agents.

`choose` depends on its arguments alone. If the choice fails for one text, it gets the error, and the others get tokens.

Legend: K agents, n texts, V vocabulary, m listed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.crowd.aggregators import Learned, aggregate, is_mean
from ci_llm.crowd.answers import TokenUncertainty, token_uncertainty
from ci_llm.crowd.decoding import Chosen, Request
from ci_llm.errors import ModelError

#: The numbers of a row before its listed tokens: the token, and the four of `token_uncertainty`.
_NUMBERS: Final = 5


def choose(logits: Tensor, rows: Sequence[Request], learned: Learned | None = None) -> list[Chosen | Exception]:
    """The next token of each of n texts.

    It waits for the device once. An agent whose logits hold NaN in a row is left out of that row.

    Args:
        logits: [K, n, V] the logits of the agents that write the texts.
        rows: [n] the texts; only their generators change.
        learned: the numbers for aggregators with learned weights; unused for one agent alone.

    Returns:
        [n] the tokens, with an exception where a choice failed.
    """
    heights = [None if row.generator is None else torch.rand(1, generator=row.generator) for row in rows]
    width = max((row.top for row in rows), default=0)
    found: dict[int, Tensor | Exception] = {}
    for places in _alike([row.decoding.aggregator for row in rows]):
        found_here = _of_group(logits, rows, places, heights, learned, width)
        found |= zip(places, found_here, strict=True)
    numbers = [each for _, each in sorted(found.items()) if isinstance(each, Tensor)]
    listed = iter(torch.stack(numbers).tolist() if numbers else [])  # here the device is waited for
    chosen: list[Chosen | Exception] = []
    for place, row in enumerate(rows):
        each = found[place]
        if isinstance(each, Exception):
            chosen.append(each)
            continue
        values = next(listed)
        if math.isnan(values[1]):
            chosen.append(_without_nan(logits[:, place], row, heights[place], learned))
        else:
            chosen.append(_chosen(values, row, width))
    return chosen


def _of_group(
    logits: Tensor,
    rows: Sequence[Request],
    places: Sequence[int],
    heights: Sequence[Tensor | None],
    learned: Learned | None,
    width: int,
) -> Sequence[Tensor | Exception]:
    """The numbers of the rows at these places, which have one aggregator; after an error they are tried one by one."""
    own = logits if len(places) == logits.shape[1] else logits[:, list(places)]
    try:
        return _numbers(own, [rows[p] for p in places], [heights[p] for p in places], learned, width).unbind(0)
    except Exception as error:  # noqa: BLE001 - an aggregator may be a user's code, and only its own rows must fail
        if len(places) == 1:
            return [error]
        return [each for place in places for each in _of_group(logits, rows, [place], heights, learned, width)]


def _numbers(
    logits: Tensor, rows: Sequence[Request], heights: Sequence[Tensor | None], learned: Learned | None, width: int
) -> Tensor:
    """The numbers [n, 5 + 2 m] fp64 of texts with one aggregator: `_NUMBERS` and the listed tokens."""
    how = rows[0].decoding.aggregator
    log_probs = logits.log_softmax(-1)
    crowd = aggregate(log_probs, how, learned) if len(logits) > 1 else log_probs[0]
    # For one agent the logits are compared, as in its own `generate`: rounding may make ties of log-probabilities.
    chosen = (crowd if len(logits) > 1 else logits[0]).argmax(-1)
    for places in _alike([None if h is None else _narrowing(row) for row, h in zip(rows, heights, strict=True)]):
        if heights[places[0]] is not None:
            narrowed = rows[places[0]].decoding.warpers()(None, crowd[places])
            own_heights = [heights[place] for place in places]
            chosen[places] = draw(narrowed, [height for height in own_heights if height is not None])
    sure = crowd.new_zeros(4, len(rows))
    sure[0] = crowd.gather(-1, chosen[:, None]).squeeze(-1)
    wanted = [place for place, row in enumerate(rows) if row.uncertainty]
    if wanted:
        mean, own = len(logits) == 1 or is_mean(how), slice(None) if len(wanted) == len(rows) else wanted
        sure[:, own] = token_uncertainty(log_probs[:, own], crowd[own], chosen[own], is_mean=mean)
    parts = [chosen[:, None].double(), sure.T.double()]
    if width:
        best = crowd.topk(min(width, crowd.shape[-1]))
        parts += [best.indices.double(), best.values.double()]
    return torch.cat(parts, dim=1)


def _narrowing(row: Request) -> tuple[Any, ...]:
    how = row.decoding
    return how.temperature, how.top_k, how.top_p, how.min_p


def _alike(keys: Iterable[Any]) -> list[list[int]]:
    """Lists of the places that have equal keys."""
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())


def _chosen(values: Sequence[float], row: Request, width: int) -> Chosen:
    sure, listed = values[1:_NUMBERS], values[_NUMBERS:]
    width = min(width, len(listed) // 2)
    return Chosen(
        int(values[0]),
        sure[0],
        TokenUncertainty(math.exp(sure[0]), *sure[1:]) if row.uncertainty else None,
        tuple((int(listed[n]), listed[width + n]) for n in range(min(row.top, width))),
    )


def _without_nan(logits: Tensor, row: Request, height: Tensor | None, learned: Learned | None) -> Chosen | Exception:
    """The choice for one row from the agents' logits [K, V] without the agents that have NaN."""
    try:
        finite, learned = without_nan(logits[:, None], learned)
        [values] = _numbers(finite, [row], [height], learned, row.top).tolist()
    except Exception as error:  # noqa: BLE001 - as in `_of_group`
        return error
    return _chosen(values, row, row.top)


def draw(log_probs: Tensor, heights: Sequence[Tensor]) -> Tensor:
    """Draw one token per row, [n, V] -> [n], by inverse transform sampling.

    `torch.multinomial` would draw the whole batch from one generator, and a sample would depend on its batch.

    Args:
        heights: n uniform random numbers, tensors of shape [1], one for each row.
    """
    # fp64, because a cumulative sum over a large vocabulary in fp32 loses improbable tokens.
    probabilities = log_probs.double().softmax(-1)
    if torch.are_deterministic_algorithms_enabled():
        probabilities = probabilities.cpu()  # CUDA has no deterministic cumulative sum
    cumulative = probabilities.cumsum(-1)
    # The last sum differs from 1 by rounding, so the numbers are scaled to it.
    wanted = torch.stack(list(heights)).to(cumulative) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)
    return drawn.clamp_max(log_probs.shape[-1] - 1).to(log_probs.device)  # a row of NaN would have no place


def without_nan(per_agent: Tensor, learned: Learned | None) -> tuple[Tensor, Learned | None]:
    """The logits [K', B, V] of the agents without NaN, with their learned numbers: a mean would spread the NaN.

    Raises:
        ModelError: every agent has NaN.
    """
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
