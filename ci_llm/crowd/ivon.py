"""IVON, an optimizer that learns a Gaussian over the weights of each agent: its mean is the agent.

Gradients are taken at weights drawn from it, and how they vary with the noise gives its spread.
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
        if len(self._noise) != len(self.param_groups):
            raise RuntimeError("Ivon.step needs the gradients at weights that Ivon.draw has drawn: call it first")
        for group, noise in zip(self.param_groups, self._noise, strict=True):
            (row,) = group["params"]
            if row.grad is None:
                continue
            decay = group["weight_decay"]
            state, precision = self.state[row], self._precision(group)
            if not state:
                moments = {"momentum": torch.zeros_like(row), "hess": torch.full_like(row, group["hess_init"])}
                state.update(moments, step=torch.zeros(()))  # which AdamW counts like this
            state["step"] += 1
            momentum, hess = state["momentum"], state["hess"]
            momentum.lerp_(row.grad, 1 - BETA1)
            estimate = (row.grad * noise).mul_(precision).mul_(group["ess"])
            change = estimate.sub_(hess).mul_(1 - BETA2)
            # The square is what keeps the precision positive.
            hess.add_(change).addcdiv_(change.square_(), precision, value=0.5)
            debias = 1 - BETA1 ** state["step"].double()  # a tensor: a number would wait for a GPU
            towards = torch.add(momentum / debias, row, alpha=decay)
            row.addcdiv_(towards, hess + decay, value=-group["lr"] * (group["hess_init"] + decay))

    def _spread(self, group: dict[str, Any]) -> Tensor:
        """[P] the standard deviation of an agent's numbers."""
        return self._precision(group).mul_(group["ess"]).rsqrt_()

    def _precision(self, group: dict[str, Any]) -> Tensor:
        """[P] that of an agent's numbers, for one example; in memory of its own."""
        (row,) = group["params"]
        if state := self.state.get(row):
            return state["hess"] + group["weight_decay"]  # type: ignore[no-any-return]
        return torch.full_like(row, group["hess_init"] + group["weight_decay"])
