"""A call that trains: it begins or resumes the run, leases its folder, trains, concludes; to be read from the top."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ci_llm import objectives
from ci_llm.base.load import Base, keep
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import find_deadline, watch_walltime
from ci_llm.cluster.launch import Launch
from ci_llm.config import Config
from ci_llm.core.run_status import readable_status
from ci_llm.distributed.processes import Patience, Processes, ends_if_stopped
from ci_llm.errors import ProgressLost, StoppedBeforeMeeting
from ci_llm.interrupts import Interrupts
from ci_llm.logs.hardware import monitored
from ci_llm.logs.run_log import RunLog
from ci_llm.logs.trackers import require_installed
from ci_llm.run.conclusion import conclude, known_conclusion
from ci_llm.run.context import Resources, Run
from ci_llm.run.crowd_changes import return_to
from ci_llm.run.end.attempt import Attempt, end_at_once
from ci_llm.run.end.emergency_save import EmergencySave
from ci_llm.run.end.mirroring import RunMirror, require_store
from ci_llm.run.end.result import Result, log_next_steps, push_result, write_page
from ci_llm.run.end.watchdog import Stacks, Watchdog
from ci_llm.run.loop import compute_gradients, note_evaluation, steps, train
from ci_llm.run.setup import build, check_folder, require_no_sweep
from ci_llm.run.start import beginning
from ci_llm.run.start.loading import Loaded
from ci_llm.run.start.resume import Restored, Source, settle_precision
from ci_llm.run.step import evaluation
from ci_llm.run.step.callbacks import Callbacks
from ci_llm.run.step.state import TrainState, Validation
from ci_llm.run.step.step_metrics import Learning

logger = logging.getLogger(__name__)


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
        reason, attempt = interrupts.stop_reason or "", Attempt(config, launch, CheckpointManager(config.run_folder))
        return Result("interrupted", attempt.stopped_before_it_began(reason), config.run_folder, reason=reason)
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
    within: Attempt | None = None,
) -> Result:
    """`run_job` on processes that have met, and that can train another run afterwards.

    Args:
        loaded: base and rows, if several runs share them; at the end the base is without agents again. People are then
            not told what to do next.
        given, quiet: see `run_job`.
        within: the attempt at a sweep, which does the last act of this one.
    """
    log = RunLog(config.run_folder, is_main_process=processes.is_main_process, quiet=quiet)
    manager = _manager_of(config, processes, interrupts)
    mirror = RunMirror(config, manager, processes, interrupts)
    attempt = Attempt(config, processes.launch, manager, log)
    for note in [*(f"config    {line}" for line in sources), *processes.notes, *config.notices()]:
        logger.info(note)
    processes.patience = Patience(record=attempt.stopped_before_it_began)
    result: Result | None = None
    run: Run | None = None
    try:
        with ends_if_stopped(interrupts, processes.patience, config.interrupted_exit_code):
            try:
                start, requests = beginning.find_beginning(config, processes, manager, mirror)
            except ProgressLost as error:
                attempt.refused(error)
                raise
            before = None if start.source is None else start.source.config
            config = settle_precision(config.settled_as(before), processes, before)
            run = build(Resources(config, processes, interrupts, manager, mirror, log), loaded, before, given)
            run.callbacks, run.logs_next_steps = callbacks or Callbacks(), loaded is None
            trackers = _resume(run, start, requests)
            start = replace(start, source=None)  # its tensors are in place
            result = _to_the_end(run, attempt, start, trackers)
            return result
    finally:
        ended_by = sys.exc_info()[1]
        with ExitStack() as ending:  # runs these from the last to the first, all of them, whatever one of them raises
            if run is not None and loaded is not None:
                ending.callback(run.crowd.detach)
            ending.callback(log.close)
            ending.callback(manager.close)
            if within is None:
                ending.callback(attempt.last_act)  # training.log takes its line only while the folder is leased
            else:
                within.last_act = attempt.last_act
            if run is not None:
                ending.callback(mirror.end, result.status if result else None, ended_by)
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


def _to_the_end(run: Run, attempt: Attempt, start: beginning.Start, trackers: Mapping[str, str]) -> Result:
    """Train and conclude a run that stands where it begins or resumes, unless nothing is left to do."""
    config, processes, interrupts, manager = run.config, run.processes, run.interrupts, run.manager
    interrupts.describe_stop = run.describe_stop
    find = partial(known_conclusion, config.run_folder, run.state.step)
    if (known := processes.on_main(find) if run.is_finished else None) is not None:
        return _completed(run, known, f"This run is complete at step {run.state.step}; nothing is left to do.")
    with Stacks() as stacks:
        batches = steps(run)  # forks its workers now, before the run has threads
        _begin(run, attempt, start, trackers)
        record: dict[str, Any] = {}
        with attempt.recorded(lambda: run.state.step):
            _open(run, attempt)
            manager.connect()
            with _watched(run, attempt, stacks):
                run.call_event("on_train_begin")
                stop = run.stop_vote.reason() or train(run, batches)
                if stop is None:
                    stop, record = conclude(run)
                run.call_event("on_train_end")
            manager.wait_until_finished()
            run.log.report_save(manager.last_result)
            run.mirror.settle(stop)
    if stop is not None:
        attempt.interrupted(stop)
        result = Result("interrupted", run.state.step, config.run_folder, reason=stop)
    else:
        attempt.completed()
        but = f", but {warning}" if (warning := run.status.current.warning) else ""
        result = _completed(run, record, f"completed at step {run.state.step}{but}")
    write_page(config, processes, interrupts, manager)
    return result


def _completed(run: Run, record: dict[str, Any], told: str) -> Result:
    """Publish, tell people, and return the result of a run whose `evaluation.json` is written."""
    push_result(run.config, run.processes)  # which may last, and a later call pushes as well
    logger.info(told)
    if run.logs_next_steps:
        log_next_steps(run.present_config, run.processes.launch, record, run.keys_to_go_on)
    return Result("completed", run.state.step, run.config.run_folder, record)


def _resume(run: Run, start: beginning.Start, requests: beginning.Requests) -> Mapping[str, str]:
    """Bring the run to the checkpoint that it resumes from, if there is one, and apply the requests.

    Returns:
        the ids under which trackers know the run.
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
    return restored.trackers


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


def _begin(run: Run, attempt: Attempt, start: beginning.Start, trackers: Mapping[str, str]) -> None:
    """Lease the folder, prepare it as `start` says, start the trackers. A refusal here is not a failed attempt."""
    config, processes, step = run.config, run.processes, run.state.step

    def prepare(number: int) -> None:
        for line in beginning.prepare(run.manager, start):
            logger.info(line)
        keep(run.base, config.run_folder)
        run.mirror.begin(start.keeps, number)

    attempt.begin(processes, step, prepare)
    run.status = attempt.status
    begun_at: dict[str, Any] = {"resumed_from": step, "saved_state": trackers, "hyperparameters": config.model_dump()}
    start_trackers = partial(run.log.start_trackers, processes.accelerator, config.report_to, **begun_at)
    run.log.known_tracker_state = processes.on_main(start_trackers)


def _open(run: Run, attempt: Attempt) -> None:
    """Open the log of the attempt, write its first status, and remove the metrics of later steps."""
    config, processes, step = run.config, run.processes, run.state.step
    run.log.open(attempt.number, still_held=run.manager.holds_lease)
    last = readable_status(config.run_folder) if processes.is_main_process else None
    run.evaluator.at_most = processes.broadcast_object(last.evaluation_at_most if last else None)
    earlier = last if step else None
    known = (earlier.first_loss, earlier.warning) if earlier else ()
    run.learning = Learning(run.state.names, run.total_steps, *known)
    run.status.update(
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
    run.mirror.on_change = lambda state: attempt.status.update(mirror=state)
    run.log.truncate_metrics(step if step else -1, run.manager.staging if processes.is_main_process else None)
    run.status.start(step)
    for line in run.outlook():
        logger.info(line)
    run.log.begin_progress(run.position())
    asks = run.callbacks.hears("on_step_end", "on_log")  # perhaps on one process only
    run.votes_after_steps = any(processes.gather_object(asks))


@contextmanager
def _watched(run: Run, attempt: Attempt, stacks: Stacks) -> Iterator[None]:
    """Watch the run within the block: hardware, walltime, grace and progress."""

    def step() -> int:
        return run.state.step

    def save_last(generators: Sequence[dict[str, Any] | None]) -> None:
        """Without a collective: the process ends after it."""
        kept = evaluation.kept_steps(run.config, run.state.validation)
        run.manager.save_last(step(), run.contents(generators), info=run.info, keep=kept)

    config, interrupts, pace = run.config, run.interrupts, run.pace
    monitors, send = config.monitor_gpu and run.processes.is_main_process, run.mirror.flush_before_kill
    with (
        monitored(config.run_folder, run.manager.holds_lease, wanted=monitors),
        watch_walltime(config.max_runtime, run.processes.launch, pace, interrupts) as walltime,
        EmergencySave(attempt, interrupts, pace, run.optimizer, walltime, step=step, save=save_last, send=send),
        Watchdog(attempt, run.heartbeat, pace, step, stacks),
    ):
        yield
