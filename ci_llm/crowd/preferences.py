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

from ci_llm.crowd.model import CrowdModel, CrowdOutput
from ci_llm.crowd.objective import StepLoss, bootstrap_weights, of_all
from ci_llm.data.batches import Batch
from ci_llm.objectives import Evidence, Metrics, Objective, for_agents, pairs


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
    def count(batch: Batch) -> int:
        """The number of units, by which sums over a micro-batch become means."""
        return batch.num_units

    def __call__(self, output: CrowdOutput, step: int) -> StepLoss:
        """The loss of the agents of one output; `step` is unused here."""
        agents, batch = output.agents, output.batch
        objective = for_agents(self.objective, _index(agents))
        evidence = self.evidence(output)
        losses = objective.losses(evidence)
        keys = [self.bootstrap[k] for k in agents] if self.bootstrap else []
        weighted = losses * bootstrap_weights(keys, batch.sample_ids).to(losses) if any(keys) else losses
        with torch.no_grad():
            measured = _measured(objective, evidence)
            sums = (measured[name] for name in self.metric_names)
            found = [torch.stack([total, torch.zeros_like(total) + count], -1) for total, count in sums]
            metrics = torch.stack(found, 1) if found else losses.new_zeros(len(losses), 0, 2)
        return StepLoss(
            agents,
            batch,
            total=weighted.sum(),
            task=losses.detach().sum(1),
            diversity=losses.new_zeros(()),
            targets=(batch.num_units,) * len(losses),
            metrics=metrics,
        )

    def together(self, losses: Sequence[StepLoss], num_agents: int, step: int) -> StepLoss:
        """Join the losses of all passes of a micro-batch; `step` is unused here."""
        return of_all(losses, num_agents)

    def evidence(self, output: CrowdOutput) -> Evidence:
        """The evidence about the rows of one output."""
        needs, batch, places = self.objective.needs, output.batch, _index(output.agents)
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
            reference=sums_of(self.crowd.reference(output.agents, batch)) if needs.reference else None,
            labels=judged,
            kl=None if self.facts.kl is None else self.facts.kl[places],
        )
        if needs.nll == "none":
            return found
        shares = found.sums.new_tensor(self.facts.nll_shares or (1.0,) * self.crowd.num_agents)[places, None]
        nll = -(row_sums(output.log_probs, batch) if needs.nll == "rows" else found.sums)
        return replace(found, nll=pairs(nll)[0], nll_tokens=pairs(counts)[0], nll_share=shares)


def _index(agents: tuple[int, ...]) -> slice | list[int]:
    """The places of agents as an index; a slice where it can be one, because a GPU is waited for to take a list."""
    if not agents:
        return slice(None)  # the base alone
    first, end = agents[0], agents[-1] + 1
    return slice(first, end) if agents == tuple(range(first, end)) else [*agents]


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
    rewards = objective.answer_rewards(e)
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
