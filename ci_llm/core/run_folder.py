"""The folder of a run: the names of its parts, its metrics, and the small records in it that later attempts read.

metrics.jsonl            numbers by optimizer step; this is the one way to read them
attempts/<n>/            the step at which an attempt began, and in process_<i>.json why its processes failed
skipped_batches.json     the batches that the next attempts skip, whichever checkpoint they resume from
recovery.json            what the supervisor asks of the next attempts
hub.json                 how the last push of the result to the hub ended, for the next call and `ci-llm status`
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import psutil
from annotated_types import Gt, Le

from ci_llm.core.durable import make_folders, read_as, read_object, write_json
from ci_llm.core.typed_json import as_plain
from ci_llm.errors import BadInput, CheckpointError, CiLlmError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOVE_AWAY: Final = "move it away"
NOT_A_RUN: Final = "this is not the folder of a run: it has no status.json"

ATTEMPTS: Final = "attempts"
_BEGAN: Final = "began.json"
PEER_LOST: Final = "peer_lost"


@dataclass(frozen=True)
class Failure:
    """The failure of one process of an attempt.

    Launchers flatten exit codes, so the reason travels by file.

    Attributes:
        reason: a word for scripts: "out_of_memory", "nonfinite", "disk_full", "peer_lost", "error:OSError";
            "unreadable" if the file of the failure is damaged.
        message: a sentence for people.
        time: unix seconds.
        step: optimizer steps done, if known.
        traceback: the traceback of the exception, if known.
    """

    reason: str
    message: str
    process_index: int
    time: float
    step: int | None = None
    host: str = ""
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException, reason: str, process_index: int, step: int | None = None) -> Failure:
        """The failure of this process, at this moment, by this exception."""
        return cls(
            reason=reason,
            message=str(error) or type(error).__name__,
            process_index=process_index,
            time=time.time(),
            step=step,
            host=socket.gethostname(),
            traceback="".join(traceback.format_exception(error)),
        )


def attempt_folder(run_folder: Path | str, attempt: int) -> Path:
    """The folder of one attempt below the folder of its run; it may not exist yet."""
    return Path(run_folder, ATTEMPTS, str(attempt))


def attempt_numbers(run_folder: Path | str) -> list[int]:
    """The numbers of the attempts that have a folder, in order."""
    names = (path.name for path in Path(run_folder, ATTEMPTS).glob("*"))
    return sorted(int(name) for name in names if name.isdecimal())


def record_attempt(run_folder: Path, attempt: int, step: int, place: Mapping[str, object] | None = None) -> None:
    """Write at which step an attempt begins, and when its process was launched (unix seconds).

    The next attempts see from it whether this one made progress.

    Args:
        place: more plain values about where it runs.
    """
    path = attempt_folder(run_folder, attempt) / _BEGAN
    make_folders(path.parent)
    write_json(path, {"step": step, "launched": psutil.Process().create_time(), **(place or {})})


def attempts_without_progress(run_folder: Path, step: int) -> int:
    """The number of attempts in a row, the last one included, that have begun at `step`."""
    found = [each for each in attempt_numbers(run_folder) if (attempt_folder(run_folder, each) / _BEGAN).exists()]
    return len([*takewhile(lambda number: read_began(run_folder, number).get("step") == step, reversed(found))])


def read_began(run_folder: Path | str, attempt: int) -> Mapping[str, Any]:
    """The record of `record_attempt`; empty if it is missing or damaged, because no run may end by this record."""
    try:
        return read_object(attempt_folder(run_folder, attempt) / _BEGAN)
    except (OSError, ValueError):
        return {}


def write_failure(run_folder: Path | str, attempt: int, process_index: int, failure: Failure) -> Path:
    """Write why this process fails, before anything else is tried. An existing file stays: it is of an earlier failure.

    Returns:
        the path of the file.

    Raises:
        OSError: the disk refuses it.
    """
    path = attempt_folder(run_folder, attempt) / f"process_{process_index}.json"
    if not path.exists():
        make_folders(path.parent)
        write_json(path, asdict(failure))
    return path


def read_failures(run_folder: Path | str, attempt: int) -> list[Failure]:
    """The failures that the processes of an attempt have recorded, by process index."""
    found = attempt_folder(run_folder, attempt).glob("process_*.json")
    told = [(path.stem.removeprefix("process_"), path) for path in found]
    numbered = {int(number): path for number, path in told if number.isdecimal()}
    return [_read_failure(path, index) for index, path in sorted(numbered.items())]


def _read_failure(path: Path, process_index: int) -> Failure:
    """The failure in a file. Even a damaged file tells which process failed, and when."""
    try:
        return read_record(Failure, path)
    except BadInput as error:
        return Failure("unreadable", f"{error.what} ({path})", process_index, path.stat().st_mtime)


def earliest_failure(failures: Iterable[Failure]) -> Failure | None:
    """The cause of the end of an attempt: its earliest failure; None without any.

    The other failures follow from it. A lost peer counts only if there is no other failure: it is always a consequence,
    but the clocks of two machines may disagree about the order.
    """
    return min(failures, key=lambda failure: (failure.reason == PEER_LOST, failure.time), default=None)


def read_record(kind: type[T], path: Path) -> T:
    """The dataclass `kind` from a file.

    Raises:
        BadInput: the file was not written by this program, or may not be read. FileNotFoundError, NotADirectoryError.
    """
    return parsed(path, partial(read_as, kind), f"this is not the {kind.__name__.lower()} of a run")


def parsed(
    path: Path, parse: Callable[[Path], T], what: str, *, error: type[CiLlmError] = BadInput, hint: str = MOVE_AWAY
) -> T:
    """The value that `parse` returns for a small file; its exceptions become errors that name the file.

    Args:
        what: begins the message of the error.
        error: its type.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        CiLlmError: `error`: the file was not written by this program, or may not be read.
    """
    try:
        return parse(path)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as refused:
        ask = "try again, or ask its owner"
        raise error(f"it cannot be read: {refused.strerror}", where=str(path), hint=ask) from refused
    except KeyError as missing:
        raise error(f"{what}: it lacks {missing}", where=str(path), hint=hint) from missing
    except (AttributeError, IndexError, TypeError, ValueError, BadInput) as damage:
        raise error(f"{what}: {damage}", where=str(path), hint=hint) from damage


def read_known(kind: type[T], path: Path, what: str, hint: str = MOVE_AWAY) -> T | None:
    """The value of a type from a file that an earlier attempt may have left; None without the file.

    Raises:
        CheckpointError: the file was not written by this program, or may not be read.
    """
    try:
        return parsed(path, partial(read_as, kind), what, error=CheckpointError, hint=hint)
    except FileNotFoundError:
        return None


def write_known(path: Path, value: object, what: str, hint: str = "") -> None:
    """Write a small file for later attempts, durably, and its folder where that does not exist.

    Raises:
        CheckpointError: the disk refuses it.
    """
    try:
        make_folders(path.parent)
        write_json(path, value)
    except OSError as error:
        raise CheckpointError(f"{what} cannot be written: {error.strerror}", where=str(path), hint=hint) from error


PUSH_RECORD: Final = "hub.json"


@dataclass(frozen=True)
class PushRecord:
    """The content of hub.json.

    Attributes:
        to: the repository, as it was asked for.
        repository, url: as the hub has it; None after a push that failed.
        step: the optimizer step that is published.
        weights: the fingerprint of what is published.
        error: why the push failed; None if it did not.
    """

    to: str
    repository: str | None = None
    url: str | None = None
    step: int | None = None
    weights: str | None = None
    error: str | None = None

    def has(self, weights: str, to: str) -> bool:
        """True if these weights are known to be in that repository."""
        return self.error is None and self.weights == weights and to in (self.to, self.repository)


def keep_push(run_folder: Path, record: PushRecord) -> None:
    """Write hub.json. A disk that refuses it costs one more push: what is on the hub stays there."""
    with contextlib.suppress(OSError):
        write_json(run_folder / PUSH_RECORD, asdict(record))


def last_push(run_folder: Path) -> PushRecord | None:
    """The outcome of the last push; None without one, or if that is not known."""
    try:
        return read_record(PushRecord, run_folder / PUSH_RECORD)
    except (OSError, BadInput):
        return None


RECOVERY: Final = "recovery.json"


@dataclass(frozen=True)
class Recovery:
    """The changes for the next attempts.

    Only the supervisor writes them, atomically, into the run's folder; the trainer reads them at its start. They are
    part of the state of the run and not of its configuration: a resume never refuses them.

    Attributes:
        micro_batch_size: the most rows per process and micro-step; the effective batch stays the same.
        resume_at_most_step: the next attempt resumes from the newest checkpoint of this step or before (0: a fresh
            start); newer ones are superseded. It holds only while status.json names `after_attempt`: the attempt that
            applies it writes its own number there, and later attempts resume from their newest checkpoint again.
        after_attempt: the attempt after which `resume_at_most_step` holds.
        because: the reasons for people, in the order of the events.
        learning_rate_factor: multiplies the scheduled learning rate of every agent.
    """

    micro_batch_size: int | None = None
    resume_at_most_step: int | None = None
    after_attempt: int | None = None
    because: tuple[str, ...] = ()
    learning_rate_factor: Annotated[float, Gt(0), Le(1)] = 1.0

    def latest_step_allowed(self, last_attempt: int | None) -> int | None:
        """The newest step from which an attempt after `last_attempt` may resume; None for any."""
        return self.resume_at_most_step if self.after_attempt == last_attempt else None


def read_recovery(run_folder: Path | str) -> Recovery:
    """The recovery state of a run; the default one without a file.

    Raises:
        CheckpointError: the file was not written by this program. To ignore it would repeat the failure.
    """
    return read_known(Recovery, Path(run_folder, RECOVERY), "the recovery state cannot be read") or Recovery()


def write_recovery(run_folder: Path | str, recovery: Recovery) -> None:
    """Write `recovery` for the next attempts, durably.

    Raises:
        CheckpointError: the disk refuses the file.
    """
    hint = "make space there; the same command resumes from the last checkpoint"
    write_known(Path(run_folder, RECOVERY), as_plain(recovery), "the recovery state", hint)


SKIPPED_BATCHES: Final = "skipped_batches.json"


#: Finite steps in a row that end an episode of nonfinite ones: what leads to one begins some steps before it.
GOOD_AFTER_STEPS: Final = 50


@dataclass(frozen=True)
class BadBatch:
    """A step in which every agent was nonfinite. A later attempt compares the rows: the step may hold others then."""

    step: int
    rows: tuple[int, ...]


def read_skipped_batches(run_folder: Path) -> list[BadBatch]:
    """The batches that earlier attempts have skipped, whichever checkpoint the run resumes from.

    Raises:
        CheckpointError: the file is not of this program.
    """
    what = "this is not a record of skipped batches"
    return read_known(list[BadBatch], run_folder / SKIPPED_BATCHES, what) or []


def write_skipped_batches(run_folder: Path, batches: Sequence[BadBatch]) -> None:
    """Record the bad batches; a disk that refuses it is reported, and the run continues."""
    try:
        write_json(run_folder / SKIPPED_BATCHES, [as_plain(batch) for batch in batches])
    except OSError as error:
        logger.warning(f"{SKIPPED_BATCHES} cannot be written, the run continues: {error}")


# Metrics. A crash or a full disk may have torn a line, and JSON has no NaN: "nan", "inf" and "-inf" stand for numbers.

METRICS_NAME: Final = "metrics.jsonl"
Record: TypeAlias = Mapping[str, Any]


def record_of(line: bytes) -> Record | None:
    """The record in a line, which has a step; None for a line that a crash has torn."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    return value if isinstance(value.get("time", 0), int | float) else None


def read_records(run_folder: Path) -> tuple[list[Record], int]:
    """All records in order, and the number of torn lines; no records without a file."""
    path = run_folder / METRICS_NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [record for record in map(record_of, lines) if record is not None]
    return records, len(lines) - len(records)


def last_records(run_folder: Path, at_most: int) -> list[Record]:
    """The records in the last `at_most` bytes, in order; none without a file."""
    try:
        with (run_folder / METRICS_NAME).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - at_most))
            return [*filter(None, map(record_of, file.read().splitlines()))]
    except OSError:  # the file does not exist yet, or no longer
        return []


def metrics_of(run_folder: Path, step: int) -> dict[str, object]:
    """All values that the file has for `step`; of a name that comes twice, the later value."""
    records = [record for record in read_records(run_folder)[0] if record["step"] == step]
    return {name: value for record in records for name, value in record.items()}


def number(value: object) -> float:
    """A value of a record as a number; NaN for a value that is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


# Names

BEGINNING: Final = "beginning.json"
#: What attempts have decided about changes of the crowd.
CROWD_CHANGES: Final = "crowd_changes.json"
#: The result of a run; `ci_llm.core.evaluation_file` writes and reads it.
EVALUATION: Final = "evaluation.json"
#: The answers to the rows of `ci-llm evaluate`, a line each.
PREDICTIONS: Final = "predictions.jsonl"
#: Names in the folder of a sweep: its record, the folder of its runs, and the folder of the best trial's agent.
SWEEP: Final = "sweep.json"
SEGMENTS: Final = "segments"
BEST: Final = "best"
#: How the name of a launch's token begins, by which simultaneous starts find each other before one has the lease.
LAUNCH_TOKEN: Final = ".launch-"
#: A base that no other folder has; see `ci_llm/base/load.py`.
BASE_MODEL: Final = "base_model"
#: A folder of completions with their rewards, a file for each step.
COMPLETIONS: Final = "completions"
#: What a run leaves in its folder. When the run is moved aside, everything else stays where it is.
OF_A_RUN: Final = (
    *("checkpoint_step_*", "final_checkpoint", "quarantine", "superseded", ATTEMPTS, BEGINNING, RECOVERY),
    *("status.json", "training.log", METRICS_NAME, EVALUATION, "gpu_stats.json"),
    *("tensorboard", "requests", COMPLETIONS, CROWD_CHANGES, SKIPPED_BATCHES, BASE_MODEL),
    *("report.html", PREDICTIONS, "predictions.source.json", "calibration.json", PUSH_RECORD),
)
#: Other files of a run and of a sweep, which stay where they are. `BEST` is a likely name of a run.
_BESIDE: Final = (".*", "overwritten", "mirror.json", SWEEP, SEGMENTS)


def is_reserved(name: str) -> bool:
    """True if a run or a sweep may give this name to a part of itself; some disks do not tell capitals apart."""
    return any(fnmatch(name.lower(), pattern) for pattern in (*OF_A_RUN, *_BESIDE))


def is_run(folder: Path) -> bool:
    """True if a folder holds a run, whatever its name."""
    return (folder / BEGINNING).is_file() or (folder / ATTEMPTS).is_dir()
