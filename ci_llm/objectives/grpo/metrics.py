"""The metrics of a step, by TRL's names, from pairs of numbers that processes and micro-batches add up.

A deviation follows from the sums of values and of squares. The shortest and the longest completion of each process have
a pair of their own.

Legend: F rewards, P prompts, R completions, M pairs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Pair = tuple[float, float]


@dataclass(frozen=True)
class Sums:
    """What is added up for one agent in a step.

    Attributes:
        rewards: the names of the functions.
        has_reference: whether agents are compared with a reference.
    """

    rewards: tuple[str, ...]
    has_reference: bool
    num_processes: int

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each of the M pairs."""
        squares = [f"{what} {name}" for name in self.rewards for what in ("sum", "squares")]
        ends = (f"lengths {process}" for process in range(self.num_processes))
        names = ("entropy", "kl", "reward", "squares", *squares, "flat", "length", "cut", *ends)
        return {name: place for place, name in enumerate(names)}

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return (*self.means([0.0] * 2 * len(self.places)),)

    def of_completions(
        self, rewards: Tensor, total: Tensor, flat: Tensor, lengths: Sequence[int], cut: Sequence[bool], process: int
    ) -> Tensor:
        """[M, 2] the sums of the completions that one agent has drawn in a process.

        Args:
            rewards, total: [R, F] and [R], NaN where there is none.
            flat: [P] whether all rewards of a group are equal.
            lengths, cut: [R] tokens, and whether `max_completion_length` ended them.
        """
        values = {"reward": total, "squares": total.square(), "flat": flat}
        values |= {"length": torch.tensor(lengths), "cut": torch.tensor(cut)}
        for name, own in zip(self.rewards, rewards.unbind(-1), strict=True):
            values |= {f"sum {name}": own, f"squares {name}": own.square()}
        found = torch.zeros(len(self.places), 2, dtype=torch.float64)
        for name, each in values.items():
            known = each.double()[~each.double().isnan()]
            found[self.places[name]] = torch.stack([known.sum(), torch.tensor(float(len(known))).double()])
        found[self.places[f"lengths {process}"]] = torch.tensor([min(lengths), max(lengths)]).double()
        return found

    def means(self, numbers: Sequence[float]) -> Mapping[str, Pair]:
        """Sum and count of each metric in a step, from the M pairs of all processes, one after the other."""
        pairs = {name: (numbers[2 * at], numbers[2 * at + 1]) for name, at in self.places.items()}
        found = {"reward": pairs["reward"], "reward_std": _deviation(pairs["reward"], pairs["squares"])}
        for name in self.rewards:
            found[f"rewards/{name}/mean"] = pairs[f"sum {name}"]
            found[f"rewards/{name}/std"] = _deviation(pairs[f"sum {name}"], pairs[f"squares {name}"])
        found |= {"kl": pairs["kl"]} if self.has_reference else {}
        found |= {"entropy": pairs["entropy"], "frac_reward_zero_std": pairs["flat"]}
        ends = [pairs[f"lengths {process}"] for process in range(self.num_processes)]
        known = [each for each in ends if each[1]]  # a process may have no completion
        found["completions/mean_length"] = pairs["length"]
        found["completions/min_length"] = min((least for least, _ in known), default=0.0), float(bool(known))
        found["completions/max_length"] = max((most for _, most in known), default=0.0), float(bool(known))
        return found | {"completions/clipped_ratio": pairs["cut"]}

    def share(self, name: str, sums: Sequence[Sequence[float]]) -> float:
        """The mean of what has this name, over the sums of all agents."""
        at = 2 * self.places[name]
        return sum(own[at] for own in sums) / max(1.0, sum(own[at + 1] for own in sums))


def _deviation(mean: Pair, squares: Pair) -> Pair:
    """The unbiased standard deviation of values with these sums, as one number; none of fewer than two values."""
    total, count = mean
    if count < 2:
        return 0.0, 0.0
    return math.sqrt(max(0.0, squares[0] - total**2 / count) / (count - 1)), 1.0


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

    def look(self, sums: Sums, of_agents: Sequence[Sequence[float]], step: int) -> None:
        """Look at the sums of a step, [K][2 M], over all processes."""
        self.flat = self.flat + 1 if sums.share("flat", of_agents) >= MOST else 0
        is_cut = sums.share("cut", of_agents) >= MOST
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
