"""An attempt at a run or a sweep: its lease, status.json and log, how it begins and ends, which command resumes it.

A process that fails writes the reason to a file first, and enters no collective after that.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.store import DISK_FULL
from ci_llm.cluster.deadline import Pace
from ci_llm.cluster.launch import SUPERVISED, Launch, shell_line
from ci_llm.cluster.slurm import read_job, requeue
from ci_llm.cluster.starter import exit_code_told
from ci_llm.config import Config, parse_config
from ci_llm.core import run_folder
from ci_llm.core.memory import is_out_of_memory
from ci_llm.core.run_status import RunStatus, keep_status, readable_status
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError, CiLlmError, ConfigError, GivenUp, PeerLost, WriterBusy
from ci_llm.interrupts import Interrupts
from ci_llm.logs.run_log import RunLog
from ci_llm.run.mirroring import RunMirror
from ci_llm.run.step.callbacks import Callbacks
from ci_llm.run.step.step_metrics import Learning

logger = logging.getLogger(__name__)


class Attempt:
    """One attempt at a run, or at a sweep, whose runs are attempts of their own: all beside the training.

    Args:
        manager: of the checkpoints in the folder; it holds the lease.
        interrupts: the signals and requests that this process receives.
        log: a sweep has none: what there is to say, its runs say.
        callbacks: a program's own code, called at the events of the run.

    Attributes:
        processes: those that take part, from its beginning on.
        number: the same on every process; 0 until it has begun.
        began_at: the step from which it resumes.
        status: status.json.
        mirror: sends what the run writes to another place.
        pace: how long steps and saves take.
        bits: the names and the digest that tell what bits this machine computes; see `record_bits` (exactness.py).
        exactness: how exactly it resumes, for people; None for a fresh start.
        learning: tells whether the agents learn; from the first step on.
        requests_wait: why the disk takes no decisions about requests at present; None if it takes them.
    """

    processes: Processes
    learning: Learning

    def __init__(
        self,
        config: Config,
        launch: Launch,
        manager: CheckpointManager,
        interrupts: Interrupts,
        log: RunLog | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.config, self.launch, self.manager, self.interrupts = config, launch, manager, interrupts
        self._log = log
        self.callbacks = callbacks or Callbacks()
        self.pace = Pace()
        self.mirror = RunMirror(config, manager, launch, interrupts, lambda state: self.status.update(mirror=state))
        self.number = self.began_at = 0
        self.status = RunStatus(config.run_folder, 0, is_main_process=False)
        self.bits: dict[str, Any] = {}
        self.exactness: str | None = None
        self.requests_wait: str | None = None
        self._interruption: tuple[str, int] | None = None  # its reason, and the step that is saved

    @property
    def log(self) -> RunLog:
        """The log of a run."""
        assert self._log is not None, "a sweep has none"
        return self._log

    @property
    def folder(self) -> Path:
        """Where the processes of this attempt leave files for each other and for later readers."""
        return run_folder.attempt_folder(self.config.run_folder, self.number)

    def begin(self, processes: Processes, step: int, when_leased: Callable[[int], object] = lambda _: None) -> None:
        """Lease the folder, and record that this attempt begins at `step`. A collective.

        Args:
            when_leased: called on the main process with the number of the attempt, once the folder is leased and how
                the last attempt ended is kept.

        Raises:
            CiLlmError: a refusal, which is no failed attempt.
        """
        self.processes = processes
        processes.require_same_folder(self.config.run_folder)
        self._take_number(processes.on_main(partial(self._lease, step, when_leased)), step)

    def _lease(self, step: int, when_leased: Callable[[int], object] = lambda _: None) -> int:
        folder = self.config.run_folder
        number = self.manager.store.acquire_lease()
        try:
            keep_status(folder)
            when_leased(number)
            run_folder.record_attempt(folder, number, step, _place())
        except OSError as error:
            raise CheckpointError(
                f"the run cannot begin here: {error.strerror}",
                where=str(folder),
                hint="make space there, and call it again",
            ) from error
        return number

    def _take_number(self, number: int, step: int) -> None:
        is_main = self.launch.is_main_process
        self.number = number
        self.began_at = step
        self.status = RunStatus(
            self.config.run_folder,
            number,
            is_main_process=is_main,
            still_held=self.manager.store.holds_lease,
            staging=self.manager.store.staging if is_main else None,
        )
        self.status.update(step=step, next_command=command_line(self.launch))

    @contextmanager
    def recorded(self, step: Callable[[], int]) -> Iterator[None]:
        """Record an error or a second Ctrl-C that ends the block; `step` returns the optimizer steps taken."""
        try:
            yield
        except KeyboardInterrupt:  # what is committed stays
            self.interrupted("signal:SIGINT")
            raise
        except BaseException as error:
            self.failed(step(), error)
            raise

    def interrupted(self, reason: str) -> None:
        """Record and tell that the attempt was interrupted, at the step from which the same command resumes."""
        step = self.status.current.step
        if self._log is not None:
            self.finish_save_in_flight()
            saved = self.manager.all_steps() if self.launch.is_main_process else []
            step = max([self.began_at, *saved])
            self.status.update(step=step)
        command = command_line(self.launch)
        try:
            is_own = self.status.finish("interrupted", reason, command)
        except OSError as error:
            logger.warning(f"status.json cannot be written: {error}")
            # The write that failed cannot say whether the folder is still this attempt's; the lease can.
            is_own = self.launch.is_main_process and self.manager.store.holds_lease()
        if self._log is not None:
            self._log.end_progress()
            where = f"step {step} is saved" if step else "no step is saved"
            logger.info(f"interrupted ({reason}): {where}; resume with: {command}")
            if is_own:  # else another attempt has taken the job over, and puts it back
                self._interruption = reason, step

    def last_act(self) -> str | None:
        """Put the SLURM job back into the queue if this attempt of it was interrupted; returns what SLURM answered.

        To be called last, and by a run while its folder is still leased: SLURM ends what is left of the job, and the
        answer goes into training.log.
        """
        if self._interruption is None:
            return None
        reason, step = self._interruption
        self._interruption = None  # SLURM is asked once
        without_progress = run_folder.attempts_without_progress(self.config.run_folder, step)
        line = requeue(self.config.requeue, reason, without_progress=without_progress)
        if line:
            logger.info(line)
        return line

    def stopped_before_it_began(self, reason: str, step: int = 0) -> int:
        """Record the interruption and put the SLURM job back, unless the run is complete or another attempt has it.

        Returns:
            the last step that is saved.
        """
        step = max(self.manager.all_steps(), default=step)
        if self.launch.is_main_process and not self._is_complete(step):
            with suppress(WriterBusy):
                self._take_number(self._lease(step), step)
                if self.status.finish("interrupted", reason, self.status.current.next_command):
                    self._interruption = reason, step
                    self.last_act()
        self.manager.close()
        return step

    def _is_complete(self, step: int) -> bool:
        """True if the run is complete, and the configuration does not change where it ends."""
        last = readable_status(self.config.run_folder)
        if last is None or last.status != "completed":
            return False
        try:
            file = self.manager.store.path(step) / "config.yaml"
            before = parse_config(file.read_text("utf-8"), str(file))
        except (OSError, CheckpointError, ConfigError):  # a sweep has none
            return True
        return all(change.kind != "schedule" for change in before.diff(self.config))

    def lost_peer_is_a_stop(self) -> bool:
        """True if a peer that is lost has left because of a request to stop; the stop is then recorded.

        It is so before this attempt has begun: the peer has waited for this process as long as it may.
        """
        reason = self.interrupts.stop_reason
        if self.number or reason is None:
            return False
        self.stopped_before_it_began(reason)
        return True

    def refused(self, error: CiLlmError) -> None:
        """Record that it failed where no step is left to resume from: else readers would call the run vanished."""
        if self.launch.is_main_process:
            self._take_number(self._lease(0), 0)
            self.log.open(self.number, still_held=self.manager.store.holds_lease)
            self.failed(0, error)

    def failed(self, step: int, error: BaseException) -> None:
        """Record why this process fails; on the main process also that the attempt failed.

        A disk that refuses is reported and raises nothing, because people have to see `error` itself: the program
        prints it on the terminal, and this method puts it into training.log.

        Args:
            step: the optimizer steps taken.
        """
        for write in self.records_of_failure(step, error):
            try:
                write()
            except OSError as refusal:
                logger.warning(f"the failure could not be written down: {refusal}")
        if self._log is not None:
            self._log.end_progress()
            logger.error(f"failed ({reason_of(error)}) after step {step}")
            self._log.note(str(error))

    def records_of_failure(self, step: int, error: BaseException) -> tuple[Callable[[], object], Callable[[], object]]:
        """Two writes, of which a disk may refuse either: this process fails, and the attempt fails."""
        reason, index = reason_of(error), self.launch.process_index
        failed_at = error.step if isinstance(error, GivenUp) and error.step is not None else step
        failure = run_folder.Failure.of(error, reason, index, failed_at)
        return (
            partial(run_folder.write_failure, self.config.run_folder, self.number, index, failure),
            partial(self.status.finish, "failed", reason, command_line(self.launch)),
        )

    def finish_save_in_flight(self) -> None:
        """Wait for the save in flight. Its error is only reported, so that the status is still written."""
        try:
            self.manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001 - the run resumes from an older step
            logger.warning(f"the save in flight has failed: {described(error)}")


def _place() -> dict[str, object]:
    """Where an attempt runs, for its record: in which SLURM job, and whether under a supervisor."""
    job = read_job()
    place: dict[str, object] = {"slurm_job": job.id, "slurm_restarts": job.restarts} if job else {}
    return place | {"supervised": True} if SUPERVISED in os.environ else place


def described(error: Exception) -> str:
    """An error in a line for people; it begins with the type if the message was not written for them."""
    return str(error) if isinstance(error, (CiLlmError, OSError)) else f"{type(error).__name__}: {error}"


def end_at_once(code: int, error: BaseException | None) -> None:
    """End this process at once: torch waits for a peer, also at the exit of the interpreter."""
    with suppress(OSError, ValueError):  # the terminal may be gone
        if error is not None:
            print(f"error: {error}", file=sys.stderr)
        print(end="", flush=True)
    os._exit(exit_code_told(error.exit_code if isinstance(error, CiLlmError) else code))


def command_line(launch: Launch) -> str:
    """The command that starts this run again, by its launcher if there is one: a line for a shell.

    Of a run that was called in a notebook or at a prompt, words for a call, where no shell command would do the same.
    """
    if launch.called_at is not None and hasattr(sys, "ps1"):
        return "the same call of ci_llm.train"
    return shell_line([*(launch.launcher_command or _own_words())])


def _own_words() -> list[str]:
    """The words that started this program; a command that pip has installed needs no interpreter before it."""
    python, *words = sys.orig_argv
    if not words or not Path(python).is_absolute() or Path(words[0]).parent != Path(python).parent:
        return [python, *words]
    command, *words = words
    name = Path(command).name
    return [name if shutil.which(name) == command else command, *words]


def reason_of(error: BaseException) -> str:
    """The reason of a failure for status.json: `nonfinite`, `disk_full`, ..., or `error:` and the type of the error."""
    if isinstance(error, PeerLost):
        return run_folder.PEER_LOST
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
