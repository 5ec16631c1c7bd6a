"""The progress of a run: its position, its speed, and a plain line per interval for whoever has no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from ci_llm.core.quantities import countdown, describe_losses
from ci_llm.core.work import Work

WINDOW_S: Final = 60.0  # of training, over which the speed is measured


@dataclass(frozen=True)
class Position:
    """The position of a run after a step.

    Attributes:
        step, total: optimizer steps done, and of the whole run.
        losses: the loss of each agent in this step, in nats per target token; empty if it has none.
        tokens: packed tokens since the beginning of the run.
        epoch: passes over the rows.
        learning_rate: the rate of this step; None before the first.
        agents: the names of those whose losses these are; empty: agent0, agent1, ...
    """

    step: int
    total: int
    losses: Sequence[float] = ()
    tokens: int = 0
    epoch: float = 0.0
    learning_rate: float | None = None
    agents: Sequence[str] = ()


class Speed:
    """Steps and tokens per second of training over the last minute, and the time left.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time, of this attempt
        self._last: tuple[int, float] = (0, 0.0)
        self._marks: deque[tuple[float, int, int]] = deque()  # seconds of training, step, tokens
        self._rested_s, self._rests_since = 0.0, 0.0

    def mark(self, position: Position) -> None:
        """Take the position after a step."""
        now = self._clock()
        self._first = self._first or (position.step, now)
        self._last = position.step, now
        self._marks.append((now - self._rested_s, position.step, position.tokens))
        while len(self._marks) > 2 and self._marks[-1][0] - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()

    def pause(self) -> None:
        """Begin a pause, such as an evaluation, whose time does not count as slow steps."""
        self._rests_since = self._clock()

    def resume(self) -> None:
        """End the pause."""
        self._rested_s += self._clock() - self._rests_since

    def rates(self) -> tuple[float, float] | None:
        """Steps and tokens per second; None before two steps."""
        if len(self._marks) < 2:
            return None
        (began, first, before), (now, last, after) = self._marks[0], self._marks[-1]
        return ((last - first) / (now - began), (after - before) / (now - began)) if now > began else None

    def elapsed(self) -> timedelta:
        """The time since the first position."""
        return countdown(self._clock() - self._first[1] if self._first else 0)

    def left(self, total: int) -> timedelta | None:
        """The time until the last step, at the pace so far with its pauses; None without a pace, or after it."""
        if self._first is None:
            return None
        return left_of(total - self._last[0], self._last[0] - self._first[0], self._last[1] - self._first[1])


class ProgressLines:
    """Turns steps into lines like `step 120/260  46%  loss 1.23 (1.21 1.25)  2.1 steps/s  0:01:06 left`.

    Losses are means over the steps since the line before.

    Args:
        interval_s: seconds; at most one line per interval, and always one for the last step.
        clock: seconds, monotonic.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._last_s: float | None = None
        self._since: list[Sequence[float]] = []
        self._names: Sequence[str] = ()

    def of_step(self, position: Position, speed: Speed) -> str | None:
        """The line for a step; None if the last line is younger than the interval."""
        if position.losses:
            self._since = [*(self._since if position.agents == self._names else ()), position.losses]
            self._names = position.agents
        if not self._is_due() and position.step < position.total:
            return None
        self._last_s = self._clock()
        losses, self._since = means(self._since), []
        step, total = position.step, position.total
        parts = [f"step {step}/{total}", f"{step / total:.0%}", describe_losses(losses)]
        if (rates := speed.rates()) is not None:
            parts.append(f"{rates[0]:.3g} steps/s")
        if (left := speed.left(total)) is not None:
            parts.append(f"{left} left")
        return "  ".join(filter(None, parts))

    def of_work(self, work: Work) -> str | None:
        """The line for work that takes longer than an interval; None most of the time."""
        age_s = time.monotonic() - work.began_at
        if work.ended or age_s < self._interval_s or not self._is_due():
            return None
        self._last_s = self._clock()
        left = left_of(work.total - work.done, work.done, age_s)
        line = f"{work.what:<9} {work.done}/{work.total} {work.parts}  {work.done / work.total:.0%}"
        return line if left is None else f"{line}  {left} left"

    def _is_due(self) -> bool:
        return self._last_s is None or self._clock() - self._last_s >= self._interval_s


def left_of(parts_left: int, done: int, seconds: float) -> timedelta | None:
    """The time for the parts that are left, at the pace of those that are done; None without a pace, or a part left."""
    return countdown(parts_left * seconds / done) if done > 0 and seconds > 0 and parts_left > 0 else None


def means(steps: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each agent over the steps, [S][K] -> [K]; NaN for an agent that had one."""
    return [sum(losses) / len(steps) for losses in zip(*steps, strict=True)]
