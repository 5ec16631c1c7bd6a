"""KTO: a good answer is to gain over the base, and a bad one to lose, measured from `kl` (Ethayarajh et al., 2024).

`kl` is estimated from answers to other prompts, of the whole step: TRL takes those of a micro-batch. The loss type
apo_zero_unpaired (D'Oosterlinck et al., 2024) measures from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ci_llm.objectives import Evidence, Needs, Number, Objective, require_loss_types


@dataclass(frozen=True)
class Kto(Objective):
    """Keys: beta, loss_type, desirable_weight, undesirable_weight."""

    beta: Number
    loss_type: tuple[str, ...] | None
    desirable_weight: Number
    undesirable_weight: Number

    def __post_init__(self) -> None:
        require_loss_types(self.loss_type or (), ("kto", "apo_zero_unpaired"), "kto", mixed=False)

    @property
    def needs(self) -> Needs:
        return Needs("rated", reference=True, mismatched=self.loss_type in (None, ("kto",)))

    def losses(self, e: Evidence) -> Tensor:
        assert e.labels is not None
        gain = self.beta * (e.ratios if e.kl is None else e.ratios - e.kl)
        good = self.desirable_weight * (1 - torch.sigmoid(gain))
        bad = self.undesirable_weight * (1 - torch.sigmoid(-gain))
        return torch.where(e.labels, good, bad)


objective = Kto
