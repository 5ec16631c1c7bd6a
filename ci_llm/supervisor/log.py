"""The supervisor's log: a handler that writes each record to the terminal and to safe_train.log."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Final

LOG_NAME: Final = "safe_train.log"
#: For `extra` of a logging call while a progress bar may stand on the current line of the terminal.
MID_LINE: Final = {"mid_line": True}
_PACKAGE: Final = "ci_llm"
_TERMINAL_WAIT_S: Final = 1.0


class SupervisorLog(logging.Handler):
    """Shows the records of this package on the terminal, and appends them to a file; a context manager.

    Debug records go to the file alone. A file that cannot be written is reported once, and a terminal that is gone, or
    stopped by Ctrl-S, is skipped: the training is worth more than its log.

    Args:
        path: the file.
        fd: the terminal; standard error by default.
    """

    def __init__(self, path: Path, *, fd: int = 2) -> None:
        super().__init__()
        self._path, self._fd = path, fd
        self._is_failing = False
        self._level_before = logging.NOTSET

    def __enter__(self) -> SupervisorLog:
        logger = logging.getLogger(_PACKAGE)
        self._level_before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger = logging.getLogger(_PACKAGE)
        logger.setLevel(self._level_before)
        logger.removeHandler(self)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, in as many lines as its message has. A warning is marked, so that grep finds it."""
        mark = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        lines = [f"{mark}{line}" for line in self.format(record).splitlines() or [""]]
        if record.levelno >= logging.INFO:
            before = "\n" if getattr(record, "mid_line", False) else ""  # the bar keeps its line
            self._show(before + "".join(f"safe_train: {line}\n" for line in lines))
        self._append(lines, datetime.fromtimestamp(record.created))

    def _append(self, lines: list[str], time: datetime) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{time:%Y-%m-%d %H:%M:%S} {line}".rstrip() + "\n" for line in lines))
        except OSError as error:
            if not self._is_failing:
                self._show(f"safe_train: {self._path} cannot be written: {error.strerror}\n")
            self._is_failing = True

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            if select.select([], [self._fd], [], _TERMINAL_WAIT_S)[1]:
                os.write(self._fd, text.encode(errors="replace"))
