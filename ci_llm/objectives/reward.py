"""Reward: a head's number for the better answer is to exceed that for the worse one (Bradley and Terry, 1952).

As in TRL, a column `margin` says by how much (Touvron et al., "Llama 2", 2023), and `center_rewards_coefficient` draws
the two numbers of a pair towards a sum of 0 (Eisenstein et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ci_llm.objectives import Evidence, Needs, Objective, pairs


@dataclass(frozen=True)
class Reward(Objective):
    """Keys: center_rewards_coefficient."""

    center_rewards_coefficient: float | None
    needs = Needs("pairs", head=True)

    def losses(self, e: Evidence) -> Tensor:
        chosen, rejected = pairs(self.answer_rewards(e))
        losses = -F.logsigmoid(chosen - rejected - (0.0 if e.labels is None else e.labels))
        if self.center_rewards_coefficient is None:
            return losses
        return losses + self.center_rewards_coefficient * (chosen + rejected) ** 2


objective = Reward
