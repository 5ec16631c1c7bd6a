"""Trackers that `report_to` may name. Each module of this package is one, named as in Accelerate.

To add one that Accelerate supports, add a file `trackers/<name>.py` that defines

    kind = TrackerKind()

and `report_to: <name>` selects it. Override a method where the tracker needs more: an id by which a resumed attempt
finds its run again, other settings at the start, another axis.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ci_llm.core.plugins import load_plugin

PROJECT = "ci-llm"


class TrackerKind:
    """How a run uses one kind of tracker. The methods here suit any tracker of Accelerate."""

    def project(self) -> str:
        """The project that Accelerate starts the tracker with."""
        return os.environ.get("WANDB_PROJECT", PROJECT)

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        """Arguments of the tracker's start.

        Args:
            folder: the run's folder; a new run is named after it.
            resumed_from: the step this attempt resumes from; 0 for a fresh start.
            run_id: what `run_id` returned in the previous attempt; None if there was none.
        """
        return {}

    def in_group(self, group: str) -> dict[str, Any]:
        """More arguments of the tracker's start, for a run that belongs to a group of runs."""
        return {}

    def on_start(self, tracker: Any) -> None:
        """Called once with Accelerate's tracker, before anything is logged."""

    def run_id(self, tracker: Any) -> str | None:
        """The id of this run, for the checkpoint; None if the tracker cannot find a run again."""
        return None

    def log(self, tracker: Any, step: int, numbers: dict[str, int | float]) -> None:
        """Send the numbers of one optimizer step."""
        tracker.log(numbers, step=step)

    def show_hyperparameters(self, tracker: Any, values: Mapping[str, object]) -> None:
        """Show the configuration of a fresh run."""
        tracker.store_init_configuration(
            {key: value if _is_plain(value) else str(value) for key, value in values.items()}
        )


def find_kind(name: str) -> TrackerKind:
    """The kind that the module `name` defines.

    Raises:
        BadInput: no module of this package has that name.
    """
    kind: TrackerKind = load_plugin(__name__, name, "kind")
    return kind


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
