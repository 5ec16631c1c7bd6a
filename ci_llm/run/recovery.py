"""What earlier attempts and the supervisor leave to this one in the run's folder: obeyed, said, and kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ci_llm.core.recovery import Recovery, read_recovery
from ci_llm.core.run_status import last_attempt
from ci_llm.run.beginning import Beginning, read_beginning
from ci_llm.run.context import Run
from ci_llm.run.nonfinite import read_record
from ci_llm.run.nonfinite_policy import BadBatch


@dataclass(frozen=True)
class Remembered:
    """What lies in the run's folder beside its checkpoints.

    Attributes:
        recovery: what the supervisor asks for.
        at_most: the newest step that this attempt may resume from; None: any. It holds for one attempt only, and
            is lost once that has written its status.
        bad_batches: steps that earlier attempts have skipped.
        beginning: how the run began; None: nobody has written it down.
    """

    recovery: Recovery = field(default_factory=Recovery)
    at_most: int | None = None
    bad_batches: tuple[BadBatch, ...] = ()
    beginning: Beginning | None = None


def remember(run_folder: Path) -> Remembered:
    """Read it all.

    Raises:
        CheckpointError, BadInput: a file is not of this program.
    """
    recovery = read_recovery(run_folder)
    at_most = recovery.latest_step_allowed(last_attempt(run_folder))
    return Remembered(recovery, at_most, tuple(read_record(run_folder)), read_beginning(run_folder))


def obey(run: Run, remembered: Remembered) -> list[str]:
    """Put in force what was asked for, on top of what the checkpoint knows; returns what is, for people."""
    asked, healing = remembered.recovery, run.state.healing
    healing = healing.asked_for(asked.learning_rate_factor, asked.micro_batch_size)
    run.state = replace(run.state, healing=healing.with_batches(remembered.bad_batches))
    if healing.recompute:
        run.crowd.gradient_checkpointing_enable()
    return [f"recovery: {line}" for line in (*_in_force(run), *asked.because)]


def _in_force(run: Run) -> Iterator[str]:
    healing = run.state.healing
    if healing.rate_factor != 1.0:
        yield f"learning rate x {healing.rate_factor:.3g} for all agents"
    for k, health in enumerate(healing.agents):
        if health.rate_share != 1.0:
            yield f"learning rate x {health.rate_share:.3g} for agent{k}"
    if run.micro_batch_size < run.config.batch_size:
        yield f"micro-batch of at most {run.micro_batch_size} row(s), the effective batch holds"
    if healing.recompute:
        yield "layers are recomputed in the backward pass"
    if healing.bad_batches:
        yield f"steps skipped: {', '.join(str(batch.step + 1) for batch in healing.bad_batches)}"
