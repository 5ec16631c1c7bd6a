"""How well agents and crowd tell better answers from worse ones, on pairs or rated rows that were not trained on.

A pair is ranked right if its chosen answer has the higher reward of the objective; ties count as wrong, as in TRL. Of
rated rows it is the share of (good, bad) couples that are in order: the area under the ROC curve. The reward of the
crowd is the mean of its agents'.

Legend: K agents, U units (pairs or rated rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ci_llm.core.scores import paired_interval
from ci_llm.crowd.preferences import Preferences
from ci_llm.data.batches import Batch

#: What is measured, by whether rows are rated.
MEASURES: Final = {False: "accuracies", True: "auroc"}


@dataclass(frozen=True)
class Ranking:
    """What each of U units was worth.

    Attributes:
        rewards: [K, U, 2] fp64 of the chosen and the rejected answer; of rated rows [K, U, 1].
        good: [U] bool, of rated rows; False for pairs.
    """

    rewards: Tensor
    good: Tensor
    key: ClassVar = "preferences"

    @classmethod
    def joined(cls, parts: Iterable[Ranking]) -> Ranking:
        """The units of all parts, in order; a process may have had none."""
        listed = [part for part in parts if part.good.numel()]
        return cls(torch.cat([part.rewards for part in listed], 1), torch.cat([part.good for part in listed]))

    @property
    def measure(self) -> str:
        """The name of what `right` is."""
        return MEASURES[self.rewards.shape[-1] == 1]

    @property
    def right(self) -> list[float]:
        """Share of pairs that are ranked right, or area under the curve: K agents, then the crowd."""
        everyone = torch.cat([self.rewards, self.rewards.mean(0, keepdim=True)])
        if everyone.shape[-1] == 2:
            return (everyone[..., 0] > everyone[..., 1]).double().mean(1).tolist()
        areas = [auroc(own[:, 0], self.good) for own in everyone]
        return [math.nan if area is None else area for area in areas]

    @property
    def margins(self) -> list[float]:
        """Mean reward of better answers minus that of worse ones: K agents, then the crowd."""
        everyone = torch.cat([self.rewards, self.rewards.mean(0, keepdim=True)])
        if everyone.shape[-1] == 2:
            return (everyone[..., 0] - everyone[..., 1]).mean(1).tolist()
        return (everyone[:, self.good, 0].mean(1) - everyone[:, ~self.good, 0].mean(1)).tolist()

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """By the names of metrics.jsonl.

        Args:
            names: of the agents.
        """
        found = zip([*names, "crowd"], self.right, self.margins, strict=True)
        return {
            f"eval/{name}/rewards/{key}": value
            for name, right, margin in found
            for key, value in ((self.measure, right), ("margins", margin))
        }

    def record(self) -> dict[str, Any]:
        """`preferences` of `evaluation.json`. The interval is of the crowd minus the mean of its agents, over pairs."""
        *agents, crowd = self.right
        *agents_margins, crowd_margin = self.margins
        interval = None
        if self.rewards.shape[-1] == 2:
            right = (self.rewards[..., 0] > self.rewards[..., 1]).double().mean(0)
            together = self.rewards.mean(0)
            interval = paired_interval(((together[:, 0] > together[:, 1]).double() - right).tolist())
        return {
            "n": len(self.good),
            self.measure: {
                "agents": agents,
                "crowd": crowd,
                "crowd_minus_mean": {"value": crowd - sum(agents) / len(agents), "interval95": interval},
            },
            "margins": {"agents": agents_margins, "crowd": crowd_margin},
        }

    def __str__(self) -> str:
        """The same for people, in a line."""
        *agents, crowd = self.right
        what = f"of {len(self.good)} pairs ranked right" if self.measure == "accuracies" else "AUROC of the ratings"
        return f"{what}: crowd {crowd:.3f}; agents {', '.join(f'{own:.3f}' for own in agents)}"


def auroc(sure: ArrayLike, right: ArrayLike) -> float | None:
    """The area under the ROC curve, by the statistic of Mann and Whitney: the chance that a right answer has a higher
    number than a wrong one; ties count half. None if all are right, or none."""
    numbers, is_right = np.asarray(sure, float), np.asarray(right, bool)
    if is_right.all() or not is_right.any():
        return None
    wrong = np.sort(numbers[~is_right])
    below, not_above = (np.searchsorted(wrong, numbers[is_right], side) for side in ("left", "right"))
    return float((below + not_above).mean() / 2 / len(wrong))


@torch.no_grad()
def rank(objective: Preferences, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> Ranking | None:
    """Let the agents judge every unit of `batches`.

    Args:
        objective: with the crowd, which is in training mode afterwards if it was before.
        stop: called before every batch.

    Returns:
        the ranking, of no unit at all for no batch; None if `stop` returned True.
    """
    crowd = objective.crowd
    training, parts = crowd.training, [Ranking(torch.zeros(0), torch.zeros(0, dtype=torch.bool))]
    crowd.eval()
    try:
        for batch in batches:
            if stop():
                return None
            batch = batch.to(crowd.device)
            rewards = objective.objective.rewards(objective.evidence(crowd(batch), batch))
            assert batch.labels is not None
            parts.append(Ranking(rewards.unflatten(1, (batch.num_units, -1)).cpu(), (batch.labels > 0).cpu()))
    finally:
        crowd.train(training)
    return parts[0] if len(parts) == 1 else Ranking.joined(parts)
