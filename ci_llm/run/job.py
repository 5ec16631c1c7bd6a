"""A call that trains: it leases the run's folder, begins or resumes the run, trains, evaluates, concludes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ci_llm import objectives
from ci_llm.base.load import Base, keep
from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.cluster.deadline import find_deadline
from ci_llm.cluster.launch import Launch
from ci_llm.config import Config
from ci_llm.core.durable import read_object, write_json
from ci_llm.core.run_folder import record_attempt
from ci_llm.core.run_status import RunStatus, keep_status, readable_status
from ci_llm.crowd.scoring import AnswerScores, Scores, best_agent, evaluation_record, rows_record
from ci_llm.distributed.processes import Patience, Processes, ends_if_stopped
from ci_llm.errors import DamagedCheckpoint, ProgressLost, StoppedBeforeMeeting, WriterBusy
from ci_llm.interrupts import Interrupts
from ci_llm.logs.hardware import monitored
from ci_llm.logs.run_log import RunLog
from ci_llm.logs.trackers import require_installed
from ci_llm.report.scores import rows_evaluated
from ci_llm.run.context import Resources, Run
from ci_llm.run.crowd_changes import return_to
from ci_llm.run.end.emergency_save import EmergencySave
from ci_llm.run.end.mirroring import RunMirror, require_store
from ci_llm.run.end.result import Result, final_card, log_next_steps, push_result, score_table, write_page
from ci_llm.run.end.shutdown import Attempt, command_line, end_at_once, require_written, watch_walltime
from ci_llm.run.end.watchdog import Stacks, Watchdog
from ci_llm.run.loop import Batches, compute_gradients, note_evaluation, steps, train
from ci_llm.run.setup import build, check_folder, require_no_sweep
from ci_llm.run.start import beginning
from ci_llm.run.start.loading import Loaded
from ci_llm.run.start.resume import Restored, Source, settle_precision
from ci_llm.run.step import evaluation
from ci_llm.run.step.callbacks import Callbacks
from ci_llm.run.step.state import TrainState, Validation
from ci_llm.run.step.step_metrics import Learning

logger = logging.getLogger(__name__)


def conclusion_of(folder: Path, step: int) -> dict[str, Any] | None:
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


def run_job(
    config: Config,
    interrupts: Interrupts,
    launch: Launch,
    *,
    sources: Sequence[str] = (),
    callbacks: Iterable[object] = (),
    given: Base | None = None,
    quiet: bool = False,
) -> Result:
    """Train as `config` says, from the first step or where an earlier call stopped.

    Args:
        sources: lines for people about where the values of `config` come from.
        callbacks: see step/callbacks.py.
        given: a base that is loaded already.
        quiet: show people nothing but warnings.

    Raises:
        CiLlmError: with a hint; if the run had begun, its failure is on record in the run's folder.
    """
    checked = Callbacks(callbacks)  # refuses what is not a callback, before anything is loaded
    require_no_sweep(config.run_folder)
    try:
        processes = meet(config, launch, interrupts)
    except StoppedBeforeMeeting as stop:
        logger.warning(str(stop))
        reason = interrupts.stop_reason or ""
        step = _record_stop(config, launch, reason, CheckpointManager(config.run_folder))
        return Result("interrupted", step, config.run_folder, reason=reason)
    result: Result | None = None
    try:
        result = run_among(processes, config, interrupts, sources=sources, callbacks=checked, given=given, quiet=quiet)
        return result
    finally:
        if not processes.shutdown():
            end_at_once(result.exit_code(config) if result else 1, sys.exc_info()[1])


def meet(config: Config, launch: Launch, interrupts: Interrupts) -> Processes:
    """Join the processes of the run, after everything that one process can refuse alone. A collective."""
    check_folder(config.run_folder)
    find_deadline(config.max_runtime, None)  # on every process, so that all refuse a deadline that is not a time
    require_installed(config.report_to)
    require_store(config)
    with ends_if_stopped(interrupts, Patience(), config.interrupted_exit_code):
        return Processes(config, launch=launch, interrupts=interrupts)


def _record_stop(config: Config, launch: Launch, reason: str, manager: CheckpointManager) -> int:
    """Record an attempt that was interrupted before it began, unless another has the folder; the last step saved."""
    step, last = max(manager.all_steps(), default=0), readable_status(config.run_folder)
    if launch.is_main_process and (last is None or last.status != "completed"):
        with suppress(WriterBusy):
            _status_of_refused(config, manager, step).finish("interrupted", reason, command_line(launch))
    manager.close()
    return step


def _status_of_refused(config: Config, manager: CheckpointManager, step: int) -> RunStatus:
    """The status of a new attempt that does not begin."""
    number = manager.acquire_lease()
    keep_status(config.run_folder)
    record_attempt(config.run_folder, number, step, beginning.place_of_attempt())
    status = RunStatus(config.run_folder, number, still_held=manager.holds_lease, staging=manager.staging)
    status.update(step=step)
    return status


def run_among(
    processes: Processes,
    config: Config,
    interrupts: Interrupts,
    *,
    sources: Sequence[str] = (),
    callbacks: Callbacks | None = None,
    loaded: Loaded | None = None,
    given: Base | None = None,
    quiet: bool = False,
    end_by: Callable[[Callable[[], str | None]], object] = lambda last_act: last_act(),
) -> Result:
    """`run_job` on processes that have met, and that can train another run afterwards.

    Args:
        loaded: base and rows, if several runs share them; at the end the base is without agents again. People are then
            not told what to do next.
        given, quiet: see `run_job`.
        end_by: does the last act of the attempt, or keeps it for later; see `Attempt.interrupted`.
    """
    log = RunLog(config.run_folder, is_main_process=processes.is_main_process, quiet=quiet)
    manager = _manager_of(config, processes, interrupts)
    mirror = RunMirror(config, manager, processes, interrupts)
    resources = Resources(config, processes, interrupts, manager, mirror, log)
    for note in [*(f"config    {line}" for line in sources), *processes.notes, *config.notices()]:
        logger.info(note)
    result: Result | None = None
    run: Run | None = None
    processes.patience = Patience(record=lambda reason: _record_stop(config, processes.launch, reason, manager))
    try:
        with ends_if_stopped(interrupts, processes.patience, config.interrupted_exit_code):
            try:
                start, requests = beginning.find_beginning(config, processes, manager, mirror)
            except ProgressLost as error:
                _record_refusal(resources, error)
                raise
            before = None if start.source is None else start.source.config
            config = settle_precision(config.settled_as(before), processes, before)
            run = build(replace(resources, config=config), loaded, before, given)
            run.callbacks, run.logs_next_steps = callbacks or Callbacks(), loaded is None
            result = _run_to_end(run, start, requests)
            return result
    finally:
        ended_by = sys.exc_info()[1]
        with ExitStack() as ending:  # runs these from the last to the first, all of them, whatever one of them raises
            if run is not None and loaded is not None:
                ending.callback(run.crowd.detach)
            ending.callback(log.close)
            ending.callback(manager.close)
            if run is not None:
                ending.callback(end_by, run.last_act)  # training.log takes its line only while the folder is leased
                ending.callback(run.mirror.end, result.status if result else None, ended_by)
            ending.callback(log.finish_trackers)  # while the folder is still leased to this attempt


def _manager_of(config: Config, processes: Processes, interrupts: Interrupts) -> CheckpointManager:
    return CheckpointManager(
        config.run_folder,
        save_interval_steps=config.save_steps,
        save_interval_seconds=config.save_interval_seconds,
        max_to_keep=config.save_total_limit,
        checkpoint_backend=config.checkpoint_backend,
        processes=processes,
        interrupts=interrupts,
    )


def _record_refusal(found: Resources, error: ProgressLost) -> None:
    """Record a failed attempt where the folder has no step to resume from: else readers would call the run vanished."""
    config, processes, manager, log = found.config, found.processes, found.manager, found.log
    if processes.is_main_process:
        status = _status_of_refused(config, manager, 0)
        log.open(number := status.current.attempt, still_held=manager.holds_lease)
        Attempt(number, 0, config, processes, manager, status, log).failed(0, error)


def _run_to_end(run: Run, start: beginning.Start, requests: beginning.Requests) -> Result:
    """Resume or begin, train and conclude."""
    start, trackers = _resume(run, start, requests)
    run.interrupts.describe_stop = run.describe_stop
    conclusion = partial(conclusion_of, run.config.run_folder, run.state.step)
    record = run.processes.on_main(conclusion) if run.is_finished else None
    if record is not None:
        logger.info(f"This run is complete at step {run.state.step}; nothing is left to do.")
        push_result(run.config, run.processes)
        if run.logs_next_steps:
            log_next_steps(run.present_config, run.processes.launch, record, run.keys_to_go_on)
        return Result("completed", run.state.step, run.config.run_folder, record)
    with Stacks() as stacks:
        batches = steps(run)  # forks its workers now, before the run has threads
        attempt = _begin(run, start, trackers)
        return _train_and_conclude(run, batches, attempt, stacks)


def _train_and_conclude(run: Run, batches: Batches, attempt: Attempt, stacks: Stacks) -> Result:
    record: dict[str, Any] = {}
    try:
        _open(run, attempt.number)
        run.manager.connect()
        with _watched(run, attempt, stacks):
            asks = run.callbacks.hears("on_step_end", "on_log")  # perhaps on one process only
            run.votes_after_steps = any(run.processes.gather_object(asks))
            run.call_event("on_train_begin")
            stop = run.stop_vote.reason()
            if stop is None:
                stop = train(run, batches)
            if stop is None:
                stop, record = conclude(run)
            run.call_event("on_train_end")
        run.manager.wait_until_finished()
        run.log.report_save(run.manager.last_result)
        run.mirror.settle(stop)
    except KeyboardInterrupt:  # a second Ctrl-C: what is committed stays
        run.last_act = attempt.interrupted("signal:SIGINT")
        raise
    except BaseException as error:
        attempt.failed(run.state.step, error)
        raise
    if stop is not None:
        run.last_act = attempt.interrupted(stop)
        write_page(run.config, run.processes, run.interrupts, run.manager)
        return Result("interrupted", run.state.step, run.config.run_folder, reason=stop)
    run.status.finish("completed")
    push_result(run.config, run.processes)  # which may last, and a later call pushes as well
    warning = run.status.current.warning
    but = f", but {warning}" if warning else ""
    logger.info(f"completed at step {run.state.step}{but}")
    if run.logs_next_steps:
        log_next_steps(run.present_config, run.processes.launch, record, run.keys_to_go_on)
    write_page(run.config, run.processes, run.interrupts, run.manager)
    return Result("completed", run.state.step, run.config.run_folder, record)


def _resume(
    run: Run, start: beginning.Start, requests: beginning.Requests
) -> tuple[beginning.Start, Mapping[str, str]]:
    """Bring the run to the checkpoint that it resumes from, if there is one, and apply the requests.

    Returns:
        `start` without the checkpoint, whose tensors are in place; and the ids under which trackers know the run.
    """
    _log_lines([start.note] if start.note else [])
    restored = Restored(run.state)
    if start.source is None:
        logger.info("resume    no checkpoint: a fresh start")
    else:
        restored = _restore(run, start.source, start)
        _log_lines(restored.lines)
    run.state = beginning.apply_requests(run.state, requests, run.config)
    run.crowd.storage.pass_per_agent |= run.state.recovery.pass_per_agent
    if run.state.recovery.recompute:
        run.crowd.gradient_checkpointing_enable()
    _log_lines(
        f"recovery: {line}"
        for line in (*beginning.in_force(run.state, run.config.batch_size), *requests.recovery.because)
    )
    recorded: Any = start.source.checkpoint.manifest.info["surroundings"] if start.source else {}
    _log_lines(f"kernels   {line}" for line in run.choose_kernels(compute_gradients))
    if line := run.choose_threads(compute_gradients, recorded):
        logger.info(f"threads   {line}")
    measure = partial(run.measure, compute_gradients)
    if start.source is None:
        measure()
    else:
        run.exactness = run.checkpoint.restore_environment(start.source, run.state, measure)
        _log_lines([f"exactness: {run.exactness}"])
        _recover_evaluation(run, from_log=start.is_own)
    return replace(start, source=None), restored.trackers


def _restore(run: Run, source: Source, start: beginning.Start) -> Restored:
    """Bring the run to the step of the checkpoint; order, length and schedule follow from it."""
    saved = TrainState.from_dict(source.checkpoint.state["train_state"])
    if saved.members is not None and saved.members.made:
        run.checkpoint.require_same_settings(source)  # before its agents look for their rows in these settings
    return_to(run, saved)
    restored = run.checkpoint.restore(source)
    run.state = restored.state
    if run.is_finished and not start.is_own:
        raise beginning.nothing_to_train(run.state.step, run.total_steps, source.folder)
    if start.is_own:  # else the interval was another run's
        run.step_metrics.load(source.checkpoint.manifest.info)
    logger.info(f"resume    step {run.state.step} of {run.total_steps}, verified, from {source.shown}")
    if run.state.step > run.total_steps:
        asked = f"the {run.total_steps} of {'epochs' if run.config.max_train_steps is None else 'max_train_steps'}"
        taken = f"this run has taken {run.state.step} steps already, more than {asked}"
        logger.warning(f"{taken}: it ends here; restart_from=STEP goes back")
    return restored


def _recover_evaluation(run: Run, *, from_log: bool) -> None:
    """Take the evaluation after the present step from metrics.jsonl, if the checkpoint is older than it. A collective.

    Args:
        from_log: the checkpoint is the run's own, so its metrics.jsonl is about that step.
    """
    metric = run.config.metric_for_best_model
    if run.state.validation.metric != metric:
        logger.info(f"          best so far was by {run.state.validation.metric}: from here on by {metric} alone")
        run.state = replace(run.state, validation=Validation(metric))
    if from_log and run.evaluation_missed:
        known = run.processes.broadcast_object(run.log.read_metrics(run.state.step))
        if f"eval/crowd/{metric}" in known:
            note_evaluation(run, known)


def _log_lines(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info(f"          {line}")


def _begin(run: Run, start: beginning.Start, trackers: Mapping[str, str]) -> Attempt:
    """Lease the folder, prepare it as `start` says, start the trackers. A refusal here is not a failed attempt."""
    config, manager, processes, step = run.config, run.manager, run.processes, run.state.step
    processes.require_same_folder(config.run_folder)
    number = processes.on_main(partial(_lease, manager, run.log, run.mirror, start, step, run.base))
    begun_at: dict[str, Any] = {"resumed_from": step, "saved_state": trackers, "hyperparameters": config.model_dump()}
    start_trackers = partial(run.log.start_trackers, processes.accelerator, config.report_to, **begun_at)
    run.log.known_tracker_state = processes.on_main(start_trackers)
    run.status = RunStatus(
        config.run_folder,
        number,
        is_main_process=processes.is_main_process,
        still_held=manager.holds_lease,
        staging=manager.staging if processes.is_main_process else None,
    )
    run.status.update(next_command=command_line(processes.launch))
    return Attempt(number, step, config, processes, manager, run.status, run.log)


def _lease(
    manager: CheckpointManager, log: RunLog, mirror: RunMirror, start: beginning.Start, step: int, base: Base
) -> int:
    """Lease and prepare the folder of the run; returns the number of the attempt."""
    number = manager.acquire_lease()
    try:
        keep_status(manager.directory, **log.last_metrics())
        for line in beginning.prepare(manager, start):
            logger.info(line)
        record_attempt(manager.directory, number, step, beginning.place_of_attempt())
        keep(base, manager.directory)
    except OSError as error:
        raise beginning.cannot_begin(manager.directory, error) from error
    mirror.begin(start.keeps, number)
    return number


def _open(run: Run, number: int) -> None:
    """Open the log of the attempt, write its first status, and remove the metrics of later steps."""
    config, processes, step = run.config, run.processes, run.state.step
    run.log.open(number, still_held=run.manager.holds_lease)
    last = readable_status(config.run_folder) if processes.is_main_process else None
    run.evaluator.at_most = processes.broadcast_object(last.evaluation_at_most if last else None)
    earlier = last if step else None
    known = (earlier.first_loss, earlier.warning) if earlier else ()
    run.learning = Learning(run.state.names, run.total_steps, *known)
    run.status.update(
        step=step,
        total_steps=run.total_steps,
        agent_steps=run.state.agent_steps,
        best_step=run.state.validation.best_step,
        objective=objectives.measured_as(config),
        judged_by=run.evaluator.judged_by,
        micro_batch_size=run.micro_batch_size,
        warning=run.learning.earlier,
        first_loss=run.learning.first_loss,
        exactness=run.exactness,
        evaluation_batch_size=run.evaluator.at_most,
    )
    run.evaluator.note = run.status.note
    if run.evaluator.at_most is not None:
        _log_lines([f"recovery: at most {run.evaluator.at_most} row(s) are evaluated at a time, as memory was short"])
    run.mirror.on_change = lambda state: run.status.update(mirror=state)
    run.log.truncate_metrics(step if step else -1, run.manager.staging if processes.is_main_process else None)
    run.status.start(step)
    for line in run.outlook():
        logger.info(line)
    run.log.begin_progress(run.position())


@contextmanager
def _watched(run: Run, attempt: Attempt, stacks: Stacks) -> Iterator[None]:
    """Watch the run within the block: hardware, walltime, grace and progress."""

    def step() -> int:
        return run.state.step

    def save_last(generators: Sequence[dict[str, Any] | None]) -> None:
        """Without a collective: the process ends after it."""
        kept = evaluation.kept_steps(run.config, run.state.validation)
        run.manager.save_last(step(), run.contents(generators), info=run.info, keep=kept)

    monitors = run.config.monitor_gpu and run.processes.is_main_process
    with (
        monitored(run.config.run_folder, run.manager.holds_lease, wanted=monitors),
        watch_walltime(run.config, run.processes, run.pace, run.interrupts) as walltime,
        EmergencySave(
            attempt,
            run.interrupts,
            run.pace,
            run.optimizer,
            walltime,
            step=step,
            save=save_last,
            send=run.mirror.flush_before_kill,
        ),
        Watchdog(attempt, run.heartbeat, run.pace, step, stacks),
    ):
        yield


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
        require_written(run.manager, run.processes)
        added = {"README.md": card.encode(), **run.checkpoint.agents_tokenizers()}
        run.manager.finish(added, step=None if step == run.state.step else step)
        require_written(run.manager, run.processes)
    if run.processes.is_main_process and run.manager.holds_lease():
        write_json(config.run_folder / "evaluation.json", record, staging=run.manager.staging)


def _record(run: Run, step: int, scores: Scores, answers: AnswerScores | None) -> dict[str, Any]:
    """The contents of evaluation.json: the scores of the step that is the result of the run, and the best step."""
    config, rows, judged_by = run.present_config, run.eval_rows, run.evaluator.judged_by
    has_best = len(config.agents) > 1 and rows.are_common
    asked = {"task": run.config.task, "aggregator": config.aggregator, "trained_on": rows.trained_on}
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
