"""hub.json: how the last push of a run's result to the hub ended, for the next call of the run and `ci-llm status`."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ci_llm.core.attempts import read_record
from ci_llm.core.durable import write_json
from ci_llm.errors import BadInput

NAME: Final = "hub.json"


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
        """Whether these weights are known to be in that repository."""
        return self.error is None and self.weights == weights and to in (self.to, self.repository)


def keep_push(run_folder: Path, record: PushRecord) -> None:
    """Write hub.json. A disk that refuses it costs one more push: what is on the hub stays there."""
    with contextlib.suppress(OSError):
        write_json(run_folder / NAME, asdict(record))


def last_push(run_folder: Path) -> PushRecord | None:
    """How the last push ended; None if there was none, or that is not known."""
    try:
        return read_record(PushRecord, run_folder / NAME)
    except (OSError, BadInput):
        return None
