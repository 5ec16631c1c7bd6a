"""The facts of a run, read from its folder as plain values: configuration, metrics, scores, predictions, attempts.

The facts of an attempt are when and how it began and ended, how its time was spent, and what its end cost.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeAlias

from ci_llm.checkpoints.layout import committed
from ci_llm.checkpoints.manifest import read_file, read_manifest
from ci_llm.config import Config, parse_config
from ci_llm.core import run_folder
from ci_llm.core.durable import read_json, read_object
from ci_llm.core.evaluation_file import Evaluation, read_evaluation
from ci_llm.core.measures import Measures, measures_of
from ci_llm.core.run_status import Status, kept_status, read_status
from ci_llm.errors import BadInput, CheckpointError, ConfigError
from ci_llm.report.scores import as_line, what_evaluated

Points: TypeAlias = "list[tuple[float, float]]"
Kind = Literal["training", "evaluation", "start-up", "shutdown", "lost steps", "no process"]

#: The kinds of time of a run; the first one is useful time.
KINDS: Final[Mapping[Kind, str]] = {
    "training": "optimizer steps that are part of the result",
    "evaluation": "evaluations on the way and after the last step, with the final checkpoint",
    "start-up": "from the launch of a process to its first optimizer step",
    "shutdown": "the last save, and the end of the process",
    "lost steps": "optimizer steps that a later attempt took again",
    "no process": "between two attempts",
}
#: What an attempt did after its last line of metrics, by its outcome; of any other its last steps are lost.
_AT_THE_END: Final[Mapping[str, Kind]] = {"completed": "evaluation", "interrupted": "shutdown", "running": "training"}

_LOG_LINE: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[(\d+)\] (?!step \d+/\d+ )(.*)")
_GONE: Final = "The process ended without writing a reason: it was killed, or its machine was lost."


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
        seconds: its time by kinds; the last one is the pause before the next attempt.
        restart_s: seconds in which the next attempt started up.
    """

    number: int
    first_step: int
    last_step: int
    launched: float
    started: float
    ended: float
    outcome: str
    reason: str | None
    message: str
    host: str
    log: tuple[str, ...]
    kept_step: int = 0
    redone_steps: int = 0
    seconds: Mapping[Kind, float] = field(default_factory=dict)
    restart_s: float = 0.0

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.log if line.startswith("WARNING ")]

    @property
    def cost_s(self) -> float:
        """Seconds that its end has cost: lost steps, the pause before the next attempt, and its start-up."""
        return self.seconds["lost steps"] + self.seconds["no process"] + self.restart_s


def read_attempts(folder: Path, status: Status, lines: Sequence[run_folder.Record]) -> tuple[Attempt, ...]:
    """All attempts that have left a trace, in order.

    Args:
        status: the status of the run, and so of its last attempt.
        lines: the records of metrics.jsonl, which has none for a step that was lost.
    """
    numbers = {number for number in run_folder.attempt_numbers(folder) if number < status.attempt} | {status.attempt}
    own_lines = {each: [line for line in lines if line.get("attempt") == each and "time" in line] for each in numbers}
    log = _read_log(folder / "training.log")
    found: list[Attempt] = []
    for each in sorted(numbers):
        one = _read_attempt(folder, each, status, own_lines[each], log.get(each, []))
        if found:  # no attempt is launched before the one before has ended
            one = replace(one, launched=min(max(one.launched, found[-1].ended), one.started))
        found.append(one)
    step_s = median([line["step_time_s"] for line in lines if "step_time_s" in line] or [0.0])
    after: Attempt | None = None
    kept_step = math.inf
    for place, one in reversed([*enumerate(found)]):
        last_step = max(one.last_step, after.first_step) if after else one.last_step
        redone = last_step - after.first_step if after else 0
        kept_step = int(min(kept_step, last_step))
        one = replace(one, last_step=last_step, kept_step=kept_step, redone_steps=redone)
        restart_s = after.seconds["start-up"] if after else 0.0
        spent = _spent(one, after, own_lines[one.number], step_s)
        found[place] = after = replace(one, seconds=spent, restart_s=restart_s)
        kept_step = min(kept_step, one.first_step)
    return tuple(found)


def seconds_by_kind(attempts: Sequence[Attempt]) -> dict[Kind, float]:
    """The time of all attempts by kind, in the order of `KINDS`."""
    return {kind: sum(attempt.seconds[kind] for attempt in attempts) for kind in KINDS}


def _read_log(path: Path) -> dict[int, list[str]]:
    """The lines of each attempt. Lines about progress, and those without a head, such as stacks, are left out."""
    found: dict[int, list[str]] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for match in filter(None, map(_LOG_LINE.fullmatch, text.splitlines())):
        found.setdefault(int(match[1]), []).append(match[2])
    return found


def _read_attempt(
    folder: Path, attempt: int, newest: Status, lines: Sequence[run_folder.Record], log: Sequence[str]
) -> Attempt:
    """One attempt by its own files. The status of one that was followed may be damaged, or was never written."""
    status = newest if attempt == newest.attempt else kept_status(folder, attempt)
    told = run_folder.read_began(folder, attempt)
    began = {key: each for key, each in told.items() if isinstance(each, int | float) and math.isfinite(each)}
    cause = run_folder.earliest_failure(run_folder.read_failures(folder, attempt))
    times = [line["time"] for line in lines]
    started = status.started if status else began.get("launched", min(times, default=newest.started))
    ended = status.heartbeat if status else started
    if status is None or status.status in ("running", "vanished"):
        ended = max([ended, *times, *([cause.time] if cause else [])])
    outcome, reason, message = _ending(status, cause, is_newest=attempt == newest.attempt)
    first = int(began.get("step", lines[0]["step"] - 1 if lines else 0))
    last = max([first, *(line["step"] for line in lines), status.step if status else 0, (cause and cause.step) or 0])
    return Attempt(
        number=attempt,
        first_step=first,
        last_step=last,
        launched=min(began.get("launched", started), started),
        started=started,
        ended=ended,
        outcome=outcome,
        reason=reason,
        message=message,
        host=status.host if status else "",
        log=tuple(log),
    )


def _ending(status: Status | None, cause: run_folder.Failure | None, *, is_newest: bool) -> tuple[str, str | None, str]:
    """(outcome, reason, message). Only the newest attempt may still be running."""
    if status is not None and status.status in ("completed", "interrupted"):
        return status.status, status.reason, ""
    if cause is not None:
        return "failed", cause.reason, cause.message
    if status is not None and status.status == "failed":
        return "failed", status.reason, ""
    is_running = is_newest and status is not None and status.status == "running"
    return ("running", None, "") if is_running else ("killed", None, _GONE)


def _spent(
    attempt: Attempt, after: Attempt | None, lines: Sequence[run_folder.Record], step_s: float
) -> dict[Kind, float]:
    """Divide the time from the launch of an attempt to that of the next.

    A line of training ends the steps since the line before it; one of an evaluation ends the evaluation after its
    step. What a first line took beyond its steps is start-up. Steps that were kept and have no line, because only
    every `logging_steps`-th has one, count as typical ones.

    Args:
        step_s: seconds of a typical optimizer step.
    """
    spent: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    now, step = attempt.launched, attempt.first_step

    def until(end: float, kind: Kind) -> None:
        nonlocal now
        spent[kind] += max(0.0, end - now)
        now = max(now, end)

    # A first line of an evaluation is of one that was still due, and has no steps before it.
    first_s = (lines[0]["step"] - step) * step_s if lines and "epoch" in lines[0] else math.inf
    until(max(attempt.started, lines[0]["time"] - first_s) if lines else attempt.started, "start-up")
    for line in lines:
        until(line["time"], "training" if "epoch" in line else "evaluation")
        step = line["step"]
    until(min(attempt.ended, now + max(0, attempt.kept_step - step) * step_s), "training")
    # An interrupted one may have ended clean, and the run went back before its end all the same.
    lost_s = (attempt.last_step - max(attempt.kept_step, attempt.first_step)) * step_s
    until(min(attempt.ended, now + lost_s), "lost steps")
    until(attempt.ended, _AT_THE_END.get(attempt.outcome, "lost steps"))
    if after is not None:
        until(max(after.launched, attempt.ended), "no process")
    return spent


_ASKED: Final = "predictions.source.json"


@dataclass(frozen=True)
class Metrics:
    """The lines of metrics.jsonl, in order.

    Attributes:
        unreadable: the number of lines that a crash or a full disk has torn.
    """

    lines: tuple[run_folder.Record, ...]
    unreadable: int = 0

    def curve(self, key: str) -> Points:
        """(step, value) of every line that has the key, with the NaN and infinities that the run wrote."""
        return [(line["step"], run_folder.number(line[key])) for line in self.lines if key in line]

    def peak(self, key: str) -> float | None:
        """The largest value of a key; None if no line has it."""
        return max((value for _, value in self.curve(key) if math.isfinite(value)), default=None)

    def last(self, key: str) -> float | None:
        """The latest value of a key; None if no line has it."""
        curve = self.curve(key)
        return curve[-1][1] if curve else None

    def with_last(self, evaluation: Evaluation) -> Metrics:
        """The metrics with the final evaluation as one more line, because only evaluation.json has it."""
        if evaluation.ending is None or evaluation.ending.last_step != evaluation.step:
            return self  # that of an older step has its line
        last = as_line(replace(evaluation, exact_match=evaluation.solutions.exact_match))
        return Metrics((*self.lines, last), self.unreadable)

    @cached_property
    def agents(self) -> list[str]:
        """The names of the agents that have a curve, in order: agent0, agent1, ... A crowd may have changed."""
        names = {found[1] for line in self.lines for key in line if (found := re.match(r"\w+/agent(\d+)/", key))}
        return [f"agent{name}" for name in sorted(names, key=int)]


class RunFacts:
    """The facts of one run; it may be read while the run writes.

    Args:
        path: the output folder of a run, or a checkpoint in it.

    Attributes:
        folder, status, attempts, metrics: what is known of every run.
        config: the configuration of the newest checkpoint; None before the first.
        size: "processes" and "rows per step" of that checkpoint, which a launcher may decide.
        evaluation: the final evaluation; None before the end.
        predictions: one mapping for each row that was answered.
        asked: checkpoint and rows of the predictions, as the evaluation recorded them; empty if they are not known.
        because: the changes of the supervisor between attempts, in its words.

    Raises:
        BadInput: there is no run here, or one of its files is damaged.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder = _folder_of_run(path)
        self.status = read_status(self.folder)
        self.evaluation = read_evaluation(self.folder)
        metrics = read_metrics(self.folder)
        self.metrics = metrics.with_last(self.evaluation) if self.evaluation else metrics
        self.attempts = read_attempts(self.folder, self.status, metrics.lines)
        self.config, self.size = _newest_config(self.folder)
        self.predictions = tuple(_read_predictions(self.folder / run_folder.PREDICTIONS))
        asked = self.folder / _ASKED
        self.asked: run_folder.Record = (
            run_folder.parsed(asked, read_object, f"{_ASKED} cannot be read") if asked.exists() else {}
        )
        try:
            self.because = run_folder.read_recovery(self.folder).because
        except CheckpointError as error:
            raise BadInput(error.what, where=error.where, hint=error.hint) from error

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def agents_names(self) -> dict[str, str]:
        """The name that people gave each agent, by the name of its folder."""
        if self.evaluation:
            return dict(zip(self.evaluation.agent_folders, self.evaluation.agent_names, strict=True))
        return {f"agent{k}": name for k, name in enumerate(self.config.agent_names if self.config else ())}

    @property
    def words(self) -> Measures:
        """The words for the measures of the run, by its evaluation, or before that by its objective."""
        if self.evaluation is not None:
            return self.evaluation.measures
        return measures_of("sft" if self.config is None else self.config.objective)

    @property
    def wall_s(self) -> float:
        """Seconds from the launch of the first attempt to the last sign of life."""
        return max(0.0, self.attempts[-1].ended - self.attempts[0].launched)

    @property
    def has_gone_on(self) -> bool:
        """True if the run was trained on after its evaluation."""
        ending = None if self.evaluation is None else self.evaluation.ending
        return ending is not None and ending.last_step < self.status.step

    @property
    def what_evaluated(self) -> str:
        """A line for people: how, and on which rows, the scores were measured; empty without an evaluation."""
        if self.evaluation is None:
            return ""
        ending = self.evaluation.ending if self.has_gone_on else None
        since = f", after step {ending.last_step}: the run has gone on since" if ending else ""
        return what_evaluated(self.evaluation) + since

    @property
    def evaluated_predictions(self) -> tuple[Mapping[str, Any], ...]:
        """The predictions, if the scores are those of these answers; else nothing."""
        scored = self.evaluation
        if scored is None or scored.answered is None:
            return ()
        known = asdict(scored.answered) | {"step": scored.step, "aggregator": scored.aggregator}
        return self.predictions if known.items() <= self.asked.items() else ()


def _folder_of_run(path: Path | str) -> Path:
    """The folder of the run that `path` means: itself, or the folder around a checkpoint.

    Raises:
        BadInput: it is a mirror, or a sweep without a run.
    """
    if "://" in str(path):
        raise BadInput("this needs the run's folder on a disk", where=str(path), hint="copy the folder of the run here")
    folder = Path(path)
    for place in (folder, folder.absolute().parent):
        if folder.is_dir() and (place / "status.json").is_file():
            return place
    if (folder / run_folder.SWEEP).is_file():  # of a program's own loop, which writes no status
        hint = f"ci-llm compare {shlex.quote(str(path))} shows the trials of this sweep"
        raise BadInput(run_folder.NOT_A_RUN, where=str(path), hint=hint)
    return folder  # `read_status` says what it is


def read_metrics(folder: Path) -> Metrics:
    """metrics.jsonl; nothing where it is missing.

    Raises:
        BadInput: it holds lines, and none of them is a record of a run.
    """
    records, torn = run_folder.read_records(folder)
    if torn and not records:
        where = str(folder / run_folder.METRICS_NAME)
        raise BadInput("no line of this file is a record of a run", where=where, hint=run_folder.MOVE_AWAY)
    return Metrics(tuple(records), unreadable=torn)


def _newest_config(folder: Path) -> tuple[Config | None, dict[str, int]]:
    """(configuration, size of a step) of the newest checkpoint that can be read; a resume reports damaged ones."""
    for _, checkpoint in committed(folder):
        with contextlib.suppress(ConfigError, CheckpointError, OSError, KeyError, TypeError, ValueError):
            manifest = read_manifest(checkpoint)
            text = read_file(checkpoint, "config.yaml", manifest.files["config.yaml"]).decode()
            config = parse_config(text, str(checkpoint / "config.yaml"))
            state: Any = read_json(checkpoint / "train_state.json")
            place: Any = manifest.info["surroundings"]
            return config, {"processes": place["processes"], "rows per step": state["rows_per_step"]}
    return None, {}


def _read_predictions(path: Path) -> Iterator[Mapping[str, Any]]:
    content = path.read_bytes() if path.exists() else b""
    # An evaluation that still runs, or was killed, leaves the beginning of a line at the end.
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    for place, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not {"prompt", "answer", "correct"} <= set(row):
                raise ValueError("prompt, answer or correct is missing")
        except ValueError as error:
            raise BadInput(
                f"this is not a prediction: {error}", where=f"{path}:{place}", hint="move the file away"
            ) from error
        yield row
