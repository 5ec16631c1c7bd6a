"""The trials of a sweep, for its page and for a terminal: read from sweep.json, the best first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci_llm.core.ranking import place_of_trial
from ci_llm.core.run_folder import SEGMENTS, SWEEP
from ci_llm.errors import BadInput


@dataclass(frozen=True)
class Leaderboard:
    """The trials that were scored.

    Attributes:
        keys: the columns of settings.
        rows: of every trial its id, status, last step, score and settings; those that went furthest first.
        best: the id of the best one; None before there is one.
        best_run: the folder of the run that trained it last.
    """

    metric: str
    keys: tuple[str, ...]
    rows: tuple[tuple[int, str, int, float | None, tuple[str, ...]], ...]
    best: int | None
    best_run: Path | None


def read_trials(folder: Path) -> Leaderboard | None:
    """The leaderboard of a sweep; None where the folder holds none.

    Raises:
        BadInput: its record is not of this program.
    """
    path = folder / SWEEP
    try:
        record = json.loads(path.read_bytes())
        metric, steps = record["plan"]["metric"], record["plan"]["steps"]
        scored = [trial for trial in record["trials"] if trial["scores"]]
        keys = tuple(dict.fromkeys(key for trial in scored for key in trial["settings"]))
        scored.sort(key=lambda trial: place_of_trial(trial["id"], trial["scores"], metric))
        rows = [
            (each["id"], each["status"], steps[each["rung"] - 1], each["score"], _cells(each["settings"], keys))
            for each in scored
        ]
        best = next((trial for trial in scored if trial["id"] == record["best"]), None)
        best_run = folder / SEGMENTS / str(best["segment"]) if best else None
        return Leaderboard(metric, keys, tuple(rows), record["best"], best_run)
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise BadInput(f"no record of a sweep: {error}", where=str(path), hint="move it away") from error


def _cells(settings: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    values = [settings.get(key, "") for key in keys]
    return tuple(", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
