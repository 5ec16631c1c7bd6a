"""GRPO: completions that agents draw themselves, compared within the group of a prompt (Shao et al., 2024).

An agent draws `num_generations` completions of each prompt, functions reward them, and what a reward exceeds the mean
of its group by is the advantage of its tokens. Names, defaults and formulas are those of TRL 1.16, on policy: old
log-probabilities are the present ones, and nothing is clipped. Loss types: grpo (a mean over completions of means over
tokens), dapo (over all tokens; Yu et al., 2025), dr_grpo (over as many tokens as there could be; Liu et al., 2025).

Legend: P prompts, G completions of each, R = P·G, F functions, T tokens of all completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ci_llm.objectives import Needs, Number, Objective, require_loss_types

#: Added to a standard deviation that divides, as in TRL.
EPSILON = 1e-4


@dataclass(frozen=True)
class Grpo(Objective):
    """Keys: beta, loss_type, and those of rewards and completions."""

    beta: Number
    loss_type: tuple[str, ...] | None
    rewards: tuple[str, ...] | None
    reward_weights: tuple[float, ...] | None
    num_generations: int
    max_completion_length: int
    temperature: Number
    top_p: float
    top_k: int
    min_p: float | None
    scale_rewards: str
    use_bias_correction_kl: bool
    mask_truncated_completions: bool
    reward_timeout: float | None
    log_completions: bool

    def __post_init__(self) -> None:
        require_loss_types(self.loss_type or (), ("dapo", "grpo", "dr_grpo"), "grpo", mixed=False)

    @property
    def needs(self) -> Needs:
        beta = self.beta
        return Needs("prompts", reference=bool((beta > 0).any()) if isinstance(beta, Tensor) else beta > 0)

    @property
    def kind(self) -> str:
        """The loss type."""
        return self.loss_type[0] if self.loss_type else "dapo"

    def of_agent(self, agent: int) -> tuple[float, float]:
        """`beta` and `temperature` of an agent."""
        beta, warmth = (float(x[agent]) if isinstance(x, Tensor) else x for x in (self.beta, self.temperature))
        return beta, warmth

    def token_losses(self, log_probs: Tensor, advantages: Tensor, divergences: Tensor | None, beta: float) -> Tensor:
        """The loss of every token, TRL's `per_token_loss` where old log-probabilities are the present ones.

        Args:
            log_probs: [T] of the tokens drawn, at the temperature at which they were drawn.
            advantages: [T] of their completions.
            divergences: [T] see `divergence`; None without a reference.
        """
        ratio = (log_probs - log_probs.detach()).exp()  # 1, with the gradient of the log-probability
        losses = -ratio * advantages
        if divergences is None:
            return losses
        return losses + beta * (divergences * ratio if self.use_bias_correction_kl else divergences)

    def weight_of(self, tokens: int) -> float:
        """The weight of each token in the sum over a step, for a completion of so many tokens."""
        return 1 / max(tokens, 1) if self.kind == "grpo" else 1.0

    def count_of(self, tokens: int) -> int:
        """What a completion adds to the number that divides this sum; `tokens` are those that are learned of it."""
        return {"grpo": 1, "dapo": tokens, "dr_grpo": self.max_completion_length}[self.kind]


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """The estimate k3 of the divergence from the reference at each token [T] (Schulman, 2020), which is never negative.

    Args:
        log_probs, reference: [T] log-probabilities of the tokens drawn.
    """
    gap = reference - log_probs
    return gap.exp() - gap - 1


def total_rewards(rewards: Tensor, weights: tuple[float, ...] | None) -> Tensor:
    """The reward [..., R] of each completion: the weighted sum over the functions that gave it one; NaN without any.

    A function of weight 0 rewards nothing: it is only measured.

    Args:
        rewards: [..., R, F] fp64, NaN where a function gave none.
    """
    factors = rewards.new_tensor(weights or (1.0,) * rewards.shape[-1])
    given = ~rewards.isnan() & (factors != 0)
    return (rewards * factors).where(given, 0.0).sum(-1).where(given.any(-1), torch.nan)


def spread(rewards: Tensor) -> Tensor:
    """The unbiased standard deviation over the last dimension, without NaN; NaN for fewer than two values."""
    count = (~rewards.isnan()).sum(-1)
    gaps = rewards - rewards.nanmean(-1, keepdim=True)
    return (gaps.square().nansum(-1) / (count - 1)).sqrt().where(count > 1, torch.nan)


def advantages(rewards: Tensor, scale_rewards: str, of_batch: Tensor | None = None) -> Tensor:
    """The advantages [P, G] of completions: their rewards minus the mean of the group, over a standard deviation.

    The source is `_generate_and_score_completions` of TRL. A completion that is the only one with a reward in its group
    has advantage 0; one without a reward has NaN, and is left out of the step.

    Args:
        rewards: [P, G] fp64.
        scale_rewards: the deviation: that of the "group", of the "batch", or "none".
        of_batch: [] the `spread` of all rewards of the step, for "batch".
    """
    gains = rewards - rewards.nanmean(1, keepdim=True)
    if scale_rewards != "none":
        own = spread(rewards)[:, None] if of_batch is None else of_batch
        gains = (gains / (own + EPSILON)).nan_to_num(nan=0.0)
    return gains.where(~rewards.isnan(), torch.nan)


objective = Grpo
