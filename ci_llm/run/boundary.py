"""What a run does between two steps, where it is due: a checkpoint, an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ci_llm.errors import RewardFailed
from ci_llm.run.attempt import RunAttempt
from ci_llm.run.report import call_event
from ci_llm.run.step import evaluator as judging
from ci_llm.run.trainer import Trainer

logger = logging.getLogger(__name__)


def contents_of(
    trainer: Trainer, attempt: RunAttempt, generators: Sequence[dict[str, Any] | None] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of a checkpoint of the present step, and the information for its manifest.

    Args:
        generators: see `RunCheckpoint.contents`.
    """
    state, checkpoint = trainer.state, trainer.checkpoint
    rate = trainer.last_learning_rate if state.step else trainer.learning_rate(0)
    contents = checkpoint.contents(state, rate, attempt.log.tracker_state(), generators)
    return contents, checkpoint.info(state, trainer.courses.epoch(state.step)) | attempt.metrics.record()


def save(trainer: Trainer, attempt: RunAttempt) -> None:
    """Begin a checkpoint of where the run stands. A collective."""
    manager, step = attempt.manager, trainer.state.step
    logger.debug("step %d: save begins; the one before: %s", step, manager.last_result)
    contents, info = contents_of(trainer, attempt)
    with trainer.heartbeat.resting():  # a slow disk is no hang
        manager.save(step, contents, force=True, info=info, keep={*trainer.kept_steps, *attempt.mirror.sending})
    call_event(trainer, attempt, "on_save")


def save_before_error(trainer: Trainer, attempt: RunAttempt) -> None:
    """Save where the run stands, unless that is done, before an error that ends it on all processes. A collective."""
    manager, step = attempt.manager, trainer.state.step
    manager.wait_until_finished()
    if step and trainer.processes.broadcast_object(manager.latest_step()) != step:
        save(trainer, attempt)
        manager.wait_until_finished()


def evaluate(trainer: Trainer, attempt: RunAttempt) -> str | None:
    """Score agents and crowd in the middle of a run; returns the reason of a stop that was asked for meanwhile.

    Raises:
        RewardFailed: on every process, when a function could not reward answers; the present step is saved.
    """
    evaluator, step = trainer.evaluator, trainer.state.step
    with attempt.metrics.paused():
        try:
            scores = evaluator.scores(step, trainer.micro_batch_size)
        except RewardFailed:
            save_before_error(trainer, attempt)
            raise
    if scores is not None:
        metrics = judging.evaluation_metrics(scores, trainer.state.names)
        attempt.log.metrics(step, metrics)
        note_evaluation(trainer, attempt, metrics)
        evaluator.last_scores = scores
        line = judging.describe_scores(step, scores, evaluator.judged_by)
        logger.info(f"{line}{trainer.state.best_note}")
        with attempt.metrics.paused():
            example = evaluator.example(step)
        if example is not None:
            logger.info(judging.describe_example(example, evaluator.judged_by))
        call_event(trainer, attempt, "on_evaluate", metrics=metrics)
        if trainer.is_finished:
            logger.info(f"early stopping after step {step}: {trainer.state.validation.described()}")
    return evaluator.vote.reason()


def note_evaluation(trainer: Trainer, attempt: RunAttempt, metrics: Mapping[str, Any]) -> None:
    """Decide by the evaluation after the present step which step is best. A collective."""
    trainer.state = judging.evaluated(trainer.state, metrics, trainer.processes)
    attempt.status.update(best_step=trainer.state.validation.best_step)
