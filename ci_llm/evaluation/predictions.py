"""The predictions file, one JSON line per row, and what its lines say of how sure the crowd is.

Lines are appended as the rows are answered, so that a killed evaluation resumes.

Beside `NAME.jsonl` lies `NAME.source.json`. It is written first and records which weights, questions and settings the
lines come from. A call with the same source keeps the complete lines, removes the beginning of a line that a crash
has left at the end, and resumes from there; any other call is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from ci_llm.core.durable import append, cut, locked, make_folders, read_json, write_bytes, write_json
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.judging import auroc, calibration_error
from ci_llm.errors import BadInput

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_WAYS_ON = "give another name by --output, or begin again with --overwrite"


@dataclass(frozen=True)
class Source:
    """Where the lines of a predictions file come from: their weights, their questions, and how they were answered.

    Attributes:
        weights: fingerprint of agents and base.
        questions: fingerprint of the questions and their reference answers.
        checkpoint, data: where both came from, for people; they are not compared.
        metric, aggregator, max_new_tokens: how answers were generated and judged.
        step: the step of the checkpoint, for reports; it is not compared. Older releases did not write it.
        under_way: how many questions the present call, or one that was killed, answers at a time, and how many lines
            it found; not compared either.
        format: raised when the lines of a later version say something else.
    """

    weights: str
    questions: str
    checkpoint: str
    data: str
    rows: int
    metric: str
    aggregator: str
    max_new_tokens: int
    format: int = 3
    step: int | None = None
    under_way: Mapping[str, int] | None = None

    def differences(self, other: Mapping[str, Any]) -> Iterator[str]:
        """What another source has that is not the same, in words."""
        own = asdict(self)
        for key, shown in (("weights", "checkpoint"), ("questions", "data")):
            if other.get(key) != own[key]:
                yield f"{shown} {other.get(shown)} and not {own[shown]}"
        for key in ("metric", "aggregator", "max_new_tokens", "format"):
            if other.get(key) != own[key]:
                yield f"{key} {other.get(key)} and not {own[key]}"


class Predictions:
    """The lines of a predictions file that is open for more.

    Attributes:
        rows: the complete lines.
        batch_size: questions to answer at a time: those asked for, or half of those with which a call was killed
            before its first line.
    """

    def __init__(self, path: Path, rows: list[Row], batch_size: int) -> None:
        self.path, self.rows, self.batch_size = path, rows, batch_size

    def append(self, rows: Sequence[Row]) -> None:
        """Add lines at the end of the file, durably.

        Raises:
            BadInput: the disk refuses them.
        """
        lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        try:
            append(self.path, lines.encode())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.rows += rows


@contextmanager
def open_predictions(
    path: Path, source: Source, prompts: Sequence[str], batch_size: int, *, overwrite: bool = False
) -> Iterator[Predictions]:
    """A predictions file of `source`: new, or with the lines that an earlier call has left. One process at a time.

    Args:
        prompts: the prompts of all questions, in order; a line must be about the question whose place it has.
        batch_size: questions to answer at a time.
        overwrite: start again, whatever the file holds.

    Raises:
        BadInput: the file is of another source, damaged, or in use; or the disk refuses it.
    """
    require_own(path, overwrite=overwrite)
    try:
        make_folders(path.parent)
        if overwrite and path.exists():
            with _held(path):
                path.unlink()
        if not path.exists():
            write_json(source_path(path), asdict(source))
            write_bytes(path, b"")
    except OSError as error:
        raise _unwritable(path, error) from error
    with _held(path):
        rows, killed = _kept(path, source, prompts)
        size = batch_size
        # Without a line since it began: with lines, its batches fit, and it was killed for another reason.
        if killed is not None and killed.get("after") == len(rows):
            size = min(batch_size, max(1, killed["batch_size"] // 2))
            logger.warning(f"a call was killed with {killed['batch_size']} questions at a time: {size} from here")
        _note(path, source, {"batch_size": size, "after": len(rows)})
        try:
            yield Predictions(path, rows, size)
        finally:
            _note(path, source, None)


def _note(path: Path, source: Source, under_way: Mapping[str, int] | None) -> None:
    try:
        write_json(source_path(path), asdict(replace(source, under_way=under_way)))
    except OSError as error:
        raise _unwritable(path, error) from error


def require_own(path: Path, *, overwrite: bool) -> None:
    """Refuse a file that no evaluation has written; nothing but its name is looked at.

    Raises:
        BadInput: it may not be replaced.
    """
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise BadInput("predictions go into a file, and this is none", where=str(path), hint="give a name by --output")
    if path.exists() and not overwrite and not source_path(path).is_file():
        what = f"this file exists and is not of an evaluation: {source_path(path).name} is not beside it"
        raise BadInput(what, where=str(path), hint=_WAYS_ON)


def source_path(path: Path) -> Path:
    """The file that says what the lines of a predictions file are of."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".source.json")


def _kept(path: Path, source: Source, prompts: Sequence[str]) -> tuple[list[Row], Mapping[str, int] | None]:
    """The complete lines of the file, and `under_way`; what is behind the lines is cut off."""
    try:
        written = read_json(source_path(path))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{source_path(path).name} cannot be read: {error}", where=str(source_path(path)), hint=_WAYS_ON
        ) from error
    known = written if isinstance(written, dict) else {}
    if different := list(source.differences(known)):
        what = f"the predictions in this file are of {', '.join(different)}"
        free = next(name for n in count(2) if not (name := path.with_stem(f"{path.stem}-{n}")).exists())
        raise BadInput(what, where=str(path), hint=f"--output {free} keeps both; --overwrite begins this one again")
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    rows = [_parsed(line, prompts, number, path) for number, line in enumerate(content[:size].split(b"\n")[:-1])]
    if size < len(content):
        cut(path, size)
    return rows, known.get("under_way")


def _parsed(line: bytes, prompts: Sequence[str], number: int, path: Path) -> Row:
    with contextlib.suppress(ValueError):  # includes text that is not UTF-8
        row = json.loads(line)
        if number < len(prompts) and isinstance(row, dict) and row.get("prompt") == prompts[number]:
            return row
    raise BadInput(
        "this line is not a prediction for the row of its place", where=f"{path}:{number + 1}", hint=_WAYS_ON
    )


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Lock the file: of two evaluations at a time the second is refused."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path, wait=False, required=False))
        except BlockingIOError as error:
            raise BadInput(
                "another process evaluates into this file", where=str(path), hint="wait for it, or give --output"
            ) from error
        yield


def _unwritable(path: Path, error: OSError) -> BadInput:
    return BadInput(
        f"the predictions cannot be written: {error.strerror or os.strerror(error.errno or 0)}",
        where=str(path),
        hint="make space there, or give another place by --output; the same call goes on after the last row",
    )


COVERAGE: Final = 0.8
DRAWS: Final = 200
#: The price in agents that escalation is shown at.
AGENTS_PER_PROMPT: Final = 1.6
#: Right answers, and as many wrong ones, below which people are shown no AUROC.
LEAST_OF_EACH: Final = 10


def honest_error(probabilities: ArrayLike) -> float:
    """The calibration error that the same probabilities would have if they were true, by chance alone."""
    p, generator = np.asarray(probabilities, float), np.random.default_rng(0)
    return float(np.mean([calibration_error(p, generator.random(len(p)) < p) for _ in range(DRAWS)]))


def at_coverage(sure: ArrayLike, right: ArrayLike) -> float:
    """The share of right answers among the `COVERAGE` of them that are surest."""
    numbers, is_right = np.asarray(sure, float), np.asarray(right, float)
    kept = np.argsort(-numbers, kind="stable")[: max(1, round(COVERAGE * len(numbers)))]
    return float(is_right[kept].mean())


def sureness_record(
    rows: Sequence[Row],
    calibration: Calibration | None,
    aggregator: str,
    *,
    abstain_below: float | None = None,
    agents_per_prompt: float = AGENTS_PER_PROMPT,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What the lines of a predictions file say of how sure the crowd is: `sureness` of an evaluation.

    `by` names the number that is judged: the calibrated probability, or without a calibration the confidence. Its order
    is that of the log-probabilities: the confidence itself is 0 for every long text.

    Args:
        names: the names of the agents; None: agent0, agent1, ...
    """
    fits = calibration is not None and calibration.aggregator == aggregator
    numbers = [calibration.right(row["signals"]) if fits else row["confidence"] for row in rows]  # type: ignore[union-attr]
    order = numbers if fits else [row["signals"][0] for row in rows]
    by = "probability_right" if fits else "confidence"
    record = sureness(by, numbers, [row["correct"] for row in rows], abstain_below, order)
    if calibration is not None:
        record["escalation"] = _escalation(rows, calibration, agents_per_prompt, names)
    return record


def sureness(
    by: str, numbers: ArrayLike, right: ArrayLike, abstain_below: float | None, order: ArrayLike | None = None
) -> dict[str, Any]:
    """How far n numbers called `by`, each a probability that an answer is right, can be trusted.

    Args:
        order: what the answers are sorted by, where the numbers themselves round to 0; None: by these.
    """
    p, is_right, order = np.asarray(numbers, float), np.asarray(right, bool), numbers if order is None else order
    record: dict[str, Any] = {
        "by": by,
        "rows": len(p),
        "right": int(is_right.sum()),
        "auroc": auroc(order, is_right),
        "calibration_error": calibration_error(p, is_right),
        "calibration_error_by_chance": honest_error(p),
        "coverage": COVERAGE,
        "exact_match_at_coverage": at_coverage(order, is_right),
    }
    if abstain_below is not None:
        given = p >= abstain_below
        record["abstention"] = {
            "below": abstain_below,
            "answered": float(given.mean()),
            "exact_match": float(is_right[given].mean()) if given.any() else None,
        }
    return record


def _escalation(
    rows: Sequence[Row], calibration: Calibration, agents_per_prompt: float, names: Sequence[str] | None
) -> dict[str, Any]:
    """What asking one agent first, and all where it is unsure, costs and keeps; from answers that are there already."""
    agent, below = calibration.agent, calibration.escalates_below(agents_per_prompt)
    unsure = np.array([calibration.agent_right(row["agents_signals"][agent]) < below for row in rows])
    right = np.where(unsure, [row["correct"] for row in rows], [row["agents_correct"][agent] for row in rows])
    return {
        "agent": names[agent] if names else f"agent{agent}",
        "below": below,
        "agents_per_prompt": float(1 + len(calibration.learned.weights) * unsure.mean()),
        "exact_match": float(right.mean()),
    }
