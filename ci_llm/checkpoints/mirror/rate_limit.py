"""How fast a mirror sends and reads: a bound in megabytes per second, and the time between two tries of a store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

#: After an error the next try comes after so many seconds, twice as many each time, at most the longest.
FIRST_TRY_S: Final = 1.0
LONGEST_S: Final = 60.0
#: When the run is about to end nobody can wait longer.
HURRY_S: Final = 1.0


class RateLimiter:
    """Spreads bytes over time.

    Args:
        max_mb_per_s: megabytes per second; None: no bound.
        clock: seconds, monotonic.

    Attributes:
        hurry: while set, nothing waits.
    """

    def __init__(self, max_mb_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = None if max_mb_per_s is None else max_mb_per_s * 1e6
        self._clock, self._free_at = clock, clock()
        self.hurry = threading.Event()

    def __call__(self, nbytes: int) -> None:
        """Wait until `nbytes` may go."""
        if self._bytes_per_s is None or self.hurry.is_set():
            return
        now = self._clock()
        self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        self.hurry.wait(self._free_at - now)


def backoff_s(failures: int, *, hurry: bool) -> float:
    """Seconds until the next try after so many failures in a row, with jitter: many runs may share a store."""
    longest = HURRY_S if hurry else LONGEST_S
    return min(FIRST_TRY_S * 2.0 ** min(failures - 1, 10), longest) * random.uniform(0.5, 1.0)
