"""A run or a sweep of this project as a target: it reports in its folder, resumes by itself, reads recovery.json."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cluster.launch import SUPERVISED
from ci_llm.cluster.slurm import requeue
from ci_llm.config import Config, default_file, load_config
from ci_llm.config.sweep import read_sweep
from ci_llm.core import run_folder
from ci_llm.core.run_status import VANISHED_AFTER_S, Status, pid_space, read_status
from ci_llm.errors import BadInput
from ci_llm.interrupts import SAVE_SIGNALS, send
from ci_llm.supervisor import process_tree
from ci_llm.supervisor.child import AttemptResult, StopOrder
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.policy import Decision, Outcome, classify_by_status

GRACE_S: Final = 120.0
HANG_AFTER_S: Final = 2 * VANISHED_AFTER_S
#: The last line of a supervision.
UNCHANGED: Final = "the configuration is unchanged; adjustments, if any, are in recovery.json"
_LOOK_S: Final = 5.0
#: torchrun must kill its workers before the supervisor kills torchrun.
_LAUNCHER_RESERVE_S: Final = 5.0


class OwnRun:
    """A target that is a run of this project, under any launcher on this machine.

    Args:
        command: what launches the trainer.
        words: the `key=value` words in the command.
        grace_s: seconds from TERM to KILL; None for the time that a last checkpoint may take.

    Attributes:
        grace_s: seconds from the signal to stop until the kill.
        restarts_from_scratch: a later attempt uses nothing that a failed one left, W&B runs included.
        stop_signal: the signal that stops the attempt, when the supervisor was told to stop; None for the one it got.
        rerun_effect: the effect of the same call after an interruption; the end of a sentence.

    Raises:
        ConfigError: the configuration is wrong, and nothing is launched.
    """

    restarts_from_scratch = False
    stop_signal: str | None = "SIGTERM"  # which every launcher passes on
    rerun_effect = "the same command resumes"

    def __init__(self, command: list[str], words: list[str], *, grace_s: float | None = None) -> None:
        self.grace_s = GRACE_S if grace_s is None else grace_s
        self._command = command
        self._config = self._read(words)
        self._highest_rate = max(own.learning_rate for own in self._config.each_agent)
        self._folder = self._config.run_folder
        self._recovery = run_folder.read_recovery(self._folder)
        self._status_before: Status | None = None
        self._has_begun = False
        self._step_before = 0
        self._last_sign: tuple[int, float] | None = None  # lines of output, and the time of the heartbeat
        self._last_sign_at = 0.0
        self._next_look = 0.0

    def _read(self, words: list[str]) -> Config:
        """The configuration that the command gives."""
        return load_config(default_file(), words)

    def prepare(self) -> list[str]:
        """The folder of the run."""
        return [f"run: {self._folder}"]

    def begin_attempt(self) -> tuple[list[str], Mapping[str, str]]:
        """The command and the environment of the next attempt. Called once, right before its launch.

        The command is the same every time. The environment tells how long a last checkpoint may take.

        PET_SIGNALS_TO_HANDLE makes torchrun pass these signals on to its workers.
        """
        self._status_before = self._status()
        self._step_before = self._newest_step()
        self._last_sign_at = time.monotonic()
        patience_s = max(1, int(self.grace_s - _LAUNCHER_RESERVE_S))
        return self._command, {
            SUPERVISED: f"{self.grace_s:g}",
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1,SIGUSR2",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience_s),
            **os.environ,
        }

    def stop_order(self, evidence: Evidence) -> StopOrder | None:
        """How and why the running attempt is to be ended: by KILL, without a sign of life, be it output or heartbeat.

        KILL, because the thread of the heartbeat is stuck as well, and with it the reaction to a TERM. Its age is
        measured by the clock of this process: the time in the file may come from another machine, or from before a
        correction of the clock.
        """
        now = time.monotonic()
        if now < self._next_look:  # this is called several times a second, and a status file may be on a network
            return None
        self._next_look = now + _LOOK_S
        status = self._status_of_attempt()
        if status is None or status.status not in ("running", "vanished"):
            return None
        sign = evidence.num_lines, status.heartbeat
        if sign != self._last_sign:
            self._last_sign, self._last_sign_at = sign, now
        return StopOrder("SIGKILL", "hang") if now - self._last_sign_at > HANG_AFTER_S else None

    def request_save(self) -> str:
        """Send the main process of the run the signal by which it saves."""
        status = self._status_of_attempt()
        # A pid in status.json may belong to another machine, or to a program that came later and got the same number.
        descendants = {process.pid for process in process_tree.living()}
        is_here = status is not None and status.pid_space == pid_space() and status.pid in descendants
        if status is None or not is_here or status.status != "running" or not send(status.pid, SAVE_SIGNALS[0]):
            return f"nothing is saved: there is no training on this machine that reacts to {SAVE_SIGNALS[0]}"
        return f"{SAVE_SIGNALS[0]} to process {status.pid}: it saves and continues"

    def classify(self, result: AttemptResult) -> Outcome:
        """Classify by what the run wrote about its end; by exit code and output where it could write nothing."""
        self._recovery = run_folder.read_recovery(self._folder)  # an attempt that started again has moved it aside
        status = self._status_of_attempt()
        cause = run_folder.earliest_failure(run_folder.read_failures(self._folder, status.attempt)) if status else None
        kind, detail = classify_by_status(result, status, cause, has_begun=self._has_begun)
        if kind == "completed" and self._status() is None and (self._folder / "status.json").exists():
            # The next attempt writes a status, and resumes or finds the run complete.
            kind, detail = "crashed", "status.json: it cannot be read"
        self._has_begun |= status is not None
        good_step = None
        if kind == "nonfinite" and cause is not None and cause.step is not None:
            # What led to non-finite values may have begun some steps before them.
            good_step = max(0, cause.step - run_folder.GOOD_AFTER_STEPS)
        return Outcome(
            kind,
            detail,
            progress=self._newest_step() > self._step_before,
            learning_rate=self._highest_rate * self._recovery.learning_rate_factor,
            batch_size=self._micro_batch_size(),
            good_step=good_step,
            duration_s=result.duration_s,
        )

    def adjust(self, decision: Decision, retry: int) -> list[str]:
        """Write the new settings into recovery.json. The configuration stays, and so does the effective batch.

        Args:
            retry: the number of the next retry, from 1 on.
        """
        lines, new = [], self._recovery
        if decision.learning_rate is not None:
            factor = decision.learning_rate / self._highest_rate
            new = replace(new, learning_rate_factor=factor)
            lines.append(f"learning rate: {self._recovery.learning_rate_factor:.3g} -> {factor:.3g} of the schedule's")
        last = self._status_of_attempt()
        is_evaluation = last is not None and last.phase == "evaluation"
        if decision.batch_size is not None and is_evaluation:
            lines.append(
                f"evaluation: fewer than {self._micro_batch_size()} rows at a time; the training stays as it is"
            )
        elif decision.batch_size is not None:
            new = replace(new, micro_batch_size=decision.batch_size)
            lines.append(f"micro-batch: {self._micro_batch_size()} -> {decision.batch_size}, the effective batch holds")
        status = self._status()
        if decision.resume_at_most_step is not None and status is not None:
            new = replace(new, resume_at_most_step=decision.resume_at_most_step, after_attempt=status.attempt)
            lines.append(f"going back to a checkpoint of step {decision.resume_at_most_step} or before")
        if new != self._recovery:
            attempt = status.attempt if status else 0
            self._recovery = replace(new, because=(*new.because, f"attempt {attempt}: {decision.why}"))
            run_folder.write_recovery(self._folder, self._recovery)
        return lines

    def requeue(self, stop_reason: str | None) -> str | None:
        """Ask SLURM to run this job again, as the configuration allows; the last act.

        Args:
            stop_reason: the signal that the supervisor got; None if the training stopped by itself.
        """
        status = self._status()
        return requeue(
            self._config.requeue,
            stop_reason or (status and status.reason) or "",
            without_progress=run_folder.attempts_without_progress(self._folder, status.step) if status else 0,
        )

    def clean_up(self) -> list[str]:
        """Remove nothing: an own run leaves nothing temporary."""
        steps = CheckpointStore(self._folder).all_steps()
        newest = f"newest checkpoint: step {steps[-1]}" if steps else "no checkpoint yet"
        return [f"{newest} in {self._folder}", UNCHANGED]

    def _micro_batch_size(self) -> int:
        """The micro-batch size in force. If the trainer has cut it by itself, it is in status.json.

        If the attempt ended in an evaluation, the batch size of that evaluation, which the next attempt cuts by itself.
        """
        status = self._status_of_attempt()
        if status and status.phase and status.evaluation_batch_size:
            return status.evaluation_batch_size
        reported = status.micro_batch_size if status else None
        known = [self._config.batch_size, self._recovery.micro_batch_size, reported]
        return min(size for size in known if size is not None)

    def _newest_step(self) -> int:
        """The step of the newest checkpoint from which the next attempt may resume; 0 without one."""
        # After a rollback was ordered, checkpoints beyond it are not progress, though they are still in the folder.
        status = self._status()
        allowed = self._recovery.latest_step_allowed(status.attempt if status else None)
        steps = CheckpointStore(self._folder).all_steps()
        return max((step for step in steps if allowed is None or step <= allowed), default=0)

    def _status(self) -> Status | None:
        """The status of the last attempt; None if there is none, or it cannot be read: no training ends by that."""
        try:
            return read_status(self._folder)
        except (BadInput, OSError):
            return None

    def _status_of_attempt(self) -> Status | None:
        """The status, if the attempt that was launched last has written it; None if an earlier one has."""
        status, before = self._status(), self._status_before
        if status is None or before is None:
            return status
        return status if (status.attempt, status.pid) != (before.attempt, before.pid) else None


class SweepRun(OwnRun):
    """A sweep of this project as a target. Its progress sums up its segments; see `OwnRun` for its arguments."""

    def _read(self, words: list[str]) -> Config:
        return read_sweep(default_file(), words).config

    def clean_up(self) -> list[str]:
        """Remove nothing: an own run leaves nothing temporary."""
        return [f"sweep: {self._folder}", UNCHANGED]

    def _newest_step(self) -> int:
        """The optimizer steps that the newest checkpoints of all segments hold."""
        segments = sorted((self._folder / run_folder.SEGMENTS).glob("*"))
        return sum(max(CheckpointStore(folder).all_steps(), default=0) for folder in segments)
