"""Named checks that build on each other: each runs if those that it needs have passed, and is shown as it ends.

A result is shown in columns that fold on a terminal, with quantities in their units.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TextIO, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci_llm.errors import CiLlmError

S = TypeVar("S")

Verdict = Literal["passed", "failed", "skipped", "inapplicable"]


class Inapplicable(Exception):
    """There is nothing to check here, such as a GPU where there is none; the message says what was not checked."""


@dataclass(frozen=True)
class Check(Generic[S]):
    """One question about a run, asked of its context.

    Attributes:
        needs: names of the checks that must have passed before.
        run: returns what was found, in lines; raises a `CiLlmError` for what is wrong, or `Inapplicable`.
    """

    name: str
    needs: tuple[str, ...]
    run: Callable[[S], str]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `lines` hold what was found, or what is wrong, where, and the hint."""

    name: str
    verdict: Verdict
    lines: tuple[str, ...]
    seconds: float = 0.0


def run_checks(
    checks: Sequence[Check[S]], context: S, *, stopped: Callable[[], str | None], debug: bool = False
) -> Iterator[CheckResult]:
    """Run each check whose needs have passed, and yield its result.

    Args:
        stopped: called before each check; a reason that it returns skips the check.
        debug: show the traceback of a failure.
    """
    outcomes: dict[str, CheckResult] = {}
    for check in checks:
        outcomes[check.name] = _skipped(check, outcomes, stopped()) or _run_check(check, context, debug)
        yield outcomes[check.name]


def _skipped(check: Check[S], outcomes: Mapping[str, CheckResult], stop: str | None) -> CheckResult | None:
    lacking = [name for name in check.needs if outcomes[name].verdict != "passed"]
    if stop is None and not lacking:
        return None
    return CheckResult(check.name, "skipped", (stop or f"needs {', '.join(lacking)}",))


def _run_check(check: Check[S], context: S, debug: bool) -> CheckResult:
    start = time.monotonic()
    try:
        lines, verdict = check.run(context).splitlines() or [""], "passed"
    except Inapplicable as nothing:
        lines, verdict = [str(nothing)], "inapplicable"
    except Exception as error:  # noqa: BLE001  the dry run names every failure and goes on
        if debug:
            traceback.print_exc()
        lines, verdict = _error_lines(error), "failed"
    return CheckResult(check.name, verdict, tuple(lines), time.monotonic() - start)  # type: ignore[arg-type]


def _error_lines(error: Exception) -> list[str]:
    if isinstance(error, CiLlmError):
        return str(error).splitlines()
    said = str(error).strip().splitlines()
    return [f"{type(error).__name__}: {said[0] if said else 'no message'}", "  hint:  --debug shows where it happened"]


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
