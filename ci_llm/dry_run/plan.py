"""The dry run: named checks that depend on each other, in their order; each result is shown when it is there.

A check runs if those that it needs have passed.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console
from rich.text import Text

from ci_llm.cluster.launch import Launch
from ci_llm.config import Config
from ci_llm.core.quantities import duration
from ci_llm.dry_run import inputs, toy_run
from ci_llm.dry_run.context import CheckContext
from ci_llm.errors import CiLlmError, first_line
from ci_llm.interrupts import Interrupts

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One question about a run, asked of its context.

    Attributes:
        needs: names of the checks that must have passed before.
        run: returns what was found, in lines; raises a `CiLlmError` for what is wrong.
    """

    name: str
    needs: tuple[str, ...]
    run: Callable[[CheckContext], str]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `lines` tell what was found, or what is wrong, where, and the hint."""

    name: str
    verdict: Verdict
    lines: Sequence[str]
    seconds: float = 0.0


def run_checks(
    checks: Sequence[Check], context: CheckContext, *, stopped: Callable[[], str | None], debug: bool = False
) -> Iterator[CheckResult]:
    """Run each check whose needs have passed, and yield its result.

    Args:
        stopped: called before each check; a reason that it returns skips the check.
        debug: show the traceback of a failure.
    """
    passed: set[str] = set()
    for check in checks:
        lacking = [name for name in check.needs if name not in passed]
        if reason := stopped() or (f"needs {', '.join(lacking)}" if lacking else None):
            yield CheckResult(check.name, "skipped", [reason])
            continue
        start = time.monotonic()
        verdict: Verdict = "passed"
        try:
            lines = check.run(context).splitlines() or [""]
            passed.add(check.name)
        except Exception as error:  # noqa: BLE001  the dry run names every failure and continues
            if debug:
                traceback.print_exc()
            lines = [f"{type(error).__name__}: {first_line(error)}", "  hint:  --debug shows where it happened"]
            if isinstance(error, CiLlmError):
                lines = str(error).splitlines()
            verdict = "failed"
        yield CheckResult(check.name, verdict, lines, time.monotonic() - start)


MARKS: Final = {"passed": ("ok", "green"), "failed": ("FAILED", "bold red"), "skipped": ("skipped", "dim")}


CHECKS: Final = (
    Check("environment", (), inputs.environment),
    Check("precision", (), inputs.precision),
    Check("port", ("precision",), inputs.port),  # first, as later checks may fail on one process alone
    Check("disk", (), inputs.disk),
    Check("mirror", (), inputs.mirror),
    Check("accelerate", ("disk", "port"), inputs.accelerate),
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
    Check("rewards", ("model",), toy_run.rewards),
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
    results: list[CheckResult] = []

    def stopped() -> str | None:
        if interrupts.stop_reason is not None:
            return f"stopped: {interrupts.stop_reason}"
        broken = launch.num_processes > 1 and any(result.verdict == "failed" for result in results)
        return "this process leaves the others after a failure" if broken else None

    context = CheckContext(config, launch, interrupts)
    with context.at_end:
        for result in run_checks(CHECKS, context, stopped=stopped, debug=debug):
            results.append(result)
            if launch.is_main_process:
                _show(result)
            elif result.verdict == "failed":
                story = "\n".join(result.lines)
                print(f"process {launch.process_index}: {result.name} failed: {story}", file=sys.stderr, flush=True)
        if launch.is_main_process:
            notes = context.processes.notes if hasattr(context, "processes") else ()
            print(*notes, *config.notices(), _summary(results, time.monotonic() - start), sep="\n", flush=True)
    return 0 if all(result.verdict == "passed" for result in results) else 1


def _show(result: CheckResult) -> None:
    """Print a result at once. Nothing is redrawn, because lines may have left the screen."""
    mark, style = MARKS[result.verdict]
    width = max(len(check.name) for check in CHECKS)
    took = "" if result.verdict == "skipped" else f"{result.seconds:.1f} s"
    lines = f"\n{'':<{width + 18}}".join(result.lines)
    row = Text.assemble((f"{mark:<8}", style), f"{result.name:<{width}}", (f"{took:>8}", "dim"), f"  {lines}")
    Console(highlight=False).print(row, soft_wrap=True)


def _summary(results: Sequence[CheckResult], seconds: float) -> str:
    failed = [result.name for result in results if result.verdict == "failed"]
    skipped = sum(result.verdict == "skipped" for result in results)
    if not failed and not skipped:
        left = "they leave nothing on the disk but the cache of the data set"
        return f"all {len(results)} checks passed in {duration(seconds)}; {left}"
    return f"failed: {', '.join(failed) or 'none'}; {skipped} of {len(results)} checks skipped"
