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
        total: [] the loss for the backward pass.
        task: [K] the cross-entropy of each agent, for the log.
        diversity: [] the diversity term times S, for the log.
        targets: [K] how many targets each agent has, if agents have rows of their own; otherwise empty.
        log_probs: [1, S] the log-probabilities of the only agent of a pass, detached; None in a pass of all agents.
        metrics: [K, M, 2] sum and count of each of the objective's `metric_names`; None if it has none.
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
        diversity: a module of `ci_llm.crowd.diversity`: none or swd.
        weight: the weight of the term; without effect for `none`.
        representation: the state that stands for a row in this distance: last_token, first_token or mean.
        seed: the seed of the directions.
        bootstrap: [K] the key of an agent's random row weights, None for an agent that weighs all rows the same; empty
            if all agents do. Weights change what is learned, and not the reported losses.
    """

    diversity: str = "none"
    weight: float = 0.0
    representation: str = "last_token"
    seed: int = 42
    bootstrap: tuple[tuple[int, int] | None, ...] = ()
    metric_names: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def count(batch: Batch | AgentBatches) -> int:
        """The number of targets, by which sums over a micro-batch become means."""
        return batch.num_targets

    def __call__(
        self, output: CrowdOutput | AgentOutputs, batch: Batch | AgentBatches, step: int, agent: int | None = None
    ) -> StepLoss:
        """The loss of one micro-batch; for agents with rows of their own, the sum of their losses alone.

        Args:
            step: the optimizer step, which keys the random directions.
            agent: the only agent of the pass; None for a pass of all agents. `together` joins the losses of passes.

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
        """Join the losses of all passes of a micro-batch.

        Args:
            parts: the agent and the loss of every pass; agent None in the only part for a pass of all agents.
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
            representation=self.representation,
        )
        return find_form(self.diversity).term(inputs)

    def _of_one(self, output: CrowdOutput, batch: Batch, agent: int) -> StepLoss:
        """The loss of one agent's pass."""
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
    """The summed cross-entropy [] of agents [K, S], with every row's weight for every agent.

    Args:
        keys: see `Objective.bootstrap`.
    """
    weights = bootstrap_weights(keys, batch.sample_ids).to(log_probs, non_blocking=True)
    return -(log_probs * weights[:, batch.target_rows]).sum()


def bootstrap_weights(keys: Sequence[tuple[int, int] | None], rows: Sequence[int]) -> Tensor:
    """Row weights that each agent draws for itself, once for the whole run: exponential with mean 1.

    This is the Bayesian bootstrap: an agent trained with such weights is a sample from the posterior distribution of
    agents (Rubin, "The Bayesian Bootstrap", 1981; Newton and Raftery, 1994). A weight depends only on the agent's key
    and the number of the row: it is the same in every epoch, on any number of processes and after a resume.

    Args:
        keys: [K] seed and index of the agents that draw weights; None for the others, whose weights are 1.
        rows: [B] the numbers of the rows in the data set.

    Returns:
        [K, B] fp64.
    """
    weights = [[1.0 if key is None else _weight(*key, row) for row in rows] for key in keys]
    return torch.tensor(weights, dtype=torch.float64)


def _weight(seed: int, index: int, row: int) -> float:
    uniform = (derive_seed(seed, "row weight", index, row) + 0.5) / 2**63  # in (0, 1]
    return -math.log(uniform)
