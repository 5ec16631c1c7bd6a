"""When a checkpoint is due: a pure function of step and time; the clock is passed in.

`CheckpointManager.should_save` asks this policy. The training loop also saves at the end, when it is asked to stop, and
after the best evaluation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ci_llm.errors import CheckpointError


@dataclass(frozen=True)
class SavePolicy:
    """When to save.

    Args:
        every_steps: at each multiple of it; None never.
        every_seconds: when so much time has passed since the last save was tried; None never.
        on_steps: and at these.
        initially: also at the first step passed to `due`, if there is no checkpoint yet.
    """

    every_steps: int | None = 1
    every_seconds: float | None = None
    on_steps: Collection[int] = ()
    initially: bool = False

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise CheckpointError("save at multiples of 1 or more", where="save_interval_steps")

    def due(self, step: int, *, newest: int | None, elapsed_s: float, must: bool = False) -> bool:
        """Whether to save `step`.

        Args:
            newest: newest committed step; only later steps are saved.
            elapsed_s: seconds since the last save was tried.
            must: the end, an interruption or a request: save whatever the intervals say.
        """
        if newest is not None and step <= newest:
            return False
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        by_time = self.every_seconds is not None and elapsed_s >= self.every_seconds
        named = step in self.on_steps or (self.initially and newest is None)
        return must or by_steps or by_time or named
