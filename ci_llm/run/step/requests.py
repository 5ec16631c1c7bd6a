"""Requests to stop an agent, and the record of what the run decided.

Anybody who may write to the run's folder may ask for an agent to be stopped: a request is a file in `requests/`, which
the main process takes between two steps. What it decides is in `crowd_changes.json` before it acts, with the step, so
that an attempt that resumes from an older checkpoint makes the change at the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ci_llm.core.durable import read_json, write_json
from ci_llm.core.run_folder import CROWD_CHANGES, read_known, write_known
from ci_llm.run.step.state import CrowdChange

FOLDER: Final = "requests"


def ask(run_folder: Path, agent: int) -> str:
    """Leave a request to stop an agent for the run in this folder.

    Returns:
        the `id` that it has when it is decided.

    Raises:
        CheckpointError: the disk refuses the file.
    """
    name = f"{time.time_ns()}-{os.getpid()}"
    write_known(_path(run_folder, name), {"stop": agent}, "the request")
    return name


def is_waiting(run_folder: Path) -> bool:
    """True if a request lies in the folder; asked at every step.

    It takes one system call if nobody has asked yet, and four afterwards. `stat` would take as long, and would not see
    a second request within the same tick of the disk's clock.
    """
    return bool(_names(run_folder))


def read_waiting(run_folder: Path, step: int) -> list[CrowdChange]:
    """The requests that wait in the folder, the oldest first; a file that holds no request is refused.

    Args:
        step: the optimizer steps taken, after which they would act.
    """
    known = {decided.id for decided in read_record(run_folder)}  # a kill may have come before they were removed
    return [_read(_path(run_folder, name), step) for name in sorted(_names(run_folder)) if name not in known]


def decide(run_folder: Path, decided: Sequence[CrowdChange]) -> None:
    """Put decided requests on record, and then remove the files of all that are on record.

    Raises:
        OSError: the disk refuses the record, and so nothing is decided.
    """
    known = [*read_record(run_folder), *decided]
    if decided:
        _write_record(run_folder, known)
    for request in known:
        with suppress(OSError):  # it is on record, and so it is not read again
            _path(run_folder, request.id).unlink(missing_ok=True)


def read_record(run_folder: Path) -> list[CrowdChange]:
    """The requests that were decided so far.

    Raises:
        CheckpointError: the file is not of this program.
    """
    return read_known(list[CrowdChange], run_folder / CROWD_CHANGES, "no record of changes") or []


def forget_after(run_folder: Path, step: int) -> None:
    """Remove from the record what acts after `step`, because the run goes back to that step on purpose.

    Raises:
        CheckpointError: the file is not of this program.
    """
    kept = [decided for decided in read_record(run_folder) if decided.step <= step]
    if kept:
        _write_record(run_folder, kept)
    else:
        (run_folder / CROWD_CHANGES).unlink(missing_ok=True)


def _write_record(run_folder: Path, decided: Sequence[CrowdChange]) -> None:
    write_json(run_folder / CROWD_CHANGES, [asdict(each) for each in decided])


def _names(run_folder: Path) -> list[str]:
    try:
        return [name.removesuffix(".json") for name in os.listdir(run_folder / FOLDER) if name.endswith(".json")]
    except OSError:
        return []  # nobody has asked for anything


def _path(run_folder: Path, name: str) -> Path:
    return run_folder / FOLDER / f"{name}.json"


def _read(path: Path, step: int) -> CrowdChange:
    try:
        value: Any = read_json(path)
        agent = value["stop"]
        if type(agent) is not int:
            raise ValueError("stop is not the number of an agent")
        return CrowdChange(step, agent, path.stem)
    except (OSError, KeyError, TypeError, ValueError) as error:
        return CrowdChange(step, 0, path.stem, refused=f"{path.name} holds no request: {error}")
