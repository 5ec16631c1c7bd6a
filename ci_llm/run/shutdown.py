"""A run that ends before its work is done: interrupted, when and with which words; or failed, and why.

A process that fails first writes the reason to a file, and enters no collective after that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ci_llm.checkpoints.store import DISK_FULL
from ci_llm.cluster.deadline import REASON, Deadline, Walltime, find_deadline
from ci_llm.cluster.launch import Launch, shell_line
from ci_llm.cluster.slurm import Job, ask, attempts_in_vain, end_now, end_of, killed_at, put_back, read_job
from ci_llm.config import Config, words_without
from ci_llm.core.memory import is_out_of_memory
from ci_llm.core.run_status import PEER_LOST, Failure, write_failure
from ci_llm.distributed.side_channel import PeerLost
from ci_llm.errors import GivenUp
from ci_llm.run.context import Run

_BRIEFLY_S = 3.0  # who is about to be killed cannot wait long for an answer


def walltime_watched(run: Run) -> Walltime:
    """The end of the job becomes a request to stop, on the main process; the ballot tells the others."""
    deadline = _deadline(run.config, end_of) if run.processes.is_main else None
    if deadline is not None:
        run.log.say(f"walltime  stops in time before {deadline}")
    elif run.config.stop_before_walltime is True:
        run.log.say("walltime  nothing says when the time of this run is over: stop_before_walltime has no effect")
    return Walltime(deadline, run.pace, run.interrupts, look_again=lambda: _deadline(run.config, end_now))


def _deadline(config: Config, end: Callable[[Job], float | None]) -> Deadline | None:
    job = read_job() if config.stop_before_walltime else None
    return find_deadline(config.max_runtime, None if job is None else end(job))


def kill_at(run: Run, deadline: Deadline | None) -> float:
    """When a run that was told to stop will be killed, by `time.monotonic()`.

    At the end of its time if that was the reason; else when SLURM says, or after `grace_s`, and by its launcher perhaps
    before that.
    """
    heard_at = run.interrupts.stop_requested_at or time.monotonic()
    if deadline is not None and run.interrupts.stop_reason == REASON:
        return time.monotonic() + deadline.at - time.time()
    job = read_job()
    end = killed_at(job, partial(ask, timeout_s=_BRIEFLY_S)) if job else None
    by_slurm = time.monotonic() + end - time.time() if end else heard_at + run.config.grace_s
    return min(by_slurm, heard_at + run.processes.launch.patience_s)


def leave(run: Run, reason: str) -> None:
    """Say that the run was interrupted and how it goes on; put its SLURM job back into the queue.

    What counts is the step from which the same command goes on: one that was trained and not saved will be done again.
    """
    command = command_line(run.processes.launch)
    saved = run.manager.all_steps() if run.processes.is_main else []
    step = run.status.step = max([run.began_at, *saved])
    try:
        mine = run.status.finish("interrupted", reason, command)
    except OSError as error:
        run.log.say(f"status.json cannot be written: {error}")
        mine = run.processes.is_main and run.manager.holds_lease()
    where = f"step {step} is saved" if step else "no step is saved"
    run.log.say(f"interrupted ({reason}): {where}; go on with: {command}")
    if mine:  # a job that another attempt has taken over is that attempt's to put back
        config = run.config
        in_vain = attempts_in_vain(config.run_folder, step)
        line = put_back(config.requeue, reason, max_requeues=config.max_requeues, in_vain=in_vain)
        if line:
            run.log.say(line)


def command_line(launch: Launch, changes: Mapping[str, str | None] | None = None) -> str:
    """What a person types to start this run again, by its launcher if there is one.

    Args:
        changes: for another run like it: a key with its new value, or None for a key that is left out.
    """
    command = [*(launch.launcher_command or _own_command(launch))]
    if changes is not None:
        if not _ends_with(command, launch.words):
            command = _by_module(launch)
        program = command[: len(command) - len(launch.words)]
        given = [f"{key}={value}" for key, value in changes.items() if value is not None]
        command = [*program, *words_without(launch.words, changes), *given]
    return shell_line(command)


def _own_command(launch: Launch) -> list[str]:
    """That of this process, unless a person talks to it: then it is the notebook's, or that of a bare interpreter."""
    return _by_module(launch) if hasattr(sys, "ps1") else sys.orig_argv


def _by_module(launch: Launch) -> list[str]:
    return [sys.executable, "-m", "ci_llm", "train", *launch.words]


def _ends_with(command: Sequence[str], words: Sequence[str]) -> bool:
    return [*command[len(command) - len(words) :]] == [*words]


# ---------------------------------------------------------------------------------------------------- failure


def record_failure(run: Run, attempt: int, error: BaseException) -> None:
    """Write why this process fails, then, on the main one, how the run ended.

    A disk that refuses either is told and no more: the error itself is what people have to see. They see it once: the
    terminal hears it from the door, which explains it, and training.log has it from here.
    """
    reason = reason_of(error)
    step = error.step if isinstance(error, GivenUp) and error.step is not None else run.state.step
    failure = Failure.of(error, reason, run.processes.index, step)
    for write in (
        lambda: write_failure(run.config.run_folder, attempt, run.processes.index, failure),
        lambda: run.status.finish("failed", reason, command_line(run.processes.launch)),
    ):
        try:
            write()
        except OSError as refusal:
            run.log.say(f"the failure could not be written down: {refusal}")
    run.log.say(f"failed ({reason}) after step {run.state.step}")
    run.log.note(str(error))


def reason_of(error: BaseException) -> str:
    """A word for scripts, and for the supervisor."""
    if isinstance(error, PeerLost):
        return PEER_LOST
    for cause in _causes(error):
        if isinstance(cause, GivenUp):
            return cause.reason
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            return "disk_full"
        if is_out_of_memory(cause):
            return "out_of_memory"
    return f"error:{type(error).__name__}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
