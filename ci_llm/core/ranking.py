"""Which of two scores is better, and the order of the trials of a sweep, for whoever chooses or shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

#: The metrics by which steps and trials are compared, and whether more of them is better.
GREATER_IS_BETTER: Final[Mapping[str, bool]] = {"nll": False, "exact_match": True}


def place_of_trial(trial: int, scores: Sequence[float | None], metric: str) -> tuple[bool, int, float, int]:
    """What scored trials are sorted by: those that went furthest first, of these the best first, failed ones last.

    Args:
        trial: its id; of equal ones the older comes first.
        scores: one for each rung that it reached; the last is NaN or None if it failed there.
        metric: see `GREATER_IS_BETTER`.
    """
    last = scores[-1]
    if last is None or math.isnan(last):
        return True, 0, 0.0, trial
    return False, -len(scores), -last if GREATER_IS_BETTER[metric] else last, trial
