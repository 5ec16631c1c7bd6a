"""How the checks are shown: a line for each, columns that fold on a terminal, and quantities with their units."""

from __future__ import annotations

import sys
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci_llm.dry_run.checks import CheckResult

MARKS: Final = {"passed": "ok", "failed": "FAILED", "skipped": "skipped", "inapplicable": "-"}
STYLES: Final = {"passed": "green", "failed": "bold red", "skipped": "dim", "inapplicable": "dim"}


class Report:
    """Shows each result as it comes, and draws nothing twice: lines that have left the screen cannot be redrawn.

    Args:
        terminal: standard output by default.
        width: of the names' column.
    """

    def __init__(self, width: int, terminal: TextIO | None = None) -> None:
        self._terminal = terminal or sys.stdout
        self._width = width
        self._console = Console(file=self._terminal, highlight=False)

    def show(self, outcome: CheckResult) -> None:
        """Show a result: what was found; of a failure what, where and the hint."""
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
        """Print a line below the results."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)


def size(nbytes: float) -> str:
    """Bytes in decimal units, as disks are sold: 2.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there is more than one: 2.5 min."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def count(number: float) -> str:
    """A number of parameters: 8.03 billion."""
    for word, scale in (("billion", 1e9), ("million", 1e6)):
        if number >= scale / 10:
            return f"{number / scale:.2f} {word}"
    return f"{number:,.0f}"
