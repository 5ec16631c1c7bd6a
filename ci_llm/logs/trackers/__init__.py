"""The trackers that `report_to` may name, each a module of this package, named as in Accelerate.

The step of the run is their axis, and a resumed run continues its curve. A tracker that fails during a run is reported
and left out: it must never end the run. A tracker that cannot start is bad input.

To add one that Accelerate supports, add a file `trackers/<name>.py` that defines

    kind = TrackerKind()

and `report_to: <name>` selects it. Override a method where the tracker needs more: an id by which a resumed attempt
finds its run again, other settings at the start, another axis.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ci_llm.core.imports import load_plugin
from ci_llm.core.run_folder import SEGMENTS
from ci_llm.errors import ConfigError

logger = logging.getLogger(__name__)


class TrackerKind:
    """One kind of tracker, as a run uses it. The methods here suit any tracker of Accelerate."""

    def project(self) -> str:
        """The project that Accelerate starts the tracker with."""
        return os.environ.get("WANDB_PROJECT", "ci-llm")

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        """Arguments of the tracker's start.

        Args:
            folder: the run's folder; a new run has `name_of(folder)`, and belongs to the group `group_of(folder)`.
            resumed_from: the step this attempt resumes from; 0 for a fresh start.
            run_id: what `run_id` returned in the previous attempt; None without one.
        """
        return {}

    def on_start(self, tracker: Any, objective: str) -> None:
        """Called once with Accelerate's tracker and what the run learns, before anything is logged."""

    def run_id(self, tracker: Any) -> str | None:
        """The id of this run, for the checkpoint; None if the tracker cannot find a run again."""
        return None

    def log(self, tracker: Any, step: int, numbers: dict[str, int | float]) -> None:
        """Send the numbers of one optimizer step."""
        tracker.log(numbers, step=step)

    def show_hyperparameters(self, tracker: Any, values: Mapping[str, object]) -> None:
        """Show the configuration of a run that is new to the tracker."""
        plain = bool | int | float | str | None
        tracker.store_init_configuration(
            {key: value if isinstance(value, plain) else str(value) for key, value in values.items()}
        )


def name_of(folder: Path) -> str:
    """The name of a new run: that of its folder, and for a segment of a sweep that of the sweep before it."""
    sweep = group_of(folder)
    return folder.name if sweep is None else f"{sweep}-{folder.name}"


def group_of(folder: Path) -> str | None:
    """The name of the sweep that this run is a segment of; None for any other run."""
    above = folder.resolve().parent
    return above.parent.name if above.name == SEGMENTS else None


def find_kind(name: str) -> TrackerKind:
    """The kind that the module `name` defines.

    Raises:
        BadInput: no module of this package has that name.
    """
    kind: TrackerKind = load_plugin(__name__, name, "kind")
    return kind


def require_installed(names: tuple[str, ...]) -> None:
    """Refuse trackers whose package is missing, before a run leaves anything behind.

    Raises:
        ConfigError: names the first that is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"report_to names {name}, which is not installed",
                where="report_to",
                hint=f"pip install {name}, or report_to=none",
            )


class Trackers:
    """The trackers of one attempt, on the main process.

    Args:
        accelerator: its trackers are replaced.
        names: the key `report_to`.
        folder: the run's folder.
        resumed_from: the step this attempt resumes from; 0 for a fresh start.
        saved_state: `state()` of the previous attempt.
        hyperparameters: plain values; they are shown once.

    Raises:
        ConfigError: a tracker is not installed or cannot start.
    """

    def __init__(
        self,
        accelerator: Any,
        names: tuple[str, ...],
        *,
        folder: Path,
        resumed_from: int,
        saved_state: Mapping[str, str],
        hyperparameters: Mapping[str, object],
    ) -> None:
        require_installed(names)
        accelerator.project_configuration.logging_dir = str(folder)  # TensorBoard writes below it
        self._trackers, self._ids = list[_Guarded](), dict[str, str]()
        for name in names:
            kind = find_kind(name)
            tracker = _start(accelerator, name, kind, kind.settings(folder, resumed_from, saved_state.get(name)))
            kind.on_start(tracker, str(hyperparameters.get("objective", "sft")))
            self._trackers.append(_Guarded(name, kind, tracker))
            if run_id := kind.run_id(tracker):
                self._ids[name] = run_id
            is_known = name in saved_state if run_id else resumed_from > 0
            if not is_known:
                kind.show_hyperparameters(tracker, hyperparameters)
        self._accelerator, accelerator.trackers = accelerator, self._trackers

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Send the numbers among `values`, under the names of metrics.jsonl and under those that Trainer has."""
        own = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._accelerator.log(own | _trainers_names(own), step=step)

    def state(self) -> dict[str, str]:
        """The ids of this run in its trackers, for the checkpoint; the next attempt may find one that has failed."""
        return dict(self._ids)

    def finish(self) -> None:
        """Flush and close every tracker."""
        for one in self._trackers:
            one.call(one.tracker.finish)
        self._trackers.clear()


@dataclass
class _Guarded:
    """A tracker in Accelerate's list: where it fails it is left out, and the others go on."""

    name: str
    kind: TrackerKind
    tracker: Any
    has_failed: bool = False

    def log(self, values: dict[str, int | float], step: int) -> None:
        self.call(partial(self.kind.log, self.tracker, step, values))

    def call(self, call: Callable[[], None]) -> None:
        if not self.has_failed:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - no error of a tracker may end the run
                self.has_failed = True
                logger.warning(f"{self.name} failed and is left out from here on: {type(error).__name__}: {error}")


#: Transformers' Trainer logs under these names what is ours under the others: dashboards and sweeps look for them.
_TRAINERS_NAMES: Final = {"train/loss": "train/task_loss", "train/epoch": "epoch", "eval/loss": "eval/crowd/nll"}
_AGENTS_NORM: Final = re.compile(r"train/agent\d+/grad_norm")


def _trainers_names(numbers: Mapping[str, int | float]) -> dict[str, int | float]:
    renamed = {theirs: numbers[ours] for theirs, ours in _TRAINERS_NAMES.items() if ours in numbers}
    if norms := [number for key, number in numbers.items() if _AGENTS_NORM.fullmatch(key)]:
        renamed["train/grad_norm"] = sum(norms) / len(norms)
    return renamed


def _start(accelerator: Any, name: str, kind: TrackerKind, settings: dict[str, Any]) -> Any:
    """Start one tracker. One at a time, because the project of Accelerate is the folder of TensorBoard."""
    accelerator.log_with, accelerator.trackers = [name], []
    try:
        accelerator.init_trackers(kind.project(), init_kwargs={name: settings})
    except Exception as error:  # any error of the tracker's library means that the tracker cannot be used
        raise ConfigError(
            f"{name} cannot start: {error}",
            where="report_to",
            hint=f"set {name} up, or leave it out of report_to",
        ) from error
    return accelerator.trackers[0]
