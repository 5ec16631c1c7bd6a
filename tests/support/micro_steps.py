"""Micro-steps as the training loop makes them, for tests of a crowd without a run."""

from __future__ import annotations

from collections.abc import Sequence

from ci_llm.core.determinism import seed_everything
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import StepLoss, TrainedObjective
from ci_llm.data.batches import Batch, MicroBatch, Owned


def owned(each: Sequence[Batch | None]) -> MicroBatch:
    """A micro-batch of agents with rows of their own."""
    return [Owned((k,), batch) for k, batch in enumerate(each) if batch is not None]


def micro_step(
    crowd: Crowd, objective: TrainedObjective, rows: MicroBatch | Batch, step: int, number: int = 0
) -> StepLoss:
    """Forward and backward; a batch is one that all agents read."""
    crowd.storage.begin_micro_step(step, 0, number)
    losses = list[StepLoss]()
    for part in crowd.passes_of(crowd.for_all(rows) if isinstance(rows, Batch) else rows):
        seed_everything(1, step)
        found = [objective(output, step) for output in crowd(part)]
        sum(loss.total for loss in found).backward()  # type: ignore[union-attr]
        losses += found
    return objective.together(losses, crowd.settings.num_agents, step)
