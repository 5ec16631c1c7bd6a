"""SimPO: log-probability per token of the better answer above the worse one, by a margin (Meng et al., 2024).

Without a reference, by TRL's names and defaults. Those are not the paper's, which has cpo_alpha 0, beta 2 to 2.5 and
simpo_gamma 0.3 to 0.5 of beta: TRL adds `cpo_alpha` times the next-token loss of the better answer (CPO, Xu et al.,
2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ci_llm.objectives import Evidence, Needs, Number, Objective, pairs


@dataclass(frozen=True)
class Simpo(Objective):
    """Keys: beta, simpo_gamma, cpo_alpha."""

    beta: Number
    simpo_gamma: Number
    cpo_alpha: float

    @property
    def needs(self) -> Needs:
        return Needs(nll="answers" if self.cpo_alpha else "none")

    def losses(self, e: Evidence) -> Tensor:
        chosen, rejected = pairs(e.means)
        losses = -F.logsigmoid(self.beta * (chosen - rejected) - self.simpo_gamma)
        return losses + self.cpo_alpha * e.mean_nll if self.cpo_alpha else losses


objective = Simpo
