"""Agents of a crowd that a few optimizer steps have trained, for tests that compare their bits with those alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.batches import Batch
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.settings import LoraSettings
from tests.support.micro_steps import micro_step, owned

#: The rows of a micro-step: those that all agents read, or of each agent its own, None where it sits it out.
Rows = Batch | Sequence[Batch | None]


def crowd_of(model: Any, entries: Sequence[dict[str, Any]]) -> Crowd:
    """Agents that start by their seeds; B is not 0, so that every gradient is at work from the first step on."""
    crowd = Crowd(copy.deepcopy(model), LoraSettings(agents=tuple(entries)), "toy")
    for row, agent in zip(crowd.storage.rows, crowd.agents, strict=True):
        generator = torch.Generator().manual_seed(agent.settings.seed)
        row.data.add_(torch.randn(row.shape, generator=generator).to(row) * 0.02)
    return crowd


def train(
    model: Any,
    entries: Sequence[dict[str, Any]],
    steps: Sequence[Sequence[Rows]],
    *,
    route: Literal["packed", "padded"] = "packed",
    bootstrap: Sequence[bool] = (),
    checkpointing: bool = False,
    sick: int | None = None,
    pass_per_agent: bool = True,
    fast: bool = False,
) -> list[dict[str, Tensor]]:
    """Train as the loop does, with a learning rate, weight decay and clipping of each agent's own.

    Args:
        steps: the micro-steps of every step.

    Returns:
        what can be told about each agent: weights, moments, losses and norms of every step.
    """
    crowd = crowd_of(model, entries).train()
    crowd.base_model.route, storage = route, crowd.storage
    storage.pass_per_agent = pass_per_agent
    crowd.base_model.compute_fast(PARTS if fast else ())
    if checkpointing:
        crowd.gradient_checkpointing_enable()
    if sick is not None:
        storage.weights[sick].fill_(float("nan"))
    each_own = [agent.settings for agent in crowd.agents]
    keys = tuple((own.seed, 0) if draws else None for own, draws in zip(each_own, bootstrap, strict=False))
    objective = NextToken(bootstrap=keys if any(keys) else ())
    rates = [1e-2 / own.rank for own in each_own]
    optimizer = torch.optim.AdamW(
        [{"params": [row], "lr": rate, "weight_decay": rate} for row, rate in zip(storage.rows, rates, strict=True)],
        fused=True,
    )
    told: list[dict[str, Tensor]] = [{} for _ in entries]
    for step, micro_steps in enumerate(steps):
        storage.begin_step(step)
        targets, losses = torch.zeros(len(entries)), torch.zeros(len(entries), dtype=torch.float64)
        for number, rows in enumerate(micro_steps):
            loss = micro_step(crowd, objective, rows if isinstance(rows, Batch) else owned(rows), step, number)
            losses += loss.task
            targets += torch.tensor(loss.targets)
        for gradient, count in zip(storage.gradients, targets.tolist(), strict=True):
            gradient.div_(count)
        norms = storage.clip([0.5 * own.rank for own in each_own])
        storage.leave_out([] if sick is None else [sick])
        optimizer.step()
        for k, facts in enumerate(told):
            facts |= {f"loss {step}": losses[k].clone(), f"norm {step}": norms[k].clone()}
    for k, facts in enumerate(told):
        facts |= {name: tensor.clone() for name, tensor in crowd.agents[k].state_dict().items()}
        facts |= {f"moment {name}": each for name, each in optimizer.state.get(storage.rows[k], {}).items()}
        assert k == sick or not storage.weights[k, storage.sizes[k] :].any()
        assert not storage.gradients[k, storage.sizes[k] :].any()
    return told


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of what is not equal to the bit."""
    assert one.keys() == other.keys()
    assert all(tensor.isfinite().all() for tensor in one.values())
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
