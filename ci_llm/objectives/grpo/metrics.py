"""The metrics of the completions of a step, by TRL's names, and a warning where completions teach nothing.

Legend: F rewards, P prompts, G completions of each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ci_llm.objectives.grpo import spread

logger = logging.getLogger(__name__)

#: Sum and count of a metric.
SumAndCount = tuple[float, float]


def metrics_of(
    names: Sequence[str], rewards: Tensor, total: Tensor, spreads: Tensor, lengths: Sequence[int], cut: Sequence[bool]
) -> dict[str, SumAndCount]:
    """The metrics of the completions that an agent has drawn in a step, in all processes.

    Args:
        names: [F] those of the functions.
        rewards, total: [P, G, F] and [P, G], NaN where there is none.
        spreads: [P] the deviation that divides the advantages of each group.
        lengths, cut: of each completion its tokens, and whether `max_completion_length` ended it.
    """
    found = {"reward": _mean(total), "reward_std": _deviation(total)}
    for name, own in zip(names, rewards.unbind(-1), strict=True):
        found |= {f"rewards/{name}/mean": _mean(own), f"rewards/{name}/std": _deviation(own)}
    found["frac_reward_zero_std"] = _mean(torch.isclose(spreads, torch.zeros_like(spreads)))
    found["completions/mean_length"] = float(sum(lengths)), float(len(lengths))
    for name, extreme in (("min", min), ("max", max)):
        found[f"completions/{name}_length"] = float(extreme(lengths, default=0)), float(len(lengths) > 0)
    return found | {"completions/clipped_ratio": (float(sum(cut)), float(len(cut)))}


def _mean(values: Tensor) -> SumAndCount:
    known = values[~values.isnan()]
    return float(known.sum()), float(len(known))


def _deviation(values: Tensor) -> SumAndCount:
    """The unbiased standard deviation as one number; none of fewer than two values."""
    found = spread(values.flatten())
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
