"""The optimizer of a run, and the scheduled learning rate of a step; `Trainer.rate_of` adds what faults have cut."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.lora.schedules import factor


def optimizer_of(config: Config, crowd: Crowd) -> torch.optim.Optimizer:
    """The optimizer of the agents of `config`."""
    betas, groups = (config.adam_beta1, config.adam_beta2), [agent.optimizer_group for agent in crowd.agents]
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, fused=True)


def schedule(config: Config, total_steps: int) -> Callable[[int], float]:
    """The learning rate as a pure function of the 0-based step.

    That of a trial follows the length of a whole trial, wherever this run ends; later steps have the last rate.
    """
    total = config.trial_steps or total_steps
    share = factor(config.lr_scheduler_type, config.warmup_steps(total), total)
    return lambda step: config.learning_rate * share(min(step, total))
