"""The route of rows through a base, packed or padded, chosen by a trial against the base's own forward pass.

A family may accept packed rows and still compute something else. So nothing is assumed about a family: at the start one
short batch goes both ways, and the logits are compared.

Legend: K agents, N packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ci_llm.crowd.numerics import describe_error, distance, dtypes_of, tolerance, unusable_base
from ci_llm.data.batches import Batch
from ci_llm.errors import ModelError

if TYPE_CHECKING:
    from ci_llm.crowd.model import Crowd

Route = Literal["packed", "padded"]


def choose_route(crowd: Crowd) -> str | None:
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
            raise unusable_base(
                crowd.model, crowd.base_name, f"cannot read a short batch with agents on it ({describe_error(error)})"
            ) from error
        if wanted.isnan().any():
            raise ModelError(
                f"{type(crowd.model).__name__} gives NaN for logits: some of its weights are not finite",
                where=f"model_name: {crowd.base_name}",
                hint="download or save the base anew; if its weights are whole, take a wider model_dtype",
            )
        _refuse_non_causal(crowd, batch)
        reason = None
        routes: tuple[Route, ...] = ("packed", "padded")
        for crowd.route in routes:
            try:
                found = crowd.head.logits(crowd.states(batch))
            except Exception as error:  # noqa: BLE001 - families raise errors of every kind for packed rows
                reason = describe_error(error)
                continue
            gap = distance(found, wanted)
            if gap <= tolerance(*dtypes_of(crowd.model, found)):
                return reason
            reason = f"{crowd.route} rows change its logits by {gap:.1e}"
    raise unusable_base(
        crowd.model, crowd.base_name, f"computes its logits in a way this program does not reproduce ({reason})"
    )


@contextmanager
def _random_agents(crowd: Crowd) -> Iterator[None]:
    """Give the agents random weights for the trial: with B = 0 a mix-up of adapters would change nothing."""
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
    """Logits [K, N, V] of the model's own forward pass, for each agent and each row separately."""
    rows = [batch.input_ids[s:e][None] for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)]
    logits = []
    for k in range(crowd.num_agents):
        with crowd.active_agent(k) as model:
            logits.append(torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows]))
    return torch.stack(logits)


def _refuse_non_causal(crowd: Crowd, batch: Batch) -> None:
    """Change the last token of a row, and refuse the base if logits before it change."""
    row = batch.input_ids[: batch.bounds[1]][None]
    other = row.clone()
    other[0, -1] = (other[0, -1] + 1) % crowd.model.get_input_embeddings().weight.shape[0]
    with crowd.active_agent(0) as model:
        first, second = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (row, other))
    if distance(first, second) > tolerance(*dtypes_of(crowd.model, first)):
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
