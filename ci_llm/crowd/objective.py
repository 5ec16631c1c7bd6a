"""What the agents are trained on: summed cross-entropy, minus a weighted diversity term.

It has no state and does not communicate. Losses are SUMS over targets: only the ballot knows the target count of the
whole optimizer step, and the loop divides by it. So neither accumulation nor uneven rows nor the number of processes
can bias a mean.

Legend: K agents, S targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ci_llm.crowd.diversity import TermInputs, find_form
from ci_llm.crowd.model import CrowdOutput
from ci_llm.crowd.row_weights import bootstrap_weights
from ci_llm.data.batches import Batch


@dataclass(frozen=True)
class StepLoss:
    """The loss of one micro-batch, in nats, summed over its targets.

    Attributes:
        total: [] what the backward pass begins with.
        task: [K] cross-entropy of each agent, for the log.
        diversity: [] the diversity term times S, for the log.
    """

    total: Tensor
    task: Tensor
    diversity: Tensor


@dataclass(frozen=True)
class Objective:
    """Σₖ Σₛ cross-entropy - weight·K·(diversity x S).

    Args:
        diversity: a module of `ci_llm.crowd.diversity`: none, joint, swd or swd_raw.
        weight: of the term; without effect for `none`.
        projections: random directions of the sliced Wasserstein distance.
        representation: the point of a row that it compares: last_token, first_token or mean.
        seed: of the directions.
        bootstrap: [K] what keys the row weights of an agent that draws them, None for an agent that weighs all rows
            alike; empty if all do. Weights change what is learned, and not the losses that are reported.
    """

    diversity: str = "none"
    weight: float = 0.0
    projections: int = 64
    representation: str = "last_token"
    seed: int = 42
    bootstrap: tuple[tuple[int, int] | None, ...] = ()

    def __call__(self, output: CrowdOutput, batch: Batch, step: int) -> StepLoss:
        """The loss of one micro-batch.

        Args:
            step: the optimizer step, which keys the random directions.

        Raises:
            BadInput: there is no such diversity form.
        """
        log_probs, form = output.log_probs, find_form(self.diversity)
        task = -log_probs.sum(1)
        inputs = TermInputs(
            log_probs,
            output.states,
            finite=log_probs.detach().isfinite().all(1),
            batch=batch,
            step=step,
            seed=self.seed,
            projections=self.projections,
            representation=self.representation,
        )
        with torch.set_grad_enabled(form.rewarded and torch.is_grad_enabled()):
            term = form.term(inputs)
        total = self._weighted(log_probs, batch) if self.bootstrap else task.sum()
        if form.rewarded:
            total = total - self.weight * log_probs.shape[0] * term
        return StepLoss(total, task.detach(), term.detach())

    def _weighted(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """[] the summed cross-entropy with every row's weight for every agent."""
        weights = bootstrap_weights(self.bootstrap, batch.sample_ids).to(log_probs)
        return -(log_probs * weights[:, batch.target_rows]).sum()
