"""KTO: a good answer shall gain on the base, and a bad one lose, measured from `kl` (Ethayarajh et al., 2024).

`kl` is estimated from answers to other prompts, of the whole step: TRL takes those of a micro-batch. The loss type
apo_zero_unpaired (D'Oosterlinck et al., 2024) measures from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ci_llm.objectives import Evidence, Metrics, Needs, Number, one_loss_type


@dataclass(frozen=True)
class Kto:
    """Keys: beta, loss_type, desirable_weight, undesirable_weight."""

    beta: Number
    loss_type: tuple[str, ...] | None
    desirable_weight: Number
    undesirable_weight: Number

    def __post_init__(self) -> None:
        self._type  # noqa: B018 - refuses one that there is not

    @property
    def _type(self) -> str:
        return one_loss_type(self.loss_type, ("kto", "apo_zero_unpaired"), "kto")

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("kl",) if self.needs.mismatched else ()

    @property
    def needs(self) -> Needs:
        return Needs("rated", reference=True, mismatched=self._type == "kto")

    def losses(self, e: Evidence) -> Tensor:
        assert e.labels is not None
        gain = self.beta * (e.ratios if e.kl is None else e.ratios - e.kl)
        good = self.desirable_weight * (1 - torch.sigmoid(gain))
        bad = self.undesirable_weight * (1 - torch.sigmoid(-gain))
        return torch.where(e.labels, good, bad)

    def rewards(self, e: Evidence) -> Tensor:
        return self.beta * e.ratios

    def metrics(self, e: Evidence) -> Metrics:
        return {} if e.kl is None else {"kl": (e.kl[:, 0] * e.sums.shape[1], float(e.sums.shape[1]))}


objective = Kto
