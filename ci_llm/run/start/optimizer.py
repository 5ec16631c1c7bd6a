"""The optimizer of a run, with a group for each agent, and the learning rate of an agent at a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.lora.schedules import factor


def optimizer_of(config: Config, crowd: Crowd) -> torch.optim.Optimizer:
    """The optimizer of the agents of `config`."""
    betas = config.adam_beta1, config.adam_beta2
    return torch.optim.AdamW(optimizer_groups(crowd), betas=betas, eps=config.adam_epsilon, fused=True)


def optimizer_groups(crowd: Crowd) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, one per agent."""
    return [agent.optimizer_group for agent in crowd.agents]


def schedule(config: Config, total_steps: int) -> Callable[[int], float]:
    """The learning rate as a pure function of the 0-based step.

    That of a trial follows the length of a whole trial, wherever this run ends; later steps have the last rate.
    """
    total = config.trial_steps or total_steps
    share = factor(config.lr_scheduler_type, config.warmup_steps(total), total)
    return lambda step: config.learning_rate * share(min(step, total))
