"""When a save is due, and which checkpoints stay after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci_llm.checkpoints.due import SavePolicy
from ci_llm.checkpoints.manager import CheckpointManager


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


@pytest.mark.parametrize("behind", [False, True])
def test_the_newest_are_kept_and_what_a_loop_names(behind: bool, tmp_path: Path) -> None:
    losses, keep = {0: 1.0, 1: 3.0, 2: 2.0, 3: 0.5, 4: 4.0, 5: 5.0}, set[int]()
    with CheckpointManager(tmp_path, max_to_keep=1, async_save=behind) as manager:
        for step, loss in losses.items():
            assert manager.save(step, {"step": step}, info={"loss": loss}, keep=keep)
            keep.clear()
            keep.add(min(range(step + 1), key=losses.__getitem__))  # the best so far, for the next save
        assert manager.all_steps() == [3, 5]
        assert manager.metadata(3).info == {"loss": 0.5}
