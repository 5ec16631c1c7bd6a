"""The IVON optimizer, and the learning-rate schedules of all optimizers.

A schedule is a pure function of the step, with the name and the bits of Transformers' own. Transformers' schedules are
methods of a scheduler around an optimizer, with a position to save. Their module also imports all of PEFT, which takes
seconds with bitsandbytes.

Legend: K agents, P trainable numbers of an agent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ci_llm.lora.adapters import AgentStorage


#: The decay of the momentum and of the Hessian, as in ivon-opt.
BETA1: Final = 0.9
BETA2: Final = 0.99999


class Ivon(torch.optim.Optimizer):
    """IVON, which learns a Gaussian over the weights of every agent; each agent is one parameter group.

    The parameters are the means. Each step takes gradients at weights that `draw` has drawn from the Gaussian, and
    their correlation with the noise gives its spread. Source: Shen et al., "Variational Learning is Effective for Large
    Deep Networks", 2024, algorithm 1; the names are those of its package, ivon-opt, with `rescale_lr`.

    The state of an agent is `step`, `momentum` [P] and `hess` [P], an estimate of the diagonal of the Hessian. The
    standard deviation of its weights is 1 / sqrt(ess (hess + weight_decay)).

    Args:
        groups: K groups, each with one parameter, `lr`, `weight_decay` and `ess`, the effective number of examples.
        hess_init: the value of `hess` before the first step. A larger value begins with less noise.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], hess_init: float) -> None:
        super().__init__(groups, {"hess_init": hess_init})
        self._noise: list[Tensor] = []

    def draw(self, agents: AgentStorage, step: int) -> None:
        """Draw the weights at which the passes of this step compute."""
        self._noise = agents.drawn.draw_noise(step, [self._spread(group) for group in self.param_groups])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move means and spreads by the gradients at the drawn weights; an agent without a gradient does not move."""
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
                state.update(moments, step=torch.zeros(()))  # a tensor, as in AdamW
            state["step"] += 1
            momentum, hess = state["momentum"], state["hess"]
            momentum.lerp_(row.grad, 1 - BETA1)
            estimate = (row.grad * noise).mul_(precision).mul_(group["ess"])
            change = estimate.sub_(hess).mul_(1 - BETA2)
            # The squared term keeps the precision positive.
            hess.add_(change).addcdiv_(change.square_(), precision, value=0.5)
            debias = 1 - BETA1 ** state["step"].double()  # a tensor: a number would wait for a GPU
            towards = torch.add(momentum / debias, row, alpha=decay)
            row.addcdiv_(towards, hess + decay, value=-group["lr"] * (group["hess_init"] + decay))

    def _spread(self, group: dict[str, Any]) -> Tensor:
        """The standard deviation [P] of an agent's numbers."""
        return self._precision(group).mul_(group["ess"]).rsqrt_()

    def _precision(self, group: dict[str, Any]) -> Tensor:
        """The precision [P] of an agent's numbers for one example, as a new tensor."""
        (row,) = group["params"]
        state = self.state.get(row)
        if state:
            return state["hess"] + group["weight_decay"]  # type: ignore[no-any-return]
        return torch.full_like(row, group["hess_init"] + group["weight_decay"])


#: Where the schedules `with_min_lr` end, as a share of the peak.
SMALLEST: Final = 0.1
#: Where `polynomial` ends.
POLYNOMIAL_END: Final = 1e-7
#: The steps of `inverse_sqrt` in place of a missing warm-up.
TIMESCALE: Final = 10_000


def factor(kind: str, warmup: int, total: int) -> Callable[[int], float]:
    """A function from the 0-based step, at most `total`, to the learning rate as a share of its peak.

    Args:
        kind: a name in `SCHEDULES`.
        warmup: the steps in which the rate rises to the peak.
        total: the steps of the whole schedule.
    """
    after_warmup = SCHEDULES[kind]
    ahead = int(kind == "cosine_warmup_with_min_lr")  # so that its first step has a learning rate above 0

    def share(step: int) -> float:
        if step < warmup and kind != "constant":
            return (step + ahead) / max(1, warmup)
        return after_warmup(step + ahead, warmup, total)

    return share


def _progress(step: int, warmup: int, total: int) -> float:
    """The share of the steps after the warm-up that have passed."""
    return (step - warmup) / max(1, total - warmup)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, warmup: int, total: int) -> float:
    return max(0.0, _half_cosine(_progress(step, warmup, total)))


def _cosine_with_restarts(step: int, warmup: int, total: int) -> float:
    """A cosine of one cycle, Transformers' default, which is exactly 0 at its end."""
    return 0.0 if step >= max(total, warmup + 1) else _cosine(step, warmup, total)


def _cosine_with_min_lr(step: int, warmup: int, total: int) -> float:
    return _half_cosine(_progress(step, warmup, total)) * (1 - SMALLEST) + SMALLEST


def _polynomial(step: int, warmup: int, total: int) -> float:
    return (1.0 - POLYNOMIAL_END) * (1 - _progress(step, warmup, total)) + POLYNOMIAL_END


def _inverse_sqrt(step: int, warmup: int, total: int) -> float:
    scale = warmup or TIMESCALE
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


def _warmup_stable_decay(step: int, warmup: int, total: int) -> float:
    """A constant rate that decays in the last tenth of the steps."""
    decay = max(1, total // 10)
    falling = step - (total - decay)
    if falling < 0:
        return 1.0
    return max(0.0, _half_cosine(falling / decay)) if falling < decay else 0.0


#: By name, the share of the peak after the warm-up, as a function of step, warm-up and total.
SCHEDULES: Final[dict[str, Callable[[int, int, int], float]]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
