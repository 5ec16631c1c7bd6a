"""The gradients of one optimizer step on this process: its micro-batches, forward and backward.

Losses are summed, so that the gradients of all passes add up. Nothing is sent here: under `no_sync` a process that runs
out of memory leaves nobody waiting. `apply_gradients` (loop.py) reduces them, and clips them with `AgentStorage.clip`.

Legend: K agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ci_llm.core.determinism import seed_everything
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken, StepLoss, TrainedObjective
from ci_llm.data.batches import MicroBatch
from ci_llm.distributed.ballot import StepSums
from ci_llm.run.step.nonfinite import nonfinite_here


@dataclass
class Sums:
    """The sums of one optimizer step on this process; the ballot adds them over all processes."""

    num_targets: int
    sums: Tensor  # see `StepSums`
    nonfinite: Tensor  # [K] bool: an agent's loss or gradient is not finite here


@dataclass(frozen=True)
class TrainingPasses:
    """The passes of a crowd, forward and backward.

    Attributes:
        model: the crowd as Accelerate has prepared it.
        seed: the seed of random numbers.
        loss_scale: the factor on fp16 losses; None in every other precision.
        tick: called before every pass, as a sign of life.
    """

    accelerator: Accelerator
    model: nn.Module
    crowd: Crowd
    objective: TrainedObjective
    seed: int
    loss_scale: float | None
    tick: Callable[[], object]

    def of_fixed_rows(self) -> TrainingPasses:
        """Passes that do not depend on the step: fixed rows are single ones, whatever is trained on."""
        objective = self.objective if isinstance(self.objective, NextToken) else NextToken()
        return replace(self, objective=objective, loss_scale=None)

    def compute_gradients(self, step: int, micro_batches: Sequence[MicroBatch]) -> Sums:
        """Forward and backward of every micro-batch; the gradients add up in the crowd's storage."""
        objective, accelerator, crowd = self.objective, self.accelerator, self.crowd
        process = accelerator.process_index
        self.model.train()
        crowd.storage.begin_step(step)
        sums = torch.zeros(num_sums(crowd.num_agents, objective), dtype=torch.float64, device=crowd.device)
        for number, batch in enumerate(micro_batches):
            crowd.storage.begin_micro_step(step, process, number)
            losses = list[StepLoss]()
            for rows in crowd.parts([own.to(crowd.device) for own in batch]):
                self.tick()
                # Keyed, not sequential: what is drawn here depends on nothing that happened before, so a resume draws
                # the same, and so does an agent that is alone.
                seed_everything(self.seed, "micro-step", step, process, number)
                with accelerator.no_sync(self.model):
                    with accelerator.autocast():
                        found = [objective(output, step) for output in self.model(rows)]
                    total = found[0].total if len(found) == 1 else torch.stack([loss.total for loss in found]).sum()
                    accelerator.backward(total if self.loss_scale is None else total * self.loss_scale)
                losses += found
            loss = objective.together(losses, crowd.num_agents, step)
            tokens = sum(own.batch.num_tokens for own in batch)
            sums += StepSums.pack(loss.task, loss.targets, loss.diversity, tokens, loss.metrics)
        counted = sum(objective.count(own.batch) for batch in micro_batches for own in batch)
        return Sums(counted, sums, nonfinite_here(crowd.storage.gradients, sums[: crowd.num_agents]))


def num_sums(agents: int, objective: TrainedObjective) -> int:
    """The length of `Sums.sums`."""
    return StepSums.size(agents, metrics=len(objective.metric_names))
