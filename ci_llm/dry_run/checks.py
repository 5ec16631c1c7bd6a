"""Named checks that build on each other: they run in order, and a check is skipped if one that it needs has failed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

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
