"""When a save is due."""

from __future__ import annotations

import pytest

from ci_llm.checkpoints.policy import SavePolicy


@pytest.mark.parametrize(
    ("policy", "step", "newest", "elapsed_s", "due"),
    [
        (SavePolicy(every_steps=4), 8, 4, 0.0, True),
        (SavePolicy(every_steps=4), 9, 4, 1e9, False),
        (SavePolicy(every_steps=4), 4, 4, 0.0, False),  # nothing is saved twice
        (SavePolicy(every_steps=4), 4, 8, 0.0, False),
        (SavePolicy(None, 60.0), 9, None, 59.9, False),
        (SavePolicy(None, 60.0), 9, None, 60.0, True),
        (SavePolicy(None), 3, None, 1e9, False),
        (SavePolicy(100, 300.0), 100, 0, 1.0, True),
    ],
)
def test_when_a_save_is_due(policy: SavePolicy, step: int, newest: int | None, elapsed_s: float, due: bool) -> None:
    assert policy.due(step, newest=newest, elapsed_s=elapsed_s) is due
