"""The interval of saves that loses the least time, for `save_interval_seconds: auto`, measured while a run saves.

It is the interval of Young and Daly. Saving too often costs stalls; saving too seldom costs the work since the last
save. With a stall d and a mean time between failures M, the optimum is about sqrt(2 d M) seconds (Young, CACM 17(9),
1974), or more exactly Daly's estimate (Future Generation Computer Systems 22, 2006, eq. 20 and 21). Asynchronous saves
stall the training so briefly that the formula gives an interval of a few seconds. The interval is therefore at least
ten times as long as a save takes.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.folders import FINAL, folders_of
from ci_llm.checkpoints.manifest import read_manifest

logger = logging.getLogger(__name__)

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

    Args:
        cost_s: seconds that a save keeps the work from going on.
        mtbf_s: mean seconds between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


@dataclass(frozen=True)
class FailureHistory:
    """The failures of a run as its manifests record them.

    Args:
        seconds: that all attempts have run, added up.
        failures: attempts that ended without having saved where they stood.
        left: whether the attempt saved this because it was asked to stop; its end is then no failure.
    """

    seconds: float = 0.0
    failures: int = 0
    left: bool = False

    @classmethod
    def before(cls, directory: Path, step: int, attempt: int) -> FailureHistory:
        """The history for attempt number `attempt`, which goes on from `step` of its own or of an earlier one."""
        folders = folders_of(directory, step)
        manifest = read_manifest(folders[0])
        known: Any = manifest.info.get("endurance", {})
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
            newest: the step in `directory` that the attempt goes on from.
        """
        if self._past is None:
            self._past = FailureHistory() if newest is None else FailureHistory.before(directory, newest, attempt)

    def record(self, *, left: bool) -> dict[str, Any]:
        """The entry of the manifest that the next attempt reads.

        Args:
            left: whether this attempt was asked to stop.
        """
        return {"endurance": asdict(self.history(left=left))}

    def history(self, *, left: bool) -> FailureHistory:
        """What a save at this moment hands on. `left` as in `record`."""
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
            f"saves every {interval_s:.3g} s from here (save_interval_seconds: auto): a save holds the training for"
            f" {stall_s:.2g} s and is durable after {save_s:.2g} s; {seen.failures} failures in"
            f" {seen.seconds / 3600:.1f} h"
        )
