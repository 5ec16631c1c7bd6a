"""The conclusion of a run: agents and crowd are evaluated, evaluation.json and the final checkpoint are written."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.core.evaluation_file import Ending, Evaluation, read_evaluation, write_evaluation
from ci_llm.core.run_folder import EVALUATION
from ci_llm.core.run_status import readable_status
from ci_llm.crowd.scoring import AnswerScores, Scores, best_agent, fields_of, parts_of_rows
from ci_llm.distributed.processes import Processes
from ci_llm.errors import BadInput, CheckpointError, DamagedCheckpoint
from ci_llm.report.scores import rows_evaluated
from ci_llm.run.attempt import RunAttempt
from ci_llm.run.boundary import note_evaluation
from ci_llm.run.end.result import final_card, score_table
from ci_llm.run.report import call_event
from ci_llm.run.step import evaluator as judging
from ci_llm.run.trainer import Trainer

logger = logging.getLogger(__name__)


def known_conclusion(folder: Path, step: int) -> Evaluation | None:
    """The evaluation of a run that is complete at `step`; None if its end is still to be made, or to be made again.

    It is made again if the run was complete at another step, if evaluation.json or the final checkpoint is damaged, or
    if the last attempt ended before the mirror had all of it.
    """
    status = readable_status(folder)
    if (status is not None and status.status != "completed") or not (folder / FINAL).exists():
        return None
    try:
        known = read_evaluation(folder)
        if known is None or known.ending is None or known.ending.last_step != step:
            return None
        verify_folder(folder / FINAL)
    except BadInput as error:
        logger.warning(f"{EVALUATION} of {folder} cannot be read, the run is evaluated again: {error.what}")
    except DamagedCheckpoint as damage:
        logger.warning(f"{damage.what}; the run is evaluated again, and it is made again from step {step}")
    else:
        return known
    return None


def conclude(trainer: Trainer, attempt: RunAttempt) -> tuple[str | None, Evaluation | None]:
    """Evaluate agents and crowd, write the results and the final checkpoint.

    Returns:
        the reason if the run was interrupted meanwhile; else None, and the evaluation.
    """
    evaluator, state, rows = trainer.evaluator, trainer.state, trainer.evaluator.rows
    logger.info(f"evaluate  agents and crowd on {rows_evaluated(len(rows), rows.trained_on)}")
    is_known = state.validation.step == state.step  # early stopping ends a run after an evaluation
    scores = evaluator.last_scores if is_known else None
    if scores is None:
        scores = evaluator.scores(state.step, trainer.micro_batch_size)
    latest = {} if scores is None else judging.evaluation_metrics(scores, state.names)
    if latest and not is_known:
        note_evaluation(trainer, attempt, latest)
        call_event(trainer, attempt, "on_evaluate", metrics=latest)
    with trainer.heartbeat.resting():
        best = judging.result_of(trainer.config, trainer.state, attempt.manager, trainer.processes)
    step = state.step if best is None else best.manifest.step
    with nullcontext() if best is None else judging.weights_of(best, trainer.crowd):
        if scores is not None and best is not None:
            scores = evaluator.scores(step, trainer.micro_batch_size)
        answers = evaluator.answers(step, trainer.micro_batch_size) if scores is not None else None
        example = answers.example if answers is not None else evaluator.example(step)
    has_answers = answers is not None
    base = None if scores is None else evaluator.base(step, trainer.micro_batch_size, answers=has_answers)
    stop = evaluator.vote.reason()
    if stop is not None or scores is None:
        return stop, None
    attempt.log.report_save(attempt.manager.last_result)
    attempt.log.end_progress()
    if example is not None:
        logger.info(judging.describe_example(example, evaluator.judged_by))
    found = replace(_evaluation(trainer, attempt, step, scores, answers), base=base)
    _write_results(trainer, attempt, step, found)
    attempt.log.track(state.step, latest | judging.result_metrics(found, state.names))
    return None, found


def _write_results(trainer: Trainer, attempt: RunAttempt, step: int, found: Evaluation) -> None:
    """The table for people, the final checkpoint with its model card, evaluation.json. A collective."""
    logger.info(score_table(found, trainer.config.run_folder))
    config = trainer.config
    card = final_card(found, trainer.crowd, config.all_dataset_names, step)
    with trainer.heartbeat.resting():
        _require_written(attempt.manager, trainer.processes)
        added = {"README.md": card.encode(), **trainer.checkpoint.agents_tokenizers()}
        attempt.manager.saver.finish(added, step=None if step == trainer.state.step else step)
        _require_written(attempt.manager, trainer.processes)
    if trainer.processes.is_main_process and attempt.manager.store.holds_lease():
        write_evaluation(config.run_folder, found, attempt.manager.store.staging)


def _require_written(manager: CheckpointManager, processes: Processes) -> None:
    """Refuse to call a run complete unless its last checkpoint is on the disk. A collective.

    Raises:
        CheckpointError: on every process.
    """
    manager.wait_until_finished()
    result = manager.last_result
    cause = processes.broadcast_object(result.cause if result else None)
    if cause is not None:  # the manager has logged what was dropped, and why
        raise CheckpointError(
            "the run is not complete: what it wrote last is not on the disk",
            where=str(manager.directory),
            hint="make space on this disk; the same command resumes from the last checkpoint",
        ) from cause


def _evaluation(
    trainer: Trainer, attempt: RunAttempt, step: int, scores: Scores, answers: AnswerScores | None
) -> Evaluation:
    """The evaluation of the step that is the result of the run, without the base."""
    config, rows, state = trainer.present_config, trainer.evaluator.rows, trainer.state
    judged_by, has_best = trainer.evaluator.judged_by, len(config.agents) > 1 and rows.are_common
    return Evaluation(
        **fields_of(scores, answers, heads=bool(trainer.crowd.settings.outputs)),
        task=config.task,
        data=tuple(part.rows.where for part in rows.sets),
        rows_trained_on=rows.trained_on,
        aggregator=config.aggregator,
        judged_by=judged_by,
        step=step,
        names=tuple(config.agent_names) if config.agents else (),
        folders=tuple(trainer.crowd.names) if state.history.made else (),
        learning_rates=tuple(own.learning_rate for own in config.each_agent),
        best_agent=best_agent(scores, answers, judged_by) if has_best else None,
        sets=tuple(judging.scores_of_sets(scores, rows)),
        of_rows=parts_of_rows(scores, answers) if config.trial_steps else None,  # a sweep compares them
        dropped=tuple(trainer.nonfinite.dropped(state)),
        ending=Ending(
            last_step=state.step,
            agent_steps=state.agent_steps,
            stopped_early=state.step < trainer.total_steps,
            best=state.best_steps,
            warning=attempt.status.current.warning,
        ),
    )
