"""What earlier attempts and the supervisor have left for this attempt: limits, skipped steps, changes of the crowd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ci_llm.core.run_folder import BadBatch, Recovery, read_recovery, read_skipped_batches
from ci_llm.core.run_status import last_attempt
from ci_llm.run.step.requests import read_record
from ci_llm.run.step.state import CrowdChange, TrainState


@dataclass(frozen=True)
class Inherited:
    """What was left for this attempt.

    Attributes:
        recovery: the requests of the supervisor.
        at_most: the newest step from which this attempt may resume; None: any. It holds for one attempt only, because
            that one writes a status.
        bad_batches: steps that earlier attempts have skipped.
        changes: changes of the crowd that earlier attempts have accepted.
    """

    recovery: Recovery = field(default_factory=Recovery)
    at_most: int | None = None
    bad_batches: tuple[BadBatch, ...] = ()
    changes: tuple[CrowdChange, ...] = ()

    def applied_to(self, state: TrainState) -> TrainState:
        """The state of a checkpoint with this on top."""
        asked = self.recovery
        recovery = state.recovery.with_requests(asked.learning_rate_factor, asked.micro_batch_size)
        return replace(state, recovery=recovery.with_batches(self.bad_batches)).with_planned(self.changes)


def read_inherited(run_folder: Path) -> Inherited:
    """Read what was left in the folder of the run.

    Raises:
        CheckpointError: a file is not of this program.
    """
    recovery = read_recovery(run_folder)
    return Inherited(
        recovery,
        recovery.latest_step_allowed(last_attempt(run_folder)),
        tuple(read_skipped_batches(run_folder)),
        tuple(each for each in read_record(run_folder) if each.refused is None),
    )


def in_force(state: TrainState, batch_size: int) -> Iterator[str]:
    """Lines for people: in what the run differs from its configuration.

    Args:
        batch_size: as configured.
    """
    recovery = state.recovery
    if recovery.requested_lr_factor != 1.0:
        yield f"learning rate x {recovery.requested_lr_factor:.3g} for all agents"
    for agent in state.agents:
        if agent.recovery.lr_factor != 1.0:
            yield f"learning rate x {agent.recovery.lr_factor:.3g} for {agent.name}"
    if (limit := recovery.limit(batch_size)) < batch_size:
        yield f"micro-batch of at most {limit} row(s), the effective batch holds"
    if recovery.pass_per_agent:
        yield "every agent takes a pass of its own"
    if recovery.recompute:
        yield "layers are recomputed in the backward pass"
    if recovery.bad_batches:
        yield f"steps skipped: {', '.join(str(batch.step + 1) for batch in recovery.bad_batches)}"
