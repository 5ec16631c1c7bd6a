"""The terminal of a run: lines of text that stay, and below them a live area that shows how far the run is.

The live area is at the bottom of a terminal, or in the output of a notebook cell.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TextIO, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from ci_llm.core.quantities import finite, mean_of, short
from ci_llm.core.work import Work
from ci_llm.logs.progress import Position, Speed, left_of, means

logger = logging.getLogger(__name__)


#: From the start of the line to the end of the screen.
ERASE: Final = "\r\x1b[J"
NOTEBOOK_WIDTH: Final = 100
HTML: Final = "<pre style=\"line-height:normal; font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace\">{code}</pre>"
_LABEL: Final = re.compile(r"^[a-z]\w*(?= {2,}\S)|^[a-z]{9}(?= \S)", re.MULTILINE)
INDENT: Final = 10  # where a line begins behind its label
#: The beginning of a line that never holds a command to copy: its label, or none if it continues the line above.
_SENTENCE: Final = re.compile(
    "(agents|answer|attention|auto|batch|config|data|evaluate|kernels|memory|model|optimizer|precision|question"
    "|reference|resume|saved)? +"
)
_MARK: Final = re.compile(r"^(debug|warning|error|critical):")
_MARK_STYLES: Final = {"debug": "dim", "warning": "bold yellow"}

Draw = Callable[[int], RenderableType]


class ScreenArea:
    """The bottom of a terminal. Every method returns what to write there, in one piece.

    The cursor stays on an empty line above the area, and all below it is erased before the area is drawn again. So what
    another process prints, or the `^C` of the keyboard, gets a line above the area. A terminal that breaks lines again
    at another width keeps the cursor on that empty line.

    `rich.live` keeps the cursor at the end of its area, and hides it. Its next refresh then erases what another process
    has printed there, leaves lines of the old area behind, and a kill leaves the terminal without a cursor.
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
        """A text that stays, and the area below it. Long commands are left to the terminal: so they can be copied."""
        shown = _styled(_between_words(text, self._size()[0]))
        return f"{ERASE}{self._rendered(shown, soft_wrap=True)}{self._area}"

    def erased(self) -> str:
        """Remove the area."""
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
    """One output of a notebook cell, replaced while the run trains; lines of text follow it in the same cell.

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
        """Remove the area; the next one is another output."""
        if self._handle is not None:
            self._handle.update({"text/html": ""}, raw=True)
        self._handle = None
        return ""


#: A place for a live area, with lines of text above it.
Area: TypeAlias = ScreenArea | NotebookArea


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
    """The shell of the notebook's kernel, if this process is one."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if hasattr(shell, "kernel") else None


def _between_words(text: str, columns: int) -> str:
    """The text with its long sentences broken between words, each below its own beginning."""
    how: Any = {"break_long_words": False, "break_on_hyphens": False, "expand_tabs": False, "replace_whitespace": False}
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=" " * INDENT, **how)
        if len(line) > columns > 4 * INDENT and _SENTENCE.fullmatch(line[:INDENT])
        else line
        for line in text.split("\n")
    )


def _styled(text: str) -> Text:
    """The text, with its label or the mark of a warning set off."""
    shown = Text(text)
    if mark := _MARK.match(text):
        shown.stylize(_MARK_STYLES.get(mark[1], "bold red"), 0, mark.end())
    shown.highlight_regex(_LABEL, "bold")
    return shown


SMOOTHED_STEPS: Final = 10  # a loss is shown as a mean over these steps, else it could not be read
GAP: Final = Text("  ")


class View:
    """The progress of a run, drawn for a terminal.

    It shows bars, speed and the losses of the agents, made to fit the width:

        score        200/400   50%  ━━━━━━━━━━━━━━━━━━━━━━━━━━━                           0:00:04 left
        step       1204/4000   30%  ━━━━━━━━━━━━━━━━                                      0:12:31 left
        epoch 1.20  3.71 steps/s  12.4k tokens/s  lr 9.40e-04  0:05:25 so far
        loss 1.234  agent0 1.201  agent1 1.250  agent2 1.233  agent3 1.252

    One thread updates it while another draws it, without a lock: what is updated is replaced, never changed.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._position: Position | None = None
        self._losses: tuple[Sequence[str], tuple[Sequence[float], ...]] = (), ()  # names of the agents, [steps][K]
        self._works: tuple[Work, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        return self._position is None and not self._works

    def take_position(self, position: Position | None) -> None:
        """Take where the run stands; None after its end."""
        self._position = position
        if position is not None and position.losses:
            names, steps = self._losses
            before = steps if position.agents == names else ()
            self._losses = position.agents, (*before, position.losses)[-SMOOTHED_STEPS:]

    def take_work(self, work: Work) -> None:
        """Take work that has begun, advanced or ended."""
        if work.ended:
            self._works = tuple(other for other in self._works if other is not work)
        elif not any(other is work for other in self._works):
            self._works = (*self._works, work)

    def draw(self, width: int) -> RenderableType:
        """The whole view, in lines of at most `width` columns."""
        position, works = self._position, self._works
        bars = _bars(width)
        for work in works:
            left = left_of(work.total - work.done, work.done, time.monotonic() - work.began_at)
            _add_bar(bars, work.what, work.done, work.total, left, width)
        if position is None:
            return bars
        left = self._speed.left(position.total)
        _add_bar(bars, "step", position.step, position.total, left, width)
        lines = [_fitting(_figures(position, self._speed), width)]
        names, losses = self._losses
        if losses:
            lines.append(losses_in(means(losses), width, names))
        return Group(bars, *lines)


def _bars(width: int) -> Table:
    """A line for each: name, done/total, percent, bar and time left; in a narrow terminal without the bar."""
    columns = [Column(), Column(justify="right"), Column(justify="right"), *([Column(ratio=1)] * _has_room(width))]
    return Table.grid(*columns, Column(justify="right"), padding=(0, 2, 0, 0), expand=_has_room(width))


def _has_room(width: int) -> bool:
    return width >= 48


def _add_bar(bars: Table, name: str, done: int, total: int, left: timedelta | None, width: int) -> None:
    share, room = done / max(total, 1), _has_room(width)
    bar = [ProgressBar(total=1.0, completed=share, complete_style="cyan", finished_style="green")] * room
    until = "" if left is None else f"{left} left" if room else f"{left}"
    bars.add_row(Text(name, style="bold"), f"{done}/{total}", f"{share:.0%}", *bar, until)


def _figures(position: Position, speed: Speed) -> list[Text]:
    """Epoch, speed and so on, the most important first."""
    parts = [f"epoch {position.epoch:.2f}"]
    if (rates := speed.rates()) is not None:
        parts += [f"{rates[0]:.3g} steps/s", f"{short(rates[1])} tokens/s"]
    if position.learning_rate is not None:
        parts.append(f"lr {position.learning_rate:.2e}")
    return [*map(Text, parts), Text(f"{speed.elapsed()} so far")]


def losses_in(losses: Sequence[float], width: int, names: Sequence[str]) -> Text:
    """The mean over the agents and the loss of each; of more agents than fit into a line, mean and range."""
    mean = Text().append(f"loss {_loss(mean_of(losses))}", style="bold")
    each = [
        Text().append(f"{name} ", style="dim").append(_loss(loss), style="" if finite([loss]) else "bold red")
        for name, loss in zip(names, losses, strict=True)
    ]
    line = GAP.join([mean, *each])
    return line if line.cell_len <= width else _fitting([mean, *_range(losses, names)], width)


def _range(losses: Sequence[float], names: Sequence[str]) -> list[Text]:
    known, parts = finite(losses), []
    if without := len(losses) - len(known):
        parts.append(Text().append(f"not finite: {without} of {len(losses)}", style="bold red"))
    extremes = {"lowest": min(known), "highest": max(known)} if known else {}
    for word, loss in extremes.items():
        cell = Text().append(f"{word} ", style="dim").append(_loss(loss))
        parts.append(cell.append(f" {names[losses.index(loss)]}", style="dim"))
    return parts


def _fitting(parts: Sequence[Text], width: int) -> Text:
    """A line of as many parts as fit, the first one in any case."""
    line = parts[0]
    for part in parts[1:]:
        longer = GAP.join([line, part])
        if longer.cell_len <= width:
            line = longer
    return line


def _loss(loss: float) -> str:
    """A loss in at least five columns, so that lines do not jump from step to step."""
    return f"{loss:>5.3f}" if 0.001 <= abs(loss) < 1000 or loss == 0 else f"{loss:>5.2g}"


REFRESH_S: Final = 0.25
PATIENCE_S: Final = 1.0  # with a line of others that has no end yet, such as a bar of tqdm


class Terminal:
    """Lines for people, and a live area below them.

    While there is a live area, a thread of its own writes all of it: the run waits neither for a slow connection nor
    for a terminal that Ctrl-S has stopped. `close` waits until everything is written.

    A run is worth more than its terminal: if that goes away, a warning is logged, and nothing is shown any more.

    Args:
        view: what the live area shows.
        live: draw a live area, where one is possible.

    Attributes:
        is_live: whether there is a live area.
    """

    def __init__(self, file: TextIO, view: View, *, live: bool = True) -> None:
        self._file: TextIO | None = file
        self._view = view
        self._area: Area | None = area_for(file) if live else None
        self.is_live = self._area is not None
        self._lock = threading.RLock()  # of the terminal alone; nothing is logged under it
        self._lines: deque[str] = deque()  # not shown yet
        self._news, self._ends = threading.Event(), False
        self._drawer: threading.Thread | None = None
        self._others: list[_Others] = []

    def show(self, text: str) -> None:
        """Show `text` as it is, above the live area."""
        self._lines.append(text)
        self._news.set()
        # Looked at after the line was added: either this thread sees that nobody draws, or `close` sees the line.
        # A notebook shows what this thread prints below the cell that it runs.
        if self._drawer is None or not isinstance(self._area, ScreenArea):
            self._show_lines()

    def take_position(self, position: Position | None) -> None:
        """Show where the run stands, from the next refresh on; None after its end."""
        self._view.take_position(position)
        self._draw_if_needed()

    def take_work(self, work: Work) -> None:
        """Show how far the work is, from the next refresh on."""
        self._view.take_work(work)
        self._draw_if_needed()

    def close(self) -> None:
        """Remove the live area. Not under a lock that a handler of log records takes."""
        drawer = self._drawer
        if drawer is None:
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
        """Start the thread that draws with the first thing to show, and end it with the last."""
        if self._view.is_empty:
            self.close()
        elif self._drawer is None and self._area is not None:
            if isinstance(self._area, ScreenArea):
                names = [name for name in ("stdout", "stderr") if getattr(sys, name).isatty()]
                self._others = [_Others(name, self._write) for name in names]
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
        logger.warning(f"the terminal is gone ({reason}); the run continues")


def _above(area: Area | None, text: str) -> str:
    return f"{text}\n" if area is None else area.above(text)


class _Others:
    """Standard output or error while a live area is drawn: what other code prints there stands above the area.

    It is passed on unchanged, and at once.
    """

    def __init__(self, name: str, write: Callable[[Callable[[], str]], None]) -> None:
        self._stream: TextIO = getattr(sys, name)
        self._name, self._write_first = name, write
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
        """True while other code has begun a line and not ended it: to draw now would erase it."""
        if self._open_since is not None and time.monotonic() - self._open_since >= PATIENCE_S:
            self.end_line()
        return self._open_since is not None

    def end_line(self) -> None:
        """End a line that other code has begun, so that the next one begins below it."""
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
