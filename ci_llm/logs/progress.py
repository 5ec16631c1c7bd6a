"""How far a run is: a bar on a terminal, a plain line per interval everywhere else and in the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressLine:
    """Turns steps into lines like `step 120/260  46 %  loss 1.23 (1.21 1.25)  2.1 steps/s  0:01:06 left`.

    Args:
        interval_s: at most one line per interval; the last step always has one.
        clock: seconds, monotonic.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._start: tuple[int, float] | None = None
        self._last_s: float | None = None

    def line(self, step: int, total: int, losses: Sequence[float]) -> str | None:
        """The line for `step`, or None if the last one is too young."""
        now = self._clock()
        self._start = self._start or (step, now)
        if self._last_s is not None and now - self._last_s < self._interval_s and step < total:
            return None
        self._last_s = now
        parts = [f"step {step}/{total}", f"{step / total:.0%}", describe_losses(losses)]
        return "  ".join(filter(None, [*parts, *self._pace(step, total, now)]))

    def _pace(self, step: int, total: int, now: float) -> list[str]:
        """Speed and time left, from the steps of this attempt alone."""
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


def can_redraw(terminal: TextIO) -> bool:
    """Whether a line can be drawn again there; a dumb terminal, such as an editor's, takes lines as a file does."""
    return terminal.isatty() and not Console(file=terminal).is_dumb_terminal


class Bar:
    """A bar on a terminal; text is printed above it. It draws when told to, without a thread of its own."""

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
            self._console.show_cursor(True)  # a killed process could not bring it back
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
