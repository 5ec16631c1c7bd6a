"""The end of the time that this run has, and the moment before it at which one more step no longer fits.

A clock speaks to the run as a signal does: a thread asks it to stop, and the run saves and leaves in its own time.
What it needs for that is measured: an upper quantile of its steps and of its saves, and a margin for the way out.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

import psutil

from ci_llm.errors import ConfigError
from ci_llm.interrupts import Interrupts

VARIABLE: Final = "CI_LLM_DEADLINE"
REASON: Final = "walltime"
QUANTILE: Final = 0.95
MARGIN_S: Final = 10.0
MEASUREMENTS: Final = 100
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 86400.0  # a lock cannot be waited for longer than 292 years, and a deadline may be "never"


@dataclass(frozen=True)
class Deadline:
    """Unix seconds at which the time is over, and who says so."""

    at: float
    said_by: str

    def __str__(self) -> str:
        return f"{datetime.fromtimestamp(self.at):%Y-%m-%d %H:%M:%S} ({self.said_by})"


def find_deadline(
    max_runtime_s: float | None,
    job_end: float | None,
    *,
    environ: Mapping[str, str] = os.environ,
    started: float | None = None,
) -> Deadline | None:
    """The earliest end that anybody names; None if nobody does.

    Args:
        max_runtime_s: seconds that this process may live.
        job_end: unix seconds at which the scheduler ends the job.
        environ: where CI_LLM_DEADLINE may be, in unix seconds or as 2026-11-20T18:19:57.
        started: unix seconds of the start of this process; looked up by default.

    Raises:
        ConfigError: CI_LLM_DEADLINE is no time.
    """
    named = []
    if job_end is not None:
        named.append(Deadline(job_end, "the end of the job"))
    if max_runtime_s is not None:
        born = psutil.Process().create_time() if started is None else started
        named.append(Deadline(born + max_runtime_s, "max_runtime"))
    if text := environ.get(VARIABLE):
        named.append(Deadline(_unix_seconds(text), VARIABLE))
    return min(named, key=lambda deadline: deadline.at, default=None)


def _unix_seconds(text: str) -> float:
    try:
        at = float(text) if text.replace(".", "", 1).isdecimal() else datetime.fromisoformat(text).timestamp()
        datetime.fromtimestamp(at)  # milliseconds, say, are beyond every calendar
        return at
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(
            f"{text!r} is no time",
            where=f"{VARIABLE} in the environment",
            hint=f"unix seconds or a local time, e.g. export {VARIABLE}=$(date -d '+2 hours' +%s)",
        ) from error


def spare_s(left_s: float, steps_s: Sequence[float], saves_s: Sequence[float], *, margin_s: float = MARGIN_S) -> float:
    """Seconds until the run must be asked to stop, so that the step under way and its save still fit.

    Args:
        left_s: seconds until the end.
        steps_s, saves_s: measured durations.
    """
    return left_s - upper(steps_s) - upper(saves_s) - margin_s


def upper(durations: Sequence[float], quantile: float = QUANTILE) -> float:
    """The quantile by nearest rank, which of a few measurements is the longest; 0 where nothing is measured."""
    ranked = sorted(durations)
    return ranked[math.ceil(quantile * len(ranked)) - 1] if ranked else 0.0


class Save(Protocol):
    """What became of a checkpoint; the pace only wants to know how long it took."""

    @property
    def seconds(self) -> float: ...


class Pace:
    """How long the latest steps and saves took. Written by the training thread, read by any.

    Attributes:
        step_started: when the step under way began, by `clock`; None between two steps.
        at_boundary: called after each step, when weights and state have moved.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.at_boundary: Callable[[], None] = lambda: None
        self.step_started: float | None = None
        # Tuples that are replaced: a reader in another thread sees the old one or the new one.
        self.steps_s: tuple[float, ...] = ()
        self.saves_s: tuple[float, ...] = ()
        self._last_save: Save | None = None

    def begin_step(self) -> None:
        self.step_started = self._clock()

    def end_step(self, last_save: Save | None = None) -> None:
        """Note the step that began last, and the latest save unless it is noted already."""
        if self.step_started is not None:
            self.steps_s = (*self.steps_s[1 - MEASUREMENTS :], self._clock() - self.step_started)
            self.step_started = None
        if last_save is not None and last_save is not self._last_save:
            self._last_save = last_save
            self.saves_s = (*self.saves_s[1 - MEASUREMENTS :], last_save.seconds)
        self.at_boundary()


class Walltime:
    """Asks a run to stop in time before a deadline; a context manager around the part that can be stopped.

    Args:
        deadline: None watches nothing.
        look_again: asked once the time has come: the end as it is now, for a job may be prolonged. None: unknown.
        clock: unix seconds.
    """

    def __init__(
        self,
        deadline: Deadline | None,
        pace: Pace,
        interrupts: Interrupts,
        *,
        look_again: Callable[[], Deadline | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.deadline, self._pace, self._interrupts = deadline, pace, interrupts
        self._look_again, self._clock = look_again, clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ci_llm walltime", daemon=True)

    def __enter__(self) -> Walltime:
        if self.deadline is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        # Half of the time, and half of the rest: steps may become slower while this waits.
        while not self._over.wait(min(max(self._spare_s() / 2, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)):
            if self._spare_s() <= 0 and not self._is_prolonged():
                self._interrupts.announce_stop(f"the time is over at {self.deadline}")
                self._interrupts.request_stop(REASON)
                return

    def _spare_s(self) -> float:
        assert self.deadline is not None
        return spare_s(self.deadline.at - self._clock(), self._pace.steps_s, self._pace.saves_s)

    def _is_prolonged(self) -> bool:
        now = self._look_again()
        if now is None or self.deadline is None or now.at <= self.deadline.at:
            return False
        self.deadline = now
        return self._spare_s() > 0
