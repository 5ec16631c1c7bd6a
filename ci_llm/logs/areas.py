"""Where a live area can be drawn: at the bottom of a terminal, or in the output of a notebook cell."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

#: From the start of the line to the end of the screen.
ERASE: Final = "\r\x1b[J"
NOTEBOOK_WIDTH: Final = 100
HTML: Final = "<pre style=\"line-height:normal; font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace\">{code}</pre>"
_LABEL: Final = re.compile(r"^[a-z]\w*(?= {2,}\S)|^[a-z]{9}(?= \S)")
_MARK: Final = re.compile(r"^(debug|warning|error|critical):")
_MARK_STYLES: Final = {"debug": "dim", "warning": "bold yellow"}

Draw = Callable[[int], RenderableType]


class Area(Protocol):
    """A place for a live area, with lines of text above it."""

    def draw(self, draw: Draw) -> str: ...
    def above(self, text: str) -> str: ...
    def erased(self) -> str: ...


class ScreenArea:
    """The bottom of a terminal. Every method returns what to write there, in one piece.

    The cursor stays on an empty line above the area, and all below it is erased before the area is drawn again. So what
    another process prints, or the `^C` of the keyboard, gets a line above the area. A terminal that breaks lines anew
    at another width keeps the cursor on that empty line.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._console = Console(file=file, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._area = ""

    def draw(self, draw: Draw) -> str:
        """The area as it looks now."""
        columns, rows = self._size()
        self._console.width = columns - 1  # a full line would make some terminals begin another
        lines = self._rendered(draw(columns - 1), no_wrap=True).splitlines()[: rows - 2]
        self._area = "".join(f"\n{line}" for line in lines) + f"\r\x1b[{len(lines)}A" * bool(lines)
        return ERASE + self._area

    def above(self, text: str) -> str:
        """A text that stays, and the area below it. Long lines are left to the terminal, so that they can be copied."""
        return f"{ERASE}{self._rendered(_styled(text), soft_wrap=True)}{self._area}"

    def erased(self) -> str:
        """No area any more."""
        self._area = ""
        return ERASE

    def _rendered(self, what: RenderableType, **options: Any) -> str:
        with self._console.capture() as captured:
            self._console.print(what, **options)
        return captured.get()

    def _size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._file.fileno())
        except (OSError, ValueError):  # a closed file has no number
            columns = rows = 0
        fallback = shutil.get_terminal_size()  # some pseudo-terminals have no size
        return max(columns or fallback.columns, 2), max(rows or fallback.lines, 3)


class NotebookArea:
    """One output of a notebook cell, replaced as the run goes on; lines of text follow it in the same cell.

    Args:
        display: IPython's function of this name.
    """

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None
        self._shown = ""

    def draw(self, draw: Draw) -> str:
        """Show the area as it looks now; nothing is left to write."""
        console = Console(
            file=io.StringIO(), record=True, width=NOTEBOOK_WIDTH, force_terminal=True, force_jupyter=False
        )
        console.print(draw(NOTEBOOK_WIDTH), highlight=False)
        html = console.export_html(inline_styles=True, code_format=HTML)
        if self._handle is None:
            self._handle = self._display({"text/html": html}, raw=True, display_id=True)
        elif html != self._shown:
            self._handle.update({"text/html": html}, raw=True)
        self._shown = html
        return ""

    def above(self, text: str) -> str:
        return f"{text}\n"

    def erased(self) -> str:
        """No area any more; the next one is another output."""
        if self._handle is not None:
            self._handle.update({"text/html": ""}, raw=True)
        self._handle = None
        return ""


def area_for(file: TextIO) -> Area | None:
    """The area of a notebook or of a terminal; None for a file, a pipe, or a terminal that takes lines only."""
    shell = _notebook()
    if shell is not None and file is sys.stdout:
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        return NotebookArea(display)
    # `!python train.py` in a notebook runs on a pseudo-terminal, whose output the notebook cannot redraw.
    redraws = os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown") and "JPY_PARENT_PID" not in os.environ
    return ScreenArea(file) if redraws and file.isatty() else None


def _notebook() -> Any:
    """The shell of a notebook's kernel that this process is; None: it is none."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if hasattr(shell, "kernel") else None


def _styled(text: str) -> Text:
    """The text, with its label or the mark of a warning set off."""
    shown = Text(text)
    if mark := _MARK.match(text):
        shown.stylize(_MARK_STYLES.get(mark[1], "bold red"), 0, mark.end())
    start = 0
    for line in text.splitlines(keepends=True):
        if label := _LABEL.match(line):
            shown.stylize("bold", start, start + label.end())
        start += len(line)
    return shown
