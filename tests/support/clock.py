"""A clock that moves only when a test sets it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Call it for the seconds that it shows."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now
