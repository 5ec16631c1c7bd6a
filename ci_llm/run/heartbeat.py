"""Signs of life of a run's main thread, and how long it may be silent before it counts as hanging."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: The limit until a step was measured: as long as a collective waits for a machine that went silent.
FIRST_S: Final = 1800.0
#: The learned limit: this many times the longest silence that a sign of life followed, and never less than LEAST_S.
TIMES: Final = 10.0
LEAST_S: Final = 300.0


class Heartbeat:
    """Counts signs of life. Written by the main thread, read by any; costs nothing."""

    def __init__(self) -> None:
        self.ticks = 0
        self._rests = 0

    @property
    def is_resting(self) -> bool:
        """Whether the limit on silence is suspended."""
        return self._rests > 0

    def tick(self) -> None:
        self.ticks += 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend the limit within the block: the run waits for a full disk, for instance."""
        self._rests += 1
        try:
            yield
        finally:
            self._rests -= 1
            self.ticks += 1


class SilenceTimer:
    """How long a heartbeat has been silent. It adds up its own looks, so time in which the process was stopped does not
    count.

    Args:
        timeout_s: the limit on silence; None: learned.
    """

    def __init__(self, heartbeat: Heartbeat, timeout_s: float | None = None) -> None:
        self._heartbeat, self._timeout_s = heartbeat, timeout_s
        self._ticks = heartbeat.ticks
        self._longest_s = 0.0
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        """Count the seconds since the last look, unless there was a sign of life."""
        if self._heartbeat.is_resting or self._heartbeat.ticks != self._ticks:
            self._longest_s = max(self._longest_s, 0.0 if self._heartbeat.is_resting else self.seconds)
            self._ticks, self.seconds = self._heartbeat.ticks, 0.0
        else:
            self.seconds += seconds

    def limit_s(self, *, step_measured: bool) -> float:
        """Seconds of silence that are a hang."""
        if self._timeout_s is not None:
            return self._timeout_s
        return max(LEAST_S, TIMES * self._longest_s) if step_measured else FIRST_S
