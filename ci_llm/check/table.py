"""What people see of a dry run: a table that grows on a terminal, one line per check everywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ci_llm.check.checks import Outcome

MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}
STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}


class Report:
    """Shows outcomes as they come; a context manager.

    Args:
        terminal: standard output by default.
        width: of the names' column.
    """

    def __init__(self, width: int, terminal: TextIO | None = None) -> None:
        self._terminal = terminal or sys.stdout
        self._width = width
        self._console = Console(file=self._terminal, highlight=False)
        self._table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        self._live = Live(self._table, console=self._console, auto_refresh=False, vertical_overflow="visible")

    def show(self, outcome: Outcome) -> None:
        """One more line: what was found; of a failure what, where and the cure."""
        mark = MARKS[outcome.verdict]
        took = f"{outcome.seconds:.1f} s" if outcome.verdict != "skipped" else ""
        if self._console.is_terminal:
            words = Text("\n".join(outcome.lines))
            self._table.add_row(Text(mark, STYLES[outcome.verdict]), outcome.name, Text(took, "dim"), words)
            self._live.update(self._table, refresh=True)
            return
        first, *rest = outcome.lines
        print(f"{mark:<8}{outcome.name:<{self._width}}{took:>8}  {first}", file=self._terminal)
        for line in rest:
            print(f"{'':<{self._width + 18}}{line}", file=self._terminal)
        self._terminal.flush()

    def say(self, text: str) -> None:
        """A line below the table."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)

    def __enter__(self) -> Report:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
