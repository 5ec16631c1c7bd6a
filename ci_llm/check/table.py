"""What people see of a dry run: each check as it comes, in columns that fold on a terminal, in lines elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci_llm.check.checks import Outcome

MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped", "inapplicable": "-"}
STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim", "inapplicable": "dim"}


class Report:
    """Shows outcomes as they come. Nothing is drawn twice: what has left the screen could not be taken back.

    Args:
        terminal: standard output by default.
        width: of the names' column.
    """

    def __init__(self, width: int, terminal: TextIO | None = None) -> None:
        self._terminal = terminal or sys.stdout
        self._width = width
        self._console = Console(file=self._terminal, highlight=False)

    def show(self, outcome: Outcome) -> None:
        """One more line: what was found; of a failure what, where and the cure."""
        mark = MARKS[outcome.verdict]
        took = f"{outcome.seconds:.1f} s" if outcome.verdict in ("passed", "failed") else ""
        if self._console.is_terminal:
            row = Table.grid(padding=(0, 2, 0, 0))
            for width in (max(map(len, MARKS.values())), self._width, len("00.0 s")):
                row.add_column(width=width)
            words = Text("\n".join(outcome.lines))
            row.add_row(Text(mark, STYLES[outcome.verdict]), outcome.name, Text(f"{took:>6}", "dim"), words)
            self._console.print(row)
            return
        first, *rest = outcome.lines
        print(f"{mark:<8}{outcome.name:<{self._width}}{took:>8}  {first}", file=self._terminal)
        for line in rest:
            print(f"{'':<{self._width + 18}}{line}", file=self._terminal)
        self._terminal.flush()

    def say(self, text: str) -> None:
        """A line below the table."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)
