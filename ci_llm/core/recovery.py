"""recovery.json: what the supervisor asks of the next attempts of a run.

Only the supervisor writes it, atomically, into the run's folder; the trainer reads it at its start. It is part of the
state of the run and not of its configuration: a resume never refuses it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ci_llm.core.durable import make_folders, read_fields, write_json
from ci_llm.errors import CheckpointError

NAME: Final = "recovery.json"


@dataclass(frozen=True)
class Recovery:
    """The changes for the next attempts.

    Attributes:
        learning_rate_factor: multiplies the scheduled learning rate of every agent.
        micro_batch_size: the most rows per process and micro-step; the effective batch stays the same.
        resume_at_most_step: the next attempt resumes from the newest checkpoint of this step or before (0: a fresh
            start); newer ones are superseded. It holds only while status.json names `after_attempt`: the attempt that
            applies it writes its own number there, and later attempts resume from their newest checkpoint again.
        after_attempt: the attempt after which `resume_at_most_step` holds.
        because: the reasons for people, in the order of the events.
    """

    learning_rate_factor: float = 1.0
    micro_batch_size: int | None = None
    resume_at_most_step: int | None = None
    after_attempt: int | None = None
    because: tuple[str, ...] = ()

    def latest_step_allowed(self, last_attempt: int | None) -> int | None:
        """The newest step from which an attempt after `last_attempt` may resume; None for any."""
        return self.resume_at_most_step if self.after_attempt == last_attempt else None


def read_recovery(run_folder: Path | str) -> Recovery:
    """The recovery state of a run; the default one without a file.

    Raises:
        CheckpointError: the file was not written by this program. To ignore it would repeat the failure.
    """
    path = Path(run_folder, NAME)
    try:
        known = read_fields(Recovery, path)
        recovery = Recovery(**known | {"because": tuple(known.get("because", ()))})
        if not (0 < recovery.learning_rate_factor <= 1 and math.isfinite(recovery.learning_rate_factor)):
            raise ValueError(f"learning_rate_factor {recovery.learning_rate_factor}")
        for name in ("micro_batch_size", "resume_at_most_step", "after_attempt"):
            if not isinstance(getattr(recovery, name), int | None):
                raise ValueError(f"{name} {getattr(recovery, name)}")
    except FileNotFoundError:
        return Recovery()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the recovery state cannot be read: {error}", where=str(path), hint="move it away"
        ) from error
    return recovery


def write_recovery(run_folder: Path | str, recovery: Recovery) -> None:
    """Write `recovery` for the next attempts, durably.

    Raises:
        CheckpointError: the disk refuses the file.
    """
    path = Path(run_folder, NAME)
    try:
        make_folders(path.parent)
        write_json(path, asdict(recovery) | {"because": list(recovery.because)})
    except OSError as error:
        raise CheckpointError(
            f"the recovery state cannot be written: {error.strerror}",
            where=str(path),
            hint="make space there; the same command goes on from the last checkpoint",
        ) from error
