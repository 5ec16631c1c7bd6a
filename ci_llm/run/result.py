"""What a call of a run came to, unless it failed: completed or interrupted, where, and with which scores."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ci_llm.cluster.elastic import exit_code_after_stop
from ci_llm.core.durable import read_json
from ci_llm.core.run_status import readable_status

if TYPE_CHECKING:
    from ci_llm.config import Config
    from ci_llm.crowd.model import Crowd

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """How a run ended; the same on every process. A run that fails is an exception and has none.

    Attributes:
        status: "interrupted": what is saved goes on with the same call.
        step: optimizer steps taken.
        folder: of the run.
        metrics: `evaluation.json`, the final evaluation; empty if the run was interrupted.
        reason: why it was interrupted: "signal:SIGINT", "walltime", "callback", ...; None if it is completed.
    """

    status: Literal["completed", "interrupted"]
    step: int
    folder: Path
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    reason: str | None = None

    @cached_property
    def crowd(self) -> Crowd:
        """The crowd of the final checkpoint, or of the newest one of an interrupted run; loaded at first use.

        Raises:
            CiLlmError: nothing is saved, or it is damaged.
        """
        from ci_llm.crowd.model import Crowd

        return Crowd.from_pretrained(self.folder)

    def exit_code(self, config: Config) -> int:
        """The exit code of a program that ends with this run."""
        if self.status != "interrupted":
            return 0
        return exit_code_after_stop(self.reason or "", config.interrupted_exit_code)


def conclusion_of(folder: Path, step: int) -> dict[str, Any] | None:
    """`evaluation.json` of a run that has come to its end at `step`.

    None before that, also if the run had an end at another step and went on from there. And None if the file is
    damaged, or if the last attempt ended after it was written and before the mirror had it: the end is made again then.
    """
    record, status = folder / "evaluation.json", readable_status(folder)
    if status is not None and status.status != "completed":
        return None
    if not (record.is_file() and (folder / "final_checkpoint" / "manifest.json").is_file()):
        return None
    try:
        known: Any = read_json(record)
        content = dict(known)
    except (TypeError, ValueError) as error:
        logger.warning(f"{record} cannot be read, the run is evaluated again: {error}")
        return None
    return content if content.get("last_step") == step else None
