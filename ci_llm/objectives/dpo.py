"""DPO: the better answer of a pair is to gain more over the base than the worse one (Rafailov et al., 2023).

Loss types: sigmoid; robust (Chowdhury et al., 2024); ipo (Azar et al., 2023; per token, as its authors told TRL); hinge
(SLiC, Zhao et al., 2023); sigmoid_norm (per token, as in Tulu 3, Lambert et al., 2024); apo_zero (D'Oosterlinck et al.,
2024); sft, the next-token loss of the better answer. Several of them are added by `loss_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ci_llm.errors import ConfigError
from ci_llm.objectives import Evidence, Needs, Number, Objective, pairs, require_loss_types


@dataclass(frozen=True)
class Dpo(Objective):
    """Keys: beta, loss_type, loss_weights, label_smoothing."""

    beta: Number
    loss_type: tuple[str, ...] | None
    loss_weights: tuple[float, ...] | None
    label_smoothing: float

    def __post_init__(self) -> None:
        require_loss_types(self._types, [*LOSS_TYPES], "dpo")
        if len(self._weights) != len(self._types):
            raise ConfigError(
                f"loss_weights has {len(self._weights)} for {len(self._types)} of loss_type",
                where="loss_weights",
                hint="give each loss type one weight",
            )
        if self.label_smoothing and "robust" not in self._types:
            raise ConfigError(
                f"label_smoothing {self.label_smoothing:g} does nothing for loss_type {', '.join(self._types)}",
                where="label_smoothing",
                hint="take loss_type=robust, or leave label_smoothing out",
            )

    @property
    def needs(self) -> Needs:
        return Needs(reference=True, nll="answers" if "sft" in self._types else "none")

    def losses(self, e: Evidence) -> Tensor:
        losses = [weight * LOSS_TYPES[kind](self, e) for kind, weight in zip(self._types, self._weights, strict=True)]
        return torch.stack(losses).sum(0)

    @property
    def _types(self) -> tuple[str, ...]:
        return self.loss_type or ("sigmoid",)

    @property
    def _weights(self) -> tuple[float, ...]:
        return self.loss_weights or (1.0,) * len(self._types)


def _gain(values: Tensor) -> Tensor:
    chosen, rejected = pairs(values)
    return chosen - rejected


def _robust(o: Dpo, e: Evidence) -> Tensor:
    share, gain = o.label_smoothing, o.beta * _gain(e.ratios)
    return (share * F.logsigmoid(-gain) - (1 - share) * F.logsigmoid(gain)) / (1 - 2 * share)


def _apo_zero(o: Dpo, e: Evidence) -> Tensor:
    chosen, rejected = pairs(o.beta * e.ratios)
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


LOSS_TYPES: Final[Mapping[str, Callable[[Dpo, Evidence], Tensor]]] = {
    "sigmoid": lambda o, e: -F.logsigmoid(o.beta * _gain(e.ratios)),
    "robust": _robust,
    "ipo": lambda o, e: (_gain(e.ratios / e.lengths) - 1 / (2 * o.beta)) ** 2,
    "hinge": lambda o, e: torch.relu(1 - o.beta * _gain(e.ratios)),
    "sigmoid_norm": lambda o, e: -F.logsigmoid(o.beta * _gain(e.ratios / e.lengths)),
    "apo_zero": _apo_zero,
    "sft": lambda o, e: e.mean_nll,
}
objective = Dpo
