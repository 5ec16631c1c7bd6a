"""The evaluations of a run: on the way, where they decide which step is best, and at its end, with its results.

`Evaluator` (step/evaluator.py) computes the scores; here they become decisions, metrics, lines and evaluation.json.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from ci_llm.checkpoints.checkpoint import Checkpoint
from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.config import Config
from ci_llm.core.evaluation_file import BestSteps, Ending, Evaluation, Figure, RowSet, read_evaluation, write_evaluation
from ci_llm.core.measures import LEAST_ROWS, JudgedBy, measures_of
from ci_llm.core.quantities import count
from ci_llm.core.run_folder import EVALUATION
from ci_llm.core.run_status import readable_status
from ci_llm.crowd.crowd import Crowd, load_state
from ci_llm.crowd.scoring import AnswerScores, Scores, Solved, best_agent, fields_of, parts_of_rows
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.distributed.processes import Processes
from ci_llm.errors import BadInput, CheckpointError, DamagedCheckpoint, RewardFailed
from ci_llm.report.scores import rows_evaluated
from ci_llm.run.attempt import Attempt
from ci_llm.run.reporting import call_event, save_before_error
from ci_llm.run.result import final_card, score_table
from ci_llm.run.step.state import TrainState
from ci_llm.run.trainer import Trainer

logger = logging.getLogger(__name__)


def evaluate(trainer: Trainer, attempt: Attempt) -> str | None:
    """Score agents and crowd in the middle of a run; returns the reason of a stop that was asked for meanwhile.

    Raises:
        RewardFailed: on every process, when a function could not reward answers; the present step is saved.
    """
    evaluator, step = trainer.evaluator, trainer.state.step
    with trainer.metrics.paused():
        try:
            scores = evaluator.scores(step, trainer.micro_batch_size)
        except RewardFailed:
            save_before_error(trainer, attempt)
            raise
    if scores is not None:
        metrics = evaluation_metrics(scores, trainer.state.names)
        attempt.log.metrics(step, metrics)
        note_evaluation(trainer, attempt, metrics)
        evaluator.last_scores = scores
        line = describe_scores(step, scores, evaluator.judged_by)
        logger.info(f"{line}{trainer.state.best_note}")
        call_event(trainer, attempt, "on_evaluate", metrics=metrics)
        if trainer.is_finished:
            logger.info(f"early stopping after step {step}: {trainer.state.validation.described()}")
    return evaluator.vote.reason()


def note_evaluation(trainer: Trainer, attempt: Attempt, metrics: Mapping[str, Any]) -> None:
    """Decide by the evaluation after the present step which step is best. A collective.

    All processes take the numbers of the main one: they must not end a run at different steps because the last bits of
    their means differ.

    Args:
        metrics: the numbers of the evaluation, by the names of metrics.jsonl.
    """
    state = trainer.state
    keys = [f"eval/{name}/{state.validation.metric}" for name in (*state.names, "crowd")]
    values = [float(metrics.get(key, math.nan)) for key in keys]  # NaN is never best
    *agents, crowd = trainer.processes.broadcast_object(values)
    trainer.state = state.evaluated(crowd, agents)
    attempt.status.update(best_step=trainer.state.validation.best_step)


def result_of(config: Config, state: TrainState, manager: CheckpointManager, processes: Processes) -> Checkpoint | None:
    """The checkpoint whose weights are the result of the run; None for the last step. A collective.

    With `load_best_model_at_end` it is that of the best step, unless it is damaged. Every process reads it once.
    """
    best = state.validation.best_step
    if not config.load_best_model_at_end or best is None or best == state.step:
        return None
    manager.wait_until_finished()  # an error of the last save says nothing about the best one
    found, damage = None, None
    try:
        found = manager.read(best)
    except CheckpointError as error:
        damage = str(error)
    damages = [each for each in processes.gather_object(damage) if each is not None]
    if damages:
        logger.warning(f"the best step, {best}, cannot be the result, so the last one is: {damages[0]}")
        return None
    return found


@contextmanager
def _weights_of(checkpoint: Checkpoint, crowd: Crowd) -> Iterator[None]:
    """Give the agents the weights of a checkpoint within the block; afterwards they have their own again."""
    weights = crowd.storage.weights
    own = weights.clone()
    try:
        load_state(crowd, checkpoint.state, str(checkpoint.folder))
        yield
    finally:
        weights.copy_(own)


def describe_scores(step: int, scores: Scores, judged_by: JudgedBy = "exact_match") -> str:
    """A line for people: the scores of the crowd and the means of its agents; free text has only an NLL.

    If there are few rows, the line says how many.
    """
    *agents, exact = scores.exact_match
    *agents_nll, nll = scores.mean_nll
    rows = scores.right.shape[1]
    few = f", on {count(rows, 'row')}" if rows < LEAST_ROWS else ""
    where = f"evaluate  step {step}{few}:"
    if scores.judged is not None:
        if int(scores.tokens.max()) > 1:
            return f"{where} {scores.judged}; crowd nll {nll:.3f}, of the better answers"
        return f"{where} {scores.judged}; crowd {measures_of(scores.judged.objective).loss} {nll:.3f}"
    if judged_by == "nll":
        return f"{where} crowd nll {nll:.3f}; agents nll {fmean(agents_nll):.3f}"
    crowd = f"crowd nll {nll:.3f}, exact {exact:.3f}"
    return f"{where} {crowd}; agents nll {fmean(agents_nll):.3f}, exact {fmean(agents):.3f}"


def describe_example(example: Solved) -> str:
    """A question, the answer of the crowd, and whether it is right."""
    *agents, crowd, _ = example.right
    verdict = "right" if crowd else f"wrong: {example.wanted} is right"
    verdict += f"; of {len(agents)} agents alone, {sum(agents)} answer right" if len(agents) > 1 else ""
    return f"question  {_end_of(example.question)}\nanswer    {_end_of(example.answer)}\n          {verdict}"


_SHOWN_CHARACTERS: Final = 400


def _end_of(text: str) -> str:
    """The text in one line; if it is long only its end, where the question or the answer stands."""
    line = text.strip().replace("\n", "⏎")
    return line if len(line) <= _SHOWN_CHARACTERS else f"... {line[-_SHOWN_CHARACTERS:]}"


def evaluation_metrics(scores: Scores, names: Sequence[str]) -> dict[str, float]:
    """The scores as metrics: nats per target token, and the share of rows that are reproduced exactly.

    Args:
        names: the names of the agents.
    """
    metrics = {}
    for name, exact, nll in zip([*names, "crowd"], scores.exact_match, scores.mean_nll, strict=True):
        metrics[f"eval/{name}/nll"] = nll
        metrics[f"eval/{name}/exact_match"] = exact
    return metrics if scores.judged is None else metrics | scores.judged.metrics(names)


def result_metrics(evaluation: Evaluation, names: Sequence[str]) -> dict[str, float]:
    """The scores of an evaluation as metrics for trackers: `final/crowd/exact_match` and the like.

    Args:
        names: the names of the agents.
    """
    metrics = dict[str, float | None]()
    for measure, found in (("exact_match", evaluation.exact_match), ("nll", evaluation.nll)):
        named = dict(zip(names, found.agents, strict=True)) | {"crowd": found.crowd, "vote": found.vote}
        named["base"] = getattr(evaluation.base, measure, None)
        metrics |= {f"final/{name}/{measure}": value for name, value in named.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def scores_of_sets(scores: Scores, rows: EvaluationRows) -> Iterator[RowSet]:
    """The teacher-forced scores of all agents on each set of rows; none if all agents share one."""
    start = 0
    for number, evaluated in enumerate(() if rows.are_common else rows.sets):
        part = scores.rows(slice(start, start := start + len(evaluated)))
        *agents, crowd = part.exact_match
        *agents_nll, crowd_nll = part.mean_nll
        yield RowSet(
            rows=evaluated.rows.where,
            n=len(evaluated),
            rows_trained_on=evaluated.rows.trained_on,
            measured_by="teacher_forcing",
            agents=tuple(k for k, own in enumerate(rows.of_agent) if own == number),
            exact_match=Figure(tuple(agents), crowd),
            nll=Figure(tuple(agents_nll), crowd_nll),
        )


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


def conclude(trainer: Trainer, attempt: Attempt) -> tuple[str | None, Evaluation | None]:
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
    latest = {} if scores is None else evaluation_metrics(scores, state.names)
    if latest and not is_known:
        note_evaluation(trainer, attempt, latest)
        call_event(trainer, attempt, "on_evaluate", metrics=latest)
    with trainer.heartbeat.resting():
        best = result_of(trainer.config, trainer.state, attempt.manager, trainer.processes)
    step = state.step if best is None else best.manifest.step
    with nullcontext() if best is None else _weights_of(best, trainer.crowd):
        if scores is not None and best is not None:
            scores = evaluator.scores(step, trainer.micro_batch_size)
        answers = evaluator.answers(step, trainer.micro_batch_size) if scores is not None else None
    base = None if scores is None else evaluator.base(step, trainer.micro_batch_size, answers=answers is not None)
    stop = evaluator.vote.reason()
    if stop is not None or scores is None:
        return stop, None
    attempt.log.report_save(attempt.manager.last_result)
    attempt.log.end_progress()
    if answers is not None and answers.example is not None:
        logger.info(describe_example(answers.example))
    found = replace(_evaluation(trainer, attempt, step, scores, answers), base=base)
    _write_results(trainer, attempt, step, found)
    attempt.log.track(state.step, latest | result_metrics(found, state.names))
    return None, found


def _write_results(trainer: Trainer, attempt: Attempt, step: int, found: Evaluation) -> None:
    """The table for people, the final checkpoint with its model card, evaluation.json. A collective."""
    logger.info(score_table(found, trainer.config.run_folder))
    config = trainer.config
    card = final_card(found, trainer.crowd, config.all_dataset_names, step)
    with trainer.heartbeat.resting():
        _require_written(attempt.manager, trainer.processes)
        # The tokenizer, with the chat template that was in force, beside each adapter: each may be used alone.
        files = trainer.checkpoint.tokenizer_files.items()
        tokenizers = {f"{agent}/{name}": data for agent in trainer.crowd.names for name, data in files}
        added = {"README.md": card.encode(), **tokenizers}
        attempt.manager.saver.finish(added, step=step)
        _require_written(attempt.manager, trainer.processes)
    if attempt.manager.store.holds_lease():
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
    trainer: Trainer, attempt: Attempt, step: int, scores: Scores, answers: AnswerScores | None
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
        sets=tuple(scores_of_sets(scores, rows)),
        of_rows=parts_of_rows(scores, answers) if config.trial_steps else None,  # a sweep compares them
        dropped=state.dropped,
        ending=Ending(
            last_step=state.step,
            agent_steps=state.agent_steps,
            stopped_early=state.step < trainer.total_steps,
            best=BestSteps(state.validation.metric, state.validation.crowd, tuple(own.best for own in state.agents)),
            warning=attempt.status.current.warning,
        ),
    )
