"""What the agents are trained on: summed cross-entropy, minus a weighted diversity term. No state, no communication.

Losses are SUMS over targets; the loop divides by the target count of the whole optimizer step, which only the ballot
knows, so accumulation, uneven rows and the number of processes cannot bias a mean.

Legend: K agents, S targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.diversity import jensen_gap, row_states, sliced_wasserstein, unit_directions
from ci_llm.crowd.model import CrowdOutput
from ci_llm.data.batches import Batch

Diversity = Literal["none", "joint", "swd", "swd_raw"]


@dataclass(frozen=True)
class StepLoss:
    """Sums over the targets of one micro-batch: `total []` is differentiable, the rest is for the log."""

    total: Tensor
    task: Tensor  # [K] summed cross-entropy per agent
    diversity: Tensor  # [] the term's value times S


@dataclass(frozen=True)
class Objective:
    """Σₖ Σₛ cross-entropy - λ·K·(diversity x S).

    joint    the Jensen gap between the agents' cross-entropy and the crowd's, in nats
    swd      squared sliced Wasserstein distance of unit-length final states, one point per row; at most 4
    swd_raw  the same on raw states: the original's term, unbounded, for comparison
    none     cross-entropy alone; the Jensen gap is measured for the log
    """

    diversity: Diversity = "none"
    weight: float = 0.0
    projections: int = 64
    representation: str = "last_token"
    seed: int = 42

    @property
    def compares_sets(self) -> bool:
        """A distance between sets of rows depends on how a step is split into micro-batches and processes."""
        return self.diversity in ("swd", "swd_raw")

    def __call__(self, output: CrowdOutput, batch: Batch, step: int) -> StepLoss:
        log_probs = output.log_probs
        task = -log_probs.sum(1)
        healthy = log_probs.detach().isfinite().all(1)
        term = self._term(output, batch, step, healthy)
        total = task.sum()
        if self.diversity != "none":
            total = total - self.weight * log_probs.shape[0] * term
        return StepLoss(total, task.detach(), term.detach())

    def _term(self, output: CrowdOutput, batch: Batch, step: int, healthy: Tensor) -> Tensor:
        if not self.compares_sets:
            with torch.set_grad_enabled(self.diversity == "joint" and torch.is_grad_enabled()):
                return jensen_gap(output.log_probs, healthy)
        if batch.num_rows < 2:  # a set of one point has no shape to compare
            return output.log_probs.new_zeros(())
        points = row_states(output.states, batch, self.representation).to(output.log_probs.dtype)
        if self.diversity == "swd":
            points = torch.nn.functional.normalize(points, dim=-1)
        generator = generator_for(self.seed, "directions", step)
        directions = unit_directions(points.shape[-1], self.projections, generator)
        return sliced_wasserstein(points, directions.to(points), healthy) * batch.num_targets
