"""The objective of the agents: summed cross-entropy, minus a weighted diversity term.

It has no state and does not communicate. Losses are SUMS over targets: only the ballot knows the target count of the
whole optimizer step, and the loop divides by it. So neither accumulation nor uneven rows nor the number of processes
can bias a mean.

Legend: K agents, B rows, S targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ci_llm.core.determinism import derive_seed
from ci_llm.crowd.diversity import TermInputs, find_form
from ci_llm.crowd.model import AgentOutputs, CrowdOutput
from ci_llm.data.batches import AgentBatches, Batch
from ci_llm.errors import BadInput


@dataclass(frozen=True)
class StepLoss:
    """The loss of one micro-batch, in nats, summed over its targets.

    Attributes:
        total: [] what the backward pass begins with.
        task: [K] cross-entropy of each agent, for the log.
        diversity: [] the diversity term times S, for the log.
        targets: [K] the targets of each agent, if agents have rows of their own; empty: all have those of the batch.
        log_probs: [1, S] those of the only agent of a pass, detached; None: the pass was one of all agents.
        metrics: [K, M, 2] sum and count of what the objective measures, by its `metric_names`; None: nothing.
    """

    total: Tensor
    task: Tensor
    diversity: Tensor
    targets: tuple[int, ...] = ()
    log_probs: Tensor | None = None
    metrics: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """Next-token prediction: Σₖ Σₛ cross-entropy - weight·K·(diversity x S).

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
    metric_names: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def count(batch: Batch | AgentBatches) -> int:
        """What divides the sums of a micro-batch in a mean: its targets."""
        return batch.num_targets

    def __call__(
        self, output: CrowdOutput | AgentOutputs, batch: Batch | AgentBatches, step: int, agent: int | None = None
    ) -> StepLoss:
        """The loss of one micro-batch; where agents have rows of their own, what each has alone, added up.

        Args:
            step: the optimizer step, which keys the random directions.
            agent: the only one that the output is of, in a pass of its own; `together` joins these.

        Raises:
            BadInput: there is no such diversity form, or it compares agents that take passes or rows of their own.
        """
        if isinstance(batch, AgentBatches):
            assert isinstance(output, AgentOutputs)
            each = enumerate(zip(output.each, batch.each, strict=True))
            parts = [(k, self._of_one(own, rows, k)) for k, (own, rows) in each if own is not None and rows is not None]
            return self.together(parts, batch, step)
        assert isinstance(output, CrowdOutput)
        if agent is not None:
            return self._of_one(output, batch, agent)
        log_probs, rewarded = output.log_probs, find_form(self.diversity).rewarded
        task = -log_probs.sum(1)
        with torch.set_grad_enabled(rewarded and torch.is_grad_enabled()):
            term = self._term(log_probs, output.states, batch, step)
        total = _weighted(log_probs, batch, self.bootstrap) if self.bootstrap else task.sum()
        if rewarded:
            total = total - self.weight * log_probs.shape[0] * term
        return StepLoss(total, task.detach(), term.detach())

    def together(
        self, parts: Sequence[tuple[int | None, StepLoss]], batch: Batch | AgentBatches, step: int
    ) -> StepLoss:
        """The losses of all passes of a micro-batch as one.

        Args:
            parts: agent and loss of every pass; where it was one of all agents, the only one.
            batch: the whole micro-batch.
        """
        first, loss = parts[0]
        if first is None:
            return loss
        total = torch.stack([own.total for _, own in parts]).sum()
        if isinstance(batch, Batch):
            log_probs = torch.cat([own.log_probs for _, own in parts if own.log_probs is not None])
            term = self._term(log_probs, log_probs[:, :0, None], batch, step)
            return StepLoss(total, torch.cat([own.task for _, own in parts]), term)
        found = {agent: own.task for agent, own in parts}
        tasks = [found.get(k, loss.task.new_zeros(1)) for k in range(len(batch.each))]
        targets = tuple(0 if rows is None else rows.num_targets for rows in batch.each)
        return StepLoss(total, torch.cat(tasks), total.new_zeros(()), targets)

    def _term(self, log_probs: Tensor, states: Tensor, batch: Batch, step: int) -> Tensor:
        inputs = TermInputs(
            log_probs,
            states,
            finite=log_probs.detach().isfinite().all(1),
            batch=batch,
            step=step,
            seed=self.seed,
            projections=self.projections,
            representation=self.representation,
        )
        return find_form(self.diversity).term(inputs)

    def _of_one(self, output: CrowdOutput, batch: Batch, agent: int) -> StepLoss:
        """What one agent has alone."""
        if find_form(self.diversity).rewarded:
            raise BadInput(
                f"diversity {self.diversity} has gradients through all agents, in one pass over the same rows",
                where="pass_per_agent: true, or agents with rows of their own",
                hint="take diversity none",
            )
        log_probs, keys = output.log_probs, self.bootstrap[agent : agent + 1]
        task = -log_probs.sum(1)
        total = _weighted(log_probs, batch, keys) if any(keys) else task.sum()
        return StepLoss(total, task.detach(), total.new_zeros(()), log_probs=log_probs.detach())


def _weighted(log_probs: Tensor, batch: Batch, keys: Sequence[tuple[int, int] | None]) -> Tensor:
    """[] the summed cross-entropy of agents [K, S] with every row's weight for every agent.

    Args:
        keys: see `Objective.bootstrap`.
    """
    weights = bootstrap_weights(keys, batch.sample_ids).to(log_probs, non_blocking=True)
    return -(log_probs * weights[:, batch.target_rows]).sum()


def bootstrap_weights(keys: Sequence[tuple[int, int] | None], rows: Sequence[int]) -> Tensor:
    """Weights of rows that each agent draws for itself, once for the whole run: exponential with mean 1.

    This is the Bayesian bootstrap: an agent that is trained with such weights is one draw of the distribution of agents
    that the data allow (Rubin, "The Bayesian Bootstrap", 1981; Newton and Raftery, 1994). A weight depends on the
    agent's seed and the number of the row, and on nothing else: it is the same in every epoch, on any number of
    processes and after a resume.

    Args:
        keys: [K] seed and index of the agents that draw; None for the others, whose weights are 1.
        rows: [B] numbers of the rows in the data set.

    Returns:
        [K, B] fp64.
    """
    weights = [[1.0 if key is None else _weight(*key, row) for row in rows] for key in keys]
    return torch.tensor(weights, dtype=torch.float64)


def _weight(seed: int, index: int, row: int) -> float:
    uniform = (derive_seed(seed, "row weight", index, row) + 0.5) / 2**63  # in (0, 1]
    return -math.log(uniform)
