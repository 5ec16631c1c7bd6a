"""The conclusion of a run: agents and crowd are evaluated, evaluation.json and the final checkpoint are written."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.core.durable import read_object, write_json
from ci_llm.core.run_status import readable_status
from ci_llm.crowd.scoring import AnswerScores, Scores, best_agent, evaluation_record, rows_record
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError, DamagedCheckpoint
from ci_llm.report.scores import rows_evaluated
from ci_llm.run.context import Run
from ci_llm.run.end.result import final_card, score_table
from ci_llm.run.loop import note_evaluation
from ci_llm.run.step import evaluation

logger = logging.getLogger(__name__)


def known_conclusion(folder: Path, step: int) -> dict[str, Any] | None:
    """`evaluation.json` of a run that is complete at `step`; None if its end is still to be made, or to be made again.

    It is made again if the run was complete at another step, if that file or the final checkpoint is damaged, or if the
    last attempt ended before the mirror had all of it.
    """
    record, status = folder / "evaluation.json", readable_status(folder)
    if status is not None and status.status != "completed":
        return None
    if not (record.is_file() and (folder / FINAL).exists()):
        return None
    try:
        content = read_object(record)
        if content.get("last_step") != step:
            return None
        verify_folder(folder / FINAL)
    except ValueError as error:
        logger.warning(f"{record} cannot be read, the run is evaluated again: {error}")
    except DamagedCheckpoint as damage:
        logger.warning(f"{damage.what}; the run is evaluated again, and it is made again from step {step}")
    else:
        return content
    return None


def conclude(run: Run) -> tuple[str | None, dict[str, Any]]:
    """Evaluate agents and crowd, write the results and the final checkpoint.

    Returns:
        the reason if the run was interrupted meanwhile; else None, and `evaluation.json`.
    """
    logger.info(f"evaluate  agents and crowd on {rows_evaluated(len(run.eval_rows), run.eval_rows.trained_on)}")
    is_known = run.state.validation.step == run.state.step  # early stopping ends a run after an evaluation
    scores = run.last_scores if is_known else None
    if scores is None:
        scores = run.evaluator.scores(run.state.step, run.micro_batch_size)
    latest = {} if scores is None else evaluation.evaluation_metrics(scores, run.state.names)
    if latest and not is_known:
        note_evaluation(run, latest)
        run.call_event("on_evaluate", metrics=latest)
    with run.heartbeat.resting():
        best = evaluation.result_of(run.config, run.state, run.manager, run.processes)
    step = run.state.step if best is None else best.manifest.step
    with nullcontext() if best is None else evaluation.weights_of(best, run.crowd):
        if scores is not None and best is not None:
            scores = run.evaluator.scores(step, run.micro_batch_size)
        answers = run.evaluator.answers(step, run.micro_batch_size) if scores is not None else None
        example = answers.example if answers is not None else run.evaluator.example(step)
    has_answers = answers is not None
    base = None if scores is None else run.evaluator.base(step, run.micro_batch_size, answers=has_answers)
    stop = run.stop_vote.reason()
    if stop is not None or scores is None or base is None:
        return stop, {}
    run.log.report_save(run.manager.last_result)
    run.log.end_progress()
    if example is not None:
        logger.info(evaluation.describe_example(example, run.evaluator.judged_by))
    record = _record(run, step, scores, answers) | ({"base": base} if base else {})
    _write_results(run, step, record)
    run.log.track(run.state.step, latest | evaluation.result_metrics(record, run.state.names))
    return None, record


def _write_results(run: Run, step: int, record: dict[str, Any]) -> None:
    """The table for people, the final checkpoint with its model card, evaluation.json. A collective."""
    logger.info(score_table(record, run.config.run_folder))
    config = run.config
    card = final_card(record, run.crowd, config.all_dataset_names, step)
    with run.heartbeat.resting():
        _require_written(run.manager, run.processes)
        added = {"README.md": card.encode(), **run.checkpoint.agents_tokenizers()}
        run.manager.finish(added, step=None if step == run.state.step else step)
        _require_written(run.manager, run.processes)
    if run.processes.is_main_process and run.manager.holds_lease():
        write_json(config.run_folder / "evaluation.json", record, staging=run.manager.staging)


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


def _record(run: Run, step: int, scores: Scores, answers: AnswerScores | None) -> dict[str, Any]:
    """The contents of evaluation.json: the scores of the step that is the result of the run, and the best step."""
    config, rows, judged_by = run.present_config, run.eval_rows, run.evaluator.judged_by
    has_best = len(config.agents) > 1 and rows.are_common
    asked: dict[str, Any] = {"task": config.task, "aggregator": config.aggregator, "trained_on": rows.trained_on}
    return {
        **evaluation_record(scores, answers, **asked, heads=bool(run.crowd.settings.outputs)),
        "data": [part.rows.where for part in rows.sets],
        "judged_by": judged_by,
        "learning_rates": [own.learning_rate for own in config.each_agent],
        **evaluation.sets_record(scores, rows),
        **({"names": config.agent_names} if config.agents else {}),
        **({"best_agent": best_agent(scores, answers, judged_by)} if has_best else {}),
        **({"folders": run.crowd.names} if run.state.members else {}),
        **({"of_rows": rows_record(scores, answers)} if config.trial_steps else {}),  # a sweep compares them
        **({"dropped": dropped} if (dropped := [*run.nonfinite.dropped(run.state.recovery)]) else {}),
        "step": step,
        "last_step": run.state.step,
        "agent_steps": run.state.agent_steps,
        "stopped_early": run.state.step < run.total_steps,
        "best": run.state.validation.record(),
        "warning": run.status.current.warning,
    }
