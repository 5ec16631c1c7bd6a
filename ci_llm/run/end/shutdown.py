"""The end of an attempt: when it must stop, how its interruption or failure is recorded, which command resumes it.

A process that fails writes the reason to a file first, and enters no collective after that.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.store import DISK_FULL
from ci_llm.cluster.deadline import MAX_RUNTIME, REASON, Deadline, Pace, Walltime, find_deadline
from ci_llm.cluster.launch import Launch, shell_line
from ci_llm.cluster.slurm import Job, current_job_end, job_end, kill_time, query, read_job, requeue
from ci_llm.cluster.starter import exit_code_told
from ci_llm.config import Config, arguments_without, as_python
from ci_llm.core.memory import is_out_of_memory
from ci_llm.core.run_folder import PEER_LOST, Failure, attempt_folder, attempts_without_progress, write_failure
from ci_llm.core.run_status import RunStatus
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError, CiLlmError, GivenUp, PeerLost
from ci_llm.interrupts import Interrupts
from ci_llm.logs.run_log import RunLog

logger = logging.getLogger(__name__)

#: The reason of an interruption that a callback has asked for, as status.json has it.
STOPPED_BY_CALLBACK: Final = "callback"
_BRIEFLY_S = 3.0  # a process that is about to be killed cannot wait long for an answer of SLURM


def watch_walltime(config: Config, processes: Processes, pace: Pace, interrupts: Interrupts) -> Walltime:
    """Make the end of the job a request to stop, on the main process; the ballot tells the other processes."""
    deadline = _deadline(config, processes.launch, job_end) if processes.is_main_process else None
    if deadline is not None:
        logger.info(f"walltime  stops in time before {deadline}")
    return Walltime(deadline, pace, interrupts, refresh=lambda: _deadline(config, processes.launch, current_job_end))


def _deadline(config: Config, launch: Launch, end: Callable[[Job], float | None]) -> Deadline | None:
    job = read_job()
    return find_deadline(config.max_runtime, None if job is None else end(job), started=launch.called_at)


def expected_kill(interrupts: Interrupts, grace_s: float, launch: Launch, deadline: Deadline | None) -> float:
    """When a run that was asked to stop is expected to be killed, by `time.monotonic()`.

    If the reason is the end of its time, at that end. Else when SLURM says, or after `grace_s`, but not later than the
    launcher waits. Infinite where nobody kills: a callback has asked, or the `max_runtime` of a call from Python is
    over. There an emergency save would end the interpreter of the caller.
    """
    asked_at, reason = interrupts.stop_requested_at or time.monotonic(), interrupts.stop_reason
    own_limit = launch.called_at is not None and deadline is not None and deadline.source == MAX_RUNTIME
    if deadline is not None and reason == REASON and not own_limit:
        return time.monotonic() + deadline.at - time.time()
    nobody_kills = reason == STOPPED_BY_CALLBACK or (reason == REASON and own_limit)
    job = read_job()
    end = kill_time(job, partial(query, timeout_s=_BRIEFLY_S)) if job else None
    by_slurm = time.monotonic() + end - time.time() if end else None
    if nobody_kills:
        return math.inf if by_slurm is None else by_slurm
    return min(asked_at + grace_s if by_slurm is None else by_slurm, asked_at + launch.kill_delay_s)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run, from the lease of the folder on; tells and records how it ends.

    Attributes:
        number: the same on every process.
        began_at: the step from which it resumes.
    """

    number: int
    began_at: int
    config: Config
    processes: Processes
    manager: CheckpointManager
    status: RunStatus
    log: RunLog

    @property
    def folder(self) -> Path:
        """Where the processes of this attempt leave files for each other and for later readers."""
        return attempt_folder(self.config.run_folder, self.number)

    def interrupted(self, reason: str) -> Callable[[], str | None]:
        """Record and tell that the run was interrupted, at the step from which the same command resumes.

        Returns:
            a function that puts the SLURM job of the run back into the queue, and returns what SLURM answered; None
            without a job. Call it last, while the folder is still leased: SLURM ends what is left of the job, and the
            answer goes into training.log.
        """
        command = command_line(self.processes.launch)
        finish_save_in_flight(self.manager)
        saved = self.manager.all_steps() if self.processes.is_main_process else []
        step = max([self.began_at, *saved])
        self.status.update(step=step)
        try:
            is_own = self.status.finish("interrupted", reason, command)
        except OSError as error:
            logger.warning(f"status.json cannot be written: {error}")
            # The write that failed cannot say whether the folder is still this attempt's; the lease can.
            is_own = self.processes.is_main_process and self.manager.holds_lease()
        self.log.end_progress()
        where = f"step {step} is saved" if step else "no step is saved"
        logger.info(f"interrupted ({reason}): {where}; resume with: {command}")
        # If another attempt has taken the job over, that attempt puts it back.
        return partial(self._put_job_back, reason, step) if is_own else lambda: None

    def _put_job_back(self, reason: str, step: int) -> str | None:
        config = self.config
        without_progress = attempts_without_progress(config.run_folder, step)
        line = requeue(config.requeue, reason, without_progress=without_progress)
        if line:
            logger.info(line)
        return line

    def failed(self, step: int, error: BaseException) -> None:
        """Record why this process fails; on the main process also that the run failed.

        A disk that refuses is reported and raises nothing, because people have to see `error` itself: the program
        prints it on the terminal, and this method puts it into training.log.

        Args:
            step: the optimizer steps taken.
        """
        reason, index = reason_of(error), self.processes.process_index
        failed_at = error.step if isinstance(error, GivenUp) and error.step is not None else step
        failure = Failure.of(error, reason, index, failed_at)
        for write in (
            lambda: write_failure(self.config.run_folder, self.number, index, failure),
            lambda: self.status.finish("failed", reason, command_line(self.processes.launch)),
        ):
            try:
                write()
            except OSError as refusal:
                logger.warning(f"the failure could not be written down: {refusal}")
        self.log.end_progress()
        logger.error(f"failed ({reason}) after step {step}")
        self.log.note(str(error))


def finish_save_in_flight(manager: CheckpointManager) -> None:
    """Wait for the save in flight. Its error is only reported, so that the status of the attempt is still written."""
    try:
        manager.wait_until_finished()
    except Exception as error:  # noqa: BLE001 - the run resumes from an older step
        logger.warning(f"the save in flight has failed: {described(error)}")


def described(error: Exception) -> str:
    """An error in a line for people; it begins with the type if the message was not written for them."""
    return str(error) if isinstance(error, (CiLlmError, OSError)) else f"{type(error).__name__}: {error}"


def require_written(manager: CheckpointManager, processes: Processes) -> None:
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


def end_at_once(code: int, error: BaseException | None) -> None:
    """End this process at once: torch waits for a peer, also at the exit of the interpreter."""
    with suppress(OSError, ValueError):  # the terminal may be gone
        if error is not None:
            print(f"error: {error}", file=sys.stderr)
        print(end="", flush=True)
    os._exit(exit_code_told(error.exit_code if isinstance(error, CiLlmError) else code))


def command_line(launch: Launch, changes: Mapping[str, str | None] | None = None) -> str:
    """The command that starts this run again, by its launcher if there is one.

    Args:
        changes: for another run like it: a key with its new value, or None for a key that is left out.

    Returns:
        a line for a shell. For a run that was called from Python, a call where no shell command would do the same.
    """
    if launch.called_at is not None and (changes is not None or hasattr(sys, "ps1")):
        return _call_again(changes or {})
    command = [*(launch.launcher_command or sys.orig_argv)]
    if changes is not None:
        arguments = [*launch.arguments]
        program = command[: len(command) - len(arguments)]
        if program + arguments != command:
            program = [sys.executable, "-m", "ci_llm", "train"]
        given = [f"{key}={value}" for key, value in changes.items() if value is not None]
        command = [*program, *arguments_without(launch.arguments, changes), *given]
    return shell_line(command)


def _call_again(changes: Mapping[str, str | None]) -> str:
    """The call of `ci_llm.train` that is like the one before, with these keys; a `config` replaces all of its keys."""
    given = ", ".join(f"{key}={as_python(value)}" for key, value in changes.items() if value is not None)
    if "config" in changes:
        return f"ci_llm.train({given})"
    return "the same call of ci_llm.train" + (f" with {given}" if given else "")


def reason_of(error: BaseException) -> str:
    """The reason of a failure for status.json: `nonfinite`, `disk_full`, ..., or `error:` and the type of the error."""
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
    """The error, and those from which it was raised."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
