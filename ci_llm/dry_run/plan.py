"""The dry run: named checks that depend on each other, in their order; each result is shown when it is there.

A check runs if those that it needs have passed.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TextIO, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci_llm.cluster.launch import Launch
from ci_llm.config import Config
from ci_llm.core.quantities import duration
from ci_llm.dry_run import environment, gpu, inputs, toy_run
from ci_llm.dry_run.context import CheckContext, Inapplicable
from ci_llm.errors import CiLlmError
from ci_llm.interrupts import Interrupts

S = TypeVar("S")

Verdict = Literal["passed", "failed", "skipped", "inapplicable"]


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
    """The result of one check; `lines` tell what was found, or what is wrong, where, and the hint."""

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
    except Exception as error:  # noqa: BLE001  the dry run names every failure and continues
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
    """Shows the results one by one; it redraws nothing, because lines may have left the screen.

    Args:
        terminal: standard output by default.
        width: columns that the names take.
    """

    def __init__(self, width: int, terminal: TextIO | None = None) -> None:
        self._terminal = terminal or sys.stdout
        self._width = width
        self._console = Console(file=self._terminal, highlight=False)

    def show(self, outcome: CheckResult) -> None:
        """Show a result: what was found; or what is wrong, where, and the hint."""
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


CHECKS: tuple[Check[CheckContext], ...] = (
    Check("environment", (), environment.environment),
    Check("precision", (), environment.precision),
    Check("port", ("precision",), environment.port),  # first, as later checks may fail on one process alone
    Check("disk", (), environment.disk),
    Check("mirror", (), environment.mirror),
    Check("accelerate", ("disk", "port"), environment.accelerate),
    Check("gpu autocast", ("accelerate",), gpu.on_gpu(gpu.autocast)),
    Check("gpu attention", ("accelerate",), gpu.on_gpu(gpu.attention)),
    Check("gpu determinism", ("accelerate",), gpu.determinism_of),
    Check("gpu copies", ("accelerate",), gpu.on_gpu(gpu.copies)),
    Check("gpu checkpoint", ("accelerate",), gpu.checkpoint_of),
    Check("gpu memory", ("accelerate",), gpu.on_gpu(gpu.memory)),
    Check("architecture", (), inputs.architecture),
    Check("data", (), inputs.data),
    Check("template", ("accelerate", "architecture", "data"), inputs.template),
    Check("estimate", ("port", "architecture"), inputs.estimate),
    Check("batch", ("estimate",), inputs.batch),
    Check("model", ("template", "batch"), toy_run.model),
    Check("two steps", ("model",), toy_run.two_steps),
    Check("checkpoint", ("two steps",), toy_run.checkpoint),
    Check("interruption", ("checkpoint",), toy_run.interruption),
    Check("diversity", ("model",), toy_run.diversity),
    Check("generation", ("model",), toy_run.generation),
    Check("conclusion", ("checkpoint", "generation"), toy_run.conclusion),
    Check("storage", ("estimate",), inputs.space),
    Check("time", ("estimate",), inputs.time_needed),
)


def dry_run(config: Config, interrupts: Interrupts, launch: Launch, *, debug: bool = False) -> int:
    """Run all checks and show their results; returns the exit code: 0 only if all have passed."""
    start = time.monotonic()
    # Their retries and tracebacks would appear between the results.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    outcomes: list[CheckResult] = []

    def stopped() -> str | None:
        if interrupts.stop_reason is not None:
            return f"stopped: {interrupts.stop_reason}"
        broken = launch.num_processes > 1 and any(outcome.verdict == "failed" for outcome in outcomes)
        return "this process leaves the others after a failure" if broken else None

    context = CheckContext(config, launch, interrupts)
    with context.at_end:
        report = Report(max(len(check.name) for check in CHECKS))
        for outcome in run_checks(CHECKS, context, stopped=stopped, debug=debug):
            outcomes.append(outcome)
            _show(report, outcome, launch)
        passed = all(outcome.verdict in ("passed", "inapplicable") for outcome in outcomes)
        if launch.is_main_process:
            for note in [*_notes(context), *config.notices()]:
                report.say(note)
            report.say(_summary(outcomes, time.monotonic() - start))
    return 0 if passed else 1


def _notes(context: CheckContext) -> list[str]:
    """Notes for the reader beside the checks."""
    notes = list(context.processes.notes) if hasattr(context, "processes") else []
    if context.uses_stand_in:
        notes.append(f"not proven: the weights of {context.config.model_name}, which train.py will have to download")
    return notes


def _show(report: Report, outcome: CheckResult, launch: Launch) -> None:
    """The main process shows every result, the others only their own failures."""
    if launch.is_main_process:
        report.show(outcome)
    elif outcome.verdict == "failed":
        story = "\n".join(outcome.lines)
        print(f"process {launch.process_index}: {outcome.name} failed: {story}", file=sys.stderr, flush=True)


def _summary(outcomes: list[CheckResult], seconds: float) -> str:
    failed = [outcome.name for outcome in outcomes if outcome.verdict == "failed"]
    skipped = sum(outcome.verdict == "skipped" for outcome in outcomes)
    absent = sum(outcome.verdict == "inapplicable" for outcome in outcomes)
    if not failed and not skipped:
        beside = f", {absent} had nothing to check here" if absent else ""
        passed = len(outcomes) - absent
        left = "they leave nothing on the disk but the cache of the data set"
        return f"all {passed} checks passed in {duration(seconds)}{beside}; {left}"
    return f"failed: {', '.join(failed) or 'none'}; {skipped} of {len(outcomes)} checks skipped"
