"""Schedules are Transformers' own, for every name that a configuration may give, in short and long runs."""

from __future__ import annotations

from typing import get_args

import pytest

from ci_llm.agents.agent import factor, schedule
from ci_llm.config import Config

FOLLOW_THE_LOSS = {"reduce_lr_on_plateau", "greedy"}
KINDS = sorted({*get_args(Config.model_fields["lr_scheduler_type"].annotation)} - FOLLOW_THE_LOSS)
#: (warm-up, steps)
LENGTHS = [(0, 1), (1, 1), (0, 2), (1, 3), (2, 7), (5, 100), (99, 100), (100, 100)]
#: Where a schedule of 100 steps, 5 of them warm-up, ends.
ENDS = {"constant": 1.0, "constant_with_warmup": 1.0, "polynomial": 1e-7, "inverse_sqrt": (5 / 100) ** 0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_of_the_configuration_rises_to_its_peak_and_ends(kind: str) -> None:
    for warmup, total in LENGTHS:
        share = factor(kind, warmup, total)
        each = [share(step) for step in range(total + 1)]
        assert all(0 <= own <= 1 for own in each)
        if kind != "constant" and warmup:
            assert each[0] == (1 / warmup if kind == "cosine_warmup_with_min_lr" else 0.0)
    share, last = factor(kind, 5, 100), ENDS.get(kind, 0.1 if kind.endswith("with_min_lr") else 0.0)
    assert share(100) == pytest.approx(last, abs=1e-3)
    assert max(map(share, range(100))) == 1.0
    if kind == "warmup_stable_decay":
        assert (share(89), share(91) < 1) == (1.0, True)


def test_the_schedule_of_a_trial_ends_with_a_whole_trial_and_keeps_the_last_rate() -> None:
    """Three steps with a schedule of eight have its first three rates; steps after its end keep the last rate."""
    whole = schedule(Config(learning_rate=1e-3, num_warmup_steps=2), 8)
    part = schedule(Config(learning_rate=1e-3, num_warmup_steps=2).of_trials(8, {}), 3)
    assert [part(step) for step in range(8)] == [whole(step) for step in range(8)]
    assert part(20) == part(8)
