"""Our own run: tells in its folder how it stands, goes on from its checkpoints, is asked to change by recovery.json."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cluster.launch import SUPERVISED
from ci_llm.cluster.slurm import requeue
from ci_llm.config import default_file, load_config
from ci_llm.core.attempts import Failure, attempts_without_progress, earliest_failure, read_failures
from ci_llm.core.recovery import read_recovery, write_recovery
from ci_llm.core.run_status import VANISHED_AFTER_S, Status, pid_space, read_status
from ci_llm.errors import BadInput
from ci_llm.interrupts import send
from ci_llm.supervisor import process_tree
from ci_llm.supervisor.attempt import AttemptResult
from ci_llm.supervisor.classify import BAD_CALL, classify_by_status, fault
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.patterns import OwnPatterns
from ci_llm.supervisor.policy import Decision, Outcome

GRACE_S: Final = 120.0
HANG_AFTER_S: Final = 2 * VANISHED_AFTER_S
_LOOK_S: Final = 5.0
_LAUNCHER_RESERVE_S: Final = 5.0


class OwnRun:
    """A run of this project's trainer, under any launcher on this machine.

    Args:
        command: what launches it.
        words: the keys that the command gives to the trainer.
        grace_s: seconds from TERM to KILL; None: as long as a last checkpoint may take.

    Raises:
        ConfigError: the configuration is wrong; nothing is launched then.
    """

    starts_anew = False
    own_patterns = OwnPatterns()  # it tells in status.json
    called_again = "the same command goes on"

    def __init__(self, command: list[str], words: list[str], *, grace_s: float | None = None) -> None:
        self.grace_s = GRACE_S if grace_s is None else grace_s
        self._command = command
        self._config = load_config(default_file(), words)
        self._folder = self._config.run_folder
        self._recovery = read_recovery(self._folder)
        self._before: Status | None = None
        self._has_begun = False
        self._saved_before = 0
        self._sign: tuple[int, float] | None = None  # of life: lines of output, and the heartbeat
        self._heard_at = 0.0
        self._next_look = 0.0

    def begin(self) -> list[str]:
        """What is supervised. Leftovers of attempts that were killed are the trainer's to clear away."""
        return [f"run: {self._folder}"]

    def command(self) -> list[str]:
        """Always the same: the run goes on by itself."""
        return self._command

    def environment(self) -> Mapping[str, str]:
        """Ours, how long we wait for the last checkpoint, and what makes torchrun wait for it and hand signals on."""
        self._before = self._status()
        self._saved_before = self._newest_step()
        self._heard_at = time.monotonic()
        patience_s = max(1, int(self.grace_s - _LAUNCHER_RESERVE_S))
        return {
            SUPERVISED: f"{self.grace_s:g}",
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1,SIGUSR2",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience_s),
            **os.environ,
        }

    def orders(self, evidence: Evidence) -> tuple[str, str] | None:
        """Kill what gives no sign of life: its heartbeat thread is stuck as well, so that it would not hear a TERM.

        The age of a heartbeat is measured here: clocks jump, and those of two machines differ.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        status = self._status_seen()
        if status is None or status.status not in ("running", "vanished"):
            return None
        if (sign := (evidence.num_lines, status.heartbeat)) != self._sign:
            self._sign, self._heard_at = sign, now
        return ("SIGKILL", "hang") if now - self._heard_at > HANG_AFTER_S else None

    def stop_signal(self, stop_reason: str) -> str:
        """The one that every launcher hands on."""
        return "SIGTERM"

    def save_now(self) -> str:
        """Ask the main process of the run for a checkpoint, by the signal that it listens to."""
        status = self._status_seen()
        wanted = next(iter(self._config.save_signals), None)
        if wanted is None:
            return "nothing is saved: save_signals is empty"
        ours = {process.pid for process in process_tree.living()}  # anybody else may have that number by now
        hears = status is not None and status.pid_space == pid_space() and status.pid in ours
        if status is None or not hears or status.status != "running" or not send(status.pid, wanted):
            return f"nothing is saved: there is no training on this machine that hears {wanted}"
        return f"{wanted} to process {status.pid}: it saves and goes on"

    def verdict(self, ending: AttemptResult) -> Outcome:
        """What the run wrote about its own end; what it can do nothing about is seen from outside."""
        self._recovery = read_recovery(self._folder)  # an attempt that began anew has moved the old one aside
        status = self._status_of_attempt()
        failures = read_failures(self._folder, status.attempt) if status else []
        kind, detail = classify_by_status(ending, status, failures, has_begun=self._has_begun)
        self._has_begun |= status is not None
        cause = earliest_failure(failures)
        saved = self._newest_step()
        return Outcome(
            kind,
            detail,
            progress=saved > self._saved_before,
            learning_rate=self._config.learning_rate * self._recovery.learning_rate_factor,
            batch_size=self._micro_batch_size(),
            good_step=self._good_step(cause) if kind == "nonfinite" else None,
            fault=fault(kind, f"{cause.reason}: {cause.message}" if cause else _exception_before_it_began(ending)),
            duration_s=ending.duration_s,
        )

    def adjust(self, decision: Decision, retry: int) -> list[str]:
        """Ask the next attempt for it in recovery.json: the configuration and the effective batch stay."""
        lines, new = [], self._recovery
        if decision.learning_rate is not None:
            factor = decision.learning_rate / self._config.learning_rate
            new = replace(new, learning_rate_factor=factor)
            lines.append(f"learning rate: {self._recovery.learning_rate_factor:.3g} -> {factor:.3g} of the schedule's")
        if decision.batch_size is not None:
            new = replace(new, micro_batch_size=decision.batch_size)
            lines.append(f"micro-batch: {self._micro_batch_size()} -> {decision.batch_size}, the effective batch holds")
        if decision.resume_at_most_step is not None and (status := self._status()) is not None:
            new = replace(new, resume_at_most_step=decision.resume_at_most_step, after_attempt=status.attempt)
            lines.append(f"going back to a checkpoint of step {decision.resume_at_most_step} or before")
        if new != self._recovery:
            attempt = status.attempt if (status := self._status()) else 0
            self._recovery = replace(new, because=(*new.because, f"attempt {attempt}: {decision.why}"))
            write_recovery(self._folder, self._recovery)
        return lines

    def requeue(self, stop_reason: str | None) -> str | None:
        """Ask SLURM to run this job again, as the configuration allows."""
        status = self._status()
        return requeue(
            self._config.requeue,
            stop_reason or (status and status.reason) or "",
            max_requeues=self._config.max_requeues,
            without_progress=attempts_without_progress(self._folder, status.step) if status else 0,
        )

    def close(self) -> list[str]:
        """The configuration was never touched."""
        steps = CheckpointStore(self._folder).all_steps()
        saved = f"newest checkpoint: step {steps[-1]}" if steps else "no checkpoint yet"
        return [f"{saved} in {self._folder}", "original unchanged: adjustments travel in recovery.json"]

    def _good_step(self, cause: Failure | None) -> int | None:
        """The failure names the last finite step; what went wrong may have begun a little before it showed."""
        if cause is None or cause.step is None:
            return None
        return max(0, cause.step - self._config.good_after_steps)

    def _micro_batch_size(self) -> int:
        """The one in force: the trainer may have cut it by itself, which it tells in status.json."""
        status = self._status_of_attempt()
        told = status.micro_batch_size if status else None
        known = [self._config.batch_size, self._recovery.micro_batch_size, told]
        return min(size for size in known if size is not None)

    def _newest_step(self) -> int:
        """The newest checkpoint that the next attempt may go on from, or that the last one has left; 0 if none."""
        status = self._status()
        allowed = self._recovery.latest_step_allowed(status.attempt if status else None)
        steps = CheckpointStore(self._folder).all_steps()
        return max((step for step in steps if allowed is None or step <= allowed), default=0)

    def _status(self) -> Status | None:
        return read_status(self._folder) if (self._folder / "status.json").exists() else None

    def _status_seen(self) -> Status | None:
        """That of the running attempt as far as it can be read: a file that cannot be must not end a training."""
        try:
            return self._status_of_attempt()
        except (BadInput, OSError):
            return None

    def _status_of_attempt(self) -> Status | None:
        """The status, if the attempt that was launched last has written it."""
        status = self._status()
        if status is None or self._before is None:
            return status
        return status if (status.attempt, status.pid) != (self._before.attempt, self._before.pid) else None


def _exception_before_it_began(ending: AttemptResult) -> str | None:
    """What the output tells; a refusal is none, because another writer may hold the folder for a minute."""
    return None if ending.returncode == BAD_CALL else ending.evidence.exception
