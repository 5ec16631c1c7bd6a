"""The log of a run: for people (terminal and training.log), for programs (metrics.jsonl) and for trackers.

An attempt appends to training.log, a line per message, and to metrics.jsonl, a JSON record per line. A run is worth
more than its files: a disk that refuses a line is reported once, and the run continues. The messages come by
the standard `logging`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from ci_llm.cluster.slurm import read_job
from ci_llm.core import work
from ci_llm.core.durable import Refusals, write_bytes
from ci_llm.core.quantities import duration, size
from ci_llm.core.run_folder import METRICS_NAME, record_of
from ci_llm.logs.progress import Position, ProgressLines, Speed
from ci_llm.logs.terminal import Terminal, View
from ci_llm.logs.trackers import Trackers

if TYPE_CHECKING:
    from ci_llm.checkpoints.store import SaveResult

logger = logging.getLogger(__name__)


class AppendedFile:
    """A text file to which an attempt appends whole lines.

    A crash or a full disk may have cut the last line. The next line then begins on a line of its own.

    Attributes:
        path: the file.
        still_held: called before each write. Once it returns False, another attempt owns the folder, and nothing is
            written any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.still_held: Callable[[], bool] = lambda: True
        self._may_be_cut, self._refusals = True, Refusals()

    def append(self, line: str) -> None:
        """Write `line` and a newline at the end of the file."""
        if not self.still_held():
            return
        with self._refusals.of(f"{self.path.name} cannot be written, the run continues"):
            start = "\n" if self._may_be_cut and _is_cut(self.path) else ""
            self._may_be_cut = True
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                # Again, because the open may take long, for example while the machine sleeps.
                if self.still_held():
                    file.write(f"{start}{line}\n")
            self._may_be_cut = False


class MetricsFile(AppendedFile):
    """metrics.jsonl: records of numbers by optimizer step, which are cut back to the step that a run resumes from."""

    def truncate(self, step: int, staging: Path | None = None) -> None:
        """Remove the lines past `step`, and lines that a crash has cut; -1 removes the lines of all steps.

        Args:
            staging: where the folder's owner writes the unfinished file (`durable.write_bytes`).
        """
        if self.still_held() and self.path.exists():
            lines = self.path.read_bytes().splitlines()
            kept = [line for line in lines if (record := record_of(line)) and record["step"] <= step]
            write_bytes(self.path, b"".join(line + b"\n" for line in kept), staging=staging)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append a record of `values`. JSON has no NaN: a number that is not finite becomes "nan", "inf" or "-inf"."""
        record = {"step": step, **values, "time": round(time.time(), 3)}
        odd = {name: str(each) for name, each in record.items() if isinstance(each, float) and not math.isfinite(each)}
        self.append(json.dumps(record | odd, allow_nan=False))


def _is_cut(path: Path) -> bool:
    """True if the last line has no newline: a crash or a full disk has cut it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


PACKAGE: Final = logging.getLogger("ci_llm")  # the parent of the loggers of all modules
LOG_NAME: Final = "training.log"


class RunLog:
    """The log of one attempt. Every method may be called on every process; only the main process writes anything.

    From its creation to `close`, every record of the package's loggers goes to the terminal, to training.log and to the
    handlers of the logger `ci_llm`, and not to the handlers of the root logger. Messages of the level INFO appear as
    they are. Messages of any other level are marked: `warning: ...` on the terminal, `WARNING ...` in training.log. The
    level of the logger `ci_llm` decides which records are kept; INFO if nobody has set one.

    Messages that come before `open` go to the terminal at once and to training.log as soon as it exists: a call that
    is refused for bad input leaves no file behind.

    Args:
        folder: the run's folder.
        is_main_process: True on the process that writes; the others drop their records.
        terminal: for the lines that people read; standard output by default.
        quiet: show nothing on the terminal but warnings and errors; training.log has everything.
        interval_s: seconds between two lines of progress.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        is_main_process: bool = True,
        terminal: TextIO | None = None,
        quiet: bool = False,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._is_main_process, self._quiet = Path(folder), is_main_process, quiet
        self._speed, self._progress_lines = Speed(clock), ProgressLines(interval_s, clock)
        self._terminal = Terminal(terminal or sys.stdout, View(self._speed), live=is_main_process and not quiet)
        self._file, self.metrics_file = AppendedFile(self._folder / LOG_NAME), MetricsFile(self._folder / METRICS_NAME)
        self._attempt: int | None = None
        self._last_saved = -1
        self._origin: dict[str, int] = {}
        self._pending: list[str] = []  # lines for training.log that came before `open`
        self._trackers: Trackers | None = None
        self.known_tracker_state: dict[str, str] = {}
        self._lock = threading.RLock()
        self._handler = RunHandler(self._handle, self._lock)
        self._handler.attach()
        work.listeners.append(self._take_work)

    def open(self, attempt: int, *, still_held: Callable[[], bool] = lambda: True) -> None:
        """Start to write files, in a folder that exists.

        Args:
            attempt: number of this attempt, shown in every line.
            still_held: called before each write. Once it returns False, another attempt owns the folder, and nothing
                is written any more.
        """
        if not self._is_main_process:
            return
        with self._lock:
            self._attempt = attempt
            self._file.still_held = self.metrics_file.still_held = still_held
            job = read_job()
            self._origin = {"attempt": attempt} | ({"slurm_restarts": job.restarts} if job else {})
            requeued = f", SLURM restart {job.restarts}" if job and job.restarts else ""
            head = f"attempt {attempt} on {socket.gethostname()}, process {os.getpid()}{requeued}"
            for line in [head, *self._pending]:
                self._write_line(line)
            self._pending.clear()

    def note(self, text: str) -> None:
        """Write `text` to training.log only, for what the terminal shows by other means."""
        if self._is_main_process:
            with self._lock:
                self._write(text)

    def metrics(self, step: int, values: Mapping[str, object]) -> None:
        """Append `values` of optimizer step `step` to metrics.jsonl and send its numbers to the trackers."""
        if not self._is_main_process or self._attempt is None:
            return
        with self._lock:
            self.metrics_file.write(step, {**values, **self._origin})
            self.track(step, values)

    def track(self, step: int, values: Mapping[str, object]) -> None:
        """Send the numbers among `values` to the trackers only, for what the run's folder holds in another file."""
        with self._lock:
            if self._trackers is not None:
                self._trackers.log(step, values)

    def report_save(self, result: SaveResult | None) -> None:
        """A line for each step that was saved, when its result is given for the first time."""
        if result is not None and result.saved and result.step > self._last_saved:
            self._last_saved = result.step
            logger.info(f"saved     step {result.step}, {size(result.nbytes)} in {duration(result.seconds)}")

    def begin_progress(self, position: Position) -> None:
        """Show where the run begins."""
        if self._is_main_process:
            self._speed.mark(position)
            self._terminal.take_position(position)

    def progress(self, position: Position) -> None:
        """Show where the run stands. Cheap enough for every step."""
        self.begin_progress(position)
        if self._is_main_process:
            self._show_progress(self._progress_lines.of_step(position, self._speed))

    def end_progress(self) -> None:
        """Show no progress any more: the run ends now, and what follows are lines."""
        self._terminal.take_position(None)

    def _take_work(self, work: work.Work) -> None:
        """Show how far work is, such as an evaluation."""
        if not self._is_main_process:
            return
        if work.ended:
            self._speed.resume()
        elif work.done == 0:
            self._speed.pause()
        self._terminal.take_work(work)
        self._show_progress(self._progress_lines.of_work(work))

    def _show_progress(self, line: str | None) -> None:
        """A line of progress: for the file, and for a terminal without a live area."""
        if line is None:
            return
        with self._lock:
            if not self._terminal.is_live and not self._quiet:
                self._terminal.show(line)
            self._write(line)

    def start_trackers(
        self,
        accelerator: Any,
        names: tuple[str, ...],
        resumed_from: int = 0,
        hyperparameters: Mapping[str, object] | None = None,
    ) -> dict[str, str]:
        """Start the trackers of `report_to`, which go on from the known state. Returns `tracker_state`.

        For the arguments and errors see `Trackers`.
        """
        if self._is_main_process and names:
            self._trackers = Trackers(
                accelerator,
                names,
                folder=self._folder,
                resumed_from=resumed_from,
                saved_state=self.known_tracker_state,
                hyperparameters=hyperparameters or {},
            )
        return self.tracker_state()

    def tracker_state(self) -> dict[str, str]:
        """The known state for `start_trackers` of the next attempt; other processes know it from the main one."""
        return self.known_tracker_state if self._trackers is None else self._trackers.ids

    def finish_trackers(self) -> None:
        """Flush and close the trackers."""
        with self._lock:
            if self._trackers is not None:
                self._trackers.finish()
                self._trackers = None

    def close(self) -> None:
        """Finish the trackers, remove the live area and give the package's logger back as it was before."""
        with ExitStack() as last:  # the last of these comes first
            if self._take_work in work.listeners:
                last.callback(work.listeners.remove, self._take_work)
            last.callback(self._handler.detach)
            last.callback(self._terminal.close)
            self.finish_trackers()

    def _handle(self, level: str, text: str) -> None:
        """Take one message, under the lock; `level` is empty for a message without a mark."""
        if self._is_main_process:
            if not self._quiet or level not in ("", "DEBUG"):
                self._terminal.show(f"{level.lower()}: {text}" if level else text)
            self._write(f"{level} {text}" if level else text)

    def _write(self, text: str) -> None:
        for line in text.splitlines():
            if self._attempt is None:
                self._pending.append(line)
            else:
                self._write_line(line)

    def _write_line(self, line: str) -> None:
        self._file.append(f"{datetime.now():%Y-%m-%d %H:%M:%S} [{self._attempt}] {line}")


class PackageHandler(logging.Handler):
    """A handler that takes the records of the package's loggers while it is attached; the root logger gets none."""

    def attach(self) -> None:
        """Take the package's records, beside the handlers that a program has given its logger."""
        self._before = PACKAGE.propagate, PACKAGE.level, PACKAGE.handlers[:]
        PACKAGE.propagate = False
        if PACKAGE.level == logging.NOTSET:
            PACKAGE.setLevel(logging.INFO)
        # Not the handler of a sweep around it, and not the one of `--debug`, which shows the same on the terminal.
        own = [each for each in self._before[2] if not isinstance(each, PackageHandler) and each.name != PACKAGE.name]
        PACKAGE.handlers[:] = [self, *own]

    def detach(self) -> None:
        """Undo `attach`; a second call changes nothing."""
        if self in PACKAGE.handlers:
            PACKAGE.propagate, level, PACKAGE.handlers[:] = self._before
            PACKAGE.setLevel(level)


class RunHandler(PackageHandler):
    """A handler that gives the records of the package to a run's log.

    Args:
        take: called with the name of the level, empty for INFO, and the text.
        lock: the log's lock. Handler and log share it: with two, a thread that logs and a thread that writes metrics,
            and logs that the disk is full, would wait for each other.
    """

    def __init__(self, take: Callable[[str, str], None], lock: threading.RLock) -> None:
        self._take, self._shared_lock = take, lock
        self._pid = os.getpid()
        super().__init__()

    def createLock(self) -> None:  # noqa: N802 - the name of the standard library
        self.lock = self._shared_lock

    def filter(self, record: logging.LogRecord) -> bool:
        # In `filter`, because `handle` takes the lock between `filter` and `emit`.
        # A forked worker of a data loader is not the run, and another thread may have held the lock at the fork.
        return os.getpid() == self._pid and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        self._take("" if record.levelno == logging.INFO else record.levelname, self.format(record))
