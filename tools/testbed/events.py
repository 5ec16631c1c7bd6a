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


def reads_again(crowd: Any) -> bool:
    """Whether the pass under way reads rows that the pass of another agent has read in the same micro-step."""
    reading = crowd.agents.reading
    return bool(reading.agent) and reading.shared is not None and reading.shared.same_rows
