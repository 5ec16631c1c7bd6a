"""The route of rows through a base: packed or padded, and whether prompts are shared, tested at the start.

A family may accept packed rows and still compute something else. So nothing is assumed about a family: one short batch
goes both ways, and the logits are compared with those of the base's own forward pass.

Legend: K agents, N packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ci_llm.crowd.model import CrowdModel, Route
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.data.units import unit_of
from ci_llm.errors import ModelError
from ci_llm.lora import passes

#: The standard deviation of the agents' weights in a trial. In SmolLM2-135M in bf16, rounding then gives a distance of
#: 0.02 to 0.10, mixed-up agents 0.13 or more, and a wrong mask 0.6; the limit is 0.088.
TRIAL_STD: Final = 0.02


def choose_route(crowd: CrowdModel) -> str | None:
    """Compare one short batch through the base's own forward pass with both routes, and take the first that agrees.

    Returns:
        why the padded route was taken, or None for the packed one.

    Raises:
        ModelError: the base cannot run with agents, is not causal, or neither route reproduces its logits.
    """
    with _random_agents(crowd), torch.no_grad():
        batch = _probe(crowd.model, crowd.device)
        try:
            wanted = _reference(crowd, batch)
        except Exception as error:
            raise passes.unusable_base(
                crowd.model,
                crowd.base_name,
                f"cannot read a short batch with agents on it ({passes.describe_error(error)})",
            ) from error
        if wanted.isnan().any():
            raise ModelError(
                f"{type(crowd.model).__name__} gives NaN for logits: some of its weights are not finite",
                where=f"model_name: {crowd.base_name}",
                hint="download or save the base again; if its weights are whole, take a wider model_dtype",
            )
        _refuse_non_causal(crowd, batch)
        reason = None
        routes: tuple[Route, ...] = ("packed", "padded")
        for crowd.route in routes:
            try:
                found = crowd.head.logits(crowd.states(batch))
            except Exception as error:  # noqa: BLE001 - families raise errors of every kind for packed rows
                reason = passes.describe_error(error)
                continue
            gap, limit = passes.distance(found, wanted), passes.tolerance(*passes.dtypes_of(crowd.model, found))
            if gap <= limit or passes.agrees_by_norm(found, wanted, limit):
                return reason
            reason = f"{crowd.route} rows change its logits by {gap:.1e}"
    raise passes.unusable_base(
        crowd.model, crowd.base_name, f"computes its logits in a way this program does not reproduce ({reason})"
    )


@contextmanager
def _random_agents(crowd: CrowdModel) -> Iterator[None]:
    """Give the agents random weights inside: with B = 0 a mix-up of adapters would change nothing."""
    weights = crowd.storage.weights
    kept, generator = weights.clone(), torch.Generator().manual_seed(0)
    weights.copy_(torch.randn(kept.shape, generator=generator) * TRIAL_STD)
    try:
        with crowd.evaluating():
            yield
    finally:
        weights.copy_(kept)


def _reference(crowd: CrowdModel, batch: Batch) -> Tensor:
    """The logits [K, N, V] of the model's own forward pass, for each agent and each row separately."""
    rows = [batch.input_ids[s:e][None] for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)]
    logits = []
    for k in range(crowd.num_agents):
        with crowd.active_agent(k) as model:
            logits.append(torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows]))
    return torch.stack(logits)


def _refuse_non_causal(crowd: CrowdModel, batch: Batch) -> None:
    """Change the last token of a row, and refuse the base if earlier logits change."""
    row = batch.input_ids[: batch.bounds[1]][None]
    other = row.clone()
    other[0, -1] = (other[0, -1] + 1) % crowd.model.get_input_embeddings().weight.shape[0]
    with crowd.active_agent(0) as model:
        first, second = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (row, other))
    if passes.distance(first, second) > passes.tolerance(*passes.dtypes_of(crowd.model, first)):
        raise ModelError(
            f"{type(crowd.model).__name__} is not a causal language model: a later token changes earlier logits",
            where=f"model_name: {crowd.base_name}",
            hint="choose a decoder such as Llama, Qwen, Mistral, Gemma, Phi or GPT-NeoX",
        )


def _probe(model: PreTrainedModel, device: torch.device) -> Batch:
    """Three short rows of random tokens; one is longer than a short attention window, if the model has one."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    lengths = [7, 12, max(9, window + 5 if window < 64 else 0)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    rows = [own.numpy() for own in ids.split(lengths)]
    return pack([Example(own, np.arange(len(own)) > 0) for own in rows], range(len(rows))).to(device)


@torch.no_grad()
def share_prompts(crowd: CrowdModel) -> str | None:
    """Compute the common beginning of a unit's rows once from now on, if a trial gives the same states.

    Returns:
        why not, or None.
    """
    if crowd.route != "packed":
        return "rows are padded"
    ids = _probe(crowd.model, crowd.device).input_ids.cpu().numpy()
    at = len(ids) // 2  # the longest row of the probe is longer than a short window
    rows = [Example(np.concatenate([ids[:at], own]), np.arange(at + len(own)) > 0) for own in (ids[:4], ids[-9:])]
    batch = pack([unit_of(rows), unit_of(rows[:1])], range(2)).to(crowd.device)
    with _random_agents(crowd):
        wanted = crowd.states(batch)
        crowd.shares_prompts = True
        try:
            found = crowd.states(batch)
            other = replace(crowd.through, fast_attention=not crowd.through.fast_attention)
            (alike,) = other.states(crowd.for_all(batch))
        except Exception as error:  # noqa: BLE001 - families raise errors of every kind for packed rows
            reason: str | None = passes.describe_error(error)
        else:
            gap = passes.distance(torch.cat([found, alike]), torch.cat([wanted, wanted]))
            limit = passes.tolerance(*passes.dtypes_of(crowd.model, found))
            reason = None if gap <= limit else f"it changes states by {gap:.1e}"
    crowd.shares_prompts = reason is None
    return reason
