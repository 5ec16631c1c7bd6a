"""What a run leaves between two steps: lines for people, metrics and checkpoints in its files, events for callbacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from ci_llm.cluster.deadline import STOPPED_BY_CALLBACK, Pace
from ci_llm.core.quantities import count
from ci_llm.crowd.objective import GrpoObjective
from ci_llm.distributed.ballot import StepSums, Verdict
from ci_llm.logs.progress import Position
from ci_llm.run.attempt import Attempt
from ci_llm.run.exactness import surroundings
from ci_llm.run.run_checkpoint import contents, keep_as_good
from ci_llm.run.step.callbacks import Event, TrainerState
from ci_llm.run.step.nonfinite import Findings, recovery_metrics
from ci_llm.run.trainer import Trainer

logger = logging.getLogger(__name__)


def report(trainer: Trainer, attempt: Attempt, verdict: Verdict, findings: Findings, norms: Tensor) -> None:
    """Show how far the run is; write a line of metrics every `logging_steps`, with means since the line before.

    Args:
        norms: [K] the gradient norm of every agent in the step just taken.
    """
    state, step, metrics = trainer.state, trainer.state.step, trainer.metrics
    sums = StepSums.unpack(verdict.sums, trainer.crowd.num_agents)
    losses = [total / max(count, 1) for total, count in zip(sums.losses, sums.targets, strict=True)]
    metrics.count(findings.tokens)
    attempt.status.update(agent_steps=state.agent_steps)
    logger.debug("step %d: losses %s, %d tokens, left out %s", step, losses, findings.tokens, findings.left_out)
    attempt.log.progress(position(trainer, [] if findings.bad_batch else losses))
    attempt.log.report_save(attempt.manager.last_result)
    if not findings.bad_batch:  # else nothing was trained on
        totals = (*sums.losses, sums.diversity)
        metrics.add((*sums.targets, verdict.num_targets), totals, norms, findings.left_out)
        metrics.add_named(trainer.objective.metric_names, sums.metrics, findings.left_out)
        if isinstance(trainer.objective, GrpoObjective):
            trainer.rollouts.report(metrics, step, findings.left_out)
        else:
            attempt.learning.count(losses)
    if step % trainer.config.logging_steps and step != trainer.total_steps:
        return
    if not isinstance(trainer.objective, GrpoObjective):  # whose loss is near 0 whatever is learned
        if not findings.bad_batch:
            attempt.learning.look(norms.tolist())
        attempt.learning.report(attempt.status, trainer.present_config.learning_rates)
    line = _rates_and_epochs(trainer) | metrics.means() | recovery_metrics(state, trainer.config.batch_size)
    line["memory/resident_bytes"] = psutil.Process().memory_info().rss
    if trainer.crowd.device.type == "cuda":
        line["memory/cuda_peak_bytes"] = torch.cuda.max_memory_allocated(trainer.crowd.device)  # that tensors reached
    line |= metrics.speed() | attempt.mirror.metrics()
    attempt.log.metrics(step, line)
    metrics.restart()
    call_event(trainer, attempt, "on_log", logs=line)


def _rates_and_epochs(trainer: Trainer) -> dict[str, Any]:
    """Epoch, agent-steps and learning rate; of each agent where they differ."""
    state, rows, agents = trainer.state, trainer.training_rows, trainer.crowd.agents
    line: dict[str, Any] = {
        "epoch": rows.epoch(state.step),
        "agent_steps": state.agent_steps,
        "train/learning_rate": trainer.last_learning_rate,
    }
    if trainer.present_config.agents:
        for agent in agents:
            factor = state.lr_factor(agent.place)
            line[f"train/{agent.name}/learning_rate"] = agent.learning_rate(state.step - 1, factor)
    if rows.are_own:
        epochs = zip(agents, rows.epochs(state.step), strict=True)
        line |= {f"train/{agent.name}/epoch": epoch for agent, epoch in epochs}
    return line


def call_event(trainer: Trainer, attempt: Attempt, event: Event, **values: Mapping[str, Any]) -> None:
    """Call the callbacks of an event. If one of them asks for a stop, the next vote tells all processes."""
    if attempt.callbacks.hears(event):
        step, is_main = trainer.state.step, trainer.processes.is_main_process
        state = TrainerState(step, trainer.total_steps, trainer.training_rows.epoch(step), is_main)
        with trainer.heartbeat.resting():
            if attempt.callbacks.call_event(event, trainer.config, state, values) and not trainer.is_finished:
                attempt.interrupts.request_stop(STOPPED_BY_CALLBACK)


def contents_of(
    trainer: Trainer, attempt: Attempt, generators: Sequence[dict[str, Any] | None] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of a checkpoint of the present step, and the information for its manifest.

    Args:
        generators: see `contents` (run_checkpoint.py).
    """
    state = trainer.state
    info = {  # the position, and what a resume compares
        "epoch": trainer.training_rows.epoch(state.step),
        "position": state.samples_seen,
        "fingerprints": trainer.description.fingerprints,
        "surroundings": surroundings(trainer, attempt),
    }
    return contents(trainer, attempt.log.tracker_state(), generators), info | trainer.metrics.record()


def save(trainer: Trainer, attempt: Attempt) -> None:
    """Begin a checkpoint of where the run stands. A collective."""
    manager, step = attempt.manager, trainer.state.step
    logger.debug("step %d: save begins; the one before: %s", step, manager.last_result)
    state, info = contents_of(trainer, attempt)
    with trainer.heartbeat.resting():  # a slow disk is no hang
        keep = {*trainer.kept_steps, *attempt.mirror.sending}
        begun = manager.save(step, state, force=True, info=info, keep=keep)
    keep_as_good(trainer)
    if begun:
        call_event(trainer, attempt, "on_save")


def save_before_error(trainer: Trainer, attempt: Attempt) -> None:
    """Save where the run stands, unless that is done, before an error that ends it on all processes. A collective."""
    manager, step = attempt.manager, trainer.state.step
    manager.wait_until_finished()
    if step and trainer.processes.broadcast_object(manager.latest_step()) != step:
        save(trainer, attempt)
        manager.wait_until_finished()


def position(trainer: Trainer, losses: Sequence[float] = ()) -> Position:
    """The position of the run; `losses` are of the step just taken."""
    state = trainer.state
    rate = trainer.last_learning_rate if state.step else None
    done = state.tokens_seen, trainer.training_rows.epoch(state.step)
    return Position(state.step, trainer.total_steps, losses, *done, rate, state.names)


def outlook(trainer: Trainer) -> Iterator[str]:
    """Lines about what a step consists of, how long the run is, and how its crowd will change."""
    steps, rows, processes = trainer.total_steps, trainer.state.rows_per_step, trainer.processes.num_processes
    passes = math.ceil(rows / processes / trainer.micro_batch_size)
    epochs = ", ".join(f"{plan.epoch(steps):.3g}" for plan in trainer.training_rows.plans)
    of_each = " of each agent" if "," in epochs else ""
    yield (
        f"batch     {count(rows, 'row')} per step{of_each}: {processes} process(es)"
        f" x {passes} micro-step(s) of at most {trainer.micro_batch_size}; {count(steps, 'step')}, {epochs} epochs"
    )
    config = trainer.present_config
    kinds = ", ".join(dict.fromkeys(own.lr_scheduler_type for own in config.each_agent))
    optimizer = type(trainer.optimizer).__name__
    yield f"optimizer {optimizer}, learning_rate {config.learning_rates}, {kinds}"
    for change in trainer.state.history.planned:
        yield f"          crowd: after step {change.step} of {steps}, {change}"


def in_force(trainer: Trainer) -> Iterator[str]:
    """Lines about what the run does otherwise than its configuration says, because of faults."""
    recovery = trainer.state.recovery
    if recovery.requested_lr_factor != 1.0:
        yield f"learning rate x {recovery.requested_lr_factor:.3g} for all agents"
    for agent in trainer.state.agents:
        if agent.recovery.lr_factor != 1.0:
            yield f"learning rate x {agent.recovery.lr_factor:.3g} for {agent.name}"
    if trainer.micro_batch_size < trainer.config.batch_size:
        yield f"micro-batch of at most {trainer.micro_batch_size} row(s), the effective batch holds"
    if recovery.pass_per_agent:
        yield "every agent takes a pass of its own"
    if recovery.recompute:
        yield "layers are recomputed in the backward pass"
    if recovery.bad_batches:
        yield f"steps skipped: {', '.join(str(batch.step + 1) for batch in recovery.bad_batches)}"


def describe_stop(trainer: Trainer, pace: Pace) -> str:
    """What a request to stop does now. If the step under way has voted already, one more step follows."""
    if pace.step_started is not None:
        return f"finishing step {trainer.state.step + 1}, then saving and leaving"
    if trainer.state.step == 0:
        return "leaving before the first step"
    return f"step {trainer.state.step} is done; saving and leaving"


def keys_to_go_on(trainer: Trainer) -> dict[str, str]:
    """The keys to change, so that a run which is over trains on."""
    changes: dict[str, str] = {}
    if trainer.is_out_of_patience:
        more = trainer.state.validation.without_better + (trainer.config.early_stopping_patience or 0)
        changes["early_stopping_patience"] = str(more)
    return changes if trainer.state.step < trainer.total_steps else changes | {"max_train_steps": "..."}
