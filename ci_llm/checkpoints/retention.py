"""Which old checkpoints stay when a new one is saved: the newest, multiples of a period, and the best by a measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from ci_llm.checkpoints.folders import folders_of, numbered_steps
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.errors import CheckpointError, DamagedCheckpoint

#: The key of a manifest under which the `metrics` of a save stand.
METRICS: Final = "metrics"

Metrics: TypeAlias = "Mapping[str, Any]"


class RetentionPolicy:
    """Which old checkpoints stay although newer ones exist.

    Args:
        most: how many numbered checkpoints to keep: the newest, or with `best_fn` the best; None keeps all.
        period: multiples of it are never pruned.
        best_fn: the measure of a checkpoint, from the `metrics` that it was saved with. The newest stays as well,
            because the run goes on from it, and so does one that was saved without metrics.
        best_mode: "max" or "min".
    """

    def __init__(
        self, most: int | None, period: int | None, best_fn: Callable[[Any], float] | None, best_mode: str
    ) -> None:
        if period is not None and period < 1:
            raise CheckpointError("keep multiples of 1 or more", where="keep_period")
        if best_mode not in ("max", "min"):
            raise CheckpointError(f"{best_mode!r} is neither max nor min", where="best_mode")
        self._most, self._period, self._best_fn, self._best_mode = most, period, best_fn, best_mode
        self._known: dict[int, Metrics | None] = {}

    @property
    def newest(self) -> int | None:
        """How many of the newest stay whatever they measure; None: all."""
        return 1 if self._best_fn is not None and self._most is not None and self._most >= 1 else self._most

    def spared(self, directory: Path, step: int, metrics: Any) -> frozenset[int]:
        """The steps that stay when `step` is saved, with `metrics`. No other save is in flight."""
        self._known[step] = metrics
        if self._most is None or (self._period is None and self._best_fn is None):
            return frozenset()
        steps = {*numbered_steps(directory), step}
        by_period = {each for each in steps if self._period and each % self._period == 0}
        if self._best_fn is None:
            return frozenset(by_period)
        measured = {each: self._measure(directory, each) for each in steps}
        best = sorted((each for each in steps if measured[each] is not None), key=lambda each: (measured[each], each))
        return frozenset(by_period | {each for each in steps if measured[each] is None} | {*best[-self._most :]})

    def forget(self) -> None:
        """Forget what steps were saved with: other checkpoints may have their numbers."""
        self._known.clear()

    def best_of(self, directory: Path, steps: Collection[int]) -> int | None:
        """The best of `steps`, the newer of two alike; the newest where nothing is measured."""
        measured = {step: self._measure(directory, step) for step in steps if self._best_fn is not None}
        found = [(value, step) for step, value in measured.items() if value is not None]
        return max(found)[1] if found else max(steps, default=None)

    def _measure(self, directory: Path, step: int) -> float | None:
        """How good a step is, the more the better; None without metrics."""
        if step not in self._known:
            self._known[step] = metrics_of(directory, step)
        if self._best_fn is None or (metrics := self._known[step]) is None:
            return None
        value = float(self._best_fn(metrics))
        if math.isnan(value):
            return -math.inf
        return value if self._best_mode == "max" else -value


def metrics_of(directory: Path, step: int) -> Metrics | None:
    """What a step was saved with; None if nothing, or if that cannot be read. Raises CheckpointError: no such step."""
    try:
        found = read_manifest(folders_of(directory, step)[0]).info.get(METRICS)
    except DamagedCheckpoint:
        return None
    return found if isinstance(found, Mapping) else None
