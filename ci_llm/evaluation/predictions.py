"""The predictions file, one JSON line per row, and figures on how sure the crowd is, computed from its lines.

Lines are appended as rows are answered, so that a killed evaluation resumes.

`NAME.source.json` beside `NAME.jsonl` is written first, and records which weights, questions and settings the lines
come from. A call with the same source keeps the complete lines, removes an incomplete line that a crash has left at the
end, and resumes from there; any other call is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from ci_llm.core.durable import append, cut, locked, make_folders, read_json, write_bytes, write_json
from ci_llm.core.evaluation_file import Abstention, Sureness
from ci_llm.crowd.judging import auroc, calibration_error
from ci_llm.crowd.uncertainty import Calibration, calibrated
from ci_llm.errors import BadInput

Row = dict[str, Any]

_WAYS_ON = "give another name by --output, or begin again with --overwrite"


@dataclass(frozen=True)
class Source:
    """The source of the lines in a predictions file: weights, questions, and how these were answered.

    Attributes:
        weights: the fingerprint of agents and base.
        questions: the fingerprint of the questions and their reference answers.
        checkpoint, data: the places of both, for people; not compared.
        metric, aggregator, max_new_tokens: how answers were generated and judged.
        step: the step of the checkpoint, for reports; not compared.
        format: increased when the meaning of the lines changes.
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

    def differences(self, other: Mapping[str, Any]) -> Iterator[str]:
        """Yield the differences of another source, in words."""
        own = asdict(self)
        for key, shown in (("weights", "checkpoint"), ("questions", "data")):
            if other.get(key) != own[key]:
                yield f"{shown} {other.get(shown)} and not {own[shown]}"
        for key in ("metric", "aggregator", "max_new_tokens", "format"):
            if other.get(key) != own[key]:
                yield f"{key} {other.get(key)} and not {own[key]}"


class Predictions:
    """A predictions file that is open for further lines.

    Attributes:
        rows: the complete lines.
    """

    def __init__(self, path: Path, rows: list[Row]) -> None:
        self.path, self.rows = path, rows

    def append(self, rows: Sequence[Row]) -> None:
        """Append lines durably.

        Raises:
            BadInput: the disk refuses them.
        """
        lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with _writing(self.path):
            append(self.path, lines.encode())
        self.rows += rows


@contextmanager
def open_predictions(
    path: Path, source: Source, prompts: Sequence[str], *, overwrite: bool = False
) -> Iterator[Predictions]:
    """Open the predictions file of `source`, new or with the lines of an earlier call, for one process at a time.

    Args:
        prompts: the prompts of all questions, in order; each line must be about the question in its place.
        overwrite: replace the file, whatever it holds.

    Raises:
        BadInput: the file has another source, is damaged or in use; or the disk refuses it.
    """
    require_own(path, overwrite=overwrite)
    with _writing(path):
        make_folders(path.parent)
        if overwrite and path.exists():
            with _held(path):
                path.unlink()
        if not path.exists():
            write_json(source_path(path), asdict(source))
            write_bytes(path, b"")
    with _held(path):
        yield Predictions(path, _kept(path, source, prompts))


def require_own(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that is not the predictions file of an evaluation; only names are read.

    Raises:
        BadInput: the path may not be replaced.
    """
    is_own = path.is_file() and (overwrite or source_path(path).is_file())
    if path.exists() and not is_own:
        what = f"this is not the predictions file of an evaluation: {source_path(path).name} is not beside it"
        raise BadInput(what, where=str(path), hint=_WAYS_ON)


def source_path(path: Path) -> Path:
    """The path of the `Source` of a predictions file."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".source.json")


def _kept(path: Path, source: Source, prompts: Sequence[str]) -> list[Row]:
    """The complete lines of the file; an incomplete line is cut off."""
    try:
        written = read_json(source_path(path))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{source_path(path).name} cannot be read: {error}", where=str(source_path(path)), hint=_WAYS_ON
        ) from error
    if different := list(source.differences(written if isinstance(written, dict) else {})):
        what = f"the predictions in this file are of {', '.join(different)}"
        raise BadInput(what, where=str(path), hint=_WAYS_ON)
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    rows = [_parsed(line, prompts, number, path) for number, line in enumerate(content[:size].split(b"\n")[:-1])]
    if size < len(content):
        cut(path, size)
    return rows


def _parsed(line: bytes, prompts: Sequence[str], number: int, path: Path) -> Row:
    with contextlib.suppress(ValueError):  # includes text that is not UTF-8
        row = json.loads(line)
        if number < len(prompts) and isinstance(row, dict) and row.get("prompt") == prompts[number]:
            return row
    raise BadInput(
        "this line is not a prediction for the question in its place", where=f"{path}:{number + 1}", hint=_WAYS_ON
    )


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Lock the file within the block. Raises BadInput if another process has locked it."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path, wait=False, required=False))
        except BlockingIOError as error:
            raise BadInput(
                "another process evaluates into this file", where=str(path), hint="wait for it, or give --output"
            ) from error
        yield


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises BadInput where the disk refuses the file inside."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"the predictions cannot be written: {error.strerror or os.strerror(error.errno or 0)}",
            where=str(path),
            hint="make space there, or give another place by --output; the same call resumes after the last row",
        ) from error


#: Right answers, and as many wrong ones, below which people are shown no AUROC.
LEAST_OF_EACH: Final = 10


def sureness_of_answers(
    rows: Sequence[Row], calibration: Calibration | None, aggregator: str, *, abstain_below: float | None = None
) -> Sureness:
    """The quality of the crowd's sureness, from the lines of a predictions file.

    `by` names the judged number: the calibrated probability, or without a calibration the confidence. Answers are
    ordered by their log-probabilities, because the confidence rounds to 0 for long texts.
    """
    right = calibrated(calibration, aggregator)
    numbers = [row["confidence"] if right is None else right(row["signals"]) for row in rows]
    order = [row["signals"][0] for row in rows] if right is None else numbers
    by = "confidence" if right is None else "probability_right"
    return sureness(by, numbers, [row["correct"] for row in rows], abstain_below, order)


def sureness(
    by: str, numbers: ArrayLike, right: ArrayLike, abstain_below: float | None, order: ArrayLike | None = None
) -> Sureness:
    """The quality of n probabilities, called `by`, that answers are right.

    Args:
        order: numbers to sort the answers by, if the probabilities round to 0; None to sort by these.
    """
    p, is_right = np.asarray(numbers, float), np.asarray(right, bool)
    abstention = None
    if abstain_below is not None:
        given = p >= abstain_below
        of_given = float(is_right[given].mean()) if given.any() else None
        abstention = Abstention(abstain_below, float(given.mean()), of_given)
    return Sureness(
        by=by,
        rows=len(p),
        right=int(is_right.sum()),
        auroc=auroc(numbers if order is None else order, is_right),
        calibration_error=calibration_error(p, is_right),
        abstention=abstention,
    )


def sureness_lines(sure: Sureness) -> Iterator[str]:
    """Lines about how far the crowd's sureness can be trusted."""
    right, wrong = sure.right, sure.rows - sure.right
    are_few = min(right, wrong) < LEAST_OF_EACH
    area = f"no AUROC below {LEAST_OF_EACH} of each" if are_few else f"{sure.auroc:.3f} AUROC of wrong answers"
    yield (f"{sure.by}, {right} right and {wrong} wrong: {area}, {sure.calibration_error:.3f} calibration error")
    if found := sure.abstention:
        told = "none" if found.exact_match is None else f"{found.exact_match:.3f} of them right"
        yield f"answers of at least {found.below:g}: {found.answered:.0%} of the rows, {told}"
