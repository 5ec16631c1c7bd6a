"""The policy of saves: when a checkpoint is due, and which old ones stay.

Whether a save is due is a pure function of step and time: the clock is passed in. `CheckpointManager.should_save` asks
it. The training loop also saves at the end, when it is asked to stop, and after the best evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.layout import folders_of, numbered_steps
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.errors import CheckpointError, DamagedCheckpoint


@dataclass(frozen=True)
class SavePolicy:
    """The rule by which saves are due.

    Args:
        every_steps: at each multiple of it; None never.
        every_seconds: when so much time has passed since the last save was tried; None never.
    """

    every_steps: int | None = 1
    every_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise CheckpointError("save at multiples of 1 or more", where="save_interval_steps")

    def due(self, step: int, *, newest: int | None, elapsed_s: float) -> bool:
        """True if `step` is to be saved.

        Args:
            newest: newest committed step; only later steps are saved.
            elapsed_s: seconds since the last save was tried.
        """
        if newest is not None and step <= newest:
            return False
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        by_time = self.every_seconds is not None and elapsed_s >= self.every_seconds
        return by_steps or by_time


#: The key of a manifest under which the `metrics` of a save stand.
METRICS: Final = "metrics"


class RetentionPolicy:
    """The rule by which old checkpoints stay although newer ones exist.

    Args:
        most: how many numbered checkpoints to keep: the newest, or with `best_fn` the best; None keeps all.
        period: multiples of it are never pruned, and not counted.
        best_fn: the measure of a checkpoint, from the `metrics` that it was saved with. The newest stays as well,
            because the run resumes from it, and so does one that was saved without metrics.
        best_mode: whether more is better ("max"), or less ("min").
    """

    def __init__(
        self,
        most: int | None,
        *,
        period: int | None = None,
        best_fn: Callable[[Any], float] | None = None,
        best_mode: str = "max",
    ) -> None:
        if period is not None and period < 1:
            raise CheckpointError("keep multiples of 1 or more", where="period")
        if best_mode not in ("max", "min"):
            raise CheckpointError(f"{best_mode!r} is neither max nor min", where="best_mode")
        self._most, self._period, self._best_fn, self._best_mode = most, period, best_fn, best_mode

    @property
    def newest(self) -> int | None:
        """The number of the newest that stay whatever they measure; None for all."""
        return 1 if self._best_fn is not None and self._most is not None and self._most >= 1 else self._most

    def spared(self, directory: Path, step: int, metrics: Any) -> frozenset[int]:
        """The steps that stay when `step` is saved, with `metrics`. No other save is in flight."""
        if self._most is None or (self._period is None and self._best_fn is None):
            return frozenset()
        steps = {*numbered_steps(directory), step}
        by_period = {each for each in steps if self._period and each % self._period == 0}
        if self._best_fn is None:
            return frozenset(by_period)
        of = {each: metrics if each == step else _metrics_of(directory, each) for each in steps - by_period}
        measured = {each: self._measure(found) for each, found in of.items()}
        best = sorted((each for each in of if measured[each] is not None), key=lambda each: (measured[each], each))
        return frozenset(by_period | {each for each in of if measured[each] is None} | {*best[-self._most :]})

    def best_of(self, directory: Path, steps: Collection[int]) -> int | None:
        """The best of `steps`, the newer of two alike; the newest where nothing is measured."""
        if self._best_fn is None:
            return max(steps, default=None)
        measured = {step: self._measure(_metrics_of(directory, step)) for step in steps}
        found = [(value, step) for step, value in measured.items() if value is not None]
        return max(found)[1] if found else max(steps, default=None)

    def _measure(self, metrics: Any) -> float | None:
        """The measure of a step by its metrics, the more the better; None without metrics."""
        if self._best_fn is None or metrics is None:
            return None
        value = float(self._best_fn(metrics))
        if math.isnan(value):
            return -math.inf
        return value if self._best_mode == "max" else -value


def _metrics_of(directory: Path, step: int) -> Any:
    """The metrics of a step; None without any, or if they cannot be read. Raises CheckpointError: no such step."""
    try:
        return read_manifest(folders_of(directory, step)[0]).info.get(METRICS)
    except DamagedCheckpoint:
        return None
