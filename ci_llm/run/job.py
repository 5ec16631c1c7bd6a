"""A whole run, from the first line to the last: begin or go on, train, judge, conclude; or fail and say so."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import find_deadline
from ci_llm.cluster.launch import Launch
from ci_llm.cluster.slurm import read_job, record_attempt
from ci_llm.config import Config
from ci_llm.core.durable import write_json
from ci_llm.core.run_status import RunStatus, keep_status
from ci_llm.crowd.answers import AnswerScores, merged
from ci_llm.crowd.scoring import Scores, evaluation_record
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError, CiLlmError, ConfigError, LaunchError
from ci_llm.interrupts import Interrupts
from ci_llm.logs.hardware import HardwareMonitor
from ci_llm.logs.profile import profiled
from ci_llm.logs.run_log import RunLog
from ci_llm.logs.trackers import require_installed
from ci_llm.run.context import Run
from ci_llm.run.emergency_save import EmergencySave
from ci_llm.run.evaluation import (
    asked_to_stop,
    count_in,
    evaluate,
    evaluation_metrics,
    examine_crowd,
    is_over,
    kept_steps,
    recollect,
    result_in_place,
)
from ci_llm.run.hang import Stacks, Watchdog
from ci_llm.run.loop import Batches, steps, train
from ci_llm.run.recovery import obey, remember
from ci_llm.run.report import leave_page, model_card, next_steps, score_table
from ci_llm.run.resume import contents, describe, find_source, restore, restore_surroundings
from ci_llm.run.setup import build, plan_ahead, schedule
from ci_llm.run.shutdown import command_line, leave, record_failure, walltime_watched

PROBE_BYTES = 1 << 20


def run_job(config: Config, interrupts: Interrupts, launch: Launch, *, sources: Sequence[str] = ()) -> int:
    """Train as `config` says and return the exit code (see the contract on exit codes in docs/).

    Args:
        sources: lines for people about where the values of `config` come from.

    Raises:
        CiLlmError: with a hint; if the run had begun, its failure is on record in the run's folder.
    """
    folder = config.run_folder
    check_folder(folder)
    find_deadline(config.max_runtime, None)  # on every process, for all to refuse one that is no time
    require_installed(config.report_to)
    processes = Processes(config, log_with=config.report_to, project_dir=folder, launch=launch)
    log = RunLog(folder, is_main=processes.is_main)
    manager = CheckpointManager(
        folder,
        save_interval_steps=config.save_steps,
        save_interval_seconds=config.save_interval_seconds,
        max_to_keep=config.save_total_limit,
        async_save=config.async_save,
        checkpoint_backend=config.checkpoint_backend,
        processes=processes,
        interrupts=interrupts,
        on_disk_full=config.on_disk_full,
        say=log.say,
    )
    for note in [*(f"config    {line}" for line in sources), *processes.notes, *config.notices()]:
        log.say(note)
    code = 1
    try:
        run = build(config, processes, interrupts, manager, log)
        code = _conduct(run)
        return code
    finally:
        log.close()
        try:
            manager.close()
        finally:
            if not processes.shutdown():
                end_at_once(code, sys.exc_info()[1])


def end_at_once(code: int, error: BaseException | None) -> None:
    """End this process here: its library waits for a peer, and would wait at the exit of the interpreter as well."""
    with suppress(OSError, ValueError):  # the terminal may be gone
        if error is not None:
            print(f"error: {error}", file=sys.stderr)
        print(end="", flush=True)
    os._exit(error.exit_code if isinstance(error, CiLlmError) else code)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, by a file without a name that leaves no trace.

    Raises:
        ConfigError: read-only, full, or not a folder.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        raise ConfigError(
            f"nothing can be written here: {error.strerror}",
            where=f"output_dir: {folder}",
            hint="give an output_dir on a disk that has space and may be written",
        ) from error


def _conduct(run: Run) -> int:
    go_on(run)
    if is_over(run) and _is_concluded(run):
        run.log.say(f"This run is complete at step {run.state.step}; nothing is left to do.")
        _say_next(run)
        return 0
    with Stacks() as stacks:
        batches = steps(run)  # forks its workers now, before the run has threads
        return _carry_through(run, batches, _begin(run), stacks)


def _carry_through(run: Run, batches: Batches, attempt: int, stacks: Stacks) -> int:
    who = f"attempt{attempt}_process{run.processes.index}"
    batches = profiled(batches, run.config.profile_steps, run.config.run_folder, who, say=run.log.say)
    try:
        with _watched(run, attempt, stacks):
            if (stop := asked_to_stop(run)) is None and (stop := train(run, batches, save)) is None:
                stop = conclude(run)
        run.manager.wait_until_finished()
    except KeyboardInterrupt:  # a second Ctrl-C: what is committed stays
        leave(run, "signal:SIGINT")
        raise
    except BaseException as error:
        record_failure(run, attempt, error)
        raise
    if stop is None:
        run.status.finish("completed")
        run.log.say(f"completed at step {run.state.step}")
        _say_next(run)
        leave_page(run)
        return 0
    leave(run, stop)
    leave_page(run)
    return run.config.interrupted_exit_code


def go_on(run: Run) -> None:
    """Find the checkpoint to go on from, if there is one, and bring the run there; obey what was asked for."""
    remembered = run.processes.on_main(partial(remember, run.config.run_folder))
    with run.processes.main_first():
        source = find_source(run.manager, run.config.resume_from_checkpoint, remembered.at_most)
    _require_same_step(run, source.step if source else None)
    if source is None:
        run.log.say("resume    no checkpoint: a fresh start")
        _say_all(run, obey(run, remembered))
        return
    lines = restore(run, source)
    run.plan, run.total_steps = plan_ahead(run.config, len(run.rows), run.state.effective_batch)
    run.learning_rate = schedule(run.config, run.total_steps)
    run.log.say(f"resume    step {run.state.step} of {run.total_steps}, verified, from {source.folder}")
    _say_all(run, [*lines, *obey(run, remembered), restore_surroundings(run, source)])
    recollect(run)


def _require_same_step(run: Run, step: int | None) -> None:
    """Refuse folders that differ, before anything is concluded from what is in them. A collective.

    Raises:
        LaunchError: on every process alike.
    """
    found = run.processes.gather_object(step)
    if len({*found}) > 1:
        named = ", ".join("none" if step is None else f"step {step}" for step in found)
        raise LaunchError(
            f"the processes find different checkpoints to go on from: {named}",
            where=str(run.config.run_folder.absolute()),
            hint="give an output_dir on a disk that all machines share, as an absolute path",
        )


def _say_all(run: Run, lines: Iterable[str]) -> None:
    for line in lines:
        run.log.say(f"          {line}")


def _begin(run: Run) -> int:
    """Lease the folder, open the logs and cut them back to where the run stands; returns the attempt's number."""
    manager, processes = run.manager, run.processes
    step = run.began_at = run.state.step
    processes.same_folder(run.config.run_folder)
    attempt = processes.on_main(partial(_claim, run))
    run.log.open(attempt, still_held=manager.store.still_held)
    run.log.cut_back(step if step else -1)
    processes.on_main(partial(_start_trackers, run))
    run.status = RunStatus(
        run.config.run_folder,
        attempt,
        is_main=processes.is_main,
        still_held=manager.store.still_held,
        warn=run.log.say,
    )
    run.status.best_step = run.state.validation.best_step
    run.status.micro_batch_size = run.micro_batch_size
    run.status.start(step)
    steps, rows = run.total_steps, run.state.effective_batch
    passes = math.ceil(rows / processes.count / run.micro_batch_size)
    run.log.say(
        f"batch     {rows} rows per step: {processes.count} process(es) x {passes} micro-step(s) of at most"
        f" {run.micro_batch_size}; {steps} steps, {run.plan.epoch(steps):.3g} epochs"
    )
    return attempt


def _claim(run: Run) -> int:
    """Make the folder this attempt's; returns its number."""
    attempt = run.manager.store.claim()
    for path in run.manager.supersede(run.state.step):
        run.log.say(f"newer than the resumed step, moved to {path}")
    keep_status(run.config.run_folder, **run.log.last_metrics())
    record_attempt(run.config.run_folder, attempt, run.state.step, read_job())
    return attempt


def _start_trackers(run: Run) -> None:
    run.log.start_trackers(
        run.processes.accelerator,
        run.config.report_to,
        resumed_from=run.state.step,
        remembered=run.remembered_trackers,
        hyperparameters=run.config.model_dump(),
    )


@contextmanager
def _watched(run: Run, attempt: int, stacks: Stacks) -> Iterator[None]:
    """Everything that looks after a run while it trains."""
    with _hardware_monitored(run), walltime_watched(run) as walltime, EmergencySave(run, attempt, walltime):  # noqa: SIM117
        with Watchdog(run, attempt, stacks):
            yield


@contextmanager
def _hardware_monitored(run: Run) -> Iterator[None]:
    monitor = HardwareMonitor(run.config.run_folder, still_held=run.manager.store.still_held, warn=run.log.say)
    if run.config.monitor_gpu and run.processes.is_main:
        monitor.start()
    try:
        yield
    finally:
        monitor.stop()


def save(run: Run) -> None:
    """Begin a checkpoint of where the run stands. A collective."""
    with run.heartbeat.resting():  # a disk that is full may be waited for
        run.manager.save(run.state.step, contents(run), force=True, info=describe(run), keep=kept_steps(run))


def conclude(run: Run) -> str | None:
    """Judge agents and crowd, write the results and the final checkpoint; the reason if interrupted meanwhile."""
    run.interrupts.plan = "the last step is saved; leaving"
    run.log.say(f"judging   agents and crowd on {len(run.eval_rows)} held-out rows")
    scores = evaluate(run)
    if scores is not None:
        count_in(run, evaluation_metrics(scores))
    with result_in_place(run) as step:
        if scores is not None and step != run.state.step:
            scores = evaluate(run)
        answers = examine_crowd(run) if scores is not None else None
    if (stop := asked_to_stop(run)) is not None or scores is None:
        return stop
    record = _record(run, step, scores, answers)
    run.log.say(score_table(record))
    card = model_card(record, run.base.name, run.config.dataset_name, step, run.config.run_folder / "final_checkpoint")
    with run.heartbeat.resting():
        require_written(run)
        run.manager.finish({"README.md": card.encode()}, step=None if step == run.state.step else step)
        require_written(run)
    if run.processes.is_main and run.manager.store.still_held():
        write_json(run.config.run_folder / "evaluation.json", record)
    return None


def _record(run: Run, step: int, scores: Scores, answers: AnswerScores | None) -> dict[str, Any]:
    """`evaluation.json`: of the step that is the result of the run, and which step was the best on the way."""
    config = run.config
    return {
        **merged(evaluation_record(scores, config.dataset_name, config.aggregator), answers),
        "step": step,
        "last_step": run.state.step,
        "stopped_early": run.state.step < run.total_steps,
        "best": run.state.validation.record(),
    }


def require_written(run: Run) -> None:
    """Refuse to call a run complete of which the disk did not take what was written last. A collective.

    Raises:
        CheckpointError: on every process.
    """
    run.manager.wait_until_finished()
    result = run.manager.last_result
    note, cause = run.processes.broadcast_object((result.note, result.cause) if result else ("", None))
    if cause is not None:
        raise CheckpointError(
            note,
            where=str(run.config.run_folder),
            hint="make space on this disk; the same command goes on from the last checkpoint",
        ) from cause


def _is_concluded(run: Run) -> bool:
    folder = run.config.run_folder
    return (folder / "evaluation.json").is_file() and (folder / "final_checkpoint" / "manifest.json").is_file()


def _say_next(run: Run) -> None:
    for line in next_steps(run.config, partial(command_line, run.processes.launch)):
        run.log.say(line)
