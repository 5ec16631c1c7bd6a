"""The deadline of a run: when it is, from which moment before it one more step no longer fits, and when the kill comes.

A thread asks the run to stop, as a signal does; the run saves and leaves between two steps. The time that it needs for
this is measured: an upper quantile of its steps, an upper quantile of its saves, and a margin for its exit.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

import psutil

from ci_llm.cluster.launch import Launch
from ci_llm.cluster.slurm import Job, current_job_end, job_end, kill_time, query, read_job
from ci_llm.interrupts import Interrupts

logger = logging.getLogger(__name__)

REASON: Final = "walltime"
#: The reason of an interruption that a callback has asked for, as status.json has it.
STOPPED_BY_CALLBACK: Final = "callback"
MAX_RUNTIME: Final = "max_runtime"  # the source of a deadline that the caller has set
QUANTILE: Final = 0.95
MARGIN_S: Final = 10.0  # for the exit of the program
MEASUREMENTS: Final = 100
_BRIEFLY_S: Final = 3.0  # a process that is about to be killed cannot wait long for an answer of SLURM
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 86400.0  # Event.wait takes at most 292 years, and a deadline may be infinite


@dataclass(frozen=True)
class Deadline:
    """Unix seconds at which the time of a run is over, and the source of that number."""

    at: float
    source: str

    def __str__(self) -> str:
        return f"{datetime.fromtimestamp(self.at):%Y-%m-%d %H:%M:%S} ({self.source})"


def seconds_until_stop(left_s: float, steps_s: Sequence[float], saves_s: Sequence[float]) -> float:
    """Seconds until the run must be asked to stop, so that the step under way and its save still fit before the end.

    Args:
        left_s: seconds until the end.
        steps_s, saves_s: measured durations in seconds.
    """
    return left_s - upper_quantile(steps_s) - upper_quantile(saves_s) - MARGIN_S


def upper_quantile(durations: Sequence[float]) -> float:
    """The quantile by nearest rank: of a few measurements it is the longest. 0 without any measurement."""
    ranked = sorted(durations)
    return ranked[math.ceil(QUANTILE * len(ranked)) - 1] if ranked else 0.0


class Pace:
    """The durations of the latest steps and saves. The training thread writes them, any thread reads them.

    Attributes:
        step_started: when the step under way began, by `clock`; None between two steps.
        at_boundary: called after each step, once weights and state have changed.
        steps_s, saves_s: durations in seconds, of the latest 100 each.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.at_boundary: Callable[[], None] = lambda: None
        self.step_started: float | None = None
        # The tuples are replaced, never changed: a reader in another thread needs no lock.
        self.steps_s: tuple[float, ...] = ()
        self.saves_s: tuple[float, ...] = ()
        self._last_save: Any = None

    def begin_step(self) -> None:
        self.step_started = self._clock()

    def end_step(self, last_save: Any = None) -> None:
        """Record the duration of the step under way, and of the latest save unless that is recorded already.

        Args:
            last_save: its result, which has `seconds`; None before the first.
        """
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
        deadline: None for a run without a deadline.
        refresh: called once the time has come. It returns the present deadline, because a job may have been extended;
            None if it is unknown.
        clock: unix seconds.
    """

    def __init__(
        self,
        deadline: Deadline | None,
        pace: Pace,
        interrupts: Interrupts,
        *,
        refresh: Callable[[], Deadline | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.deadline, self._pace, self._interrupts = deadline, pace, interrupts
        self._refresh, self._clock = refresh, clock
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
        # Wait for half of the time that is left, then for half of the rest: steps may become slower meanwhile.
        while not self._over.wait(min(max(self._seconds_until_stop() / 2, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)):
            if self._seconds_until_stop() <= 0 and not self._is_extended():
                # Announced first, while the run is still as the announcement describes it.
                self._interrupts.announce_stop(f"the time is over at {self.deadline}")
                self._interrupts.request_stop(REASON)
                return

    def _seconds_until_stop(self) -> float:
        assert self.deadline is not None
        return seconds_until_stop(self.deadline.at - self._clock(), self._pace.steps_s, self._pace.saves_s)

    def _is_extended(self) -> bool:
        now = self._refresh()
        if now is None or self.deadline is None or now.at <= self.deadline.at:
            return False
        self.deadline = now
        return self._seconds_until_stop() > 0


def watch_walltime(max_runtime_s: float | None, launch: Launch, pace: Pace, interrupts: Interrupts) -> Walltime:
    """Make the end of the job a request to stop, on the main process; the ballot tells the other processes."""
    deadline = find_deadline(max_runtime_s, launch) if launch.is_main_process else None
    if deadline is not None:
        logger.info(f"walltime  stops in time before {deadline}")
    return Walltime(deadline, pace, interrupts, refresh=lambda: find_deadline(max_runtime_s, launch, current_job_end))


def find_deadline(
    max_runtime_s: float | None, launch: Launch, end_of: Callable[[Job], float | None] = job_end
) -> Deadline | None:
    """The end of the SLURM job or of `max_runtime_s` since the start of this process, whichever is earlier, if any."""
    job, found = read_job(), list[Deadline]()
    if job is not None and (end := end_of(job)) is not None:
        found.append(Deadline(end, "the end of the job"))
    if max_runtime_s is not None:
        start = psutil.Process().create_time() if launch.called_at is None else launch.called_at
        found.append(Deadline(start + max_runtime_s, MAX_RUNTIME))
    return min(found, key=lambda deadline: deadline.at, default=None)


def expected_kill(interrupts: Interrupts, grace_s: float, launch: Launch, deadline: Deadline | None) -> float:
    """The time at which a run that was asked to stop is expected to be killed, by `time.monotonic()`.

    If the reason is the end of its time, at that end. Else when SLURM says, or after `grace_s`, but not later than the
    launcher waits. Infinite where nobody kills: a callback has asked, or the `max_runtime` of a call from Python is
    over. There an emergency save would end the interpreter of the caller.
    """
    asked_at, reason = interrupts.stop_requested_at or time.monotonic(), interrupts.stop_reason
    own_limit = launch.called_at is not None and deadline is not None and deadline.source == MAX_RUNTIME
    if deadline is not None and reason == REASON and not own_limit:
        return time.monotonic() + deadline.at - time.time()
    nobody_kills = reason == STOPPED_BY_CALLBACK or (reason == REASON and own_limit)
    job = read_job()
    end = kill_time(job, partial(query, timeout_s=_BRIEFLY_S)) if job else None
    by_slurm = time.monotonic() + end - time.time() if end else None
    if nobody_kills:
        return math.inf if by_slurm is None else by_slurm
    return min(asked_at + grace_s if by_slurm is None else by_slurm, asked_at + launch.kill_delay_s)
