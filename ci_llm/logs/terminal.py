"""The terminal of a run: lines of text that stay, and a live area below them where one can be drawn."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TextIO

from ci_llm.core.work import Work
from ci_llm.logs.areas import Area, ScreenArea, area_for
from ci_llm.logs.live_area import View
from ci_llm.logs.progress import Position

logger = logging.getLogger(__name__)

REFRESH_S: Final = 0.25
PATIENCE_S: Final = 1.0  # with a line of others that has no end yet, such as a bar of tqdm


class Terminal:
    """Lines for people, and a live area below them.

    While there is a live area, a thread of its own writes all of it: the run waits neither for a slow connection nor
    for a terminal that Ctrl-S has stopped. `close` waits until everything is written.

    A run is worth more than its terminal: if that goes away, a warning is logged, and nothing is shown any more.

    Args:
        view: what the live area shows.
        live: whether there shall be a live area, where one is possible.
    """

    def __init__(self, file: TextIO, view: View, *, live: bool = True) -> None:
        self._file: TextIO | None = file
        self._view = view
        self._area: Area | None = area_for(file) if live else None
        self._lock = threading.RLock()  # of the terminal alone; nothing is logged under it
        self._lines: deque[str] = deque()  # not shown yet
        self._news, self._ends = threading.Event(), False
        self._drawer: threading.Thread | None = None
        self._others: list[_Others] = []

    @property
    def is_live(self) -> bool:
        """Whether there is a live area."""
        return self._area is not None

    def show(self, text: str) -> None:
        """Show `text` as it is, above the live area."""
        self._lines.append(text)
        self._news.set()
        # Looked at after the line was added: either this thread sees that nobody draws, or `close` sees the line.
        # A notebook shows what this thread prints below the cell that it runs.
        if self._drawer is None or not isinstance(self._area, ScreenArea):
            self._show_lines()

    def take_position(self, position: Position | None) -> None:
        """Show where the run stands, from the next refresh on; None: it has come to its end."""
        self._view.take_position(position)
        self._draw_if_needed()

    def take_work(self, work: Work) -> None:
        """Show how far the work is, from the next refresh on."""
        self._view.take_work(work)
        self._draw_if_needed()

    def close(self) -> None:
        """Remove the live area. Not under a lock that a handler of log records takes."""
        if (drawer := self._drawer) is None:
            return
        self._ends = True
        self._news.set()
        drawer.join()
        self._drawer = None
        self._show_lines()
        for others in self._others:
            others.restore()
        self._others.clear()
        if self._area is not None:
            self._write(self._area.erased)

    def _draw_if_needed(self) -> None:
        """Begin to draw with the first thing to show, and end with the last."""
        if self._view.is_empty:
            self.close()
        elif self._drawer is None and self._area is not None:
            if isinstance(self._area, ScreenArea):
                self._others = [others for name in ("stdout", "stderr") if (others := self._take_over(name))]
            self._ends = False
            self._drawer = threading.Thread(target=self._keep_drawing, name="ci_llm display", daemon=True)
            self._drawer.start()

    def _keep_drawing(self) -> None:
        assert self._area is not None
        draw: Callable[[], str] = partial(self._area.draw, self._view.draw)
        due = 0.0
        while not self._ends:
            self._show_lines()
            if time.monotonic() >= due:
                if not any(one.is_busy() for one in self._others):
                    try:
                        self._write(draw)
                    except Exception as error:  # noqa: BLE001 - the lines that wait behind a drawing must still come
                        draw = str  # nothing is drawn any more
                        logger.warning(f"the live area cannot be drawn ({type(error).__name__}: {error})")
                due = time.monotonic() + REFRESH_S
            self._news.wait(due - time.monotonic())
            self._news.clear()

    def _show_lines(self) -> None:
        """Write what waits to be shown."""
        with contextlib.suppress(IndexError):  # nothing is left; another thread may have taken the last one
            while True:
                text = self._lines.popleft()
                for others in self._others:
                    others.end_line()
                self._write(partial(_above, self._area, text))

    def _take_over(self, name: str) -> _Others | None:
        stream = getattr(sys, name)
        return _Others(name, stream, self._write) if stream.isatty() else None

    def _write(self, text: Callable[[], str]) -> None:
        """Write what `text` returns, in one piece, so that it does not mix with what other processes write."""
        with self._lock:
            if self._file is None:
                return
            shown = text()
            try:
                self._file.write(shown)
                self._file.flush()
                return
            except (OSError, ValueError) as error:
                _redirect_to_null(self._file)
                self._file, reason = None, error
        logger.warning(f"the terminal is gone ({reason}); the run goes on")


def _above(area: Area | None, text: str) -> str:
    return f"{text}\n" if area is None else area.above(text)


class _Others:
    """Standard output or error while a live area is drawn: what other code prints there stands above the area.

    It is passed on unchanged, and at once.
    """

    def __init__(self, name: str, stream: TextIO, write: Callable[[Callable[[], str]], None]) -> None:
        self._name, self._stream, self._write_first = name, stream, write
        self._pid = os.getpid()
        self._open_since: float | None = None  # when a line was begun that has no end yet
        setattr(sys, name, self)

    def write(self, text: str) -> int:
        if os.getpid() == self._pid and self._open_since is None:
            self._write_first(lambda: "\x1b[J")  # a text of several lines would else be written over the area
        count = self._stream.write(text)
        if text:
            self._open_since = None if text.endswith("\n") else time.monotonic()
        return count

    def is_busy(self) -> bool:
        """Whether somebody is at a line: to draw now would erase it."""
        if self._open_since is not None and time.monotonic() - self._open_since >= PATIENCE_S:
            self.end_line()
        return self._open_since is not None

    def end_line(self) -> None:
        """Keep a line that has no end yet: what comes next begins below it."""
        if self._open_since is not None:
            self._open_since = None
            with contextlib.suppress(OSError, ValueError):  # the next line of our own finds out
                self._stream.write("\n")

    def restore(self) -> None:
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _redirect_to_null(file: TextIO) -> None:
    """Point a terminal that is gone to the null device, so that neither a stray print nor the last flush fails."""
    with contextlib.suppress(OSError, ValueError):  # the file may have no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file.fileno())
        os.close(null)
