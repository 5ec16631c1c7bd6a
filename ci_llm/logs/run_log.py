"""What a run tells: people (terminal, training.log), programs (metrics.jsonl) and trackers.

A run is worth more than its log: a full disk or a terminal that went away is said once, and the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ci_llm.core.durable import write_bytes
from ci_llm.logs.progress import Bar, ProgressLine, can_redraw
from ci_llm.logs.trackers import Trackers

LOG_NAME = "training.log"
METRICS_NAME = "metrics.jsonl"


class RunLog:
    """The voice of one attempt. Every method may be called on every process; only the main one is heard.

    What is said before `open` goes to the terminal at once and to training.log when there is one: a call that
    is refused for bad input leaves no file behind.

    Args:
        folder: the run's folder.
        is_main: whether this process is heard.
        terminal: where lines for people go; standard output by default.
        interval_s: seconds between two lines of progress.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        is_main: bool = True,
        terminal: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._is_main = Path(folder), is_main
        self._still_mine: Callable[[], bool] = lambda: True
        self._terminal: TextIO | None = terminal or sys.stdout
        self._bar = Bar(self._terminal) if is_main and can_redraw(self._terminal) else None
        self._progress_line = ProgressLine(interval_s, clock)
        self._attempt: int | None = None
        self._origin: dict[str, int] = {}
        self._unwritten: list[str] = []
        self._failing: set[str] = set()
        self._unsure: set[str] = set()
        self._trackers: Trackers | None = None
        self._lock = threading.RLock()

    def open(self, attempt: int, *, still_held: Callable[[], bool] = lambda: True) -> None:
        """Start to write files, in a folder that exists.

        Args:
            attempt: number of this attempt, shown in every line.
            still_held: asked before each write; once it says no, another attempt owns the folder.
        """
        if not self._is_main:
            return
        with self._lock:
            self._attempt, self._still_mine = attempt, still_held
            self._origin = {"attempt": attempt, **_slurm_restarts()}
            restarts = self._origin.get("slurm_restarts")
            requeued = f", SLURM restart {restarts}" if restarts else ""
            self._unsure = {LOG_NAME, METRICS_NAME}
            head = f"attempt {attempt} on {socket.gethostname()}, process {os.getpid()}{requeued}"
            for line in [head, *self._unwritten]:
                self._write_line(line)
            self._unwritten.clear()

    def say(self, text: str) -> None:
        """Tell people `text`, of one line or more."""
        if self._is_main:
            with self._lock:
                self._show(text)
                self._note(text)

    def metrics(self, step: int, values: Mapping[str, object]) -> None:
        """Append `values` of optimizer step `step` to metrics.jsonl and send its numbers to the trackers.

        JSON has no NaN: a number that is not finite is written as "nan", "inf" or "-inf".
        """
        if not self._is_main or self._attempt is None:
            return
        record = {"step": step, **values, **self._origin, "time": round(time.time(), 3)}
        text = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        with self._lock:
            self._append(METRICS_NAME, text)
            if self._trackers is not None:
                self._trackers.log(step, values)

    def progress(self, step: int, total: int, losses: Sequence[float] = ()) -> None:
        """Show how far the run is. Cheap enough for every step.

        Args:
            losses: of each agent, in nats per target token.
        """
        if not self._is_main:
            return
        with self._lock:
            line = self._progress_line.line(step, total, losses)
            if self._bar is not None and self._terminal is not None:
                self._on_terminal(lambda bar: bar.update(step, total, losses))
            elif line is not None:
                self._show(line)
            if line is not None:
                self._note(line)

    def cut_back(self, step: int) -> None:
        """Forget the metrics past `step`, from where the run goes on; -1: all. Torn lines go as well."""
        path = self._folder / METRICS_NAME
        if self._is_main and self._still_mine() and path.exists():
            kept = [line for line in path.read_bytes().splitlines() if _step_of(line) <= step]
            write_bytes(path, b"".join(line + b"\n" for line in kept))

    def metrics_of(self, step: int) -> dict[str, Any]:
        """All that metrics.jsonl holds of `step`."""
        path = self._folder / METRICS_NAME
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = (json.loads(line) for line in lines if _step_of(line) == step)
        return {name: value for record in found for name, value in record.items()}

    def last_metrics(self) -> dict[str, Any]:
        """`step` and `time` of the last line of metrics.jsonl that is whole; empty if there is none."""
        path = self._folder / METRICS_NAME
        lines = path.read_bytes().splitlines() if path.exists() else []
        whole = (json.loads(line) for line in reversed(lines) if _step_of(line) < math.inf)
        return {key: value for key, value in next(whole, {}).items() if key in ("step", "time")}

    def start_trackers(
        self,
        accelerator: Any,
        names: tuple[str, ...],
        *,
        resumed_from: int = 0,
        remembered: Mapping[str, str] | None = None,
        hyperparameters: Mapping[str, object] | None = None,
    ) -> None:
        """Start the trackers of `report_to`; for the arguments and errors see `Trackers`."""
        if self._is_main and names:
            self._trackers = Trackers(
                accelerator,
                names,
                folder=self._folder,
                resumed_from=resumed_from,
                remembered=remembered or {},
                hyperparameters=hyperparameters or {},
                warn=self.say,
            )

    def tracker_state(self) -> dict[str, str]:
        """What `start_trackers` wants as `remembered` in the next attempt; empty on other processes."""
        return {} if self._trackers is None else self._trackers.state()

    def close(self) -> None:
        """Remove the bar and close the trackers."""
        with self._lock:
            if self._bar is not None:
                self._on_terminal(lambda bar: bar.close())
            if self._trackers is not None:
                self._trackers.finish()
                self._trackers = None

    # ------------------------------------------------------------------------------------------ terminal

    def _show(self, text: str) -> None:
        if self._bar is not None:
            self._on_terminal(lambda bar: bar.print(text))
        elif self._terminal is not None:
            terminal = self._terminal
            self._or_lose_terminal(lambda: print(text, file=terminal, flush=True))

    def _on_terminal(self, draw: Callable[[Bar], None]) -> None:
        bar = self._bar
        if bar is not None and self._terminal is not None:
            self._or_lose_terminal(lambda: draw(bar))

    def _or_lose_terminal(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:
            _silence(self._terminal)
            self._terminal = None
            self._note(f"the terminal is gone ({error}); the run goes on")

    # --------------------------------------------------------------------------------------------- files

    def _note(self, text: str) -> None:
        for line in text.splitlines():
            if self._attempt is None:
                self._unwritten.append(line)
            else:
                self._write_line(line)

    def _write_line(self, line: str) -> None:
        self._append(LOG_NAME, f"{datetime.now():%Y-%m-%d %H:%M:%S} [{self._attempt}] {line}")

    def _append(self, name: str, line: str) -> None:
        if not self._still_mine():
            return
        path = self._folder / name
        try:
            start = "\n" if name in self._unsure and _is_torn(path) else ""
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                if self._still_mine():  # again: to open a file may take as long as the nap of a machine
                    file.write(f"{start}{line}\n")
        except OSError as error:
            self._unsure.add(name)
            if name not in self._failing:
                self._failing.add(name)
                self._show(f"{name} cannot be written, the run goes on: {error}")
        else:
            self._failing.discard(name)
            self._unsure.discard(name)


def _slurm_restarts() -> dict[str, int]:
    """How often SLURM has started this job again, in every line of metrics: nothing outside of SLURM."""
    in_job = "SLURM_JOB_ID" in os.environ
    return {"slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0)} if in_job else {}


def _silence(terminal: TextIO | None) -> None:
    """Lead a terminal that is gone nowhere, so that neither a stray print nor the last flush fails."""
    with contextlib.suppress(OSError, ValueError):  # it may have no file descriptor at all
        if terminal is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, terminal.fileno())
            os.close(nowhere)


def _is_torn(path: Path) -> bool:
    """Whether the last line lacks its end: a crash or a full disk cut it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: bytes) -> float:
    """The step of a line of metrics; infinite for a line that was torn by a crash."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf
