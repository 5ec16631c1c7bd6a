"""IVON, an optimizer that learns a Gaussian over the weights of each agent: its mean is the agent.

Gradients are taken at weights drawn from it, and how they vary with the noise gives its spread, at the price of AdamW.
Source: Shen et al., "Variational Learning is Effective for Large Deep Networks", 2024, algorithm 1; the names are those
of its package, ivon-opt, with `rescale_lr`.

Legend: K agents, P trainable numbers of an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ci_llm.crowd.adapters import AgentStorage

#: Decay of the momentum and of the Hessian, as ivon-opt has them.
BETA1: Final = 0.9
BETA2: Final = 0.99999
#: Below it a learning rate was surely meant for AdamW.
LEAST_RATE: Final = 0.05


class Ivon(torch.optim.Optimizer):
    """Moves the means, one parameter group per agent, between `draw` and the next `draw`.

    The state of an agent is `step`, `momentum` [P] and `hess` [P], an estimate of the diagonal of the Hessian. The
    standard deviation of its weights is 1 / sqrt(ess (hess + weight_decay)).

    Args:
        groups: K, each with one parameter, `lr`, `weight_decay` and `ess`, the effective number of examples.
        hess_init: `hess` before the first step. A larger one begins with less noise.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], hess_init: float) -> None:
        super().__init__(groups, {"hess_init": hess_init})
        self._noise: list[Tensor] = []

    def draw(self, agents: AgentStorage, step: int) -> None:
        """Let the passes of this step compute at weights drawn around the means."""
        self._noise = agents.perturb(step, [self._spread(group) for group in self.param_groups])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move means and spreads by the gradients at the weights that were drawn; without a gradient nothing moves."""
        for group, noise in zip(self.param_groups, self._noise, strict=True):
            (row,) = group["params"]
            if row.grad is None:
                continue
            decay = group["weight_decay"]
            state = self.state[row]
            if not state:
                state.update(momentum=torch.zeros_like(row), hess=self._hess(group))
                state["step"] = torch.zeros(())  # as AdamW counts its steps
            state["step"] += 1
            momentum, hess = state["momentum"], state["hess"]
            momentum.lerp_(row.grad, 1 - BETA1)
            precision = hess + decay
            change = (row.grad * noise).mul_(precision).mul_(group["ess"]).sub_(hess).mul_(1 - BETA2)
            hess.add_(change).addcdiv_(change.square_(), precision, value=0.5)  # which keeps it positive
            towards = momentum / (1 - BETA1 ** float(state["step"])) + decay * row
            row.addcdiv_(towards, hess + decay, value=-group["lr"] * (group["hess_init"] + decay))

    def _spread(self, group: dict[str, Any]) -> Tensor:
        """[P] the standard deviation of an agent's numbers."""
        precision: Tensor = (self._hess(group) + group["weight_decay"]).mul_(group["ess"])
        return precision.rsqrt_()

    def _hess(self, group: dict[str, Any]) -> Tensor:
        (row,) = group["params"]
        hess: Tensor = self.state[row]["hess"] if self.state.get(row) else torch.full_like(row, group["hess_init"])
        return hess
