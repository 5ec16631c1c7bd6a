"""The scheduled learning rate of a step, a pure function of it; `Trainer.rate_of` adds what faults have cut.

The schedules are those of Transformers, with no position to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ci_llm.config import Config

#: Where the schedules `with_min_lr` end, as a share of the peak.
SMALLEST: Final = 0.1


def schedule(config: Config, total_steps: int) -> Callable[[int], float]:
    """The learning rate as a pure function of the 0-based step.

    That of a trial follows the length of a whole trial, wherever this run ends; later steps have the last rate.
    """
    total = config.trial_steps or total_steps
    share = factor(config.lr_scheduler_type, config.warmup_steps(total), total)
    return lambda step: config.learning_rate * share(min(step, total))


def factor(kind: str, warmup: int, total: int) -> Callable[[int], float]:
    """A function from the 0-based step, at most `total`, to the learning rate as a share of its peak.

    Args:
        kind: a name in Transformers; not of those that follow the loss.
        warmup: the steps in which the rate rises to the peak.
        total: the steps of the whole schedule; `warmup_stable_decay` decays in the last tenth of them.
    """
    from transformers import get_scheduler  # its module imports PEFT, which takes more than a second

    own: dict[str, Any] = {"min_lr_rate": SMALLEST} if kind.endswith("with_min_lr") else {}
    if kind == "warmup_stable_decay":
        own = {"num_decay_steps": max(1, total // 10)}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if kind == "polynomial":
        total = max(total, warmup + 1)  # it divides by what lies between
    scheduler = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=own)
    share: Callable[[int], float] = scheduler.lr_lambdas[0]
    return share
