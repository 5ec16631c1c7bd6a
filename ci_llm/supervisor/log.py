"""What the supervisor tells: safe_train.log for later, the terminal for now."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Final

LOG_NAME: Final = "safe_train.log"
_PATIENCE_S: Final = 1.0


class SupervisorLog:
    """Says each thing once, on the terminal and in the log; a log that cannot be written is no reason to stop.

    Args:
        path: the log, appended to.
        fd: where the terminal's lines go; standard error by default.
        now: what a line is dated with.
    """

    def __init__(self, path: Path, *, fd: int = 2, now: Callable[[], datetime] = datetime.now) -> None:
        self._path, self._fd, self._now = path, fd, now
        self._failing = False

    def say(self, text: str, *, at_line_start: bool = True) -> None:
        """Tell one thing, in as many lines as it has.

        Args:
            at_line_start: False where a progress bar stands on the terminal; it keeps its line.
        """
        lines = text.splitlines() or [""]
        self._show(("" if at_line_start else "\n") + "".join(f"safe_train: {line}\n" for line in lines))
        self.record(lines)

    def record(self, lines: Iterable[str]) -> None:
        """Write lines to the log alone: the terminal has seen them."""
        stamp = f"{self._now():%Y-%m-%d %H:%M:%S}"
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.write("".join(f"{stamp} {line}".rstrip() + "\n" for line in lines))
        except OSError as error:
            if not self._failing:
                self._show(f"safe_train: {self._path} cannot be written: {error.strerror}\n")
            self._failing = True

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone away, or stands still, and the log is still there
            if select.select([], [self._fd], [], _PATIENCE_S)[1]:
                os.write(self._fd, text.encode(errors="replace"))
