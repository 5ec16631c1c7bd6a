"""The loss of a micro-batch of pairs, rated or labelled rows: what the passes of agents and base found, given to an
objective.

As in `ci_llm.crowd.objective`, losses are SUMS, here over units (pairs, or rows), and nothing is communicated.
What concerns the whole step is given: `StepFacts`. So a mean does not depend on micro-batches, accumulation or
processes.

Legend: K agents, U units, R rows (of a pair two), S targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ci_llm.crowd.model import AgentOutputs, CrowdModel, CrowdOutput
from ci_llm.crowd.objective import Objective as NextToken
from ci_llm.crowd.objective import StepLoss, bootstrap_weights
from ci_llm.data.batches import AgentBatches, Batch
from ci_llm.objectives import Evidence, Metrics, Objective, RowKind, for_agent, pairs

#: What is measured of all pairs or rated rows, beside what an objective adds. The names are TRL's.
_NAMES: Final[dict[RowKind, tuple[str, ...]]] = {
    "pairs": ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected"),
    "rated": ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"),
    "labelled": (),
}


@dataclass(frozen=True)
class StepFacts:
    """What an objective has to know of the whole step.

    Attributes:
        nll_shares: [K] units for each token of the next-token loss; empty: nothing learns these.
        kl: [K, 1] see `Evidence.kl`.
    """

    nll_shares: tuple[float, ...] = ()
    kl: Tensor | None = None


@dataclass(frozen=True)
class Preferences:
    """An objective as the loop uses one.

    Args:
        objective: with the settings of all agents.
        crowd: its base alone is the reference, or its start.
        bootstrap: see `ci_llm.crowd.objective.Objective`.
        facts: of the step.
    """

    objective: Objective
    crowd: CrowdModel
    bootstrap: tuple[tuple[int, int] | None, ...] = ()
    facts: StepFacts = StepFacts()

    @property
    def metric_names(self) -> tuple[str, ...]:
        needs = self.objective.needs
        names = (name for name in _NAMES[needs.rows] if not (needs.head and name.startswith("logps")))
        return (*names, *self.objective.metric_names)

    @staticmethod
    def count(batch: Batch | AgentBatches) -> int:
        """What divides the sums of a micro-batch in a mean: its units."""
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
        """The losses of all passes of a micro-batch as one; step has no meaning here."""
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
            found = [torch.stack([total, torch.zeros_like(total) + count], -1) for total, count in measured.values()]
            metrics = torch.stack(found, 1) if found else losses.new_zeros(len(losses), 0, 2)
        return StepLoss(
            total=weighted.sum(),
            task=losses.detach().sum(1),
            diversity=losses.new_zeros(()),
            targets=(batch.num_units,) * len(losses),
            metrics=metrics,
        )

    def evidence(self, output: CrowdOutput, batch: Batch, agent: int | None = None) -> Evidence:
        """What was found about the rows of a micro-batch.

        Args:
            output: of all agents, or of one.
        """
        needs, part = self.objective.needs, slice(None) if agent is None else slice(agent, agent + 1)
        log_probs, labels = output.log_probs, batch.labels
        assert batch.answered is not None
        assert labels is not None
        if output.values is not None:
            counts = torch.tensor(batch.target_counts, device=labels.device)
            return Evidence(log_probs.double()[:, :0], counts, labels=labels, values=output.values.double())
        answers = log_probs.where(batch.answered, 0.0) if needs.nll == "rows" else log_probs
        ones = batch.answered.double()[None]
        found = Evidence(
            sums=row_sums(answers, batch),
            lengths=row_sums(ones, batch)[0],
            labels=labels > 0 if needs.rows == "rated" else None,
            kl=None if self.facts.kl is None else self.facts.kl[part],
        )
        if needs.reference:
            base = self.crowd.reference(batch, agent)
            base = base.where(batch.answered, 0.0) if needs.nll == "rows" else base
            found = replace(found, reference=row_sums(base, batch))
        if needs.nll != "none":
            counts = torch.tensor(batch.target_counts, device=log_probs.device)
            shares = found.sums.new_tensor(self.facts.nll_shares or (1.0,) * self.crowd.num_agents)[part, None]
            nll = -(row_sums(log_probs, batch) if needs.nll == "rows" else found.sums)
            found = replace(found, nll=pairs(nll)[0], nll_tokens=pairs(counts)[0], nll_share=shares)
        return found


#: What a run trains by.
TrainedObjective = NextToken | Preferences


def row_sums(values: Tensor, batch: Batch) -> Tensor:
    """[K, S] of targets -> [K, R] fp64 of rows. Row by row, because `index_add` has no fixed order on a GPU."""
    return torch.stack([part.double().sum(-1) for part in values.split(list(batch.target_counts), dim=-1)], dim=-1)


def _measured(objective: Objective, e: Evidence) -> Metrics:
    """Sum [K] and count of what is measured, by the names of `Preferences.metric_names`."""
    if objective.needs.rows == "labelled":
        return objective.metrics(e)
    rewards = objective.rewards(e)
    if e.values is not None or e.labels is None:
        better, worse = pairs(rewards)
        units = float(better.shape[1])
        found: Metrics = {
            "rewards/chosen": (better.sum(1), units),
            "rewards/rejected": (worse.sum(1), units),
            "rewards/accuracies": ((better > worse).double().sum(1), units),
        }
        if e.values is None:
            logps = zip(("logps/chosen", "logps/rejected"), pairs(e.sums), strict=True)
            found = {**found, **{name: (values.sum(1), units) for name, values in logps}}
    else:
        sides = {"chosen": e.labels, "rejected": ~e.labels}
        found = {
            f"{what}/{side}": (values.where(mask, 0.0).sum(1), mask.sum())
            for what, values in (("rewards", rewards), ("logps", e.sums))
            for side, mask in sides.items()
        }
    return {**found, **objective.metrics(e)}
