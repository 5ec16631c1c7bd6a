"""The policy of saves: when a checkpoint is due, at which interval the least time is lost, and which old ones stay.

Whether a save is due is a pure function of step and time: the clock is passed in. `CheckpointManager.should_save` asks
it. The training loop also saves at the end, when it is asked to stop, and after the best evaluation.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.layout import FINAL, folders_of, numbered_steps
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.core.quantities import count, duration
from ci_llm.errors import CheckpointError, DamagedCheckpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePolicy:
    """The rule by which saves are due.

    Args:
        every_steps: at each multiple of it; None never.
        every_seconds: when so much time has passed since the last save was tried, or as much as an interval says now;
            None never.
    """

    every_steps: int | None = 1
    every_seconds: float | BestInterval | None = None

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
        seconds = self.every_seconds.seconds if isinstance(self.every_seconds, BestInterval) else self.every_seconds
        by_time = seconds is not None and elapsed_s >= seconds
        return by_steps or by_time


#: Assumed before anything is known: one failure a day.
PRIOR_S: Final = 24 * 3600.0
#: The interval until the first save is measured.
FIRST_S: Final = 60.0
SHORTEST_S: Final = 1.0
WRITING_SHARE: Final = 0.1
MEASUREMENTS: Final = 20
#: A change by more than this factor is logged.
_NEWS: Final = 2.0


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves that lose the least, by Daly's higher-order estimate.

    Saving too often costs stalls; saving too seldom costs the work since the last save. With a stall d and a mean time
    between failures M, the optimum is about sqrt(2 d M) seconds (Young, CACM 17(9), 1974), or more exactly Daly's
    estimate (Future Generation Computer Systems 22, 2006, eq. 20 and 21).

    Args:
        cost_s: seconds for which a save stops the work.
        mtbf_s: mean seconds between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


#: The key of a manifest under which the failures of a run stand.
FAILURES: Final = "endurance"


@dataclass(frozen=True)
class FailureHistory:
    """The failures of a run as its manifests record them.

    Args:
        seconds: that all attempts have run, added up.
        failures: attempts that ended without having saved where they stood.
        left: whether the attempt saved this because it was asked to stop; its end is then not a failure.
    """

    seconds: float = 0.0
    failures: int = 0
    left: bool = False

    @classmethod
    def before(cls, directory: Path, step: int, attempt: int) -> FailureHistory:
        """The history for attempt number `attempt`, which resumes from `step` of its own or of an earlier one."""
        folders = folders_of(directory, step)
        manifest = read_manifest(folders[0])
        known: Any = manifest.info.get(FAILURES, {})
        ended_well = any(folder.name == FINAL for folder in folders)
        return cls(**known).after(attempt - manifest.attempt, ended_well=ended_well)

    def after(self, attempts: int, *, ended_well: bool = False) -> FailureHistory:
        """The history after more attempts that saved nothing.

        Args:
            ended_well: the attempt that saved this came to the end of the run.
        """
        return FailureHistory(self.seconds, self.failures + max(attempts - (self.left or ended_well), 0))

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures; one failure in PRIOR_S is assumed beside those that happened."""
        return (PRIOR_S + self.seconds) / (1 + self.failures)


class BestInterval:
    """The interval of a run, measured while it saves. The saving thread writes it, any thread reads it. It logs the
    interval and the reasons whenever it has changed much.

    It serves `save_interval_seconds: auto`. Asynchronous saves stall the training so briefly that `best_interval_s`
    gives a few seconds. The interval is therefore at least ten times as long as a save takes.

    Args:
        clock: seconds, monotonic.
        past: the failures before, where they are known already; otherwise `load_past` looks them up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, past: FailureHistory | None = None) -> None:
        self._clock = clock
        self._began = clock()
        self._past = past
        self._stalls: list[float] = []
        self._saves: list[float] = []
        self._logged, self._lock = 0.0, threading.Lock()

    def load_past(self, directory: Path, newest: int | None, attempt: int) -> None:
        """Look up the failures before attempt number `attempt`, unless they are known.

        Args:
            newest: the step in `directory` that the attempt resumes from.
        """
        if self._past is None:
            self._past = FailureHistory() if newest is None else FailureHistory.before(directory, newest, attempt)

    def history(self, *, left: bool) -> FailureHistory:
        """The failures as a save at this moment records them.

        Args:
            left: whether this attempt was asked to stop.
        """
        return replace(self._so_far, left=left)

    def measured(self, stall_s: float, save_s: float) -> None:
        """Note one save: how long the training waited for it, and how long it took until it was read back."""
        with self._lock:
            self._stalls = [*self._stalls[1 - MEASUREMENTS :], stall_s]
            self._saves = [*self._saves[1 - MEASUREMENTS :], save_s]
        now = self.seconds
        if not self._logged / _NEWS <= now <= self._logged * _NEWS:
            self._logged = now
            logger.info(self._describe(now))

    @property
    def seconds(self) -> float:
        """The interval as it is now."""
        with self._lock:
            if not self._stalls:
                return FIRST_S
            stall_s, save_s = statistics.median(self._stalls), statistics.median(self._saves)
        return max(best_interval_s(stall_s, self._so_far.mtbf_s), save_s / WRITING_SHARE, SHORTEST_S)

    @property
    def _so_far(self) -> FailureHistory:
        past = self._past or FailureHistory()
        return replace(past, seconds=past.seconds + self._clock() - self._began)

    def _describe(self, interval_s: float) -> str:
        stall_s, save_s = statistics.median(self._stalls), statistics.median(self._saves)
        seen = self._so_far
        return (
            f"saves every {duration(interval_s)} from here (save_interval_seconds: auto): a save holds the training for"
            f" {duration(stall_s)} and is durable after {duration(save_s)}; {count(seen.failures, 'failure')} in"
            f" {duration(seen.seconds)}"
        )


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
