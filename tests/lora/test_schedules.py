"""Schedules have the bits of those of Transformers, for every step of short and long runs."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from transformers import get_scheduler

from ci_llm.config import Config
from ci_llm.lora.schedules import SCHEDULES, factor

FOLLOW_THE_LOSS = {"reduce_lr_on_plateau", "greedy"}
#: (warm-up, steps)
LENGTHS = [(0, 1), (1, 1), (0, 2), (1, 3), (2, 7), (0, 100), (5, 100), (13, 260), (99, 100)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_is_that_of_transformers(kind: str) -> None:
    extra: dict[str, float] = {"min_lr_rate": 0.1} if kind.endswith("with_min_lr") else {}
    for warmup, total in LENGTHS:
        if kind == "warmup_stable_decay":
            extra = {"num_decay_steps": max(1, total // 10)}
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        (theirs,) = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=extra).lr_lambdas
        ours = factor(kind, warmup, total)
        steps = range(total + (warmup < total))  # where all is warm-up, there is no end to reach
        assert [ours(step) for step in steps] == [theirs(step) for step in steps], (warmup, total)


def test_every_schedule_of_the_configuration_is_there() -> None:
    names = get_args(Config.model_fields["lr_scheduler_type"].annotation)
    assert {*names} - FOLLOW_THE_LOSS == {*SCHEDULES}
