"""The facts of a run, read from its folder as plain values: configuration, metrics, scores, predictions, attempts.

The facts of an attempt are when and how it began and ended, how its time was spent, and what its end cost.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeAlias, TypeVar

from ci_llm.checkpoints.layout import committed
from ci_llm.checkpoints.manifest import read_file, read_manifest
from ci_llm.config import Config, groups, parse_config
from ci_llm.config.auto import FOLLOWED
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.durable import read_json, read_object
from ci_llm.core.metrics_file import METRICS_NAME, Record, finite_numbers, number, read_records
from ci_llm.core.run_folder import (
    MOVE_AWAY,
    NOT_A_RUN,
    SWEEP,
    Failure,
    earliest_failure,
    parsed,
    read_began,
    read_failures,
    read_recovery,
)
from ci_llm.core.run_status import Status, kept_status, read_status
from ci_llm.core.scores import Measures, measures, measures_of
from ci_llm.errors import BadInput, CheckpointError, ConfigError
from ci_llm.report.scores import agents_of, folders_of, judged_figures, read_evaluation, what_evaluated

T = TypeVar("T")
Kind = Literal["training", "evaluation", "final evaluation", "start-up", "shutdown", "lost steps", "no process"]

#: The kinds of time of a run; the first one is useful time.
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
    """A piece of time of one kind, from `start` to `end` in unix seconds."""

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
        first_step: the step from which it resumed; 0 for a fresh start.
        last_step: the last step that it is known to have taken.
        kept_step: the last of its steps that no later attempt took again.
        redone_steps: the number of its steps that the next attempt took again.
        launched, started, ended: start of its process, start of its training, last sign of life, in unix seconds.
        outcome: "completed", "interrupted", "failed", "killed" or "running".
        reason: a word for scripts, as in status.json.
        message: what happened, for people.
        log: its lines of training.log, without those about progress.
        spans: its time by kinds, in order; the last one is the pause before the next attempt.
        restart_s: seconds in which the next attempt started up.
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
        """Seconds that its end has cost: lost steps, the pause before the next attempt, and its start-up."""
        return self.seconds("lost steps") + self.seconds("no process") + self.restart_s


def read_attempts(folder: Path, status: Status, lines: Sequence[Record]) -> tuple[Attempt, ...]:
    """All attempts that have left a trace, in order.

    Args:
        status: the status of the run, and so of its last attempt.
        lines: the records of metrics.jsonl, which has none for a step that was lost.
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
    """The time of all attempts by kind, in the order of `KINDS`."""
    listed = list(attempts)
    return {kind: sum(attempt.seconds(kind) for attempt in listed) for kind in KINDS}


# What each attempt left


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("attempts/*") if path.name.isdecimal()]


def _read_log(path: Path) -> dict[int, list[tuple[float, str]]]:
    """The lines of each attempt: (unix seconds, line). Lines without a head, such as stacks, are left out."""
    found: dict[int, list[tuple[float, str]]] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for match in filter(None, map(_LOG_LINE.match, text.splitlines())):
        found.setdefault(int(match[2]), []).append((datetime.fromisoformat(match[1]).timestamp(), match[3]))
    return found


def _read_attempt(
    folder: Path, number: int, newest: Status, logged: list[tuple[float, str]], lines: Sequence[Record]
) -> Attempt:
    """One attempt by its own files. Where one is missing or damaged, the log and the metrics take its place."""
    status = newest if number == newest.attempt else kept_status(folder, number)
    began = dict(finite_numbers(read_began(folder, number)))
    cause = earliest_failure(read_failures(folder, number))
    # The log has the local time of the machine that wrote it, to the second: it is the last resort.
    times = [line["time"] for line in lines if "time" in line] or [time for time, _ in logged if status is None]
    started = status.started if status else min(times, default=newest.started)
    ended = status.heartbeat if status else max(times, default=started)
    if status is None or status.status in ("running", "vanished"):
        ended = max([ended, *times, *([cause.time] if cause else [])])
    outcome, reason, message = _ending(status, cause, is_newest=number == newest.attempt)
    first = int(began.get("step", lines[0]["step"] - 1 if lines else newest.step))
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
    """The attempts with the steps that later ones kept; none is launched before the one before has ended."""
    linked: list[Attempt] = []
    for place, (one, after) in enumerate(with_next(attempts)):
        last = max(one.last_step, after.first_step) if after else one.last_step
        kept = min([last, *(later.first_step for later in attempts[place + 1 :])])
        launched = min(max(one.launched, linked[-1].ended), one.started) if linked else one.launched
        redone = last - after.first_step if after else 0
        linked.append(replace(one, last_step=last, kept_step=kept, redone_steps=redone, launched=launched))
    return linked


# The time of an attempt by kinds


def _step_seconds(lines: Sequence[Record]) -> float:
    """A typical optimizer step of the run, in seconds."""
    measured = [line["step_time_s"] for line in lines if isinstance(line.get("step_time_s"), int | float)]
    return median(measured) if measured else 0.0


def _spans(attempt: Attempt, after: Attempt | None, lines: Sequence[Record], step_s: float) -> tuple[Span, ...]:
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


Points: TypeAlias = "list[tuple[int, float]]"

PREDICTIONS: Final = "predictions.jsonl"
_ASKED: Final = "predictions.source.json"
#: The entries that are equal if scores and predictions are of the same answers.
_ALIKE: Final = ("step", "questions", "metric", "aggregator", "max_new_tokens")
_HARDWARE: Final = "gpu_stats.json"
_AGENT: Final = re.compile(r"agent\d+")


@dataclass(frozen=True)
class Metrics:
    """The lines of metrics.jsonl, in order.

    Attributes:
        unreadable: the number of lines that a crash or a full disk has torn.
    """

    lines: tuple[Record, ...]
    unreadable: int = 0

    def curve(self, key: str) -> Points:
        """(step, value) of every line that has the key, with the NaN and infinities that the run wrote."""
        return [(line["step"], number(line[key])) for line in self.lines if key in line]

    def peak(self, key: str) -> float | None:
        """The largest value of a key; None if no line has it."""
        return max((value for _, value in self.curve(key) if math.isfinite(value)), default=None)

    def last(self, key: str) -> float | None:
        """The latest value of a key; None if no line has it."""
        curve = self.curve(key)
        return curve[-1][1] if curve else None

    def with_last(self, evaluation: Mapping[str, Any]) -> Metrics:
        """The metrics with the final evaluation as one more line, because only evaluation.json has it."""
        step, nll = evaluation.get("last_step"), evaluation["nll"]
        exact = evaluation.get("teacher_forced", evaluation)["exact_match"]
        if evaluation.get("step") != step or not isinstance(step, int):  # of an older step, which has its line
            return self
        line: dict[str, Any] = {"step": step}
        names = folders_of(evaluation)
        for name, values in {"nll": nll, "exact_match": exact, **judged_figures(evaluation)}.items():
            line |= {f"eval/{agent}/{name}": value for agent, value in zip(names, values["agents"], strict=True)}
            line[f"eval/crowd/{name}"] = values["crowd"]
        return Metrics((*self.lines, line), self.unreadable)

    @cached_property
    def agents(self) -> list[str]:
        """The names of the agents that have a curve, in order: agent0, agent1, ... A crowd may have changed."""
        names = {part for line in self.lines for key in line for part in key.split("/")[1:2]}
        return sorted((name for name in names if _AGENT.fullmatch(name)), key=lambda name: int(name[len("agent") :]))


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run.

    Attributes:
        config: the configuration of the newest checkpoint; None before the first.
        size: "processes" and "rows per step" of the newest checkpoint, as far as they are known.
        evaluation: evaluation.json; None before the end.
        predictions: one mapping for each row that was answered.
        asked: checkpoint and rows of the predictions, as the evaluation recorded them; empty if they are not known.
        hardware: the peaks of gpu_stats.json.
        because: the changes of the supervisor between attempts, in its words.
    """

    folder: Path
    status: Status
    attempts: tuple[Attempt, ...]
    metrics: Metrics
    config: Config | None
    size: Mapping[str, int]
    evaluation: Mapping[str, Any] | None
    predictions: tuple[Mapping[str, Any], ...]
    asked: Mapping[str, Any]
    hardware: Mapping[str, float]
    because: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def agents_names(self) -> dict[str, str]:
        """The name that people gave each agent, by the name of its folder."""
        given = self.config.agent_names if self.config else ()
        known = {f"agent{k}": name for k, name in enumerate(given)}
        if self.evaluation:
            known |= dict(zip(folders_of(self.evaluation), agents_of(self.evaluation), strict=True))
        return known

    @property
    def words(self) -> Measures:
        """The words for the measures of the run, by its evaluation, or before that by its objective."""
        if self.evaluation is not None:
            return measures(self.evaluation)
        return measures_of("sft" if self.config is None else self.config.objective)

    @property
    def wall_s(self) -> float:
        """Seconds from the launch of the first attempt to the last sign of life."""
        return max(0.0, self.attempts[-1].ended - self.attempts[0].launched)

    @property
    def has_gone_on(self) -> bool:
        """Whether the run was trained on after its evaluation."""
        return self.evaluation is not None and self.evaluation.get("last_step", self.status.step) < self.status.step

    @property
    def result_step(self) -> int:
        """The step that is the result so far: the evaluated one, unless the run was trained on since."""
        evaluated = None if self.evaluation is None or self.has_gone_on else self.evaluation.get("step")
        return self.status.step if evaluated is None else int(evaluated)

    @property
    def what_evaluated(self) -> str:
        """How, and on which rows, the scores were measured, for people; empty without an evaluation."""
        if self.evaluation is None:
            return ""
        since = f", after step {self.evaluation['last_step']}: the run has gone on since" if self.has_gone_on else ""
        return what_evaluated(self.evaluation) + since

    @property
    def evaluated_predictions(self) -> tuple[Mapping[str, Any], ...]:
        """The predictions, if the scores are those of these answers; else nothing."""
        scored = self.evaluation or {}
        if scored.get("measured_by") != "generation" or any(scored.get(key) != self.asked.get(key) for key in _ALIKE):
            return ()
        return self.predictions


def read_run(path: Path | str) -> RunFacts:
    """Read the facts of a run; may be called while the run writes.

    Args:
        path: the output folder of a run, or a checkpoint in it.

    Raises:
        BadInput: there is no run here, or one of its files is damaged.
    """
    folder = run_folder(path)
    status = read_status(folder)
    metrics, evaluation = read_metrics(folder), read_evaluation(folder)
    return RunFacts(
        folder=folder,
        status=status,
        attempts=read_attempts(folder, status, metrics.lines),
        metrics=metrics.with_last(evaluation) if evaluation else metrics,
        config=_newest(folder, _config_of),
        size=_newest(folder, _size_of) or {},
        evaluation=evaluation,
        predictions=tuple(_read_predictions(folder / PREDICTIONS)),
        asked=_read_object(folder / _ASKED),
        hardware=_read_peaks(folder / _HARDWARE),
        because=_because(folder),
    )


def run_folder(path: Path | str) -> Path:
    """The folder of the run that `path` means: itself, or the folder around a checkpoint.

    Raises:
        BadInput: there is no run.
    """
    if "://" in str(path):
        raise BadInput("this needs the run's folder on a disk", where=str(path), hint="copy the folder of the run here")
    folder = Path(path)
    for place in (folder, folder.absolute().parent):
        if folder.is_dir() and (place / "status.json").is_file():
            return place
    what = NOT_A_RUN if folder.is_dir() else "there is no such folder"
    if (folder / SWEEP).is_file():  # of a program's own loop, which writes no status
        raise BadInput(
            what, where=str(path), hint=f"ci-llm compare {shlex.quote(str(path))} shows the trials of this sweep"
        )
    raise BadInput(what, where=str(path), hint="give the output_dir of a run")


def read_metrics(folder: Path) -> Metrics:
    """metrics.jsonl; nothing where it is missing.

    Raises:
        BadInput: it holds lines, and none of them is a record of a run.
    """
    records, torn = read_records(folder)
    if torn and not records:
        where = str(folder / METRICS_NAME)
        raise BadInput("no line of this file is a record of a run", where=where, hint=MOVE_AWAY)
    return Metrics(tuple(records), unreadable=torn)


def _newest(folder: Path, read: Callable[[Path], T]) -> T | None:
    """The result of `read` on the newest checkpoint where it works; a resume reports damaged checkpoints."""
    for _, checkpoint in committed(folder):
        with contextlib.suppress(ConfigError, CheckpointError, OSError, KeyError, TypeError, ValueError):
            return read(checkpoint)
    return None


def _config_of(checkpoint: Path) -> Config:
    name = "config.yaml"
    text = read_file(checkpoint, name, read_manifest(checkpoint).files[name]).decode()
    return parse_config(text, str(checkpoint / name))


def _size_of(checkpoint: Path) -> dict[str, int]:
    """The numbers of a step that a launcher decides."""
    manifest: Any = read_json(checkpoint / "manifest.json")
    state: Any = read_json(checkpoint / "train_state.json")
    return {"processes": int(manifest["surroundings"]["processes"]), "rows per step": int(state["rows_per_step"])}


def settings(config: Config) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """The keys group by group: (title, [(key, value as YAML, whether it differs from the default)])."""
    defaults = config.usual().model_copy(update={key: Config.model_fields[key].default for key in FOLLOWED})
    for title, keys in groups().items():
        values = ((key, getattr(config, key), getattr(defaults, key)) for key in keys)
        yield title, [(key, dump_value(value), value != default) for key, value, default in values]


def _read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty without the file."""
    try:
        return parsed(path, read_object, f"{path.name} cannot be read")
    except FileNotFoundError:
        return {}


def _read_peaks(path: Path) -> dict[str, float]:
    peaks = _read_object(path).get("peaks")
    return dict(finite_numbers(peaks)) if isinstance(peaks, dict) else {}


def _read_predictions(path: Path) -> Iterator[Mapping[str, Any]]:
    content = path.read_bytes() if path.exists() else b""
    # An evaluation that still runs, or was killed, leaves the beginning of a line at the end.
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    for place, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not {"prompt", "answer", "correct"} <= set(row):
                raise ValueError("prompt, answer or correct is missing")
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"this is not a prediction: {error}", where=f"{path}:{place}", hint="move the file away"
            ) from error
        yield row


def _because(folder: Path) -> tuple[str, ...]:
    try:
        return read_recovery(folder).because
    except CheckpointError as error:
        raise BadInput(error.what, where=error.where, hint=error.hint) from error
