"""The loss of a micro-batch of pairs, rated or labelled rows, by an objective and the passes of agents and base.

As in `ci_llm.crowd.objective`, losses are SUMS, here over units (pairs or rows), and nothing is communicated. Facts
about the whole step are given (`StepFacts`). So a mean does not depend on micro-batches, accumulation or processes.

Legend: K agents, U units, R rows (of a pair two), S targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ci_llm.crowd.model import AgentOutputs, CrowdModel, CrowdOutput
from ci_llm.crowd.objective import Objective as NextToken
from ci_llm.crowd.objective import StepLoss, bootstrap_weights
from ci_llm.data.batches import AgentBatches, Batch
from ci_llm.objectives import Evidence, Metrics, Objective, for_agent, pairs


@dataclass(frozen=True)
class StepFacts:
    """The facts about the whole step that an objective needs.

    Attributes:
        nll_shares: [K] units per token of the next-token loss; empty if the objective does not use that loss.
        kl: [K, 1] see `Evidence.kl`.
    """

    nll_shares: tuple[float, ...] = ()
    kl: Tensor | None = None


@dataclass(frozen=True)
class Preferences:
    """An objective in the form that the loop uses.

    Args:
        objective: the objective, with the settings of all agents.
        crowd: the crowd, whose base alone or start is the reference.
        bootstrap: see `ci_llm.crowd.objective.Objective`.
        facts: the facts about the step.
    """

    objective: Objective
    crowd: CrowdModel
    bootstrap: tuple[tuple[int, int] | None, ...] = ()
    facts: StepFacts = StepFacts()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of TRL's metrics, and of those that the objective adds."""
        needs, kinds = self.objective.needs, ["rewards"] if self.objective.needs.head else ["rewards", "logps"]
        judged = [f"{kind}/{side}" for kind in kinds for side in ("chosen", "rejected")]
        names = {
            "rewards/accuracies": needs.rows == "pairs",
            **dict.fromkeys(judged, needs.rows != "labelled"),
            "nll_loss": needs.nll != "none",
            "kl": needs.mismatched,
        }
        return (*(name for name, holds in names.items() if holds), *self.objective.metric_names)

    @staticmethod
    def count(batch: Batch | AgentBatches) -> int:
        """The number of units, by which sums over a micro-batch become means."""
        present = batch.present if isinstance(batch, AgentBatches) else [batch]
        return sum(own.num_units for own in present)

    def __call__(
        self, output: CrowdOutput | AgentOutputs, batch: Batch | AgentBatches, step: int, agent: int | None = None
    ) -> StepLoss:
        """The loss of one micro-batch; for the arguments see `ci_llm.crowd.objective.Objective`."""
        if isinstance(batch, AgentBatches):
            assert isinstance(output, AgentOutputs)
            each = enumerate(zip(output.each, batch.each, strict=True))
            found = [(k, self._loss(own, rows, k)) for k, (own, rows) in each if own is not None and rows is not None]
            return self.together(found, batch, step)
        assert isinstance(output, CrowdOutput)
        return self._loss(output, batch, agent)

    def together(
        self, parts: Sequence[tuple[int | None, StepLoss]], batch: Batch | AgentBatches, step: int
    ) -> StepLoss:
        """Join the losses of all passes of a micro-batch; `batch` and `step` are unused here."""
        first, loss = parts[0]
        if first is None:
            return loss
        assert loss.metrics is not None
        nothing = StepLoss(loss.total, torch.zeros_like(loss.task), loss.diversity, (0,), None, loss.metrics * 0)
        found = dict(parts)
        each = [found.get(k, nothing) for k in range(self.crowd.num_agents)]
        return StepLoss(
            total=torch.stack([own.total for _, own in parts]).sum(),
            task=torch.cat([own.task for own in each]),
            diversity=loss.diversity,
            targets=tuple(own.targets[0] for own in each),
            metrics=torch.cat([own.metrics for own in each if own.metrics is not None]),
        )

    def _loss(self, output: CrowdOutput, batch: Batch, agent: int | None) -> StepLoss:
        """The loss of a pass of all agents, or of one."""
        objective = self.objective if agent is None else for_agent(self.objective, agent)
        evidence = self.evidence(output, batch, agent)
        losses = objective.losses(evidence)
        keys = self.bootstrap if agent is None else self.bootstrap[agent : agent + 1]
        weighted = losses * bootstrap_weights(keys, batch.sample_ids).to(losses) if any(keys) else losses
        with torch.no_grad():
            measured = _measured(objective, evidence)
            sums = (measured[name] for name in self.metric_names)
            found = [torch.stack([total, torch.zeros_like(total) + count], -1) for total, count in sums]
            metrics = torch.stack(found, 1) if found else losses.new_zeros(len(losses), 0, 2)
        return StepLoss(
            total=weighted.sum(),
            task=losses.detach().sum(1),
            diversity=losses.new_zeros(()),
            targets=(batch.num_units,) * len(losses),
            metrics=metrics,
        )

    def evidence(self, output: CrowdOutput, batch: Batch, agent: int | None = None) -> Evidence:
        """The evidence about the rows of a micro-batch.

        Args:
            output: the output of all agents, or of one.
            agent: the only agent; None for all.
        """
        needs, part = self.objective.needs, slice(None) if agent is None else slice(agent, agent + 1)
        labels, answered = batch.labels, batch.answered
        assert labels is not None
        assert answered is not None
        judged = labels > 0 if needs.rows == "rated" else labels
        counts = torch.tensor(batch.target_counts, device=labels.device)
        if output.values is not None:
            nothing = output.log_probs.double()[:, :0]
            return Evidence(nothing, counts, labels=judged, values=output.values.double())

        def sums_of(log_probs: Tensor) -> Tensor:
            return row_sums(log_probs.where(answered, 0.0) if needs.nll == "rows" else log_probs, batch)

        found = Evidence(
            sums=sums_of(output.log_probs),
            lengths=row_sums(answered[None], batch)[0],
            reference=sums_of(self.crowd.reference(batch, agent)) if needs.reference else None,
            labels=judged,
            kl=None if self.facts.kl is None else self.facts.kl[part],
        )
        if needs.nll == "none":
            return found
        shares = found.sums.new_tensor(self.facts.nll_shares or (1.0,) * self.crowd.num_agents)[part, None]
        nll = -(row_sums(output.log_probs, batch) if needs.nll == "rows" else found.sums)
        return replace(found, nll=pairs(nll)[0], nll_tokens=pairs(counts)[0], nll_share=shares)


#: The objective of a run.
TrainedObjective = NextToken | Preferences


def row_sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum values [K, S] of targets to [K, R] fp64 of rows, row by row, as `index_add` has no fixed order on a GPU."""
    return torch.stack([part.double().sum(-1) for part in values.split(list(batch.target_counts), dim=-1)], dim=-1)


def _measured(objective: Objective, e: Evidence) -> Metrics:
    """The sum [K] and the count of every metric in `Preferences.metric_names`, by name."""
    found: dict[str, tuple[Tensor, Tensor | float]] = {**objective.metrics(e)}
    if e.nll is not None and e.nll_tokens is not None:
        found["nll_loss"] = e.nll.sum(1), e.nll_tokens.sum()
    if e.kl is not None:
        found["kl"] = e.kl[:, 0] * e.sums.shape[1], float(e.sums.shape[1])
    if objective.needs.rows == "labelled":
        return found
    rewards = objective.rewards(e)
    for kind, values in (("rewards", rewards), *((("logps", e.sums),) if e.values is None else ())):
        better, worse = pairs(values)
        sides: list[tuple[Tensor, Tensor | float]] = [(better, better.shape[1]), (worse, worse.shape[1])]
        if e.labels is not None and objective.needs.rows == "rated":
            sides = [(values.where(good, 0.0), good.sum()) for good in (e.labels, ~e.labels)]
        for side, (own, count) in zip(("chosen", "rejected"), sides, strict=True):
            found[f"{kind}/{side}"] = own.sum(1), count
    if objective.needs.rows == "pairs":
        better, worse = pairs(rewards)
        found["rewards/accuracies"] = (better > worse).double().sum(1), float(better.shape[1])
    return found
