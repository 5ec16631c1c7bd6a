"""The attempts of a run: when each began and ended, how, what its time went into, and what its end cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeAlias

from ci_llm.core.attempts import Failure, earliest_failure, read_failures
from ci_llm.core.durable import read_json
from ci_llm.core.run_status import Status, kept_status

Line: TypeAlias = Mapping[str, Any]
Kind = Literal["training", "evaluation", "final evaluation", "start-up", "shutdown", "lost steps", "no process"]

#: What time can go into; the first one is what the run is for.
KINDS: Final[Mapping[Kind, str]] = {
    "training": "optimizer steps that are part of the result",
    "evaluation": "evaluations on the way",
    "final evaluation": "the evaluation after the last step, and the final checkpoint",
    "start-up": "from the launch of a process to its first optimizer step",
    "shutdown": "the last save, and the end of the process",
    "lost steps": "optimizer steps that a later attempt took again",
    "no process": "between two attempts",
}

_LOG_LINE: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \[(\d+)\] (.*)")
_PROGRESS: Final = re.compile(r"step \d+/\d+ ")
_GONE: Final = "The process ended without writing a reason: it was killed, or its machine was lost."


@dataclass(frozen=True)
class Span:
    """What a piece of time went into. `start` and `end` in unix seconds."""

    kind: Kind
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run.

    Attributes:
        first_step: the step from which it went on; 0 for a fresh start.
        last_step: the last step that it is known to have taken.
        kept_step: the last step up to which no later attempt went back.
        redone_steps: how far the next attempt went back: steps that it took again.
        launched, started, ended: unix seconds: its process, its training, its last sign of life.
        outcome: "completed", "interrupted", "failed", "killed" or "running".
        reason: a word for scripts, as in status.json.
        message: what happened, for people.
        log: its lines of training.log, without those of progress.
        spans: what its time went into, in order; the pause before the next attempt is the last of them.
        restart_s: seconds that the next attempt took to start up.
    """

    number: int
    first_step: int
    last_step: int
    kept_step: int
    redone_steps: int
    launched: float
    started: float
    ended: float
    outcome: str
    reason: str | None
    message: str
    host: str
    log: tuple[str, ...]
    spans: tuple[Span, ...] = ()
    restart_s: float = 0.0

    def seconds(self, kind: Kind) -> float:
        return sum(span.seconds for span in self.spans if span.kind == kind)

    @property
    def cost_s(self) -> float:
        """What its end has cost: the steps that were lost, the pause before the next attempt, and its start-up."""
        return self.seconds("lost steps") + self.seconds("no process") + self.restart_s


def read_attempts(folder: Path, status: Status, lines: Sequence[Line]) -> tuple[Attempt, ...]:
    """All attempts that have left a trace, in order.

    Args:
        status: that of the run, which is that of its last attempt.
        lines: of metrics.jsonl. It has no line of a step that was lost.
    """
    logged = _read_log(folder / "training.log")
    numbers = {status.attempt, *(number for number in (*_numbers(folder), *logged) if number < status.attempt)}
    own_lines = {number: [line for line in lines if line.get("attempt") == number] for number in numbers}
    attempts = [
        _read_attempt(folder, number, status, logged.get(number, []), own_lines[number]) for number in sorted(numbers)
    ]
    step_s = _step_seconds(lines)
    timed = [
        replace(one, spans=_spans(one, after, own_lines[one.number], step_s))
        for one, after in with_next(_linked(attempts))
    ]
    return tuple(replace(one, restart_s=after.seconds("start-up") if after else 0.0) for one, after in with_next(timed))


def with_next(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, Attempt | None]]:
    """Each attempt with the one after it; None after the last."""
    return zip(attempts, [*attempts[1:], None], strict=True)


def seconds_by_kind(attempts: Iterable[Attempt]) -> dict[Kind, float]:
    """What the time of all attempts went into, in the order of `KINDS`."""
    listed = list(attempts)
    return {kind: sum(attempt.seconds(kind) for attempt in listed) for kind in KINDS}


# What each attempt left


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("attempts/*") if path.name.isdecimal()]


def _read_log(path: Path) -> dict[int, list[tuple[float, str]]]:
    """By attempt: (unix seconds, line). A line without a head belongs to none: the stacks of a hang."""
    found: dict[int, list[tuple[float, str]]] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for match in filter(None, map(_LOG_LINE.match, text.splitlines())):
        found.setdefault(int(match[2]), []).append((datetime.fromisoformat(match[1]).timestamp(), match[3]))
    return found


def _read_attempt(
    folder: Path, number: int, newest: Status, logged: list[tuple[float, str]], lines: Sequence[Line]
) -> Attempt:
    """One attempt as it tells itself. Runs of older releases kept no status of it: then the log has to do."""
    status = newest if number == newest.attempt else kept_status(folder, number)
    began = _began(folder, number)
    cause = earliest_failure(read_failures(folder, number))
    # The log has the local time of the machine that wrote it, to the second: it is the last resort.
    times = [line["time"] for line in lines if "time" in line] or [time for time, _ in logged if status is None]
    started = status.started if status else min(times, default=newest.started)
    ended = status.heartbeat if status else max(times, default=started)
    if status is None or status.status in ("running", "vanished"):
        ended = max([ended, *times, *([cause.time] if cause else [])])
    outcome, reason, message = _ending(status, cause, is_newest=number == newest.attempt)
    first = int(began["step"]) if "step" in began else _first_step(number, newest, lines)
    last = max([first, *(line["step"] for line in lines), status.step if status else 0, (cause and cause.step) or 0])
    return Attempt(
        number=number,
        first_step=first,
        last_step=last,
        kept_step=last,
        redone_steps=0,
        launched=min(began.get("launched", started), started),
        started=started,
        ended=ended,
        outcome=outcome,
        reason=reason,
        message=message,
        host=status.host if status else "",
        log=tuple(line for _, line in logged if not _PROGRESS.match(line)),
    )


def _first_step(number: int, newest: Status, lines: Sequence[Line]) -> int:
    """Where an attempt of an older release began, which did not write it down: at most as much is lost as is known."""
    if lines:
        return max(0, int(lines[0]["step"]) - 1)
    return 0 if number == 1 else newest.step


def _began(folder: Path, number: int) -> Mapping[str, float]:
    """The numbers in began.json; of older releases, or damaged, there may be none."""
    try:
        value = read_json(folder / "attempts" / str(number) / "began.json")
    except (OSError, ValueError):
        return {}
    known = value.items() if isinstance(value, dict) else ()
    return {str(name): number for name, number in known if isinstance(number, int | float)}


def _ending(status: Status | None, cause: Failure | None, *, is_newest: bool) -> tuple[str, str | None, str]:
    """(outcome, reason, message). Only the newest attempt may still be running."""
    if status is not None and status.status in ("completed", "interrupted"):
        return status.status, status.reason, ""
    if cause is not None:
        return "failed", cause.reason, cause.message
    if status is not None and status.status == "running" and is_newest:
        return "running", None, ""
    if status is not None and status.status == "failed":
        return "failed", status.reason, ""
    return "killed", None, _GONE


def _linked(attempts: Sequence[Attempt]) -> list[Attempt]:
    """With what only later attempts tell: which steps were kept; nobody is launched before the one before has ended."""
    linked: list[Attempt] = []
    for number, (one, after) in enumerate(with_next(attempts)):
        last = max(one.last_step, after.first_step) if after else one.last_step
        kept = min([last, *(later.first_step for later in attempts[number + 1 :])])
        launched = min(max(one.launched, linked[-1].ended), one.started) if linked else one.launched
        redone = last - after.first_step if after else 0
        linked.append(replace(one, last_step=last, kept_step=kept, redone_steps=redone, launched=launched))
    return linked


# What its time went into


def _step_seconds(lines: Sequence[Line]) -> float:
    """A typical optimizer step of the run, in seconds."""
    measured = [line["step_time_s"] for line in lines if isinstance(line.get("step_time_s"), int | float)]
    return median(measured) if measured else 0.0


def _spans(attempt: Attempt, after: Attempt | None, lines: Sequence[Line], step_s: float) -> tuple[Span, ...]:
    """Divide the time from the launch of an attempt to that of the next.

    A line of training ends the steps since the line before it; one of an evaluation ends the evaluation after its
    step. What a first line took beyond its steps is start-up. Steps that were kept and have no line, because only
    every `logging_steps`-th has one, count as typical ones.
    """
    spans: list[Span] = []

    def until(end: float, kind: Kind) -> None:
        start = spans[-1].end if spans else attempt.launched
        spans.append(Span(kind, start, max(start, end)))

    step, is_first = attempt.first_step, True
    for line in lines:
        if "time" not in line:
            continue
        is_training = "epoch" in line
        if is_first:
            taken_s = (line["step"] - step) * step_s if is_training else math.inf  # the evaluation that is still due
            until(min(line["time"], max(attempt.started, line["time"] - taken_s)), "start-up")
        until(line["time"], "training" if is_training else "evaluation")
        step, is_first = line["step"], False
    if is_first:
        until(attempt.started, "start-up")
    _close(attempt, step, step_s, spans, until)
    if after is not None:
        until(max(after.launched, attempt.ended), "no process")
    return tuple(span for span in spans if span.seconds > 0)


def _close(
    attempt: Attempt, step: int, step_s: float, spans: Sequence[Span], until: Callable[[float, Kind], None]
) -> None:
    """From the last line of an attempt to its end."""
    unlogged_s = max(0, attempt.kept_step - step) * step_s
    until(min(attempt.ended, spans[-1].end + unlogged_s), "training")
    if attempt.outcome == "interrupted":  # it may have been clean, and the run still went back before it later
        lost_s = (attempt.last_step - max(attempt.kept_step, attempt.first_step)) * step_s
        until(min(attempt.ended, spans[-1].end + max(0.0, lost_s)), "lost steps")
    rest: Mapping[str, Kind] = {"completed": "final evaluation", "interrupted": "shutdown", "running": "training"}
    until(attempt.ended, rest.get(attempt.outcome, "lost steps"))
