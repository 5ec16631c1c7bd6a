"""The measures of each objective, which of two scores is better, and 95 % intervals over rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final, Literal, TypeAlias

#: What judges the rows of an evaluation: `nll` where no answer has to match theirs.
PrimaryMetric: TypeAlias = Literal["exact_match", "nll"]


@dataclass(frozen=True)
class Metric:
    """A number by which steps, trials and runs are compared.

    Attributes:
        told: its name for people.
        part: the part of an `Evaluation` that has it; "": the whole.
        greater: more of it is better.
    """

    told: str
    part: str = ""
    greater: bool = True


METRICS: Final[Mapping[str, Metric]] = {
    "nll": Metric("nll", greater=False),
    "exact_match": Metric("exact match"),
    "rewards/accuracies": Metric("pairs ranked right", "preferences"),
    "rewards/auroc": Metric("AUROC of the ratings", "preferences"),
    "rewards/margins": Metric("margin of the rewards", "preferences"),
    "f1": Metric("F1, mean over classes", "classes"),
    "auroc": Metric("AUROC", "classes"),
    "calibration_error": Metric("calibration error", "classes", greater=False),
    "mse": Metric("mean squared error", "numbers", greater=False),
    "mae": Metric("mean absolute error", "numbers", greater=False),
    "r2": Metric("R²", "numbers"),
    "reward": Metric("reward", "rewards"),
    "sampled_reward": Metric("reward of samples", "rewards"),
}


@dataclass(frozen=True)
class Measures:
    """The measures of an objective, beside `nll` and `exact_match`, which all have.

    Attributes:
        metrics: by their names in `METRICS`.
        first: what judges where rows are right or wrong: `exact_match`, or the first of `metrics`.
        right: what `exact_match` is.
        loss: the unit of `nll`.
        gain: what minus `nll` is, where people read that.
        trained: the unit of the loss in training.
    """

    metrics: tuple[str, ...] = ()
    first: str = "exact_match"
    right: str = "exact match"
    loss: str = "nats per token"
    gain: str | None = None
    trained: str = "nats per token"

    @property
    def told(self) -> str:
        """The first measure for people."""
        return self.right if self.first == "exact_match" else METRICS[self.first].told

    @property
    def nll(self) -> str:
        """`nll` for people, as a name."""
        return "nll" if self.loss == "nats per token" else self.loss


_PAIRS, _CLASSES = ("rewards/accuracies", "rewards/margins"), ("f1", "auroc", "calibration_error")
_RATED, _NUMBERS = ("rewards/auroc", "rewards/margins"), ("mse", "mae", "r2")
_REWARDS = "reward", "sampled_reward"
_BY_OBJECTIVE: Final[Mapping[str, Measures]] = {
    "sft": Measures(),
    "pairs": Measures(_PAIRS, _PAIRS[0], trained="loss per pair"),
    "kto": Measures(_RATED, _RATED[0], trained="loss per row"),
    "reward": Measures(_PAIRS, right="accuracy", loss="nats per pair", trained="loss per pair"),
    "classification": Measures(_CLASSES, right="accuracy", loss="nats per row", trained="nats per row"),
    "grpo": Measures(
        _REWARDS, _REWARDS[0], right="share of reward 1", loss="minus the reward", gain="reward", trained="loss of GRPO"
    ),
    "regression": Measures(_NUMBERS, right="accuracy", loss="squared error", trained="squared error"),
}


def measures_of(objective: str) -> Measures:
    """The measures of an objective; an objective that is not known here is taken to be of pairs."""
    return _BY_OBJECTIVE.get(objective, _BY_OBJECTIVE["pairs"])


def place_of_trial(trial: int, scores: Sequence[float | None], metric: str) -> tuple[bool, int, float, int]:
    """The sort key of a scored trial: those that went furthest first, among these the best first, failed ones last.

    Args:
        trial: its id; of equal ones the older comes first.
        scores: one for each rung that it reached; the last is NaN or None if it failed there.
        metric: see `METRICS`.
    """
    last = scores[-1]
    if last is None or math.isnan(last):
        return True, 0, 0.0, trial
    return False, -len(scores), -last if METRICS[metric].greater else last, trial


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
    """The half-width of the normal 95 % interval of the mean difference.

    None for too few rows, for a difference that is not finite, or if all are equal.
    """
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
    return hybrid_interval(one, share_interval(one, rows), other, share_interval(other, other_rows))


def hybrid_interval(one: float, ends: Sequence[float], other: float, other_ends: Sequence[float]) -> float:
    """The longer side of the interval of `one - other`, by the ends of the interval of each."""
    (low, high), (other_low, other_high) = ends, other_ends
    return max(math.hypot(one - low, other_high - other), math.hypot(high - one, other - other_low))
