"""GRPO: completions that agents draw themselves, compared within the group of a prompt (Shao et al., 2024).

An agent draws `num_generations` completions of each prompt, functions reward them, and what a reward exceeds the mean
of its group by is the advantage of its tokens. Names, defaults and formulas are those of TRL 1.16, on policy: old
log-probabilities are the present ones, and nothing is clipped. Loss types: grpo (a mean over completions of means over
tokens), dapo (over all tokens; Yu et al., 2025), dr_grpo (over as many tokens as there could be; Liu et al., 2025).

Legend: P prompts, G completions of each, R = P·G, F functions, T tokens of all completions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ci_llm.objectives import Needs, Number, Objective, require_loss_types

logger = logging.getLogger(__name__)

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
        beta, temperature = (float(x[agent]) if isinstance(x, Tensor) else x for x in (self.beta, self.temperature))
        return beta, temperature

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
        """The weight of each token in the sum over a step, for a completion of this number of tokens."""
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


def std(rewards: Tensor) -> Tensor:
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
        of_batch: [] the `std` of all rewards of the step, for "batch".
    """
    gains = rewards - rewards.nanmean(1, keepdim=True)
    if scale_rewards != "none":
        own = std(rewards)[:, None] if of_batch is None else of_batch
        gains = (gains / (own + EPSILON)).nan_to_num(nan=0.0)
    return gains.where(~rewards.isnan(), torch.nan)


# The metrics of a step, by the names of TRL

#: Sum and count of a metric.
SumAndCount = tuple[float, float]


def metrics_of(
    names: Sequence[str], rewards: Tensor, total: Tensor, stds: Tensor, lengths: Sequence[int], cut: Sequence[bool]
) -> dict[str, SumAndCount]:
    """The metrics of the completions that an agent has drawn in a step, in all processes.

    Args:
        names: [F] those of the functions.
        rewards, total: [P, G, F] and [P, G], NaN where there is none.
        stds: [P] the deviation that divides the advantages of each group.
        lengths, cut: of each completion its tokens, and whether `max_completion_length` ended it.
    """
    found = {"reward": _mean(total), "reward_std": _deviation(total)}
    for name, own in zip(names, rewards.unbind(-1), strict=True):
        found |= {f"rewards/{name}/mean": _mean(own), f"rewards/{name}/std": _deviation(own)}
    found["frac_reward_zero_std"] = _mean(torch.isclose(stds, torch.zeros_like(stds)))
    found["completions/mean_length"] = float(sum(lengths)), float(len(lengths))
    for name, extreme in (("min", min), ("max", max)):
        found[f"completions/{name}_length"] = float(extreme(lengths, default=0)), float(len(lengths) > 0)
    return found | {"completions/clipped_ratio": (float(sum(cut)), float(len(cut)))}


def _mean(values: Tensor) -> SumAndCount:
    known = values[~values.isnan()]
    return float(known.sum()), float(len(known))


def _deviation(values: Tensor) -> SumAndCount:
    """The unbiased standard deviation as one number; none of fewer than two values."""
    found = std(values.flatten())
    return (0.0, 0.0) if found.isnan() else (float(found), 1.0)


#: A share that is too large to learn, and the steps in a row after which the log says so.
MOST, PATIENCE = 0.9, 20


@dataclass
class Watch:
    """Warns where completions teach nothing: nine of ten groups have equal rewards, or completions are cut.

    Attributes:
        flat: steps in a row in which the one was so.
        cut: steps in which the other was so; it is told once.
    """

    flat: int = 0
    cut: int = 0

    def look(self, of_agents: Sequence[Mapping[str, SumAndCount]], step: int) -> None:
        """Look at the metrics of a step, of every agent."""

        def share(name: str) -> float:
            total, count = (sum(own[name][part] for own in of_agents) for part in (0, 1))
            return total / max(1.0, count)

        self.flat = self.flat + 1 if share("frac_reward_zero_std") >= MOST else 0
        is_cut = share("completions/clipped_ratio") >= MOST
        self.cut += is_cut
        if self.flat == PATIENCE:
            logger.warning(
                f"in {PATIENCE} steps up to step {step}, nine of ten groups had equal rewards, which teach nothing;"
                " take easier or harder prompts, a reward with more than two values, more num_generations,"
                " a higher temperature, or train by objective=sft first"
            )
        if is_cut and self.cut == 1:
            logger.warning(
                f"step {step}: nine of ten completions were cut at max_completion_length; raise it, or train agents"
                " that end their answers by objective=sft first; mask_truncated_completions=true learns nothing of them"
            )


objective = Grpo
