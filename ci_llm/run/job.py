"""A run from its start to its end: it begins or resumes, leases its folder, trains, concludes; read it from the top.

A few hooks are attributes and no arguments, because what they call is made after the object that calls them:

- `Processes.patience` is set by `opened`, and changed by `EmergencySave` for as long as a step can be given up.
- `Processes.follow` is set once the base is loaded in parts (start/loading.py): the processes meet before that.
- `Interrupts.describe_stop` is set by `_take_folder`: signals are listened to before there is a run.
- `Saver.after_save` is set by `RunMirror.begin`: only a mirror that is claimed sends.
- `Pace.at_boundary` is set by `EmergencySave`, which begins after the loading.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ci_llm import objectives
from ci_llm.base.load import Base, keep
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import watch_walltime
from ci_llm.cluster.launch import Launch
from ci_llm.config import Config
from ci_llm.core.evaluation_file import Evaluation
from ci_llm.core.run_folder import metrics_of
from ci_llm.core.run_status import readable_status
from ci_llm.distributed.processes import Patience, Processes, ends_if_stopped
from ci_llm.errors import PeerLost, ProgressLost, StoppedBeforeMeeting
from ci_llm.interrupts import Interrupts
from ci_llm.logs.hardware import monitored
from ci_llm.logs.run_log import RunLog
from ci_llm.logs.trackers import require_installed
from ci_llm.mirror.objects import open_objects
from ci_llm.run.attempt import Attempt, end_at_once
from ci_llm.run.autotune import select_kernels, select_threads
from ci_llm.run.crowd_changes import return_to
from ci_llm.run.emergency_save import EmergencySave
from ci_llm.run.evaluation import conclude, known_conclusion, note_evaluation
from ci_llm.run.exactness import record_bits, resume_exactly
from ci_llm.run.loop import steps, train
from ci_llm.run.reporting import call_event, contents_of, describe_stop, in_force, keys_to_go_on, outlook, position
from ci_llm.run.result import Result, log_next_steps, push_result, write_page
from ci_llm.run.run_checkpoint import Resume, config_of_checkpoint
from ci_llm.run.start import beginning
from ci_llm.run.start.loading import Loaded
from ci_llm.run.step.callbacks import Callbacks
from ci_llm.run.step.state import TrainState
from ci_llm.run.step.step_metrics import Learning
from ci_llm.run.trainer import Trainer, build, check_folder, require_no_sweep
from ci_llm.run.watchdog import Watchdog

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
    result: Result | None = None
    try:
        with (
            joined(config, launch, interrupts, lambda: result.exit_code(config) if result else 1) as processes,
            opened(processes, config, interrupts, sources=sources, callbacks=checked, quiet=quiet) as attempt,
        ):
            try:
                result = run_attempt(attempt, processes, given=given)
            except PeerLost:
                if not attempt.lost_peer_is_a_stop():
                    raise
                result = Result("interrupted", attempt.began_at, config.run_folder, reason=interrupts.stop_reason)
            finally:
                attempt.last_act()  # training.log takes its line only while the folder is leased
            return result
    except StoppedBeforeMeeting as stop:
        reason, step = stopped_before_meeting(config, launch, interrupts, stop)
        return Result("interrupted", step, config.run_folder, reason=reason)


def stopped_before_meeting(
    config: Config, launch: Launch, interrupts: Interrupts, stop: StoppedBeforeMeeting, step: int = 0
) -> tuple[str, int]:
    """Record that a run or a sweep is interrupted; returns the reason, and the last step that is saved.

    Args:
        step: what a sweep has trained so far, whose checkpoints lie in other folders.
    """
    logger.warning(str(stop))
    alone = config.model_copy(update={"mirror": None})  # nothing is sent, so no store is opened
    reason = interrupts.stop_reason or ""
    attempt = Attempt(alone, launch, CheckpointManager(config.run_folder), interrupts)
    return reason, attempt.stopped_before_it_began(reason, step)


@contextmanager
def joined(config: Config, launch: Launch, interrupts: Interrupts, code: Callable[[], int]) -> Iterator[Processes]:
    """The processes of the run, joined within the block, after everything that one process can refuse alone.

    Both ends of the block are collectives. Where a peer is lost, this process ends after the block, with the exit code
    of the error that ended the block, or with `code()`.
    """
    check_folder(config.run_folder)
    require_installed(config.report_to)
    if config.mirror is not None:
        open_objects(config.mirror)  # refuses a store that this installation cannot use
    with ends_if_stopped(interrupts, Patience(), config.interrupted_exit_code):
        processes = Processes(config, launch=launch, interrupts=interrupts)
    try:
        yield processes
    finally:
        if not processes.shutdown():
            end_at_once(code(), sys.exc_info()[1])


@contextmanager
def opened(
    processes: Processes,
    config: Config,
    interrupts: Interrupts,
    *,
    sources: Sequence[str] = (),
    callbacks: Callbacks | None = None,
    quiet: bool = False,
) -> Iterator[Attempt]:
    """An attempt at a run, with its log, within the block; afterwards its lease ends, and then its log.

    The processes have met, and can train another run afterwards. For the arguments see `run_job`.
    """
    with closing(RunLog(config.run_folder, is_main_process=processes.is_main_process, quiet=quiet)) as log:
        manager = CheckpointManager(
            config.run_folder,
            save_interval_steps=config.save_steps,
            save_interval_seconds=config.save_interval_seconds,
            max_to_keep=config.save_total_limit,
            checkpoint_backend=config.checkpoint_backend,
            processes=processes,
            interrupts=interrupts,
        )
        with closing(manager):
            attempt = Attempt(config, processes.launch, manager, interrupts, log, callbacks)
            for note in [*(f"config    {line}" for line in sources), *processes.notes, *config.notices()]:
                logger.info(note)
            processes.patience = Patience(record=attempt.stopped_before_it_began)
            yield attempt


def run_attempt(
    attempt: Attempt, processes: Processes, *, loaded: Loaded | None = None, given: Base | None = None
) -> Result:
    """Begin or resume the run of an attempt, train it, and conclude it.

    Args:
        loaded: base and rows, if several runs share them; at the end the base is without agents again. People are then
            not told what to do next.
        given: see `run_job`.
    """
    config, shared = attempt.config, loaded is not None
    stopping = ends_if_stopped(attempt.interrupts, processes.patience, config.interrupted_exit_code)
    with attempt.mirror, ExitStack() as before_the_last_files, stopping:
        before_the_last_files.callback(attempt.log.finish_trackers)
        try:
            start, inherited = beginning.agree_on_start(config, processes, attempt.manager, attempt.mirror)
        except ProgressLost as error:
            attempt.refused(error)
            raise
        before = config_of_checkpoint(start.source) if start.source else None
        trainer = build(config, processes, attempt, loaded, before, given)
        if shared:
            before_the_last_files.callback(trainer.crowd.detach)
        _resume(trainer, attempt, start, inherited)
        start = replace(start, source=None)  # its tensors are in place
        find = partial(known_conclusion, config.run_folder, trainer.state.step)
        known = processes.on_main(find) if trainer.is_finished else None
        if known is not None:
            told = f"This run is complete at step {trainer.state.step}; nothing is left to do."
            return _completed(trainer, known, told, alone=not shared)
        return _train_and_conclude(trainer, attempt, start, alone=not shared)


def _train_and_conclude(trainer: Trainer, attempt: Attempt, start: beginning.Start, *, alone: bool) -> Result:
    """Lease the folder, train, evaluate the result, and record how the attempt has ended."""
    found: Evaluation | None = None
    batches = steps(trainer)  # forks its workers now, before the run has threads
    _take_folder(trainer, attempt, start)
    with attempt.recorded(lambda: trainer.state.step):
        _open_log(trainer, attempt)
        with _watched(trainer, attempt):
            call_event(trainer, attempt, "on_train_begin")
            stop = trainer.evaluator.stop_reason() or train(trainer, attempt, batches)
            if stop is None:
                stop, found = conclude(trainer, attempt)
            call_event(trainer, attempt, "on_train_end")
        # The last step is saved, also in the mirror, before the status says how the run has ended.
        attempt.manager.wait_until_finished()
        attempt.log.report_save(attempt.manager.last_result)
        attempt.mirror.send_last_save(stop)
    return _ended(trainer, attempt, stop, found, alone=alone)


def _ended(trainer: Trainer, attempt: Attempt, stop: str | None, found: Evaluation | None, *, alone: bool) -> Result:
    """Record how the attempt has ended, tell people, and write the report."""
    if stop is not None:
        attempt.interrupted(stop)
        result = Result("interrupted", trainer.state.step, trainer.config.run_folder, reason=stop)
    else:
        attempt.status.finish("completed")
        but = f", but {warning}" if (warning := attempt.status.current.warning) else ""
        assert found is not None
        result = _completed(trainer, found, f"completed at step {trainer.state.step}{but}", alone=alone)
    write_page(attempt)
    return result


def _completed(trainer: Trainer, found: Evaluation, told: str, *, alone: bool) -> Result:
    """Publish, tell people, and return the result of a run whose evaluation is written."""
    push_result(trainer.config, trainer.processes)  # which may last, and a later call pushes as well
    logger.info(told)
    if alone:
        log_next_steps(trainer.present_config, found, keys_to_go_on(trainer))
    return Result("completed", trainer.state.step, trainer.config.run_folder, found)


def _resume(trainer: Trainer, attempt: Attempt, start: beginning.Start, inherited: beginning.Inherited) -> None:
    """Bring the run to the checkpoint that it resumes from, if there is one, and to what earlier attempts have left."""
    recorded: Any = {}
    if start.note:
        _log_line(start.note)
    resume = None if start.source is None else Resume(trainer, start.source)
    if resume is None:
        logger.info("resume    no checkpoint: a fresh start")
    else:
        _restore(trainer, attempt, start, resume)
        recorded = resume.source.manifest.info["surroundings"]
    trainer.state = inherited.applied_to(trainer.state)
    trainer.crowd.storage.pass_per_agent |= trainer.state.recovery.pass_per_agent
    if trainer.state.recovery.recompute:
        trainer.crowd.gradient_checkpointing_enable()
    for line in [*in_force(trainer), *inherited.recovery.because]:
        _log_line(f"recovery: {line}")
    for line in select_kernels(trainer):
        _log_line(f"kernels   {line}")
    if told := select_threads(trainer, attempt.interrupts, recorded):
        logger.info(f"threads   {told}")
    # Of the rows of the checkpoint; a crowd of a sweep, made of others, has no digest yet.
    record_bits(trainer, attempt, recorded.get("layer", {}).get("lengths", ()))
    if resume is not None:
        attempt.exactness = resume_exactly(resume, attempt)
        _log_line(f"exactness: {attempt.exactness}")
        _recover_evaluation(trainer, attempt, from_log=start.is_own)


def _restore(trainer: Trainer, attempt: Attempt, start: beginning.Start, resume: Resume) -> None:
    """Bring the run to the step of the checkpoint; order, length and schedule follow from it."""
    source = resume.source
    saved = TrainState.from_dict(source.state["train_state"])
    if saved.history.made:
        resume.require_same_settings()  # before its agents look for their rows in these settings
    return_to(trainer, saved)
    trainer.state = resume.restore()
    attempt.log.known_tracker_state = dict(source.state["trackers"])
    step, last = trainer.state.step, trainer.total_steps
    if trainer.is_finished and not start.is_own:
        raise beginning.nothing_to_train(step, last, source.folder)
    if start.is_own:  # else the interval was another run's
        trainer.metrics.load(source.manifest.info)
    shown = source.folder.relative_to(Path.cwd()) if source.folder.is_relative_to(Path.cwd()) else source.folder
    logger.info(f"resume    step {step} of {last}, verified, from {shown}")
    if step > last:
        key = "epochs" if trainer.config.max_train_steps is None else "max_train_steps"
        taken = f"this run has taken {step} steps already, more than the {last} of {key}"
        logger.warning(f"{taken}: it ends here; restart_from=STEP goes back")
    for line in resume.told_changes():
        _log_line(line)


def _recover_evaluation(trainer: Trainer, attempt: Attempt, *, from_log: bool) -> None:
    """Take the evaluation after the present step from metrics.jsonl, if the checkpoint is older than it. A collective.

    Args:
        from_log: the checkpoint is the run's own, so its metrics.jsonl is about that step.
    """
    metric = trainer.config.metric_for_best_model
    if (before := trainer.state.validation.metric) != metric:
        logger.info(f"          best so far was by {before}: from here on by {metric} alone")
        trainer.state = trainer.state.with_metric(metric)
    if from_log and trainer.evaluation_missed:
        known = trainer.processes.broadcast_object(metrics_of(trainer.config.run_folder, trainer.state.step))
        if f"eval/crowd/{metric}" in known:
            note_evaluation(trainer, attempt, known)


def _log_line(line: str) -> None:
    logger.info(f"          {line}")


def _take_folder(trainer: Trainer, attempt: Attempt, start: beginning.Start) -> None:
    """Lease the folder, change it as `start` says, start the trackers. A refusal here is not a failed attempt."""
    config, processes, step, log = trainer.config, trainer.processes, trainer.state.step, attempt.log
    attempt.interrupts.describe_stop = partial(describe_stop, trainer, attempt.pace)

    def when_leased(number: int) -> None:
        for line in beginning.record_start(attempt.manager, start):
            logger.info(line)
        keep(trainer.loaded.base, config.run_folder)
        attempt.mirror.begin(start.keeps, number)

    attempt.begin(processes, step, when_leased)
    begin = partial(log.start_trackers, processes.accelerator, config.report_to, step, config.model_dump())
    log.known_tracker_state = processes.on_main(begin)


def _open_log(trainer: Trainer, attempt: Attempt) -> None:
    """Open the log of the attempt, write its first status, and remove the metrics of later steps."""
    config, processes, step = trainer.config, trainer.processes, trainer.state.step
    attempt.log.open(attempt.number, still_held=attempt.manager.store.holds_lease)
    last = readable_status(config.run_folder) if processes.is_main_process else None
    trainer.evaluator.at_most = processes.broadcast_object(last.evaluation_at_most if last else None)
    known = (last.first_loss, last.warning) if last and step else ()
    attempt.learning = Learning(trainer.state.names, trainer.total_steps, *known)
    attempt.status.update(
        total_steps=trainer.total_steps,
        agent_steps=trainer.state.agent_steps,
        best_step=trainer.state.validation.best_step,
        objective=objectives.measured_as(config),
        judged_by=trainer.evaluator.primary_metric,
        micro_batch_size=trainer.micro_batch_size,
        warning=attempt.learning.earlier,
        first_loss=attempt.learning.first_loss,
        exactness=attempt.exactness,
        evaluation_batch_size=trainer.evaluator.at_most,
    )
    if (at_most := trainer.evaluator.at_most) is not None:
        _log_line(f"recovery: at most {at_most} row(s) are evaluated at a time, as memory was short")
    if processes.is_main_process:
        attempt.log.metrics_file.truncate(step or -1, attempt.manager.store.staging)
    attempt.status.start(step)
    for line in outlook(trainer):
        logger.info(line)
    attempt.log.begin_progress(position(trainer))
    asks = attempt.callbacks.hears("on_step_end", "on_log")  # perhaps on one process only
    attempt.callbacks.may_stop = any(processes.gather_object(asks))
    attempt.manager.saver.connect()


@contextmanager
def _watched(trainer: Trainer, attempt: Attempt) -> Iterator[None]:
    """Watch the run within the block: hardware, walltime, grace and progress."""

    def step() -> int:
        return trainer.state.step

    def save_last(generators: Sequence[dict[str, Any] | None]) -> None:
        """Without a collective: the process ends after it."""
        contents, info = contents_of(trainer, attempt, generators)
        attempt.manager.saver.save_last(step(), contents, info=info, keep=trainer.kept_steps)

    config, processes = trainer.config, trainer.processes
    watched = config.monitor_gpu and processes.is_main_process
    with (
        monitored(config.run_folder, attempt.manager.store.holds_lease) if watched else nullcontext(),
        watch_walltime(config.max_runtime, processes.launch, attempt.pace, attempt.interrupts) as walltime,
        EmergencySave(attempt, trainer.optimizer, walltime, step, save_last),
        Watchdog(attempt, trainer.heartbeat, step),
    ):
        yield
