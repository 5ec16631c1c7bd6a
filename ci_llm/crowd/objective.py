"""The objective of the agents: summed cross-entropy, minus a weighted diversity term.

It has no state and does not communicate. Losses are SUMS over targets: only the ballot knows the target count of the
whole optimizer step, and the loop divides by it. So neither accumulation nor uneven rows nor the number of processes
can bias a mean.

Legend: K agents, B rows, S targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ci_llm.core.determinism import derive_seed
from ci_llm.crowd.diversity import TermInputs, find_form
from ci_llm.crowd.model import CrowdOutput
from ci_llm.data.batches import Batch
from ci_llm.errors import BadInput


@dataclass(frozen=True)
class StepLoss:
    """The loss of agents on their rows of one micro-batch, in nats, summed over targets.

    Attributes:
        agents: the places of these n agents.
        batch: the rows.
        total: [] the loss for the backward pass.
        task: [n] the cross-entropy of each agent, for the log.
        diversity: [] the diversity term times S, for the log.
        targets: [n] how many targets each agent has.
        log_probs: [n, S] the log-probabilities, detached, from which agents with passes of their own are compared.
        metrics: [n, M, 2] sum and count of each of the objective's `metric_names`; None if it has none.
    """

    agents: tuple[int, ...]
    batch: Batch
    total: Tensor
    task: Tensor
    diversity: Tensor
    targets: tuple[int, ...]
    log_probs: Tensor | None = None
    metrics: Tensor | None = None


def of_all(losses: Sequence[StepLoss], num_agents: int) -> StepLoss:
    """The losses of a micro-batch as one, of all K agents; an agent without rows has none."""
    first = losses[0]
    if len(losses) == 1 and len(first.agents) == num_agents:
        return first
    tasks, targets = [first.task.new_zeros(1)] * num_agents, [0] * num_agents
    metrics = None if first.metrics is None else [torch.zeros_like(first.metrics[:1])] * num_agents
    for own in losses:
        for place, agent in enumerate(own.agents):
            tasks[agent], targets[agent] = own.task[place : place + 1], own.targets[place]
            if metrics is not None and own.metrics is not None:
                metrics[agent] = own.metrics[place : place + 1]
    return StepLoss(
        tuple(range(num_agents)),
        first.batch,
        torch.stack([own.total for own in losses]).sum(),
        torch.cat(tasks),
        first.diversity,
        tuple(targets),
        metrics=None if metrics is None else torch.cat(metrics),
    )


@dataclass(frozen=True)
class Objective:
    """Next-token prediction: Σₖ Σₛ cross-entropy - weight·K·(diversity x S).

    Args:
        diversity: a form of `ci_llm.crowd.diversity`: none or swd.
        weight: the weight of the term; without effect for `none`.
        seed: the seed of the directions.
        bootstrap: [K] the key of an agent's random row weights, None for an agent that weighs all rows the same; empty
            if all agents do. Weights change what is learned, and not the reported losses.
    """

    diversity: str = "none"
    weight: float = 0.0
    seed: int = 42
    bootstrap: tuple[tuple[int, int] | None, ...] = ()
    metric_names: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def count(batch: Batch) -> int:
        """The number of targets, by which sums over a micro-batch become means."""
        return batch.num_targets

    def __call__(self, output: CrowdOutput, step: int) -> StepLoss:
        """The loss of the agents of one output.

        Args:
            step: the optimizer step, which keys the random directions.

        Raises:
            BadInput: there is no such diversity form.
        """
        log_probs, batch, agents = output.log_probs, output.batch, output.agents
        task, keys = -log_probs.sum(1), [self.bootstrap[k] for k in agents] if self.bootstrap else []
        total = _weighted(log_probs, batch, keys) if any(keys) else task.sum()
        rewarded, term = find_form(self.diversity).rewarded, total.new_zeros(())
        with torch.set_grad_enabled(rewarded and torch.is_grad_enabled()):
            if rewarded or len(agents) > 1:
                term = self._term(log_probs, output.states, batch, step)
        if rewarded:
            total = total - self.weight * len(agents) * term
        targets = (batch.num_targets,) * len(agents)
        return StepLoss(agents, batch, total, task.detach(), term.detach(), targets, log_probs.detach())

    def together(self, losses: Sequence[StepLoss], num_agents: int, step: int) -> StepLoss:
        """Join the losses of all passes of a micro-batch; the diversity is that of agents on the same rows.

        Raises:
            BadInput: the diversity is rewarded, and agents took passes or rows of their own.
        """
        found, first = of_all(losses, num_agents), losses[0]
        if len(losses) == 1:
            return found
        if find_form(self.diversity).rewarded:
            raise BadInput(
                f"diversity {self.diversity} has gradients through all agents, in one pass over the same rows",
                where="pass_per_agent: true, or agents with rows of their own",
                hint="take diversity none",
            )
        if any(own.batch is not first.batch for own in losses):
            return found
        log_probs = torch.cat([own.log_probs for own in losses if own.log_probs is not None])
        return replace(found, diversity=self._term(log_probs, log_probs[:, :0, None], first.batch, step))

    def _term(self, log_probs: Tensor, states: Tensor, batch: Batch, step: int) -> Tensor:
        finite = log_probs.detach().isfinite().all(1)
        inputs = TermInputs(log_probs, states, finite=finite, batch=batch, step=step, seed=self.seed)
        return find_form(self.diversity).term(inputs)


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
