"""The optimizer of a run, AdamW: the one file that knows what it is. Another optimizer goes here.

Every agent is a group of its own, with one parameter: its row of the storage. A run sets the rate of every group before
each step. What the optimizer remembers of an agent are its moments, which snapshots and checkpoints hold by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.agents.agent import Agent
from ci_llm.config import Config

#: The moments of an agent that are as large as its weights.
MOMENTS: Final = 2


def build_optimizer(config: Config, agents: Sequence[Agent]) -> torch.optim.Optimizer:
    """The optimizer of these agents, which has taken no step."""
    betas = config.adam_beta1, config.adam_beta2
    groups = [_group(agent) for agent in agents]
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, fused=True)


def _group(agent: Agent) -> dict[str, Any]:
    return {"params": [agent.weights], "lr": agent.learning_rate(0), "weight_decay": agent.training.weight_decay}


def set_agents(
    optimizer: torch.optim.Optimizer, agents: Sequence[Agent], moments: Sequence[Mapping[str, Tensor]]
) -> None:
    """Move only these agents from here on. The optimizer stays the same object, because other parts have hooks on it.

    Args:
        moments: those of each agent, which the optimizer takes as they are.
    """
    optimizer.param_groups.clear()
    optimizer.state.clear()
    for agent, own in zip(agents, moments, strict=True):
        optimizer.add_param_group(_group(agent))
        put_moments(optimizer, agent.weights, own)


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Let the next step move every agent at its rate."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def moments_of(optimizer: torch.optim.Optimizer, row: nn.Parameter) -> dict[str, Tensor]:
    """The moments of the agent whose weights are `row`, by name; none before its first step."""
    return dict(optimizer.state.get(row, {}))


def put_moments(optimizer: torch.optim.Optimizer, row: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
    """Let the optimizer continue with these moments of an agent, which it takes as they are; without any it begins."""
    optimizer.state.pop(row, None)
    if moments:
        optimizer.state[row] = dict(moments)


def placed(moments: Mapping[str, Tensor], row: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The saved moments of an agent, with the dtype and device of its weights `row`.

    The step counter stays an fp32 scalar. As in torch's `load_state_dict` it is on the CPU unless the optimizer is
    fused: a plain AdamW reads it in every step, which would wait for a GPU.
    """
    place_of_step = row.device if optimizer.defaults.get("fused") else torch.device("cpu")
    return {name: tensor.to(place_of_step) if name == "step" else tensor.to(row) for name, tensor in moments.items()}
