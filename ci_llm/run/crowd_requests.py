"""Requests to change the crowd of a run, and the record of what became of them, as files in the run's folder.

Anybody who may write to the folder may ask: a request is a file in `requests/`. The main process of the run takes it
between two steps. What it decides is in `crowd_changes.json` before it acts, with the step, so that an attempt which
goes on from an older checkpoint makes the change at the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ci_llm.config.agents import read_own
from ci_llm.config.config import entries_of
from ci_llm.config.own_keys import ORDER_KEYS, SHAPE_KEYS, to_plain
from ci_llm.config.parsing import Entry
from ci_llm.core.durable import make_folders, read_json, write_json
from ci_llm.errors import CheckpointError, ConfigError
from ci_llm.run.members import CrowdChange, Verb

FOLDER: Final = "requests"
RECORD: Final = "crowd_changes.json"


@dataclass(frozen=True)
class CrowdRequest:
    """What somebody asks for; `id` is the name of its file."""

    id: str
    verb: Verb
    agent: int
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What a run made of a request.

    Attributes:
        step: the optimizer steps taken when it acts, or when it was refused.
        refused: why it does not act; None: it does.
    """

    id: str
    step: int
    verb: str
    agent: int
    own: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    @property
    def change(self) -> CrowdChange:
        """What acts."""
        return CrowdChange.from_dict({"step": self.step, "verb": self.verb, "agent": self.agent, "own": self.own})


@dataclass
class RecordFailure:
    """Why the disk takes no decision at present; None: it does."""

    reason: str | None = None

    def failed(self, reason: str) -> bool:
        """Note that the disk took none, and why; whether the reason is another one than that of the step before."""
        before, self.reason = self.reason, reason
        return reason != before

    def succeeded(self) -> None:
        """Note that the disk took one."""
        self.reason = None


def ask(run_folder: Path, verb: Verb, agent: int, own: Mapping[str, Any]) -> CrowdRequest:
    """Leave a request for the run in this folder.

    Args:
        own: what a clone has of its own, see `settings_of_clone`.

    Raises:
        CheckpointError: the disk refuses the file.
    """
    request = CrowdRequest(f"{time.time_ns()}-{os.getpid()}", verb, agent, own)
    path = _path(run_folder, request.id)
    try:
        make_folders(path.parent)
        write_json(path, {"verb": verb, "agent": agent, "own": to_plain(own)})
    except OSError as error:
        raise CheckpointError(f"the request cannot be written: {error.strerror}", where=str(path)) from error
    return request


def settings_of_clone(entries: Sequence[Entry]) -> dict[str, Any]:
    """The validated settings that a clone gets.

    Raises:
        ConfigError: a key or value that no clone can have.
    """
    own = read_own(entries)
    for keys, what in ((SHAPE_KEYS, "has the weights"), (ORDER_KEYS, "takes the rows")):
        if odd := [key for key in keys if key in own]:
            raise ConfigError(
                f"a clone {what} of its original, and so its {odd[0]}", where=entries[0].where, hint="leave it out"
            )
    return own


def is_waiting(run_folder: Path) -> bool:
    """Whether a request lies in the folder; asked at every step.

    It takes one system call where nobody has asked for anything yet, and four afterwards: as long as two or three
    calls of stat, which would not see a second request within the same tick of the disk's clock.
    """
    return bool(_names(run_folder))


def read_waiting(run_folder: Path) -> list[CrowdRequest | Decision]:
    """The requests in the folder that nobody has decided about, the oldest first; a refusal where a file is none."""
    known = {decision.id for decision in read_record(run_folder)}  # a kill may have come before they were removed
    return [_read(_path(run_folder, name)) for name in sorted(_names(run_folder)) if name not in known]


def decide(run_folder: Path, decisions: Sequence[Decision]) -> None:
    """Put decisions on record, and then remove every request that is decided.

    Raises:
        OSError: the disk refuses the record, and so nothing is decided.
    """
    known = [*read_record(run_folder), *decisions]
    if decisions:
        _write_record(run_folder, known)
    for decision in known:
        with suppress(OSError):  # it is on record, and so it is not read again
            _path(run_folder, decision.id).unlink(missing_ok=True)


def put_on_record(run_folder: Path, decision: Decision) -> None:
    """Put a decision on record that nobody asked for by a file.

    Raises:
        OSError: the disk refuses it.
    """
    _write_record(run_folder, [*read_record(run_folder), decision])


def read_record(run_folder: Path) -> list[Decision]:
    """What became of the requests so far.

    Raises:
        CheckpointError: the file is not of this program.
    """
    path = run_folder / RECORD
    try:
        value: Any = read_json(path)
        return [Decision(**decision) for decision in value]
    except FileNotFoundError:
        return []
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"no record of changes: {error}", where=str(path), hint="move it away") from error


def forget_after(run_folder: Path, step: int) -> None:
    """Take what acts after `step` off the record: the run goes back to it on purpose.

    Raises:
        CheckpointError: the file is not of this program.
    """
    known = read_record(run_folder)
    if kept := [decision for decision in known if decision.step <= step]:
        _write_record(run_folder, kept)
    else:
        (run_folder / RECORD).unlink(missing_ok=True)


def _write_record(run_folder: Path, decisions: Sequence[Decision]) -> None:
    write_json(run_folder / RECORD, [{**asdict(each), "own": to_plain(each.own)} for each in decisions])


def _names(run_folder: Path) -> list[str]:
    try:
        return [name.removesuffix(".json") for name in os.listdir(run_folder / FOLDER) if name.endswith(".json")]
    except OSError:
        return []  # nobody has asked for anything


def _path(run_folder: Path, name: str) -> Path:
    return run_folder / FOLDER / f"{name}.json"


def _read(path: Path) -> CrowdRequest | Decision:
    try:
        value: Any = read_json(path)
        verb, agent, own = value["verb"], value["agent"], value.get("own", {})
        if verb not in ("stop", "clone") or type(agent) is not int or (own and verb == "stop"):
            raise ValueError("it asks for nothing that a run can do")
        return CrowdRequest(path.stem, verb, agent, settings_of_clone(entries_of(own, path.name)))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        return Decision(path.stem, 0, "unknown", 0, refused=f"no request: {error}")
    except ConfigError as error:
        return Decision(path.stem, 0, verb, agent, refused=error.what)
