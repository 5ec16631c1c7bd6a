"""ORPO: next-token prediction of the better row, and odds in favour of its answer (Hong et al., 2024); no reference.

As in TRL, the prompt of the better row is learned as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ci_llm.objectives import Evidence, Metrics, Needs, Number, Objective, pairs


@dataclass(frozen=True)
class Orpo(Objective):
    """Keys: beta."""

    beta: Number
    needs = Needs(nll="rows")
    metric_names = ("log_odds_ratio", "log_odds_chosen")

    def losses(self, e: Evidence) -> Tensor:
        return e.mean_nll - self.beta * F.logsigmoid(log_odds(e))

    def metrics(self, e: Evidence) -> Metrics:
        odds, units = log_odds(e), float(e.sums.shape[1] // 2)
        return {"log_odds_ratio": (F.logsigmoid(odds).sum(1), units), "log_odds_chosen": (odds.sum(1), units)}


def log_odds(e: Evidence) -> Tensor:
    """The log of the odds ratio [K, U] of the better to the worse answer."""
    chosen, rejected = pairs(e.means.clamp(max=-_LEAST))
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


#: The least distance of a log-probability from 0, because a certain answer has infinite odds.
_LEAST = 1e-12


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0: Mächler, "Accurately computing log(1 - exp(-|a|))", 2012."""
    return torch.where(x > -0.6931471805599453, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


objective = Orpo
