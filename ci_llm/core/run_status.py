"""What others can know about a run: status.json, and one file per process that failed.

Launchers flatten exit codes, so a verdict travels by file. Only the main process writes status.json. It says
`running` as long as its heartbeat is young; a reader who finds an old heartbeat or a dead process calls the
run `vanished`. A process that fails writes `attempts/<n>/process_<i>.json` before it does anything else; the
earliest of them is the cause, the others follow from it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

import psutil

from ci_llm.core.durable import make_folders, read_json, write_json
from ci_llm.errors import BadInput

State = Literal["running", "completed", "interrupted", "failed", "vanished"]

VANISHED_AFTER_S: Final = 60.0
PEER_LOST: Final = "peer_lost"
_CLOCK_SLACK_S: Final = 5.0  # the start of a process is computed from a boot time that is corrected now and then

_EXIT_CODES: Final[Mapping[str, int]] = {"completed": 0, "interrupted": 75, "running": 3}


@dataclass(frozen=True)
class Failure:
    """Why one process of an attempt failed.

    Attributes:
        reason: a word for scripts: "out_of_memory", "nonfinite", "disk_full", "peer_lost", "error:OSError"; of a
            damaged file "unreadable".
        message: a sentence for people.
        time: unix seconds.
        traceback: where it happened, if known.
    """

    reason: str
    message: str
    process_index: int
    time: float
    step: int | None = None
    host: str = ""
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException, reason: str, process_index: int, step: int | None = None) -> Failure:
        """The failure that an exception means, now and here."""
        return cls(
            reason=reason,
            message=str(error) or type(error).__name__,
            process_index=process_index,
            time=time.time(),
            step=step,
            host=socket.gethostname(),
            traceback="".join(traceback.format_exception(error)),
        )


@dataclass(frozen=True)
class Status:
    """What status.json says, judged: `vanished` is a reader's conclusion and never written.

    Attributes:
        reason: why the run is not running: "signal:SIGTERM", "walltime", "nonfinite", "error:...".
        step: optimizer steps done.
        heartbeat: unix seconds of the last sign of life.
        pid_space: where `pid` means something: one boot of one machine, and the PID namespace of a container.
        next_command: what a person types to go on.
        best_step: the optimizer step after which the crowd was best in an evaluation so far.
        micro_batch_size: rows per process and micro-step, which want of memory may have made fewer than configured.
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
    micro_batch_size: int | None = None

    @property
    def exit_code(self) -> int:
        """What `ci-llm status` exits with: 0 completed, 75 interrupted, 3 running, 1 failed or vanished."""
        return _EXIT_CODES.get(self.status, 1)


Record = TypeVar("Record", Status, Failure)


class RunStatus:
    """Keeps the status.json of one attempt current, with a heartbeat in a thread of its own.

    Args:
        is_main: other processes make every call a no-op.
        still_held: asked before each write; once it says no, a later attempt has taken the folder over and
            nothing is written any more.
        warn: called with one line when the disk refuses a heartbeat; the run goes on.
        interval_s: seconds between heartbeats, which is all that keeping the file current costs.

    `step`, `best_step` and `micro_batch_size` may be set as often as one likes: the next heartbeat writes them.
    """

    def __init__(
        self,
        output_dir: Path | str,
        attempt: int,
        *,
        is_main: bool = True,
        still_held: Callable[[], bool] = lambda: True,
        warn: Callable[[str], None] = print,
        interval_s: float = 5.0,
    ) -> None:
        self._path = Path(output_dir, "status.json")
        self._active = is_main
        self._still_mine, self._warn, self._interval_s = still_held, warn, interval_s
        self.step = 0
        self.best_step: int | None = None
        self.micro_batch_size: int | None = None
        now = time.time()
        self._first = Status("running", None, 0, attempt, os.getpid(), socket.gethostname(), pid_space(), now, now)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, step: int = 0) -> None:
        """Write `running` and keep it young until `finish`."""
        self.step = step
        if self._active and self._write("running"):
            self._thread = threading.Thread(target=self._beat, name="ci_llm heartbeat", daemon=True)
            self._thread.start()

    def finish(self, status: State, reason: str | None = None, next_command: str | None = None) -> bool:
        """Write how the attempt ended. Returns False if nothing was written: not main, or no longer ours.

        Raises:
            OSError: the disk refuses it; readers will see the run as vanished.
        """
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._active and self._write(status, reason, next_command)

    def _write(self, status: State, reason: str | None = None, next_command: str | None = None) -> bool:
        self._active = self._active and self._still_mine()
        if self._active:
            current = replace(
                self._first,
                status=status,
                reason=reason,
                step=self.step,
                heartbeat=time.time(),
                next_command=next_command,
                best_step=self.best_step,
                micro_batch_size=self.micro_batch_size,
            )
            write_json(self._path, asdict(current))
        return self._active

    def _beat(self) -> None:
        failing = False
        while self._active and not self._over.wait(self._interval_s):
            try:
                self._write("running")
                failing = False
            except OSError as error:
                if not failing:
                    self._warn(f"status.json cannot be written, the run goes on: {error}")
                failing = True


def read_status(output_dir: Path | str, *, now: float | None = None) -> Status:
    """The state of the run in `output_dir`, judged at `now` (unix seconds).

    A running attempt with an old heartbeat or a dead process has vanished. Where a process of it left a
    failure, that is the reason, whatever the main process wrote of what it suffered from it.

    Raises:
        BadInput: there is no run, or its status.json is not of this program.
    """
    path = Path(output_dir, "status.json")
    if not path.exists():
        raise BadInput("no run has left a status here", where=str(path), hint="give the output_dir of a run")
    status = _read(Status, path)
    if status.status == "running" and _is_gone(status, time.time() if now is None else now):
        status = replace(status, status="vanished", reason="no heartbeat")
    if status.status in ("running", "completed"):
        return status
    cause = earliest_failure(read_failures(output_dir, status.attempt))
    if cause is None or (status.status == "interrupted" and not _preceded(cause, status)):
        return status
    return replace(status, status="failed", reason=cause.reason)


def last_attempt(output_dir: Path | str) -> int | None:
    """The number of the attempt that wrote status.json last; None if none ever did.

    Raises:
        BadInput: the file is not of this program.
    """
    path = Path(output_dir, "status.json")
    return _read(Status, path).attempt if path.exists() else None


def keep_status(output_dir: Path | str, *, step: int = 0, time: float = 0.0) -> None:
    """Keep the status of the last attempt as `attempts/<n>/status.json`, before the next one writes its own.

    Args:
        step, time: of its last line of metrics, which is younger than the last heartbeat of a process that was killed.

    Raises:
        OSError: the disk refuses it. BadInput: the status is not of this program.
    """
    path = Path(output_dir, "status.json")
    if path.exists():
        status = _read(Status, path)
        kept = _kept_path(output_dir, status.attempt)
        make_folders(kept.parent)
        status = replace(status, step=max(status.step, step), heartbeat=max(status.heartbeat, time))
        write_json(kept, asdict(status))


def kept_status(output_dir: Path | str, attempt: int) -> Status | None:
    """How an attempt that others followed stood last: `running` if it was killed. None if that was not kept."""
    try:
        return _read(Status, _kept_path(output_dir, attempt))
    except (BadInput, FileNotFoundError):
        return None


def _kept_path(output_dir: Path | str, attempt: int) -> Path:
    return Path(output_dir, "attempts", str(attempt), "status.json")


def _preceded(cause: Failure, interruption: Status) -> bool:
    """Whether a failure came before a stop that looks clean: the SIGTERM was a launcher's, because of it."""
    return cause.reason != PEER_LOST and cause.time < interruption.heartbeat


def _read(kind: type[Record], path: Path) -> Record:
    """The record in a file. A newer version may have written more into it than `kind` knows."""
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return kind(**{field.name: value[field.name] for field in fields(kind) if field.name in value})
    except (TypeError, ValueError) as error:
        raise BadInput(f"no {kind.__name__.lower()} of a run: {error}", where=str(path), hint="move it away") from error


def _is_gone(status: Status, now: float) -> bool:
    if now - status.heartbeat > VANISHED_AFTER_S:
        return True
    return status.pid_space == pid_space() and not is_alive(status.pid)


def write_failure(output_dir: Path | str, attempt: int, process_index: int, failure: Failure) -> Path:
    """Write why this process fails, before anything else is tried. A file that exists is the earlier truth.

    Raises:
        OSError: the disk refuses it.
    """
    path = Path(output_dir, "attempts", str(attempt), f"process_{process_index}.json")
    if not path.exists():
        make_folders(path.parent)
        write_json(path, asdict(failure))
    return path


def read_failures(output_dir: Path | str, attempt: int) -> list[Failure]:
    """The failures that the processes of an attempt have written, by process index."""
    found = Path(output_dir, "attempts", str(attempt)).glob("process_*.json")
    told = [(path.stem.removeprefix("process_"), path) for path in found]
    numbered = {int(number): path for number, path in told if number.isdecimal()}
    return [_read_failure(path, index) for index, path in sorted(numbered.items())]


def _read_failure(path: Path, process_index: int) -> Failure:
    """One that cannot be read still says which process failed, and when."""
    try:
        return _read(Failure, path)
    except BadInput as error:
        return Failure("unreadable", f"{error.what} ({path})", process_index, path.stat().st_mtime)


def earliest_failure(failures: Iterable[Failure]) -> Failure | None:
    """The cause: the earliest failure. To have lost a peer is none as long as any other is known, because the
    clocks of two machines may disagree."""
    return min(failures, key=lambda failure: (failure.reason == PEER_LOST, failure.time), default=None)


def is_alive(pid: int, started: float | None = None) -> bool:
    """Whether a process of this machine exists and is not merely waiting to be reaped.

    Args:
        started: unix seconds of its start, where they are known: a later process of the same number is another one.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return started is None or abs(process.create_time() - started) < _CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def pid_space() -> str:
    """Names the set of processes in which a pid is unique: host, boot and PID namespace."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only; elsewhere the host has to do
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)
