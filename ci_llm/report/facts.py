"""A run's folder read into plain values: status, metrics, scores, configuration, what was healed, predictions."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

from ci_llm.checkpoints.folders import committed
from ci_llm.config import Config, groups, parse_config
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.durable import read_json
from ci_llm.core.recovery import read_recovery
from ci_llm.core.run_folder import SWEEP
from ci_llm.core.run_status import Status, read_status
from ci_llm.errors import BadInput, CheckpointError, ConfigError
from ci_llm.report.attempts import Attempt, read_attempts
from ci_llm.report.scores import agents_of, folders_of, gains, scores, what_evaluated

Points: TypeAlias = "list[tuple[int, float]]"

PREDICTIONS: Final = "predictions.jsonl"
_ASKED: Final = "predictions.source.json"
#: What scores and predictions of the same answers have alike; older releases did not write all of it.
_ALIKE: Final = ("step", "questions", "metric", "aggregator", "max_new_tokens")
_HARDWARE: Final = "gpu_stats.json"
_AGENT: Final = re.compile(r"agent\d+")


@dataclass(frozen=True)
class Metrics:
    """The lines of metrics.jsonl, in order.

    Attributes:
        unreadable: how many lines are no record: a crash or a full disk has torn them.
    """

    lines: tuple[Mapping[str, Any], ...]
    unreadable: int = 0

    def curve(self, key: str) -> Points:
        """(step, value) of a key, as far as it is there; NaN where the run wrote that the number was not finite."""
        return [(line["step"], _number(line[key])) for line in self.lines if key in line]

    def peak(self, key: str) -> float | None:
        """The largest value of a key; None if it never stands there."""
        return max((value for _, value in self.curve(key) if math.isfinite(value)), default=None)

    def last(self, key: str) -> float | None:
        """The latest value of a key."""
        return next((value for _, value in reversed(self.curve(key))), None)

    def with_last(self, evaluation: Mapping[str, Any]) -> Metrics:
        """With the evaluation at the end as one more line: that one is only in evaluation.json."""
        step, nll = evaluation.get("last_step"), evaluation["nll"]
        exact = evaluation.get("teacher_forced", evaluation)["exact_match"]
        if evaluation.get("step") != step or not isinstance(step, int):  # of an older step, which has its line
            return self
        line: dict[str, Any] = {"step": step}
        names = folders_of(evaluation)
        for name, values in (("nll", nll), ("exact_match", exact)):
            line |= {f"eval/{agent}/{name}": value for agent, value in zip(names, values["agents"], strict=True)}
            line[f"eval/crowd/{name}"] = values["crowd"]
        return Metrics((*self.lines, line), self.unreadable)

    @cached_property
    def agents(self) -> list[str]:
        """The names of those that have a curve, in order: agent0, agent1, ...; a crowd may have changed on the way."""
        names = {part for line in self.lines for key in line for part in key.split("/")[1:2]}
        return sorted((name for name in names if _AGENT.fullmatch(name)), key=lambda name: int(name[len("agent") :]))


@dataclass(frozen=True)
class RunFacts:
    """What is known about one run.

    Attributes:
        config: that of the newest checkpoint; None before the first.
        size: "processes" and "rows per step" of the newest checkpoint, as far as they are known.
        evaluation: evaluation.json; None before the end.
        predictions: one mapping per answered row; empty if the run left none.
        asked: what they are answers of, as the evaluation wrote it; empty if that is not known.
        hardware: the peaks of gpu_stats.json.
        because: what the supervisor changed between attempts, in its words.
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
        """The name that people gave each agent, by that of its folder."""
        given = self.config.agent_names if self.config else ()
        known = {f"agent{k}": name for k, name in enumerate(given)}
        if self.evaluation:
            known |= dict(zip(folders_of(self.evaluation), agents_of(self.evaluation), strict=True))
        return known

    @property
    def wall_s(self) -> float:
        """From the launch of the first attempt to the last sign of life."""
        return max(0.0, self.attempts[-1].ended - self.attempts[0].launched)

    @property
    def has_gone_on(self) -> bool:
        """Whether the run was trained on after the evaluation that it has."""
        return self.evaluation is not None and self.evaluation.get("last_step", self.status.step) < self.status.step

    @property
    def result_step(self) -> int:
        """The step that is the result so far: the one that was evaluated, unless the run has gone on."""
        evaluated = None if self.evaluation is None or self.has_gone_on else self.evaluation.get("step")
        return self.status.step if evaluated is None else int(evaluated)

    @property
    def what_evaluated(self) -> str:
        """What the scores are of, for people; empty without an evaluation."""
        if self.evaluation is None:
            return ""
        since = f", after step {self.evaluation['last_step']}: the run has gone on since" if self.has_gone_on else ""
        return what_evaluated(self.evaluation) + since

    @property
    def evaluated_predictions(self) -> tuple[Mapping[str, Any], ...]:
        """The predictions, if they are the answers that the scores are of; else nothing."""
        scored = self.evaluation or {}
        if not self.predictions or scored.get("measured_by") == "teacher_forcing":
            return ()
        known = [key for key in _ALIKE if None not in (scored.get(key), self.asked.get(key))]
        if any(scored[key] != self.asked[key] for key in known):
            return ()
        if "questions" not in known:  # an older release: other rows seldom have the same share of right answers
            share = fmean(bool(row["correct"]) for row in self.predictions)
            return self.predictions if scored and math.isclose(share, scored["exact_match"]["crowd"]) else ()
        return self.predictions


def read_run(path: Path | str) -> RunFacts:
    """What the files of a run tell. Only reads, and may be called while the run writes.

    Args:
        path: the output folder of a run, or a checkpoint in it.

    Raises:
        BadInput: there is no run here, or one of its files is damaged.
    """
    folder = run_folder(path)
    status = read_status(folder)
    metrics, evaluation = read_metrics(folder), _read_evaluation(folder / "evaluation.json")
    return RunFacts(
        folder=folder,
        status=status,
        attempts=read_attempts(folder, status, metrics.lines),
        metrics=metrics.with_last(evaluation) if evaluation else metrics,
        config=read_config(folder),
        size=_read_size(folder),
        evaluation=evaluation,
        predictions=tuple(_read_predictions(folder / PREDICTIONS)),
        asked=_read_object(folder / _ASKED) or {},
        hardware=_read_peaks(folder / _HARDWARE),
        because=_because(folder),
    )


def run_folder(path: Path | str) -> Path:
    """The folder of the run that `path` means.

    Raises:
        BadInput: there is none.
    """
    if "://" in str(path):
        raise BadInput("this needs the run's folder on a disk", where=str(path), hint="copy the folder of the run here")
    folder = Path(path)
    for place in (folder, folder.absolute().parent):
        if folder.is_dir() and (place / "status.json").is_file():
            return place
    what = "this is no folder of a run: it has no status.json" if folder.is_dir() else "there is no such folder"
    if (folder / SWEEP).is_file():  # of a program's own loop, which writes no status
        raise BadInput(
            what, where=str(path), hint=f"ci-llm compare {shlex.quote(str(path))} shows the trials of this sweep"
        )
    raise BadInput(what, where=str(path), hint="give the output_dir of a run")


def read_metrics(folder: Path) -> Metrics:
    """metrics.jsonl; nothing where it is missing.

    Raises:
        BadInput: it holds no single record of a run.
    """
    path = folder / "metrics.jsonl"
    raw = path.read_bytes().splitlines() if path.exists() else []
    records = [record for record in map(_record, raw) if record is not None]
    if raw and not records:
        raise BadInput("no line of this file is a record of a run", where=str(path), hint="move it away")
    return Metrics(tuple(records), unreadable=len(raw) - len(records))


def read_config(folder: Path) -> Config | None:
    """The configuration in the newest checkpoint that has a readable one; None if there is none."""
    for _, checkpoint in committed(folder):
        path = checkpoint / "config.yaml"
        try:
            return parse_config(path.read_text(encoding="utf-8"), str(path))
        except (ConfigError, OSError, UnicodeDecodeError):
            continue  # a damaged checkpoint: the run itself will say so when it goes on
    return None


def _read_size(folder: Path) -> dict[str, int]:
    """What a launcher decides about a step, of the newest checkpoint that says it."""
    for _, checkpoint in committed(folder):
        try:
            manifest: Any = read_json(checkpoint / "manifest.json")
            state: Any = read_json(checkpoint / "train_state.json")
            return {
                "processes": int(manifest["surroundings"]["processes"]),
                "rows per step": int(state["effective_batch"]),
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue  # as in `read_config`
    return {}


def settings(config: Config) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """Group by group: title, and for each key its value as YAML, and whether it differs from the default."""
    defaults = Config()
    for title, keys in groups().items():
        values = ((key, getattr(config, key), getattr(defaults, key)) for key in keys)
        yield title, [(key, dump_value(value), value != default) for key, value, default in values]


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(value, dict) and isinstance(value.get("step"), int)):
        return None
    return value if isinstance(value.get("time", 0), int | float) else None


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BadInput(f"{path.name} cannot be read: {error}", where=str(path), hint="move it away") from error
    return value


def _read_evaluation(path: Path) -> dict[str, Any] | None:
    evaluation = _read_object(path)
    try:
        if evaluation is not None:
            _ = scores(evaluation), list(gains(evaluation))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path.name} lacks a score: {error!r}", where=str(path), hint="move it away") from error
    return evaluation


def _read_peaks(path: Path) -> dict[str, float]:
    peaks = (_read_object(path) or {}).get("peaks")
    named = peaks.items() if isinstance(peaks, dict) else ()
    return {str(name): peak for name, peak in named if isinstance(peak, int | float)}


def _read_predictions(path: Path) -> Iterator[Mapping[str, Any]]:
    content = path.read_bytes() if path.exists() else b""
    # An evaluation that still runs, or was killed, leaves the beginning of a line at the end.
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not {"prompt", "answer", "correct"} <= set(row):
                raise ValueError("prompt, answer or correct is missing")
        except (TypeError, ValueError) as error:
            raise BadInput(f"no prediction: {error}", where=f"{path}:{number}", hint="move the file away") from error
        yield row


def _because(folder: Path) -> tuple[str, ...]:
    try:
        return read_recovery(folder).because
    except CheckpointError as error:
        raise BadInput(error.what, where=error.where, hint=error.hint) from error
