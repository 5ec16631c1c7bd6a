"""The comparison of scores: which is better, and 95 % intervals over rows of shares, means and differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any, Final

#: What steps and trials are compared by: the part of an `evaluation.json` that has it, and whether more is better.
_METRICS: Final[Mapping[str, tuple[str, bool]]] = {
    "nll": ("", False),
    "exact_match": ("", True),
    "rewards/accuracies": ("preferences", True),
    "rewards/auroc": ("preferences", True),
    "rewards/margins": ("preferences", True),
    "f1": ("classes", True),
    "auroc": ("classes", True),
    "calibration_error": ("classes", False),
    "mse": ("numbers", False),
    "mae": ("numbers", False),
    "r2": ("numbers", True),
}
GREATER_IS_BETTER: Final[Mapping[str, bool]] = {metric: greater for metric, (_, greater) in _METRICS.items()}


def figures(evaluation: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """What an `evaluation.json` says of a metric: `agents` and `crowd`.

    Raises:
        KeyError: nothing.
    """
    part, _ = _METRICS[metric]
    found = evaluation[part] if part else evaluation
    return found[metric.removeprefix("rewards/")]  # type: ignore[no-any-return]


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


_Z95: Final = 1.959964
#: Below this many rows an interval says more about the formula than about the runs.
LEAST_ROWS: Final = 30


def share_interval(share: float, rows: int) -> tuple[float, float]:
    """Wilson's interval of a share (1927); unlike the normal one it stays within 0 and 1."""
    z2 = _Z95**2
    middle = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    half = _Z95 * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows**2)) / (1 + z2 / rows)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_interval(differences: Sequence[float]) -> float | None:
    """The half-width of the normal interval of their mean; None for too few rows, for one that is
    not finite, or if all differences are equal."""
    is_known = len(differences) >= LEAST_ROWS and all(map(math.isfinite, differences))
    if not is_known or min(differences) == max(differences):
        return None
    return _Z95 * stdev(differences) / math.sqrt(len(differences))


def unpaired_interval(one: float, rows: int, other: float, other_rows: int) -> float | None:
    """The longer side of the interval of `one - other`, shares of different rows; None for too few rows.

    Newcombe's hybrid of Wilson's intervals (1998): it has a width where both shares are 0 or 1.
    """
    if min(rows, other_rows) < LEAST_ROWS:
        return None
    (low, high), (other_low, other_high) = share_interval(one, rows), share_interval(other, other_rows)
    return max(math.hypot(one - low, other_high - other), math.hypot(high - one, other - other_low))
