"""The supervisor's log: a handler that writes the package's records to the terminal and to safe_train.log."""

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
#: `extra` of a logging call while a progress bar may stand on the current line of the terminal.
MID_LINE: Final = {"mid_line": True}
#: `extra` of a logging call for what the terminal has shown already.
FILE_ONLY: Final = {"file_only": True}
_PACKAGE: Final = logging.getLogger("ci_llm")
_TERMINAL_WAIT_S: Final = 1.0


class SupervisorLog(logging.Handler):
    """Handles the records of the package's loggers; a context manager.

    Messages of the level INFO appear as they are. Those of any other level are marked: `warning: ...` on the terminal,
    `WARNING ...` in the file. A file that cannot be written is reported once. A terminal that is gone, or stopped by
    Ctrl-S, is skipped: the training is worth more than its log.

    Args:
        path: the file, to which the records are appended.
        fd: the terminal; standard error by default.
    """

    def __init__(self, path: Path, *, fd: int = 2) -> None:
        super().__init__()
        self._path, self._fd = path, fd
        self._is_failing = False
        self._before = (_PACKAGE.propagate, _PACKAGE.level)

    def __enter__(self) -> SupervisorLog:
        self._before = (_PACKAGE.propagate, _PACKAGE.level)
        _PACKAGE.propagate = False
        if _PACKAGE.level == logging.NOTSET:
            _PACKAGE.setLevel(logging.INFO)
        _PACKAGE.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PACKAGE.removeHandler(self)
        _PACKAGE.propagate, level = self._before
        _PACKAGE.setLevel(level)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, in as many lines as its message has."""
        lines = self.format(record).splitlines() or [""]
        mark = "" if record.levelno == logging.INFO else record.levelname
        if not getattr(record, "file_only", False):
            before = "\n" if getattr(record, "mid_line", False) else ""  # the bar keeps its line
            prefix = f"safe_train: {mark.lower()}: " if mark else "safe_train: "
            self._show(before + "".join(f"{prefix}{line}\n" for line in lines))
        self._append([f"{mark} {line}" if mark else line for line in lines], datetime.fromtimestamp(record.created))

    def _append(self, lines: list[str], time: datetime) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{time:%Y-%m-%d %H:%M:%S} {line}".rstrip() + "\n" for line in lines))
        except OSError as error:
            if not self._is_failing:
                self._show(f"safe_train: warning: {self._path} cannot be written: {error.strerror}\n")
            self._is_failing = True

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            if select.select([], [self._fd], [], _TERMINAL_WAIT_S)[1]:
                os.write(self._fd, text.encode(errors="replace"))
