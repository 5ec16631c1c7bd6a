"""Which way rows can go through a base: tried at the start against the base's own forward, never believed.

Legend: K agents, N packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ci_llm.crowd.numerics import describe_error, distance, tolerance, unusable
from ci_llm.data.batches import Batch
from ci_llm.errors import ModelError

if TYPE_CHECKING:
    from ci_llm.crowd.model import Crowd

Route = Literal["packed", "padded"]


def choose_route(crowd: Crowd) -> str | None:
    """Try one short batch through the base's own forward and through ours, and take the way that agrees.

    Returns:
        why the padded way was taken, or None for the packed one.

    Raises:
        ModelError: the base cannot run with agents, sees the future, or no way of ours reproduces its logits.
    """
    with _noisy_agents(crowd), torch.no_grad():
        batch = _probe(crowd.model, crowd.device)
        try:
            wanted = _reference(crowd, batch)
        except Exception as error:
            raise unusable(
                crowd.model, crowd.base_name, f"cannot read a short batch with agents on it ({describe_error(error)})"
            ) from error
        _refuse_non_causal(crowd, batch)
        reason = None
        routes: tuple[Route, ...] = ("packed", "padded")
        for crowd.route in routes:
            try:
                found = crowd.head.logits(crowd.states(batch))
            except Exception as error:  # noqa: BLE001 - each family has its own words for rows it does not expect
                reason = describe_error(error)
                continue
            gap = distance(found, wanted)
            if gap <= tolerance(found.dtype, crowd.model.dtype):
                return reason
            reason = f"{crowd.route} rows change its logits by {gap:.1e}"
    raise unusable(
        crowd.model, crowd.base_name, f"computes its logits in a way this program does not reproduce ({reason})"
    )


@contextmanager
def _noisy_agents(crowd: Crowd) -> Iterator[None]:
    """Agents that differ, for a moment: with B = 0 a check would not see whose adapter was applied to whom."""
    weights, training = crowd.agents.weights, crowd.training
    kept, generator = weights.clone(), torch.Generator().manual_seed(0)
    weights.copy_(torch.randn(kept.shape, generator=generator) * 0.05)
    crowd.eval()
    try:
        yield
    finally:
        weights.copy_(kept)
        crowd.train(training)


def _reference(crowd: Crowd, batch: Batch) -> Tensor:
    """[K, N, V]: each agent alone, each row alone, through the model's own forward."""
    rows = [batch.input_ids[s:e][None] for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)]
    logits = []
    for k in range(crowd.num_agents):
        with crowd.solo(k) as model:
            logits.append(torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows]))
    return torch.stack(logits)


def _refuse_non_causal(crowd: Crowd, batch: Batch) -> None:
    row = batch.input_ids[: batch.bounds[1]][None]
    other = row.clone()
    other[0, -1] = (other[0, -1] + 1) % crowd.model.get_input_embeddings().weight.shape[0]
    with crowd.solo(0) as model:
        first, second = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (row, other))
    if distance(first, second) > tolerance(first.dtype, crowd.model.dtype):
        raise ModelError(
            f"{type(crowd.model).__name__} is no causal language model: a later token changes earlier logits",
            where=f"model_name: {crowd.base_name}",
            hint="choose a decoder such as Llama, Qwen, Mistral, Gemma, Phi or GPT-NeoX",
        )


def _probe(model: PreTrainedModel, device: torch.device) -> Batch:
    """Three short rows of random tokens; one is longer than a short attention window, if the model has one."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    lengths = [7, 12, max(9, window + 5 if window < 64 else 0)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    everything = torch.arange(len(ids))
    return Batch(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        bounds=tuple(bounds),
        predict_from=everything,
        targets=ids,
        target_rows=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        last_tokens=torch.tensor(bounds[1:]) - 1,
        sample_ids=tuple(range(len(lengths))),
    ).to(device)
