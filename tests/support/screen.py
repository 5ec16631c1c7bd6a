"""A pseudo-terminal as a person sees it: the lines on its screen, not the bytes that were written."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
from collections.abc import Callable

from tools.testbed.events import DEADLINE_S

_PIECES = re.compile(r"\x1b\[(?P<number>[\d;?]*)(?P<code>[A-Za-z])|(?P<char>[^\x1b])", re.DOTALL)
_CUT = re.compile(r"\x1b(\[[\d;?]*)?$")


class Screen:
    """What is on a screen, and has scrolled off its top, of text with the few codes that a run writes.

    Raises:
        AssertionError: the text holds a code that is not known here.
    """

    def __init__(self, columns: int, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self._lines: list[str] = [""]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        """Without trailing spaces and empty lines."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip().split("\n")

    def feed(self, text: str) -> None:
        for piece in _PIECES.finditer(text):
            if piece["char"] is not None:
                self._put(piece["char"])
            elif piece["code"] == "A":  # never above the top of the screen
                top = max(len(self._lines) - self.rows, 0)
                self._row = max(self._row - int(piece["number"] or 1), top)
            elif piece["code"] == "J":
                self._lines[self._row :] = [self._lines[self._row][: self._column]]
            else:
                assert piece["code"] == "m", f"an unknown code: {piece[0]!r}"

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._row, self._column = self._row + 1, 0
            self._lines += [""] * (self._row + 1 - len(self._lines))
        else:
            if self._column == self.columns:
                self._put("\n")
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
            self._column += 1


class PseudoTerminal:
    """A terminal of its own; a context manager. A thread reads what is written to it, unless it is stopped.

    Attributes:
        file: to write to it.
        text: what was written so far.
    """

    def __init__(self, columns: int = 80, rows: int = 24, *, reads: bool = True) -> None:
        self._master, slave = os.openpty()
        self._screen = Screen(columns, rows)
        self._news = threading.Condition()
        self._cut = ""
        self.resize(columns, rows)
        self.file = open(slave, "w", encoding="utf-8")  # noqa: SIM115 - closed at the end of the block
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        if reads:
            self.start_reading()

    def start_reading(self) -> None:
        self._reader.start()

    def resize(self, columns: int, rows: int = 24) -> None:
        with self._news:
            self._screen.columns, self._screen.rows = columns, rows
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, what: str, look: Callable[[list[str]], bool]) -> list[str]:
        """The screen as soon as `look` says so."""
        with self._news:
            assert self._news.wait_for(lambda: look(self._screen.lines), DEADLINE_S), f"{what}: {self._screen.lines}"
            return self._screen.lines

    def hang_up(self) -> None:
        """The terminal goes away, as that of a connection that is lost."""
        os.close(self._master)
        self._master = -1

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with contextlib.suppress(OSError):  # the end of a terminal is an input/output error
            while part := os.read(self._master, 1 << 16):
                with self._news:
                    text = self._cut + decoder.decode(part)
                    self.text += text[len(self._cut) :]
                    # A code that a read has cut is fed with the next one.
                    text, self._cut = (text[: cut.start()], cut[0]) if (cut := _CUT.search(text)) else (text, "")
                    self._screen.feed(text)
                    self._news.notify_all()

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        if self._reader.is_alive():
            self._reader.join(DEADLINE_S)
        if self._master >= 0:
            os.close(self._master)
