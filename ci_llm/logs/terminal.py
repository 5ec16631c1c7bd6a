"""The terminal of a run: lines of text, and the progress as a bar, or as a line per interval if no bar is possible."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class ProgressLine:
    """Turns steps into lines like `step 120/260  46 %  loss 1.23 (1.21 1.25)  2.1 steps/s  0:01:06 left`.

    Args:
        interval_s: seconds; at most one line per interval, and always one for the last step.
        clock: seconds, monotonic.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._start: tuple[int, float] | None = None
        self._last_s: float | None = None

    def line(self, step: int, total: int, losses: Sequence[float]) -> str | None:
        """The line for `step`; None if the last line is younger than the interval."""
        now = self._clock()
        self._start = self._start or (step, now)
        if self._last_s is not None and now - self._last_s < self._interval_s and step < total:
            return None
        self._last_s = now
        parts = [f"step {step}/{total}", f"{step / total:.0%}", describe_losses(losses)]
        return "  ".join(filter(None, [*parts, *self._pace(step, total, now)]))

    def _pace(self, step: int, total: int, now: float) -> list[str]:
        """Speed and time left, from the steps of this attempt only."""
        assert self._start is not None
        steps, seconds = step - self._start[0], now - self._start[1]
        if steps <= 0 or seconds <= 0:
            return []
        left = timedelta(seconds=round((total - step) * seconds / steps))
        return [f"{steps / seconds:.3g} steps/s", f"{left} left"]


def describe_losses(losses: Sequence[float]) -> str:
    """The mean over the agents, and each of them."""
    if not losses:
        return ""
    return f"loss {sum(losses) / len(losses):.4g} ({' '.join(f'{loss:.4g}' for loss in losses)})"


class Terminal:
    """Lines for people, and a progress bar below them if the terminal can redraw a line.

    A run is worth more than its terminal: if that goes away, a warning is logged, and nothing is shown any more.
    """

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file
        self._bar = _Bar(file) if _can_redraw(file) else None

    @property
    def has_bar(self) -> bool:
        """Whether progress is shown as a bar, and not as lines."""
        return self._bar is not None

    def show(self, text: str) -> None:
        """Show `text` as it is, above the bar."""
        bar, file = self._bar, self._file
        self._try(lambda: print(text, file=file, flush=True) if bar is None else bar.print(text))

    def update(self, step: int, total: int, losses: Sequence[float]) -> None:
        """Draw the bar, if there is one."""
        if (bar := self._bar) is not None:
            self._try(lambda: bar.update(step, total, losses))

    def close(self) -> None:
        """Remove the bar."""
        if (bar := self._bar) is not None:
            self._try(bar.close)

    def _try(self, write: Callable[[], None]) -> None:
        if self._file is None:
            return
        try:
            write()
        except (OSError, ValueError) as error:
            _redirect_to_null(self._file)
            self._file = None
            logger.warning(f"the terminal is gone ({error}); the run goes on")


def _redirect_to_null(file: TextIO) -> None:
    """Point a terminal that is gone to the null device, so that neither a stray print nor the last flush fails."""
    with contextlib.suppress(OSError, ValueError):  # the file may have no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file.fileno())
        os.close(null)


def _can_redraw(file: TextIO) -> bool:
    """Whether a line can be redrawn; a dumb terminal, such as that of an editor, takes lines only, as a file does."""
    return file.isatty() and not Console(file=file).is_dumb_terminal


class _Bar:
    """A progress bar with text above it. It is drawn by `update` only, without a thread of its own."""

    def __init__(self, terminal: TextIO) -> None:
        self._console = Console(file=terminal, highlight=False)
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._started = False

    def update(self, step: int, total: int, losses: Sequence[float]) -> None:
        """Draw the bar at `step`."""
        if not self._started:
            self._bar.start()
            self._console.show_cursor(True)  # hidden by rich: after a kill it would stay hidden
            self._bar.add_task("", total=total, completed=step)
            self._started = True
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=step, total=total, description=describe_losses(losses), refresh=True)

    def print(self, text: str) -> None:
        """Print `text` as it is, above the bar."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._started:
            self._bar.stop()
            self._started = False
