"""The state of a run, in status.json, for every other program.

Launchers flatten exit codes, so the state travels by file. Only the main process writes it, with a heartbeat: the time
of its last write. A reader that finds `running` with an old heartbeat, or with a dead process, reports `vanished`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from ci_llm.core import run_folder
from ci_llm.core.durable import Refusals, make_folders, write_json
from ci_llm.errors import BadInput

logger = logging.getLogger(__name__)

State = Literal["running", "completed", "interrupted", "failed", "vanished"]

VANISHED_AFTER_S: Final = 60.0
_START_SLACK_S: Final = 5.0  # psutil reads the boot time twice, and a correction of the clock moves it

_EXIT_CODES: Final[Mapping[str, int]] = {"completed": 0, "interrupted": 75, "running": 3}


@dataclass(frozen=True)
class Status:
    """The content of status.json. `vanished` is the conclusion of a reader and never in the file.

    Attributes:
        reason: why the run is not running: "signal:SIGTERM", "walltime", "nonfinite", "error:...".
        step: optimizer steps done.
        total_steps: optimizer steps of the whole run.
        started, heartbeat: unix seconds of the start of the attempt and of the last write.
        pid_space: where `pid` is unique: one boot of one machine, and the PID namespace of a container.
        next_command: the command that resumes the run.
        best_step: the optimizer step with the best evaluation so far.
        objective: what it measures, as `ci_llm.core.measures.measures_of` takes it.
        judged_by: "nll" for rows whose answers are free text, which have no exact match.
        micro_batch_size: rows per process and micro-step; fewer than configured if memory ran out.
        warning: why the result may be worthless, although the run trains or is completed; None if nothing is known.
        first_loss: nats per target at the beginning of the run, for comparison in a later attempt.
        agent_steps: optimizer steps done, counted for every agent that took them.
        mirror: how the mirror stands: url, step, behind_s, error; None without one.
        exactness: how exactly the attempt resumes from a checkpoint, and why not more so; None for a fresh start.
        phase: "evaluation" while rows are evaluated.
        evaluation_batch_size: rows per process that are evaluated at a time; between evaluations the most rows, or
            None for as many as the configuration asks for.
    """

    status: State
    reason: str | None
    step: int
    attempt: int
    pid: int
    host: str
    pid_space: str
    started: float
    heartbeat: float
    next_command: str | None = None
    best_step: int | None = None
    objective: str = "sft"
    judged_by: str = "exact_match"
    micro_batch_size: int | None = None
    warning: str | None = None
    first_loss: float | None = None
    total_steps: int | None = None
    agent_steps: int | None = None
    mirror: Mapping[str, Any] | None = None
    exactness: str | None = None
    phase: str | None = None
    evaluation_batch_size: int | None = None

    @property
    def evaluation_at_most(self) -> int | None:
        """The most rows that the next attempt evaluates at a time: half as many if this one died or failed in that."""
        size, ended = self.evaluation_batch_size, self.status in ("running", "failed", "vanished")
        if size is None or self.phase is None:
            return size
        return max(1, size // 2) if ended else None

    @property
    def exit_code(self) -> int:
        """The exit code of `ci-llm status`: 0 completed, 75 interrupted, 3 running, 1 failed or vanished."""
        return _EXIT_CODES.get(self.status, 1)


class RunStatus:
    """Keeps the status.json of one attempt current, with a heartbeat in a thread of its own.

    Args:
        folder: the run's folder.
        attempt: its number.
        is_main_process: on any other process every call does nothing.
        still_held: called before each write. Once it returns False, a later attempt owns the folder, and nothing is
            written any more.
        staging: where the folder's owner writes the unfinished file (`durable.write_bytes`): a write that a takeover
            overtakes then replaces nothing. By default it is beside the file.
        interval_s: seconds between heartbeats.

    Attributes:
        current: the status that the next heartbeat writes, with its time.
    """

    def __init__(
        self,
        folder: Path | str,
        attempt: int,
        *,
        is_main_process: bool = True,
        still_held: Callable[[], bool] = lambda: True,
        staging: Path | None = None,
        interval_s: float = 5.0,
    ) -> None:
        self._path = Path(folder, "status.json")
        self._active = is_main_process
        self._still_held = still_held
        self._staging = staging
        self._interval_s = interval_s
        now = time.time()
        self.current = Status("running", None, 0, attempt, os.getpid(), socket.gethostname(), pid_space(), now, now)
        self._updating = threading.Lock()  # the thread of a mirror updates as well
        self._writing = threading.Lock()
        self._over, self._refusals = threading.Event(), Refusals()
        self._thread: threading.Thread | None = None

    def update(self, **values: Any) -> None:
        """Change fields of the status, all at once and at no cost: the next heartbeat writes them."""
        with self._updating:
            self.current = replace(self.current, **values)

    def note(self, **values: Any) -> None:
        """Change fields as `update` does, and write them at once: the kernel may end what begins now."""
        self.update(**values)
        if self._thread is not None:
            self._write_heartbeat()

    def start(self, step: int = 0) -> None:
        """Write `running`, and write it again at every heartbeat until `finish`."""
        self.update(step=step)
        if self._active and self._write("running"):
            self._thread = threading.Thread(target=self._write_heartbeats, name="ci_llm heartbeat", daemon=True)
            self._thread.start()

    def finish(self, status: State, reason: str | None = None, next_command: str | None = None) -> bool:
        """Write how the attempt ended.

        Returns:
            False if nothing was written: this is not the main process, or another attempt owns the folder.

        Raises:
            OSError: the disk refuses it; readers will report the run as vanished.
        """
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._active and self._write(status, reason, next_command)

    def _write(self, status: State, reason: str | None = None, next_command: str | None = None) -> bool:
        # For good: an attempt that has lost its folder never writes again, even if it asks once more.
        self._active = self._active and self._still_held()
        if self._active:
            if status == "running":  # for readers that find the process killed: it cannot write the command any more
                next_command = self.current.next_command
            now = {"status": status, "reason": reason, "heartbeat": time.time(), "next_command": next_command}
            try:
                write_json(self._path, asdict(self.current) | now, staging=self._staging)
            except FileNotFoundError:
                if self._still_held():
                    raise
                self._active = False  # taken over between the question and the write
        return self._active

    def _write_heartbeats(self) -> None:
        while self._active and not self._over.wait(self._interval_s):
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        with self._writing, self._refusals.of("status.json cannot be written, the run continues"):
            self._write("running")


def read_status(folder: Path | str, *, now: float | None = None) -> Status:
    """The state of the run in `folder` at `now` (unix seconds).

    A running attempt with an old heartbeat or a dead process has vanished. If a process of the attempt recorded a
    failure, that failure is the reason: what the main process wrote may only be its consequence.

    Raises:
        BadInput: there is no run, or its status.json was not written by this program.
    """
    status = last_status(folder)
    if status is None:
        path = Path(folder, "status.json")
        runs = sorted(str(found.parent) for found in path.parent.glob("*/status.json"))
        if not path.parent.exists():
            raise BadInput("there is no such folder", where=str(path.parent), hint="give the output_dir of a run")
        raise BadInput(
            run_folder.NOT_A_RUN,
            where=str(path),
            hint=f"name one of the runs below it: {', '.join(runs)}" if runs else "give the output_dir of a run",
        )
    if status.status == "running" and (reason := _why_gone(status, time.time() if now is None else now)):
        status = replace(status, status="vanished", reason=reason)
    if status.status in ("running", "completed"):
        return status
    cause = run_folder.earliest_failure(run_folder.read_failures(folder, status.attempt))
    # "interrupted" may hide a failure: a launcher sends a SIGTERM to the others when one process has failed.
    is_consequence = cause is None or cause.reason == run_folder.PEER_LOST or cause.time >= status.heartbeat
    if cause is None or (status.status == "interrupted" and is_consequence):
        return status
    return replace(status, status="failed", reason=cause.reason)


def last_attempt(folder: Path | str) -> int | None:
    """The number of the attempt that wrote status.json last; None if there is no such file.

    Where the file is damaged, it is the number of the newest attempt that has a folder.
    """
    try:
        written = last_status(folder)
    except BadInput:
        return max(run_folder.attempt_numbers(folder), default=None)
    return None if written is None else written.attempt


def readable_status(folder: Path | str) -> Status | None:
    """`last_status`, or None if the file is damaged: the next attempt must not fail because of it."""
    try:
        return last_status(folder)
    except BadInput:
        return None


def last_status(folder: Path | str) -> Status | None:
    """The content of status.json, as it was written; None if there is no such file.

    Raises:
        BadInput: the file was not written by this program, or may not be read.
    """
    try:
        return run_folder.read_record(Status, Path(folder, "status.json"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def keep_status(folder: Path) -> None:
    """Keep the status of the last attempt as `attempts/<n>/status.json`, before the next one writes its own.

    Its last line of metrics may be younger than its last heartbeat. A damaged status cannot be kept; that is logged,
    and the next attempt writes its own.

    Raises:
        OSError: the disk refuses it.
    """
    try:
        status = last_status(folder)
    except BadInput as error:
        logger.warning(f"how the last attempt ended is not known, the run continues: {error.what} ({error.where})")
        return
    if status is not None:
        kept = _kept_path(folder, status.attempt)
        make_folders(kept.parent)
        for last in run_folder.last_records(folder, at_most=1 << 20)[-1:]:
            heartbeat = max(status.heartbeat, last.get("time", 0.0))
            status = replace(status, step=max(status.step, last["step"]), heartbeat=heartbeat)
        write_json(kept, asdict(status))


def kept_status(folder: Path | str, attempt: int) -> Status | None:
    """The last status of an attempt that others followed: `running` if it was killed. None if it was not kept."""
    try:
        return run_folder.read_record(Status, _kept_path(folder, attempt))
    except (BadInput, FileNotFoundError):
        return None


def _kept_path(folder: Path | str, attempt: int) -> Path:
    return run_folder.attempt_folder(folder, attempt) / "status.json"


def _why_gone(status: Status, now: float) -> str | None:
    """The reason why an attempt without an end in its status does not run any more; None if it may run."""
    if status.pid_space == pid_space() and not is_alive(status.pid):
        return "its process is gone"
    return "no heartbeat" if now - status.heartbeat > VANISHED_AFTER_S else None


def started_since_boot_s(pid: int | None = None) -> float:
    """Seconds from the boot of this machine to the start of a process, this one by default.

    In unix seconds, its start moves whenever the clock is corrected: the kernel then moves the time of its boot.

    Raises:
        psutil.NoSuchProcess, psutil.AccessDenied.
    """
    boot = psutil.boot_time()  # first: older versions of psutil keep it for the line below
    return round(psutil.Process(pid).create_time() - boot, 2)


def is_alive(pid: int, started_s: float | None = None) -> bool:
    """True if a process of this machine exists and is not a zombie.

    Args:
        started_s: its `started_since_boot_s`, if known: a later process with the same pid is another process.
    """
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        return started_s is None or abs(started_since_boot_s(pid) - started_s) < _START_SLACK_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def pid_space() -> str:
    """The scope in which a pid is unique, as text: host, boot and PID namespace."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):  # a container may hide them: then the host must suffice
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)
