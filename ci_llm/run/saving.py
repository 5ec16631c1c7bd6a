"""The saves of a run, after a step or before an error; `RunCheckpoint` collects what they hold (run_checkpoint.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ci_llm.run.attempt import Attempt
from ci_llm.run.reporting import call_event
from ci_llm.run.trainer import Trainer

logger = logging.getLogger(__name__)


def contents_of(
    trainer: Trainer, attempt: Attempt, generators: Sequence[dict[str, Any] | None] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of a checkpoint of the present step, and the information for its manifest.

    Args:
        generators: see `RunCheckpoint.contents`.
    """
    state, checkpoint = trainer.state, trainer.checkpoint
    rate = trainer.last_learning_rate if state.step else trainer.learning_rate(0)
    contents = checkpoint.contents(state, rate, attempt.log.tracker_state(), generators)
    return contents, checkpoint.info(state, trainer.courses.epoch(state.step)) | trainer.metrics.record()


def save(trainer: Trainer, attempt: Attempt) -> None:
    """Begin a checkpoint of where the run stands. A collective."""
    manager, step = attempt.manager, trainer.state.step
    logger.debug("step %d: save begins; the one before: %s", step, manager.last_result)
    contents, info = contents_of(trainer, attempt)
    with trainer.heartbeat.resting():  # a slow disk is no hang
        keep = {*trainer.kept_steps, *attempt.mirror.sending}
        begun = manager.save(step, contents, force=True, info=info, keep=keep)
    if begun:
        call_event(trainer, attempt, "on_save")


def save_before_error(trainer: Trainer, attempt: Attempt) -> None:
    """Save where the run stands, unless that is done, before an error that ends it on all processes. A collective."""
    manager, step = attempt.manager, trainer.state.step
    manager.wait_until_finished()
    if step and trainer.processes.broadcast_object(manager.latest_step()) != step:
        save(trainer, attempt)
        manager.wait_until_finished()
