"""The crowd changes while a run trains: agents are stopped between two steps.

A change acts on every process alike and without communication. What the other agents have reached stays: weights,
moments, recovery, the snapshot of the last good state, the sums since the last line of metrics. An agent that is
stopped leaves its adapter to the checkpoints.

A decision is put on record before it acts, so that an attempt that resumes from an older checkpoint repeats it.
Requests wait until the disk takes the record.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import objective_of
from ci_llm.distributed.ballot import Verdict
from ci_llm.errors import BadInput
from ci_llm.run.attempt import Attempt
from ci_llm.run.exactness import record_bits
from ci_llm.run.optimizer import moments_of, set_agents
from ci_llm.run.run_checkpoint import STOPPED
from ci_llm.run.start.agent_settings import assign_training, crowd_settings, describe
from ci_llm.run.start.loading import steps_of
from ci_llm.run.step.requests import decide, read_waiting
from ci_llm.run.step.state import CrowdChange, TrainState
from ci_llm.run.trainer import Trainer

logger = logging.getLogger(__name__)


def change_crowd(trainer: Trainer, attempt: Attempt, verdict: Verdict) -> None:
    """Make the changes of the crowd that are due after the step just taken; none after the last step.

    A collective if a change was asked for, or is due.
    """
    if trainer.is_finished:
        return
    if verdict.request:
        take = partial(_take_requests, trainer, attempt)
        changes = trainer.processes.on_main(lambda: take() if attempt.manager.store.holds_lease() else [])
        trainer.state = trainer.state.with_planned(changes)
    before = trainer.state
    state = before.after_changes()
    if state is before:
        return
    kept = [before.names.index(name) for name in state.names]
    attempt.manager.wait_until_copied()  # a save in flight still reads the storage that goes
    keep_agents(trainer, state, kept)
    attempt.learning.keep_agents(kept)
    for change in state.history.made[len(before.history.made) :]:
        logger.info(f"crowd     after step {state.step}: {change}; the crowd is {', '.join(state.names)}")
    trainer.prepare(trainer.prepared.loader)
    record_bits(trainer, attempt)


def keep_agents(trainer: Trainer, state: TrainState, kept: Sequence[int]) -> None:
    """Continue with the agents of this state alone.

    Args:
        kept: the place of each in the crowd before.
    """
    crowd, optimizer = trainer.crowd, trainer.optimizer
    stopped = trainer.description.stopped | dict(_adapters_of({*crowd.names} - {*state.names}, crowd))
    moments = [moments_of(optimizer, crowd.storage.rows[place]) for place in kept]
    crowd.keep_agents(crowd_settings(trainer.config, state.numbers), kept, state.names)
    trainer.state = state
    trainer.description = describe(trainer.config, state.numbers, trainer.loaded, crowd, stopped)
    _assign_training(trainer)
    set_agents(optimizer, crowd.agents, moments)
    trainer.nonfinite.last_good.keep_agents(crowd.storage.rows, kept)
    trainer.metrics.keep_agents(kept)
    trainer.objective = objective_of(trainer.present_config, crowd)
    trainer.evaluator.keep_agents(trainer.present_config, trainer.objective, kept)


def return_to(trainer: Trainer, saved: TrainState) -> None:
    """Give the run the crowd, order and length of a checkpoint, before weights and moments are put in place.

    Args:
        saved: the state in the checkpoint.

    Raises:
        BadInput: the configuration no longer has the entry of an agent.
    """
    trainer.state = replace(trainer.state, rows_per_step=saved.rows_per_step)
    trainer.total_steps = steps_of(trainer.config, [*map(len, trainer.loaded.rows)], saved.rows_per_step)
    if not saved.history.made:
        _assign_training(trainer)
        return
    if (least := max(saved.numbers) + 1) > trainer.crowd.num_agents:
        raise BadInput(
            f"a run that began with at least {least} agents resumes with {trainer.crowd.num_agents}",
            where="agents, num_agents",
            hint="leave the entry of an agent that was stopped where it was: the others have their place by it",
        )
    keep_agents(trainer, saved, saved.numbers)


def _assign_training(trainer: Trainer) -> None:
    """Tell the agents that stand in the crowd now how and on what they train."""
    state = trainer.state
    rows = [trainer.loaded.rows[number] for number in state.numbers]
    assign_training(trainer.crowd.agents, trainer.present_config, rows, state.rows_per_step, trainer.total_steps)


def _adapters_of(leaving: Collection[str], crowd: Crowd) -> Iterator[tuple[str, Any]]:
    """The files of agents that leave. From here on checkpoints hold them as PEFT folders beside those of the crowd."""
    files = crowd.adapter_files() if leaving else {}
    for name in sorted(leaving):
        tensors = files[f"{name}/adapter_model"]
        yield f"{STOPPED}{name}/adapter_model", {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
        yield f"{STOPPED}{name}/adapter_config", files[f"{name}/adapter_config"]


def _take_requests(trainer: Trainer, attempt: Attempt) -> list[CrowdChange]:
    """On the main process: decide about the requests in the run's folder. They wait while the disk takes no record."""
    folder, state = attempt.config.run_folder, trainer.state
    decided = []
    for request in read_waiting(folder, state.step):
        if request.refused is None:
            request = replace(request, refused=state.objection(request))
        if request.refused is None:
            state = state.with_planned([request]).after_changes()
        decided.append(request)
    try:
        decide(folder, decided)  # before anything acts or is told
    except OSError as error:
        before, attempt.requests_wait = attempt.requests_wait, error.strerror or str(error)
        if attempt.requests_wait != before:  # the same reason is told once
            reason = f"they cannot be put on record ({attempt.requests_wait})"
            logger.warning(f"crowd     requests wait in {folder}: {reason}")
        return []
    attempt.requests_wait = None
    for request in decided:
        if request.refused is not None:
            logger.warning(f"crowd     a request is refused: {request.refused}")
    return [request for request in decided if request.refused is None]
