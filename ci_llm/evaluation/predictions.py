"""The predictions file: one JSON line per row, appended as the rows are answered, so that a killed evaluation resumes.

Beside `NAME.jsonl` lies `NAME.source.json`. It is written first and records which weights, questions and settings the
lines come from. A call with the same source keeps the complete lines, removes the beginning of a line that a crash
has left at the end, and goes on from there; any other call is refused.
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
from typing import Any

from ci_llm.core.durable import append, cut, locked, make_folders, read_json, write_bytes, write_json
from ci_llm.errors import BadInput

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_WAYS_ON = "give another name by --output, or begin anew with --overwrite"


@dataclass(frozen=True)
class Source:
    """What the lines of a predictions file are answers of.

    Attributes:
        weights: fingerprint of agents and base.
        questions: fingerprint of the questions and their reference answers.
        checkpoint, data: where both came from, for people; they are not compared.
        metric, aggregator, max_new_tokens: how answers were generated and judged.
        step: of the checkpoint, for reports; it is not compared. Older releases did not write it.
        under_way: of the call that answers them now, or was killed: questions at a time, and lines before it; as well.
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
        prompts: of all questions, in order; a line must be about the question whose place it has.
        batch_size: questions to answer at a time.
        overwrite: begin anew, whatever the file holds.

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
        raise BadInput(what, where=str(path), hint=f"--output {free} keeps both; --overwrite begins this one anew")
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
    raise BadInput("this line is no prediction for the row of its place", where=f"{path}:{number + 1}", hint=_WAYS_ON)


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
