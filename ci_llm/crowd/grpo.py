"""GRPO in the form that the loop uses: the loss of completions that agents have drawn, and TRL's metrics of a step.

Losses are SUMS over tokens with weights, and what divides them is counted for the vote. So neither micro-batches nor
the number of processes change a step. Of metrics, too, sums are voted on (`ci_llm/objectives/grpo/metrics.py`).

Legend: K agents, M pairs of numbers that are added up, S targets, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ci_llm.crowd.model import CrowdModel, CrowdOutput
from ci_llm.crowd.objective import Objective as NextToken
from ci_llm.crowd.objective import StepLoss, of_all
from ci_llm.crowd.preferences import Preferences
from ci_llm.data.batches import Batch
from ci_llm.lora.passes import Head
from ci_llm.objectives.grpo import Grpo, divergence
from ci_llm.objectives.grpo.metrics import Sums
from ci_llm.objectives.grpo.rewards import Reward


@dataclass
class Tempered:
    """The arithmetic of a chunk at a temperature (`OfChunk` in `ci_llm/lora/passes.py`), which keeps the entropies.

    Attributes:
        entropies: of each chunk [S] the entropy of the distribution of each token, in nats, without a gradient.
    """

    temperature: float = 1.0
    entropies: list[Tensor] = field(default_factory=list)

    def __call__(self, z: Tensor, index: Tensor, head: Head, narrow: Tensor, slopes: Tensor | None) -> Tensor:
        bend = None if slopes is None or head.softcap is None else 1 - (z / head.softcap) ** 2
        if self.temperature != 1:
            z.div_(self.temperature)
        z.sub_(z.amax(1, keepdim=True))
        wanted, shares = z.gather(1, index), z.exp()
        total = shares.sum(1, keepdim=True)
        self.entropies.append((total.log() - z.mul_(shares).sum(1, keepdim=True) / total).squeeze(1))
        if slopes is not None:  # as in `plain_chunk`; the scale of the logits is one over the temperature as well
            scale = head.scale / self.temperature
            shares.mul_(-scale / total).scatter_(1, index, scale, reduce="add")
            if bend is not None:
                shares.mul_(bend)
            torch.mm(shares if shares.dtype == narrow.dtype else narrow.copy_(shares), head.weight, out=slopes)
        return (wanted - total.log()).squeeze(1)


@dataclass(frozen=True)
class GrpoObjective:
    """The objective of a run whose agents draw what they learn from.

    Args:
        objective: with the settings of all agents.
        rewards: the functions that judge completions.
        num_processes: of the run.
        of_step: [K, M, 2] what this process adds to the sums of a step beside its passes; None outside of one.
        failed: agents that could not draw, because their numbers are not finite.
    """

    objective: Grpo
    crowd: CrowdModel
    rewards: tuple[Reward, ...]
    num_processes: int = 1
    of_step: Tensor | None = None
    failed: frozenset[int] = frozenset()

    @cached_property
    def sums(self) -> Sums:
        """What is added up over micro-batches and processes."""
        return Sums(tuple(own.name for own in self.rewards), self.objective.needs.reference, self.num_processes)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics, which are TRL's."""
        return self.sums.metric_names

    @staticmethod
    def count(batch: Batch) -> int:
        """The prompts of a micro-batch."""
        return batch.num_units

    def __call__(self, output: CrowdOutput, step: int) -> StepLoss:
        """The loss of the agents of one output, each on completions of its own; `step` is unused here."""
        batch, agents = output.batch, output.agents
        assert batch.advantages is not None
        assert batch.weights is not None
        weights, gains = batch.weights[batch.target_rows], batch.advantages[batch.target_rows]
        learned, places = (weights > 0).double(), self.sums.places
        totals, metrics = [], output.states.new_zeros(len(agents), len(places), 2, dtype=torch.float64)
        for place, agent in enumerate(agents):
            beta, temperature = self.objective.of_agent(agent)
            chunk, divergences = Tempered(temperature), None
            log_probs = self.crowd.log_probs_by(output.states[place : place + 1], batch, chunk)[0].double()
            if beta:
                reference = self.crowd.reference((agent,), batch, Tempered(temperature))[0].double()
                divergences = divergence(log_probs, reference)
                metrics[place, places["kl"], 0] = (divergences.detach() * learned).sum()
            totals.append((self.objective.token_losses(log_probs, gains, divergences, beta) * weights).sum())
            metrics[place, places["entropy"], 0] = (torch.cat(chunk.entropies).double() * learned).sum()
        for name in ("entropy", "kl"):
            metrics[:, places[name], 1] = learned.sum()
        total = torch.stack(totals)
        lost = [math.nan if agent in self.failed else 0.0 for agent in agents]
        return StepLoss(
            agents,
            batch,
            total=total.sum(),
            task=total.detach() + total.new_tensor(lost) if self.failed else total.detach(),
            diversity=total.new_zeros(()),
            targets=(batch.counted,) * len(agents),
            metrics=metrics,
        )

    def together(self, losses: Sequence[StepLoss], num_agents: int, step: int) -> StepLoss:
        """Join the losses of all passes of a micro-batch; `step` is unused here."""
        return of_all(losses, num_agents)


#: The objective of a run.
TrainedObjective = NextToken | Preferences | GrpoObjective


def num_pairs(objective: TrainedObjective) -> int:
    """How many pairs of numbers of each agent are added up in a step, for its metrics."""
    return len(objective.sums.places if isinstance(objective, GrpoObjective) else objective.metric_names)


def of_metrics(objective: TrainedObjective, sums: Sequence[Sequence[float]]) -> list[list[float]]:
    """Sum and count of each of `metric_names` for every agent, from what was added up."""
    if not isinstance(objective, GrpoObjective):
        return [[*own] for own in sums]
    return [[number for pair in objective.sums.means(own).values() for number in pair] for own in sums]
