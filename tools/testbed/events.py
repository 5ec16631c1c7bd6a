"""Events that tests wait for: what must be durable, or have happened, before a process is killed or stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0  # nobody comes near it, under any load: it only ends a test that will never end
_LOOK_S = 0.01


def wait_until(what: str, look: Callable[[], bool]) -> None:
    """Return as soon as `look` says so; fails with `what` if it never does."""
    until = time.monotonic() + DEADLINE_S
    while not look():
        if time.monotonic() > until:
            raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(_LOOK_S)


def wait_until_committed(run: Path, step: int) -> None:
    """Return when this run holds the checkpoint of `step`: a save that is in flight may still be lost."""
    wait_until(f"step {step} is committed", (run / f"checkpoint_step_{step}").is_dir)


_LAST: list[Any] = [None]  # the batch of the last pass


def new_rows(micro_batch: Any) -> list[int]:
    """The rows of a pass that the pass of no other agent has read in the same micro-step; none of a layer's digest.

    A single batch is one of an evaluation, and has none either.
    """
    if not isinstance(micro_batch, list):
        return []
    new = [own.batch for own in micro_batch if own.batch is not _LAST[0]]
    _LAST[0] = micro_batch[-1].batch
    return [row for batch in new for row in batch.sample_ids if row >= 0]
