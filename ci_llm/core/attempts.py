"""`attempts/<n>/`: the step at which an attempt began, and why its processes failed.

Launchers flatten exit codes, so a reason travels by file. A process that fails writes `process_<i>.json` before it does
anything else. The earliest failure of an attempt is the cause; the others follow from it.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psutil

from ci_llm.core.durable import make_folders, read_fields, read_json, write_json
from ci_llm.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

ATTEMPTS: Final = "attempts"
PEER_LOST: Final = "peer_lost"


@dataclass(frozen=True)
class Failure:
    """Why one process of an attempt failed.

    Attributes:
        reason: a word for scripts: "out_of_memory", "nonfinite", "disk_full", "peer_lost", "error:OSError";
            "unreadable" if the file of the failure is damaged.
        message: a sentence for people.
        time: unix seconds.
        step: optimizer steps done, if known.
        traceback: of the exception, if known.
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


def newest_attempt(run_folder: Path | str) -> int | None:
    """The number of the newest attempt that has a folder; None: there is none."""
    numbers = (path.name for path in Path(run_folder, ATTEMPTS).glob("*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def record_attempt(run_folder: Path, attempt: int, step: int, place: Mapping[str, object] | None = None) -> None:
    """Write at which step an attempt begins, and when its process was launched (unix seconds).

    The next attempts see from it whether this one made progress.

    Args:
        place: more plain values about where it runs.
    """
    path = attempt_folder(run_folder, attempt) / "began.json"
    make_folders(path.parent)
    write_json(path, {"step": step, "launched": psutil.Process().create_time(), **(place or {})})


def attempts_without_progress(run_folder: Path, step: int) -> int:
    """How many attempts in a row, the last one included, have begun at `step`."""
    found = ((path.parent.name, path) for path in run_folder.glob(f"{ATTEMPTS}/*/began.json"))
    numbered = {int(number): path for number, path in found if number.isdecimal()}
    newest_first = (path for _, path in sorted(numbered.items(), reverse=True))
    return len(list(takewhile(lambda path: _first_step(path) == step, newest_first)))


def _first_step(record: Path) -> int | None:
    """The step of a record; None if it cannot be read, because the count must not end a run."""
    try:
        value: Any = read_json(record)
        return int(value["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_failure(output_dir: Path | str, attempt: int, process_index: int, failure: Failure) -> Path:
    """Write why this process fails, before anything else is tried. An existing file stays: it is of an earlier failure.

    Returns:
        the path of the file.

    Raises:
        OSError: the disk refuses it.
    """
    path = attempt_folder(output_dir, attempt) / f"process_{process_index}.json"
    if not path.exists():
        make_folders(path.parent)
        write_json(path, asdict(failure))
    return path


def read_failures(output_dir: Path | str, attempt: int) -> list[Failure]:
    """The failures that the processes of an attempt have recorded, by process index."""
    found = attempt_folder(output_dir, attempt).glob("process_*.json")
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

    A lost peer counts only if there is no other failure. It is always a consequence, but the clocks of two machines
    may disagree about the order.
    """
    return min(failures, key=lambda failure: (failure.reason == PEER_LOST, failure.time), default=None)


def read_record(kind: type[Record], path: Path) -> Record:
    """The dataclass `kind` from a file. Fields that `kind` does not know are skipped: a newer version may have them.

    Raises:
        BadInput: the file was not written by this program, or may not be read. FileNotFoundError, NotADirectoryError.
    """
    try:
        return kind(**read_fields(kind, path))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise BadInput(
            f"it cannot be read: {error.strerror}", where=str(path), hint="try again, or ask its owner"
        ) from error
    except (TypeError, ValueError) as error:
        raise BadInput(f"no {kind.__name__.lower()} of a run: {error}", where=str(path), hint="move it away") from error
