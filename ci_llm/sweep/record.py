"""sweep.json: the state of a sweep. It is written before a segment begins and after its trials were scored.

Only plain JSON is in it, for people and for programs: NaN scores are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ci_llm.config import Config, parse_config
from ci_llm.config.own_keys import from_plain
from ci_llm.config.sweep import Choices, Space, SweepKeys, SweepReading
from ci_llm.core.durable import write_bytes
from ci_llm.core.run_folder import SWEEP
from ci_llm.distributed.precision import AUTO, CHOICES
from ci_llm.errors import BadInput, CheckpointError
from ci_llm.sweep.trials import HalvingPlan, Segment, Standings, Trial

FORMAT_VERSION: Final = 1


@dataclass(frozen=True)
class Record:
    """What sweep.json holds.

    Attributes:
        spaces: plain values that tell one space from another.
        keys: those of `SweepKeys`, as decided.
        config: of what all trials share.
        is_complete: whether nothing is left to train.
    """

    spaces: Mapping[str, Any]
    keys: SweepKeys
    config: Config
    standings: Standings
    is_complete: bool = False

    def to_json(self) -> bytes:
        """The text of the file."""
        best = self.standings.best
        value = {
            "format_version": FORMAT_VERSION,
            "best": None if best is None or best.failed else best.id,
            "complete": self.is_complete,
            "trials": [_trial(self.standings, trial) for trial in self.standings.trials],
            "segments": [asdict(segment) for segment in self.standings.segments],
            "plan": asdict(self.standings.plan),
            "spaces": self.spaces,
            "keys": self.keys.model_dump(),
            "config": self.config.dump(),
        }
        return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def plain_spaces(spaces: Mapping[str, Space]) -> dict[str, Any]:
    """The spaces as plain values."""
    return {
        key: json.loads(json.dumps(space.values)) if isinstance(space, Choices) else asdict(space)
        for key, space in spaces.items()
    }


def write_record(folder: Path, record: Record, staging: Path | None = None) -> None:
    """Replace sweep.json, durably.

    Raises:
        CheckpointError: the disk refuses it.
    """
    try:
        write_bytes(folder / SWEEP, record.to_json(), staging=staging)
    except OSError as error:
        raise CheckpointError(
            f"{SWEEP} cannot be written: {error.strerror}",
            where=str(folder),
            hint="make space there; the same command goes on",
        ) from error


def read_record(folder: Path) -> Record | None:
    """The state of the sweep in a folder; None if there is none.

    Raises:
        CheckpointError: the file is not of this program.
    """
    path = folder / SWEEP
    try:
        value = json.loads(path.read_bytes())
        if value["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {value['format_version']}")
        plan = HalvingPlan(**{**value["plan"], "steps": tuple(value["plan"]["steps"])})
        segments = [Segment(**{**each, "trials": tuple(each["trials"])}) for each in value["segments"]]
        standings = Standings(plan, tuple(map(_read_trial, value["trials"])), tuple(segments))
        keys = SweepKeys.model_validate(value["keys"])
        config = parse_config(value["config"], str(path))
        return Record(value["spaces"], keys, config, standings, value["complete"])
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, ValueError, BadInput) as error:
        raise CheckpointError(f"no record of a sweep: {error}", where=str(path), hint="move it away") from error


def _trial(standings: Standings, trial: Trial) -> dict[str, Any]:
    scores = [None if math.isnan(score) else score for score in trial.scores]
    return {
        "id": trial.id,
        "settings": dict(trial.settings),
        "rung": len(scores),
        "score": scores[-1] if scores else None,
        "status": standings.status(trial),
        "scores": scores,
        "segment": trial.segment,
        "agent": trial.place,
    }


def _read_trial(value: Mapping[str, Any]) -> Trial:
    settings = from_plain(value["settings"])
    scores = tuple(math.nan if score is None else float(score) for score in value["scores"])
    return Trial(value["id"], settings, scores, value["segment"], value["agent"])


def require_same_sweep(record: Record, reading: SweepReading, folder: Path) -> None:
    """Refuse to go on with a sweep under other spaces, keys or settings.

    Raises:
        BadInput: names everything that differs.
    """
    odd = []
    spaces = plain_spaces(reading.spaces)
    for key in dict.fromkeys([*record.spaces, *spaces]):
        if record.spaces.get(key) != spaces.get(key):
            odd.append(f"the space of {key} was {_space_of(record.spaces, key)}, is {_space_of(spaces, key)}")
    for key, value in reading.keys.model_dump().items():
        if value != (before := getattr(record.keys, key)) and key != "agents_per_pass":
            odd.append(f"{key} was {before}, is {value}")
    changes = record.config.diff(reading.config)
    # The record has the precision that was chosen for auto.
    changes = [each for each in changes if each.kind != "free" and not (each.key in CHOICES and each.new == AUTO)]
    odd += [f"{each.key} was {each.old}, is {each.new}" for each in changes]
    if odd:
        raise BadInput(
            f"the sweep in this folder is another one: {'; '.join(odd)}",
            where=str(folder),
            hint="experiment_name=NAME begins a new sweep beside it; the old values go on with this one",
        )


def _space_of(spaces: Mapping[str, Any], key: str) -> str:
    return json.dumps(spaces[key]) if key in spaces else "none"
